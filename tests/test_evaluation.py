"""Evaluation rounds: leases, fair share, failures, deadline and the numbers of the result."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest

from async_rl.buffer import MemberLease
from async_rl.errors import InputError
from async_rl.evaluation import EvaluationResult, Evaluations, EvaluationSettings, clustered_stderr
from async_rl.protocol import LeaseKey, TrajectoryStatus
from tests.ledger_world import make_problem, make_trajectory

PROBLEMS = [make_problem(i) for i in range(3)]


def make(samples: int = 2, deadline_s: float = 100.0, **settings: int) -> Evaluations:
    return Evaluations(EvaluationSettings(samples=samples, deadline_s=deadline_s, **settings))


def finish(
    evaluations: Evaluations,
    lease: MemberLease,
    reward: float = 1.0,
    version: int = 0,
    owner: str = "a",
    status: TrajectoryStatus = "complete",
) -> str:
    trajectory = make_trajectory(version, status=status)
    if status != "failed":
        trajectory = msgspec.structs.replace(trajectory, reward=reward)
    return evaluations.finish(owner, lease.ticket, lease.member, lease.attempt, trajectory, 1.0)


def all_leases(evaluations: Evaluations, version: int = 0, owner: str = "a") -> list[MemberLease]:
    return evaluations.lease(owner, version, 1000, 1000, 0.0)


def one(results: list[EvaluationResult]) -> EvaluationResult:
    assert len(results) == 1
    return results[0]


def test_result_of_a_round() -> None:
    evaluations = make()
    evaluations.start(4, PROBLEMS, 10.0)
    leases = all_leases(evaluations, version=5)
    assert [(lease.problem.id, lease.member) for lease in leases] == [(str(p), s) for p in range(3) for s in range(2)]
    for lease, reward, version in zip(leases, (1, 1, 0, 1, 0, 0), (5, 5, 5, 6, 5, 5), strict=True):
        assert evaluations.tick(11.0) == []
        finish(evaluations, lease, reward=float(reward), version=version)
    result = one(evaluations.tick(12.0))
    assert (result.version, result.scored, result.failed, result.missing) == (4, 6, 0, 0)
    assert result.accuracy == 0.5
    assert (result.version_min, result.version_max, result.seconds) == (5, 6, 2.0)
    # By hand: deviations of the problems' sums from 2 x 0.5 are +1, 0, -1; sqrt(3/2 x 2) / 6.
    assert result.stderr == pytest.approx(math.sqrt(3.0) / 6)
    assert [[t.reward for t in trajectories] for _, trajectories in result.samples] == [[1, 1], [0, 1], [0, 0]]
    assert not evaluations.busy and evaluations.tick(13.0) == []


def test_stderr_is_the_usual_one_for_single_samples_and_covers_the_truth() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    expected = np.std(rewards, ddof=1) / math.sqrt(5)
    assert clustered_stderr([[r] for r in rewards]) == pytest.approx(expected)
    assert clustered_stderr([[1.0]]) is None and clustered_stderr([[], []]) is None
    # Four samples of a problem that always agree carry as much as one.
    assert clustered_stderr([[r] * 4 for r in rewards]) == pytest.approx(expected)
    rng = random.Random(0)
    errors = []
    for _ in range(400):
        rates = [rng.random() for _ in range(50)]
        drawn = [[float(rng.random() < rate) for _ in range(4)] for rate in rates]
        stderr = clustered_stderr(drawn)
        assert stderr is not None
        errors.append((sum(map(sum, drawn)) / 200 - 0.5) / stderr)
    assert np.std(errors) == pytest.approx(1.0, abs=0.12), "z-scores have deviation 1"


def test_evaluation_holds_at_most_half_of_the_slots() -> None:
    evaluations = make(samples=4)
    evaluations.start(0, PROBLEMS, 0.0)
    assert len(evaluations.lease("a", 0, free=8, slots=8, now=0.0)) == 4
    assert evaluations.lease("a", 0, free=4, slots=8, now=0.0) == []
    assert len(evaluations.lease("b", 0, free=1, slots=8, now=0.0)) == 1, "no more than are free"
    assert len(evaluations.lease("c", 0, free=1, slots=1, now=0.0)) == 1, "one slot is enough to get on"
    assert len(evaluations.lease("d", 0, free=5, slots=5, now=0.0)) == 2


def test_older_versions_do_not_evaluate_newer_ones() -> None:
    evaluations = make(samples=1)
    evaluations.start(2, PROBLEMS, 0.0)
    assert all_leases(evaluations, version=1) == []
    assert len(all_leases(evaluations, version=2)) == 3


def test_rounds_overlap_and_the_older_goes_first() -> None:
    evaluations = make(samples=1)
    evaluations.start(1, PROBLEMS[:1], 0.0)
    evaluations.start(2, PROBLEMS, 0.0)
    leases = all_leases(evaluations, version=2)
    assert len({lease.ticket for lease in leases}) == 4, "tickets of rounds differ"
    for lease in leases[1:]:
        finish(evaluations, lease, version=2)
    assert [result.version for result in evaluations.tick(1.0)] == [2]
    finish(evaluations, leases[0], reward=0.0, version=2)
    assert [(result.version, result.accuracy) for result in evaluations.tick(1.0)] == [(1, 0.0)]


def test_results_are_idempotent_and_a_death_costs_nothing() -> None:
    evaluations = make(samples=1)
    evaluations.start(0, PROBLEMS, 0.0)
    leases = all_leases(evaluations)
    assert [finish(evaluations, leases[0]) for _ in range(2)] == ["stored", "duplicate"]
    assert finish(evaluations, leases[1], owner="b") == "unknown"
    assert len(evaluations.release("a", 1.0)) == 2
    again = all_leases(evaluations, owner="b")
    assert [(lease.ticket, lease.attempt) for lease in again] == [(1, 2), (2, 2)]
    assert finish(evaluations, leases[1]) == "stored", "late, but first"
    assert evaluations.take_cancelled() == [("b", LeaseKey(kind="eval", ticket=1, member=0, attempt=2))]
    assert finish(evaluations, again[1], owner="b") == "stored"
    result = one(evaluations.tick(1.0))
    assert (result.scored, result.missing) == (3, 0)
    assert finish(evaluations, leases[2]) == "duplicate", "the round is closed"


def test_failures_are_retried_then_counted() -> None:
    evaluations = make(samples=1, max_attempts=2)
    evaluations.start(0, PROBLEMS, 0.0)
    for lease in all_leases(evaluations):
        finish(evaluations, lease, status="failed" if lease.ticket == 1 else "complete", reward=1.0)
    assert evaluations.tick(1.0) == []
    (again,) = all_leases(evaluations)
    assert (again.ticket, again.attempt) == (1, 2)
    finish(evaluations, again, status="failed")
    result = one(evaluations.tick(1.0))
    assert (result.scored, result.failed, result.missing, result.accuracy) == (2, 1, 0, 1.0)


def test_a_round_is_closed_at_its_deadline_with_what_it_has() -> None:
    evaluations = make(samples=1, deadline_s=50.0)
    evaluations.start(0, PROBLEMS, 10.0)
    leases = all_leases(evaluations)
    finish(evaluations, leases[0], reward=0.0)
    assert evaluations.tick(59.0) == []
    assert "2 of 3 samples missing after 49.0 s" in evaluations.describe(59.0)
    result = one(evaluations.tick(60.0))
    assert (result.scored, result.missing, result.accuracy, result.stderr) == (1, 2, 0.0, None)
    assert {key.ticket for _, key in evaluations.take_cancelled()} == {1, 2}
    assert evaluations.outstanding("a") == 0 and all_leases(evaluations) == []


def test_a_round_without_any_result_has_no_accuracy() -> None:
    evaluations = make()
    evaluations.start(0, PROBLEMS, 0.0)
    result = one(evaluations.close_all(1.0))
    assert (result.accuracy, result.stderr, result.version_min, result.missing) == (None, None, None, 6)
    with pytest.raises(InputError, match="at least one held-out problem"):
        evaluations.start(1, [], 0.0)


def test_random_histories_account_for_every_sample() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        evaluations = make(samples=rng.randint(1, 3), deadline_s=60.0, max_attempts=2, max_losses=3)
        held: dict[str, list[MemberLease]] = {name: [] for name in "abc"}
        results, version = [], 0
        for now in range(200):
            name, action = rng.choice("abc"), rng.choice(("start", "lease", "lease", "finish", "finish", "fail", "die"))
            if action == "start" and rng.random() < 0.2:
                evaluations.start(version, PROBLEMS[: rng.randint(1, 3)], float(now))
                version += 1
            elif action == "lease":
                held[name] += evaluations.lease(name, version, rng.randint(0, 3), 6, float(now))
                assert evaluations.outstanding(name) <= 3
            elif action == "die":
                evaluations.release(name, float(now))
            elif held[name]:
                lease = held[name].pop(rng.randrange(len(held[name])))
                status: TrajectoryStatus = "failed" if action == "fail" else "complete"
                finish(evaluations, lease, version=version, owner=name, status=status)
            results += evaluations.tick(float(now))
            evaluations._leases.check()
        results += evaluations.tick(1000.0)
        assert sorted(result.version for result in results) == list(range(version)), "every round was closed"
        for result in results:
            expected = len(result.samples) * evaluations.settings.samples
            assert result.scored + result.failed + result.missing == expected
            assert result.scored == sum(len(trajectories) for _, trajectories in result.samples)
        assert not evaluations._leases._open and not evaluations._round_of

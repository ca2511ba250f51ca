"""The time_to_reward suite: when a goal counts as reached, its ratios, and a tiny run of each peer."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_to_reward, time_to_reward_figure
from benchmarks.time_to_reward import ASYNC, PLAIN, SYNC, TRL, Course
from benchmarks.workers import peers_missing
from tests.tiny_models import tiny_model


def course(side: str, seed: int, seconds: float, accuracies: dict[int, float]) -> Course:
    """Steps of equal length, the first of which ends after ten seconds."""
    return Course(side, seed, {0: 0.0} | {step: 10.0 + seconds * (step - 1) for step in range(1, 11)}, accuracies)


def test_the_goal_is_reached_when_the_step_of_that_version_ends() -> None:
    run = course(ASYNC, 1, 2.0, {0: 0.4, 2: 0.89, 4: 0.9, 6: 0.5, 8: 0.95})
    assert run.reached(0.9) == (16.0, 6.0)
    assert run.row(0.9)["step"] == 4
    assert run.row(0.9)["curve"][:2] == [(0, 0.0, 0.4), (2, 12.0, 0.89)]
    assert run.reached(0.96) is None
    missed = Course(TRL, 1, {0: 5.0, 1: 20.0}, {0: 0.1, 2: 0.95}, note="1 steps in 20 s")
    assert missed.row(0.9) == {"side": TRL, "seed": 1, "seconds": None, "after_first_step_s": None, "step": None,
                               "curve": [(0, 5.0, 0.1)], "note": "1 steps in 20 s"}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Asynchronous 16 s and 12 s; TRL 40 s and not at all; synchronous 20 s and 24 s."""
    good, bad = {0: 0.4, 4: 0.95}, {0: 0.4, 4: 0.6}
    runs = [course(ASYNC, 1, 2.0, good), course(TRL, 1, 10.0, good), course(SYNC, 1, 10 / 3, good),
            course(ASYNC, 2, 2 / 3, good), course(TRL, 2, 10.0, bad), course(SYNC, 2, 14 / 3, good)]  # fmt: skip
    return [run.row(0.9) for run in runs]


def test_times_are_compared_where_both_reached_the_goal(tmp_path: Path) -> None:
    assert time_to_reward.ratios(rows(), ASYNC, TRL, "seconds") == [pytest.approx(0.4)]
    assert time_to_reward.ratios(rows(), ASYNC, SYNC, "seconds") == [pytest.approx(0.8), pytest.approx(0.5)]
    assert time_to_reward.ratios(rows(), ASYNC, PLAIN, "seconds") == []
    said = {headline.what: headline for headline in time_to_reward.headlines(rows(), 0.9)}
    assert said["TRL: runs that reached 0.9, share"].value == 0.5
    assert said["asynchronous, share of TRL's time"].target == "<= 0.6"
    assert said["asynchronous, share of TRL's time, from the end of the first step"].value.median == pytest.approx(0.2)
    result = json.loads(json.dumps({"runs": rows(), "goal": 0.9, "preset": "quickstart"}, default=asdict))
    time_to_reward_figure.draw(result, tmp_path / "reward.json")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    lines = time_to_reward_figure.table(result).splitlines()
    assert "| asynchronous | 1 | 4 | 16 | 6 |" in lines and "| TRL | 2 | not reached | > 40 |  |" in lines


def test_steps_are_seen_as_they_end(tmp_path: Path) -> None:
    run, path = Course(ASYNC, 1), tmp_path / "metrics.jsonl"
    time_to_reward._see_steps(tmp_path, run, 1.0)
    path.write_text('{"step": 0}\n{"step": 1}\n')
    time_to_reward._see_steps(tmp_path, run, 2.0)
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "re')
    time_to_reward._see_steps(tmp_path, run, 3.0)
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "reward/mean": 1.0}\n')
    time_to_reward._see_steps(tmp_path, run, 4.0)
    assert run.ended_s == {0: 2.0, 1: 2.0, 2: 4.0}


@pytest.mark.parametrize("loop", [PLAIN, pytest.param(TRL, marks=pytest.mark.skipif(
    bool(peers_missing()), reason=peers_missing() or "TRL is there"))])  # fmt: skip
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_peer_trains_and_tells_its_accuracies(tmp_path: Path, loop: str) -> None:
    tiny_model(tmp_path, tied=True)
    settings = {
        "config": str(time_to_reward.ROOT / "configs" / "quickstart.toml"),
        "overrides": [f"model.path={tmp_path}", "run.steps=2", "learner.batch_groups=2", "sampling.group_size=4",
                      "data.eval_problems=4", "evaluation.every=2"],
        "loop": "trl" if loop == TRL else "plain",
        "completions_each": 4,
        "steps": 2,
    }  # fmt: skip
    run = time_to_reward.run_peer(loop, settings, seed=1, goal=0.9, limit_s=600, threads=1)
    assert run.ended_s.keys() == {0, 1, 2} and run.accuracy.keys() == {0, 2}, run.note
    assert all(0 <= accuracy <= 1 for accuracy in run.accuracy.values())
    assert run.ended_s[0] < run.ended_s[1] < run.ended_s[2]
    assert run.note.startswith("2 steps in")

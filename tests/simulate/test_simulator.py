"""Simulated runs: closed forms, the bound, the accounts, and the predictions that the design was made with."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config import run_ahead
from async_rl.simulate import Costs, Outcome, Simulation, simulate
from async_rl.simulate.simulator import _shrunk
from async_rl.staleness import trajectory_staleness
from tests.simulate.settings import lognormal, make_config, make_costs


def run(*overrides: str, steps: int = 40, seed: int = 0, **changes: object) -> tuple[Simulation, Outcome]:
    simulation = Simulation(make_config(*overrides), make_costs(**changes), steps, seed)
    simulation.batches = []
    return simulation, simulation.run()


def test_synchronous_steps_take_the_sum_of_their_parts() -> None:
    """16 members of 100 tokens in 8 slots: two rounds of 1 s; then the step, the gathering, the transfer, the load."""
    _, out = run(
        "staleness.max_staleness=0",
        "learner.batch_groups=8",
        step_s=0.25,
        gather_s=0.125,
        transfer_s=0.5,
        pause_s=0.0625,
    )
    train_s = 0.25 + 1600 / 800
    step_s = 2.0 + train_s + 0.125 + 0.5 + 0.0625
    assert out.seconds / out.steps == pytest.approx(step_s)
    assert out.trained_tokens_per_s == pytest.approx(1600 / step_s)
    assert out.wait_share == pytest.approx((2.0 + 0.5 + 0.0625) / step_s)
    assert out.publish_share == pytest.approx(0.125 / step_s)
    assert out.idle_share == pytest.approx(1 - 2.0 / step_s)
    assert out.staleness == {0: 1.0}
    assert out.ideal_tokens_per_s == pytest.approx(1600 / train_s)
    assert out.limit == "learner"


def test_even_lengths_and_rates_run_at_the_ideal_limit_with_any_staleness() -> None:
    _, out = run("staleness.max_staleness=1", steps=60)
    assert out.ideal_share == pytest.approx(1.0)
    assert out.wait_share == pytest.approx(0.0, abs=1e-9)
    assert out.staleness == {1: 1.0}


def test_a_faster_learner_waits_for_the_difference() -> None:
    """Generators 800 tokens/s, the learner four times that: it works a quarter of the time."""
    _, out = run(learner_tokens_per_s=3200.0, steps=60)
    assert out.trained_tokens_per_s == pytest.approx(800.0, rel=1e-6)
    assert (out.wait_share, out.limit) == (pytest.approx(0.75, rel=1e-6), "generators")
    assert out.idle_share == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("overrides", "largest"),
    [
        (["staleness.overdue=keep"], 4),
        (["staleness.overdue=keep", "algorithm.correction.max_token_staleness=2"], 2),
        (["staleness.overdue=mask", "algorithm.correction.max_token_staleness=1"], 1),
    ],
)
def test_tokens_older_than_the_correction_takes_are_masked(overrides: list[str], largest: int) -> None:
    _, out = run(*overrides, "staleness.max_staleness=4", learner_tokens_per_s=400.0, steps=60)
    assert out.largest_staleness <= largest
    assert (out.trained_tokens_per_s == pytest.approx(out.consumed_tokens_per_s)) == (largest == 4)


def test_a_greedy_completion_for_each_group_takes_its_share_of_the_generators() -> None:
    """Groups of 2 with a third completion: 2 of 3 sampled tokens are trained, and that is the limit."""
    simulation, out = run('algorithm.advantage.type="remax"', learner_tokens_per_s=1e9, steps=60)
    assert out.generated_tokens_per_s == pytest.approx(800.0, rel=0.02)
    assert out.trained_tokens_per_s == pytest.approx(800.0 * 2 / 3, rel=0.02)
    assert (out.ideal_tokens_per_s, out.limit) == (pytest.approx(800.0 * 2 / 3), "generators")
    assert simulation.batches is not None
    assert all(g.baseline is not None and len(g.members) == 2 for batch in simulation.batches for g in batch)


@pytest.mark.parametrize(("refills", "trained"), [(0, 1.0), (10, 0.5)])
def test_groups_of_equal_rewards_are_dropped_and_refilled(refills: int, trained: float) -> None:
    """Generators are the limit; half of the groups teach nothing, and may all be refilled or none."""
    simulation, out = run(f"sampling.max_refills={refills}", equal_share=0.5, learner_tokens_per_s=1e9, steps=400)
    assert out.generated_tokens_per_s == pytest.approx(800.0, rel=0.02)
    assert out.trained_tokens_per_s == pytest.approx(800.0 * trained, rel=0.1)
    assert out.dropped_tokens_per_s == pytest.approx(800.0 * (1 - trained), rel=0.1)
    assert simulation.batches is not None
    with_signal = [group.has_signal for batch in simulation.batches for group in batch]
    assert sum(with_signal) / len(with_signal) == pytest.approx(0.5 / trained, abs=0.05)
    assert simulation.ledger.counts().dropped.get("zero_variance", 0) == pytest.approx(
        1600 * (1 / trained - 1), rel=0.1
    )


@pytest.mark.parametrize("overrides", [(), ('algorithm.advantage.type="remax"', "sampling.group_size=1")])
def test_without_a_run_every_group_has_something_to_teach(overrides: tuple[str, ...]) -> None:
    with_refills, without = (run(f"sampling.max_refills={n}", *overrides)[1] for n in (2, 0))
    assert with_refills == without and without.dropped_tokens_per_s == 0


def test_requests_that_share_an_engine_are_slower() -> None:
    _, out = run(slowdown=0.5, learner_tokens_per_s=1e9, steps=60)
    assert out.trained_tokens_per_s == pytest.approx(8 * 100 / (1 + 7 * 0.5), rel=1e-6)


def test_publishing_rarely_makes_tokens_older() -> None:
    ages = [
        run(f"staleness.publish_every={n}", "staleness.max_staleness=4", steps=80)[1].mean_staleness for n in (1, 2, 4)
    ]
    assert ages[0] < ages[1] < ages[2]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    bound=st.integers(1, 4),
    every=st.integers(1, 2),
    overdue=st.sampled_from(["wait", "mask", "keep"]),
    count=st.integers(1, 4),
    failing=st.booleans(),
    finish=st.booleans(),
)
def test_any_run_keeps_the_bound_and_its_accounts(
    seed: int, bound: int, every: int, overdue: str, count: int, failing: bool, finish: bool
) -> None:
    window = ["staleness.reorder_window=3"] if overdue == "wait" else []
    overrides = [
        f"staleness.max_staleness={bound + every}",
        f"staleness.publish_every={every}",
        f"staleness.overdue={overdue}",
        f"generator.count={count}",
        f"generator.running_requests={'finish' if finish else 'recompute'}",
        "transport.heartbeat_timeout_s=2",
        "data.eval_problems=3",
        "evaluation.every=5",
    ]
    simulation, out = run(
        *overrides, *window, seed=seed, lengths=lognormal(0.8), pause_s=0.1, score_s=0.2, transfer_s=0.3,
        failure_every_s=20.0 if failing else None, restart_s=3.0,
    )  # fmt: skip
    ledger, bound = simulation.ledger, bound + every
    ledger.check()
    assert simulation.batches is not None
    oldest = [
        trajectory_staleness(step, member.versions)
        for step, batch in enumerate(simulation.batches, start=1)
        for group in batch
        for member in group.members
    ]
    if overdue == "wait":
        assert max(oldest) <= bound
        assert out.overdue_share == 0
    if overdue != "keep":
        assert out.largest_staleness <= bound
    tickets = [group.ticket for batch in simulation.batches for group in batch]
    assert len(tickets) == len(set(tickets)) == 40 * 4
    # Every token that arrived was trained, is buffered or part of an open group, was dropped, or was an evaluation's.
    ages = sum((Counter(record.ages) for record in simulation.records), Counter[int]())
    assert ages.total() == sum(len(m.completion_ids) for b in simulation.batches for g in b for m in g.members)
    assert simulation.fleet.generated_tokens >= ages.total() + simulation.fleet.dropped_tokens
    assert failing or simulation.fleet.lost_tokens == 0


def test_a_run_is_repeated_by_its_seed() -> None:
    one, again, other = (
        run(seed=seed, lengths=lognormal(0.8), failure_every_s=30.0, restart_s=2.0)[1] for seed in (3, 3, 4)
    )
    assert one == again
    assert one != other


def test_lengths_belong_to_tickets_whatever_the_settings() -> None:
    """So that two settings are compared on the same problems."""
    lengths = []
    for bound in (1, 4):
        simulation, _ = run(f"staleness.max_staleness={bound}", "generator.count=2", lengths=lognormal(1.0))
        assert simulation.batches is not None
        groups = {g.ticket: [len(m.completion_ids) for m in g.members] for b in simulation.batches for g in b}
        lengths.append([groups[ticket] for ticket in range(100)])
    assert lengths[0] == lengths[1]
    assert len({length for pair in lengths[0] for length in pair}) > 50


def test_a_generator_that_dies_loses_its_work_and_delays_the_run() -> None:
    (_, well), (simulation, ill) = (
        run("generator.count=2", steps=400, learner_tokens_per_s=1e9, restart_s=10.0, failure_every_s=every)
        for every in (None, 20.0)
    )
    assert simulation.fleet.failures > 5
    assert simulation.ledger.events["lost_leases"] > 0
    assert ill.lost_tokens_per_s > 0
    # Each generator is up 20 of 30 s, and what it had begun is lost besides.
    assert 0.4 < ill.generated_tokens_per_s / well.generated_tokens_per_s < 0.75
    assert well.lost_tokens_per_s == well.failures == 0


def test_evaluation_takes_slots_from_training() -> None:
    without, with_it = (
        run(f"evaluation.every={every}", "data.eval_problems=8", learner_tokens_per_s=1e9, steps=60)[1]
        for every in (0, 2)
    )
    # 16 members trained for 8 evaluated: a third of the fleet's tokens.
    assert with_it.trained_tokens_per_s / without.trained_tokens_per_s == pytest.approx(2 / 3, rel=0.05)


def test_a_large_fleet_is_simulated_as_a_small_one_of_the_same_proportions() -> None:
    config = make_config("generator.count=128", "learner.batch_groups=512", "plan.members=1000")
    costs = make_costs(lengths=lognormal(0.7), learner_tokens_per_s=128 * 800.0)
    small, slower = _shrunk(config, costs, 32, 4.0)
    assert (small.generator.count, small.learner.batch_groups) == (32, 128)
    assert slower.learner_tokens_per_s == 32 * 800.0
    whole, shrunk = Simulation(config, costs, 30).run(), simulate(config, costs)
    assert shrunk.trained_tokens_per_s == pytest.approx(whole.trained_tokens_per_s, rel=0.05)
    assert shrunk.ideal_tokens_per_s == pytest.approx(whole.ideal_tokens_per_s, rel=0.05)


@pytest.mark.parametrize("groups", [1, 9, 52, 500])
@pytest.mark.parametrize("window", [1, 2, 52, 53, 157, 1000])
def test_a_smaller_fleet_runs_as_many_batches_ahead(groups: int, window: int) -> None:
    """Window and batch are rounded apart; the window must not take more steps of staleness than it did, nor fewer."""
    config = make_config(
        "staleness.overdue=wait", "staleness.max_staleness=1000", f"staleness.reorder_window={window}",
        f"learner.batch_groups={groups}",
    )  # fmt: skip
    for factor in (1.1, 2.0, 3.7, 8.0):
        small, _ = _shrunk(config, make_costs(), 1, factor)
        ahead = [run_ahead(c.staleness, c.learner.batch_groups) for c in (config, small)]
        assert ahead[0] == ahead[1], factor
        assert small.staleness.reorder_window is not None and small.staleness.reorder_window >= 1


def test_a_cancelled_last_request_lets_a_draining_engine_load() -> None:
    """Rounds of evaluation end at a deadline of 3 s, often while an engine finishes nothing but their members."""
    for seed in range(4):
        simulation, _ = run(
            "generator.running_requests=finish", "evaluation.every=1", "data.eval_problems=4",
            "run.stall_timeout_s=3", "generator.count=2",
            seed=seed, lengths=lognormal(1.0), learner_tokens_per_s=3200.0,
        )  # fmt: skip
        assert len(simulation.records) == 40


PREDICTED = [
    # sigma, overdue, max_staleness: share of the ideal rate (tokens masked later included), share of tokens masked
    (0.5, "mask", 0, 0.38, 0.000),
    (0.5, "wait", 1, 0.76, 0.000),
    (0.5, "wait", 2, 0.98, 0.000),
    (0.5, "wait", 4, 1.00, 0.000),
    (0.5, "mask", 1, 0.80, 0.014),
    (0.5, "mask", 2, 1.00, 0.001),
    (0.5, "mask", 4, 1.00, 0.000),
    (1.0, "mask", 0, 0.21, 0.000),
    (1.0, "wait", 1, 0.37, 0.000),
    (1.0, "wait", 2, 0.52, 0.000),
    (1.0, "wait", 4, 0.77, 0.000),
    (1.0, "mask", 1, 0.69, 0.116),
    (1.0, "mask", 2, 0.99, 0.089),
    (1.0, "mask", 4, 0.99, 0.009),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "overdue", "bound", "share", "masked"), PREDICTED)
def test_it_finds_what_an_independent_simulation_of_the_rule_found(
    sigma: float, overdue: str, bound: int, share: float, masked: float
) -> None:
    """Groups of 8, batch = 4 x slots, equal rates; that simulation shared no code with this one."""
    window = ["staleness.reorder_window=1"] if overdue == "wait" else []
    config = make_config(
        "generator.slots=128", "generator.prefetch=0", "sampling.group_size=8", "learner.batch_groups=64",
        "sampling.max_completion_tokens=100000", f"staleness.max_staleness={bound}", f"staleness.overdue={overdue}",
        *window,
    )  # fmt: skip
    costs: Costs = make_costs(lengths=lognormal(sigma, 100_000), learner_tokens_per_s=12_800.0)
    out = Simulation(config, costs, steps=50 if sigma < 1 else 150).run()
    assert out.consumed_share == pytest.approx(share, abs=0.05)
    assert out.overdue_share == pytest.approx(masked, abs=0.01)


def test_a_run_that_never_ends_a_step_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators that die every few milliseconds finish nothing."""
    monkeypatch.setattr("async_rl.simulate.simulator.MOST_INSTANTS", 500)
    with pytest.raises(RuntimeError, match="stands still after 0 steps: step 1 waits for 4 of 4 groups"):
        run(failure_every_s=0.01, restart_s=0.1)

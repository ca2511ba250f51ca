"""Costs measured from the metrics of a run are those that the run had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from async_rl.config import Config, ConfigError, dump_json
from async_rl.simulate import Costs, Lognormal, Quantiles, Simulation
from async_rl.simulate.calibrate import costs_from_run, line
from async_rl.simulate.outcome import Mark
from tests.simulate.settings import lognormal, make_config, make_costs


def write_run(folder: Path, config: Config, costs: Costs, steps: int = 40) -> Simulation:
    """The metrics that a real run would write, of a simulated one."""
    simulation = Simulation(config, costs, steps)
    simulation.batches = []
    dropped: list[int] = []
    mark = simulation._mark

    def marked() -> Mark:
        dropped.append(simulation.ledger.counts().dropped.get("zero_variance", 0))
        return mark()

    simulation._mark = marked  # type: ignore[method-assign]
    simulation.run()
    (folder / "config.json").write_text(dump_json(config))
    slots = config.generator.count * config.generator.slots
    with (folder / "metrics.jsonl").open("w") as file:
        for record, batch, before, after, refilled in zip(
            simulation.records,
            simulation.batches,
            simulation.marks[:-1],
            simulation.marks[1:],
            dropped[1:],
            strict=True,
        ):
            lengths = np.array([len(m.completion_ids) for group in batch for m in group.members])
            step_s = after.time - before.time
            busy = (after.busy_slot_s - before.busy_slot_s) / (after.slot_s - before.slot_s)
            values = {
                "step": record.step,
                "time/step_s": step_s,
                "time/train_s": record.train_s,
                "time/wait_for_batch_s": record.wait_s,
                "time/publish_s": step_s - record.wait_s - record.train_s,
                "time/gather_s": costs.gather_s,
                "time/publication_s": costs.transfer_s + costs.pause_s,
                "time/pause_s": costs.pause_s,
                "reward/score_s": costs.score_s,
                "generator/round_trip_s": costs.round_trip_s,
                "group/trained": len(batch),
                "group/zero_variance_share": sum(not group.has_signal for group in batch) / len(batch),
                **({"ledger/dropped_zero_variance": refilled} if refilled else {}),
                "completion/length_mean": lengths.mean(),
                "completion/length_max": int(lengths.max()),
                **{f"completion/length/p{q}": float(np.quantile(lengths, q / 100)) for q in (10, 50, 90)},
                "throughput/generated_tokens_per_s": (after.generated_tokens - before.generated_tokens) / step_s,
                "throughput/trained_tokens_per_s": record.tokens / step_s,
                "generator/slots": slots,
                "generator/idle_share": 1 - busy,
            }
            file.write(json.dumps(values) + "\n")
    return simulation


def test_costs_are_recovered_and_predict_the_run(tmp_path: Path) -> None:
    config = make_config("learner.batch_groups=32", "generator.count=2")
    costs = make_costs(
        lengths=lognormal(0.7), step_s=1.0, learner_tokens_per_s=2000.0, gather_s=0.2, transfer_s=0.4, pause_s=0.3
    )
    run = write_run(tmp_path, config, costs)
    found = costs_from_run(tmp_path)
    assert found.gather_s == pytest.approx(0.2)
    assert found.transfer_s == pytest.approx(0.4)
    assert found.pause_s == pytest.approx(0.3)
    assert found.tokens_per_s == pytest.approx(100.0, rel=0.05)
    assert found.lengths.mean() == pytest.approx(costs.lengths.mean(), rel=0.05)
    tokens = np.mean([record.tokens for record in run.records])
    assert found.train_s(config, tokens) == pytest.approx(costs.train_s(config, tokens), rel=0.02)
    # Settings that the run did not have: the costs say what they would do.
    for overrides in (("staleness.max_staleness=0",), ("generator.count=4",), ("learner.batch_groups=16",)):
        other = make_config("learner.batch_groups=32", "generator.count=2", *overrides)
        real, predicted = (Simulation(other, c, 60).run().trained_tokens_per_s for c in (costs, found))
        assert predicted == pytest.approx(real, rel=0.1), overrides


def test_short_completions_wait_for_rewards_and_messages(tmp_path: Path) -> None:
    """3 tokens at 100 a second, 20 ms for the reward and 40 ms for the answer: a lease takes 90 ms, not 30."""
    config = make_config("generator.prefetch=0", "learner.batch_groups=32", "staleness.max_staleness=4")
    short = Lognormal(3.0, 0.0, 4096)
    costs = make_costs(lengths=short, score_s=0.02, round_trip_s=0.04, learner_tokens_per_s=1e6)
    run = write_run(tmp_path, config, costs)
    rate = run.marks[-1].generated_tokens / run.marks[-1].time
    assert rate == pytest.approx(8 * 3 / 0.09, rel=0.02)
    found = costs_from_run(tmp_path)
    assert found.round_trip_s == pytest.approx(0.04)
    assert Simulation(config, found, 40).run().trained_tokens_per_s == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize("refills", [0, 1, 10])
def test_the_share_of_equal_rewards_is_seen_whether_they_are_trained_or_dropped(tmp_path: Path, refills: int) -> None:
    """And so a run without refills says what some would cost."""
    config = make_config(f"sampling.max_refills={refills}")
    write_run(tmp_path, config, make_costs(equal_share=0.4), steps=300)
    found = costs_from_run(tmp_path)
    assert found.equal_share == pytest.approx(0.4, abs=0.05)
    refilled = make_config("sampling.max_refills=10")
    real, predicted = (Simulation(refilled, c, 200).run() for c in (make_costs(equal_share=0.4), found))
    assert predicted.trained_tokens_per_s == pytest.approx(real.trained_tokens_per_s, rel=0.1)
    assert predicted.dropped_tokens_per_s == pytest.approx(real.dropped_tokens_per_s, rel=0.2)


def test_a_line_is_fitted_where_it_can_be_told() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert line(x, 2 + 3 * x) == (pytest.approx(2.0), pytest.approx(3.0))
    # No spread: all of it is per token. A falling line, or one that starts below zero: the same.
    assert line(np.array([2.0, 2.01]), np.array([6.0, 6.0]))[0] == 0
    assert line(x, 10 - x) == (0.0, pytest.approx(float(x @ (10 - x) / (x @ x))))
    assert line(x, 3 * x - 1)[0] == 0


def test_a_single_step_does_not_bend_the_line() -> None:
    """Busy slots and seconds per token of a run whose slots ran empty in its last step."""
    busy = np.array([16.0] * 13 + [15.95, 6.0])
    noise = np.array([-9, 2, 0, 5, -2, 3, 0.5, 5, -9, 2, 1, 18, 3, -6, -49]) / 100
    start, slope = line(busy, (1 + noise) / 60)
    assert start == 0 and slope * 16 == pytest.approx(1 / 60, rel=0.05)
    x = np.linspace(1, 2, 5000)
    y = np.where(np.arange(5000) % 50 == 0, 100.0, 2 + 3 * x)
    assert line(x, y) == (pytest.approx(2.0), pytest.approx(3.0)), "one step in fifty is far off, and there are many"


def test_quantiles_are_drawn_as_they_are_given() -> None:
    lengths = Quantiles((0.0, 0.1, 0.5, 0.9, 1.0), (10.0, 20.0, 50.0, 200.0, 400.0), 300)
    drawn = lengths.draw(np.random.default_rng(0), 20_000)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([20, 50, 200], rel=0.05)
    assert (drawn.min() >= 10, drawn.max()) == (True, 300)
    assert lengths.mean() == pytest.approx(drawn.mean(), rel=0.02)


@pytest.mark.parametrize("longest", [100_000, 150, 60])
def test_the_mean_of_a_lognormal_is_that_of_its_draws(longest: int) -> None:
    lengths = lognormal(0.8, longest)
    assert lengths.mean() == pytest.approx(lengths.draw(np.random.default_rng(1), 200_000).mean(), rel=0.01)


def test_runs_that_say_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        costs_from_run(tmp_path)
    write_run(tmp_path, make_config(), make_costs(), steps=3)
    with pytest.raises(ConfigError, match="has 2 steps after the first"):
        costs_from_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "time/step_s": 1.0}}\n' for n in range(1, 9)))
    with pytest.raises(ConfigError, match=r"has time/train_s, .* in fewer than 3 steps"):
        costs_from_run(tmp_path)

"""One sentence names the bottleneck and the setting that moves it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.advice import FIRST_STEP, Predictions, advice_after, bottleneck_sentence, devices_here
from async_rl.config import build_config
from tests.simulate.settings import lognormal, make_config, make_costs
from tests.simulate.test_calibrate import write_run


def sentence(wait: float, idle: float, publish: float = 0.0, *overrides: str, **more: float) -> str:
    config = build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}}, overrides)
    values = {
        "learner/wait_share": wait,
        "generator/idle_share": idle,
        "time/step_s": 10.0,
        "time/publish_s": publish * 10,
    }
    return bottleneck_sentence({**values, **more}, config)


@pytest.mark.parametrize(
    ("wait", "idle", "publish", "starts", "names"),
    [
        (0.4, 0.05, 0.0, "The learner waits 40%", "generator.slots"),
        (0.05, 0.3, 0.0, "Generators idle 30%", "fewer generators"),
        (0.2, 0.1, 0.3, "Publications hold the learner 30%", "staleness.publish_every"),
        (0.3, 0.4, 0.0, "The learner waits 30% while generators idle 40%", "staleness.max_staleness"),
        (0.1, 0.14, 0.05, "Balanced: the learner waits 10% of the time, generators idle 14%", ""),
    ],
)
def test_the_largest_share_is_named(wait: float, idle: float, publish: float, starts: str, names: str) -> None:
    found = sentence(wait, idle, publish)
    assert found.startswith(starts)
    assert names in found


def test_synchronous_training_waits_in_turns() -> None:
    assert sentence(0.5, 0.5, 0.0, "staleness.max_staleness=0").startswith("Synchronous")


def test_a_smaller_wire_type_is_offered_only_where_it_is_smaller() -> None:
    assert "bfloat16" in sentence(0.0, 0.0, 0.5)
    assert "bfloat16" not in sentence(0.0, 0.0, 0.5, "weights.wire_dtype=bfloat16")
    assert "bfloat16" not in sentence(0.0, 0.0, 0.5, "model.dtype=bfloat16")


def test_slots_that_admission_cannot_fill_are_named() -> None:
    # (2 + 1) batches of 16 x 8 members may be in work
    assert "at most 384 members" in sentence(0.0, 0.5, **{"generator/slots": 385.0})
    assert "at most" not in sentence(0.0, 0.5, **{"generator/slots": 384.0})


def test_an_empty_fleet_is_named() -> None:
    assert sentence(0.9, 0.0, **{"generator/count": 0.0}).startswith("No generator is registered")


def test_before_the_first_step() -> None:
    config = build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}})
    assert bottleneck_sentence({}, config) == "Waiting for the first step."


def test_after_a_run_every_change_has_the_gain_that_its_metrics_promise(tmp_path: Path) -> None:
    """The run's learner could train twice what one generator samples, and says so without having been told."""
    config = make_config("learner.batch_groups=16")
    write_run(tmp_path, config, make_costs(lengths=lognormal(0.2), learner_tokens_per_s=1600.0))
    first, *_ = advice_after(tmp_path, config)
    assert first.startswith("1. generator.count 1 -> 2: +")
    gain = int(first.split("+")[1].split("%")[0])
    assert 85 <= gain <= 110


def test_a_run_that_is_too_short_gets_no_advice(tmp_path: Path) -> None:
    config = make_config()
    assert advice_after(tmp_path, config) == []
    write_run(tmp_path, config, make_costs(), steps=3)
    assert advice_after(tmp_path, config) == []


def predicted(folder: Path, overrides: tuple[str, ...], devices: int | None = None, **costs: Any) -> str:
    """The sentence during a run of these costs, from its own metrics."""
    config = make_config("learner.batch_groups=16", *overrides)
    write_run(folder, config, make_costs(**costs))
    values = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    values["learner/wait_share"] = values["time/wait_for_batch_s"] / values["time/step_s"]
    predictions = Predictions(folder, config, devices)
    predictions.update(FIRST_STEP - 1, values)
    assert predictions.sentence == ""
    predictions.update(FIRST_STEP, values)
    return bottleneck_sentence(values, config, predictions.sentence)


def gain(sentence: str, change: str) -> int:
    """Percent that the sentence promises for a change."""
    return int(sentence.split(f"{change} (+")[1].split("%")[0])


def test_a_fleet_that_is_too_small_is_told_how_many_generators(tmp_path: Path) -> None:
    found = predicted(tmp_path, (), lengths=lognormal(0.2), learner_tokens_per_s=1600.0)
    assert re.match(r"The learner waits (49|5\d)% of the time; predicted gain: ", found)
    assert gain(found, "generator.count 1 -> 2") == pytest.approx(100, abs=12)


def test_a_slow_learner_is_told_how_many_ranks(tmp_path: Path) -> None:
    found = predicted(tmp_path, ("generator.count=2",), lengths=lognormal(0.2))
    assert found.startswith("Generators idle")
    assert gain(found, "learner.ranks 1 -> 2") == pytest.approx(100, abs=12)


@pytest.mark.parametrize(("count", "learner"), [(1, 1600.0), (2, 800.0)])
def test_machines_that_are_not_there_are_not_suggested(tmp_path: Path, count: int, learner: float) -> None:
    overrides = (f"generator.count={count}",)
    found = predicted(tmp_path, overrides, 3 if count == 2 else 2, lengths=lognormal(0.2), learner_tokens_per_s=learner)
    assert "predicted" not in found
    config = make_config("learner.batch_groups=16", *overrides)
    assert not any("->" in line and "costs nothing" not in line for line in advice_after(tmp_path, config, count + 1))
    assert any("->" in line and "costs nothing" not in line for line in advice_after(tmp_path, config, count + 2))


def test_publications_that_hold_the_learner_are_predicted_to_be_made_rarer(tmp_path: Path) -> None:
    """A step is 1 s and 4 s of publication, its batch takes 4 s to sample: half of the publications gain a quarter."""
    found = predicted(tmp_path, ("staleness.max_staleness=6",), 2, gather_s=4.0, learner_tokens_per_s=3200.0)
    assert found.startswith("Publications hold the learner 80% of the time; predicted gain: ")
    config = make_config("learner.batch_groups=16", "staleness.max_staleness=6")
    assert any("staleness.publish_every 1 -> 2: +2" in line for line in advice_after(tmp_path, config, 2))


def test_a_tail_is_hidden_by_larger_batches_or_more_staleness(tmp_path: Path) -> None:
    """Batches of half of the slots, equal rates, a heavy tail: both sides wait."""
    overrides = ("generator.count=4", "learner.batch_groups=8", "staleness.overdue=wait", "staleness.max_staleness=1")
    found = predicted(tmp_path, overrides, 5, lengths=lognormal(1.0), learner_tokens_per_s=3200.0)
    assert " while generators idle " in found and "predicted gain: " in found
    config = make_config("learner.batch_groups=16", *overrides)
    advice = "\n".join(advice_after(tmp_path, config, 5))
    assert "learner.batch_groups 8 -> " in advice and "staleness.max_staleness 1 -> " in advice


def test_a_balanced_run_is_left_alone(tmp_path: Path) -> None:
    found = predicted(tmp_path, ("learner.batch_groups=32",), lengths=lognormal(0.2))
    assert found.startswith("Balanced")


def test_devices_are_counted_where_all_of_them_are_here() -> None:
    assert devices_here(make_config(), 4) == 4
    assert (devices_here(make_config(), 0) or 0) >= 1
    assert devices_here(make_config("transport.host=10.0.0.1", "transport.insecure=true"), 4) is None

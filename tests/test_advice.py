"""One sentence names the bottleneck and the setting that moves it."""

from pathlib import Path

import pytest

from async_rl.advice import advice_after, bottleneck_sentence
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

"""One sentence names the bottleneck and the setting that moves it."""

import pytest

from async_rl.advice import bottleneck_sentence
from async_rl.config import build_config


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

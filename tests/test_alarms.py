"""Alarms: each is raised by what is wrong, by nothing else, once, and ends when it is over."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.alarms import RULES, Alarms, default_mismatch
from async_rl.config import Config, build_config
from async_rl.config.checks import ALARM_THRESHOLDS
from async_rl.config.schema import AlarmsConfig
from async_rl.metrics import find_row

HEALTHY = {
    "ratio/effective_sample_size": 0.97, "mismatch/logprob_abs_mean": 1e-6, "correction/masked_share": 0.0,
    "staleness/overdue_token_share": 0.02, "group/repeated_nats": 6.0, "group/zero_variance_share": 0.4,
    "loss/entropy": 0.3, "reward/failed_share": 0.0,
}  # fmt: skip
BROKEN = {
    "effective_sample_size": {"ratio/effective_sample_size": 0.1},
    "mismatch": {"mismatch/logprob_abs_mean": 0.02},
    "all_rejected": {"correction/masked_share": 1.0},
    "overdue": {"staleness/overdue_token_share": 0.8},
    "repeated_completions": {"group/repeated_nats": 200.0},
    "equal_rewards": {"group/zero_variance_share": 1.0},
    "entropy_collapse": {"loss/entropy": 1e-4},
    "failures": {"reward/failed_share": 0.9},
}


def config(*overrides: str) -> Config:
    return build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}}, overrides)


def alarms(*overrides: str) -> Alarms:
    return Alarms(config(*overrides), on_cpu=True)


def test_every_alarm_has_a_rule_a_threshold_a_metric_and_a_broken_input() -> None:
    names = [rule.name for rule in RULES]
    assert names == list(ALARM_THRESHOLDS) == list(BROKEN)
    assert list(get_args(get_args(get_type_hints(AlarmsConfig)["stop"])[0])) == names
    assert {rule.metric for rule in RULES} == HEALTHY.keys()
    assert all(find_row(rule.metric) and find_row(f"alarm/{rule.name}") for rule in RULES)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_raises_its_alarm_alone_after_some_patience(name: str) -> None:
    judge = alarms("alarms.patience=2")
    assert judge.check(1, HEALTHY | BROKEN[name]) == []
    (line,) = judge.check(2, HEALTHY | BROKEN[name])
    value = next(iter(BROKEN[name].values()))
    rule = next(rule for rule in RULES if rule.name == name)
    assert line.startswith(f"ALARM {name}: {rule.metric} = {value:.3g} is")
    assert f"alarms.{ALARM_THRESHOLDS[name]} = " in line and rule.meaning in line and rule.advice in line
    assert judge.counts() == {other: int(other == name) for other in BROKEN}


def test_a_healthy_run_raises_nothing() -> None:
    judge = alarms("alarms.patience=1")
    assert [judge.check(step, HEALTHY) for step in range(50)] == [[]] * 50
    assert sum(judge.counts().values()) == 0 and judge.ends_run() is None


@pytest.mark.parametrize(
    ("name", "values"),
    [("overdue", (0.5, 0.499)), ("equal_rewards", (1.0, 0.999)), ("effective_sample_size", (0.299, 0.3))],
)
def test_the_threshold_itself_is_on_its_side(name: str, values: tuple[float, float]) -> None:
    metric = next(iter(BROKEN[name]))
    for value, raised in zip(values, (True, False), strict=True):
        assert bool(alarms("alarms.patience=1").check(1, {metric: value})) == raised


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_wrong(value: float) -> None:
    assert len(alarms("alarms.patience=1").check(1, {"ratio/effective_sample_size": value})) == 1


def test_a_standing_alarm_repeats_itself_rarely_counts_and_says_when_it_is_over() -> None:
    judge, broken = alarms("alarms.patience=2", "alarms.repeat_every=5"), HEALTHY | BROKEN["mismatch"]
    assert [step for step in range(1, 13) if judge.check(step, broken)] == [2, 7, 12]
    assert judge.counts()["mismatch"] == 11
    assert judge.check(13, HEALTHY) == [] and judge.counts()["mismatch"] == 12  # one good step does not end it
    assert judge.check(14, HEALTHY) == ["alarm mismatch is over: mismatch/logprob_abs_mean = 1e-06"]
    assert judge.check(15, HEALTHY) == []


def test_steps_without_the_metric_neither_raise_nor_end() -> None:
    """Tokens of staleness 0 are rare in an asynchronous run, and with them the mismatch."""
    judge = alarms("alarms.patience=2")
    broken, absent = BROKEN["mismatch"], {"loss/entropy": 0.3}
    lines = [judge.check(step, values) for step, values in enumerate([broken, absent, absent, broken])]
    assert list(map(len, lines)) == [0, 0, 0, 1]
    assert judge.check(9, absent) == [] and judge.counts()["mismatch"] == 1


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 9))
def test_lines_are_never_closer_than_asked_for_and_only_after_patience(
    history: list[bool], patience: int, repeat: int
) -> None:
    judge = alarms(f"alarms.patience={patience}", f"alarms.repeat_every={repeat}")
    said = []
    for step, wrong in enumerate(history):
        lines = judge.check(step, HEALTHY | (BROKEN["failures"] if wrong else {}))
        said += [step] if any(line.startswith("ALARM") for line in lines) else []
    assert all(later - earlier >= repeat for earlier, later in pairwise(said))
    raised = [i + patience - 1 for i in range(len(history) - patience + 1) if all(history[i : i + patience])]
    assert said[:1] == raised[:1], "the first line comes with the first `patience` wrong steps in a row"


def test_an_alarm_can_end_the_run() -> None:
    judge = alarms("alarms.patience=1", "alarms.stop=mismatch,failures")
    judge.check(1, HEALTHY | BROKEN["equal_rewards"])
    assert judge.ends_run() is None
    judge.check(2, HEALTHY | BROKEN["failures"])
    assert judge.ends_run() == "alarms.stop ends the run: failures (see the line above)"


def test_an_alarm_without_threshold_is_off() -> None:
    judge = alarms("alarms.patience=1", "alarms.min_entropy=none")
    assert judge.check(1, BROKEN["entropy_collapse"]) == []
    assert "entropy_collapse" not in judge.counts()
    assert "overdue" not in alarms("staleness.overdue=keep").counts()


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "expected"),
    [
        ([], True, 1e-3),
        ([], False, 0.05),  # on GPU "auto" is the model's own type
        (["generator.engine.dtype=float32"], False, 1e-3),
        (["model.dtype=bfloat16"], True, 0.05),
        (["generator.engine.type=hf"], False, 1e-3),
        (["generator.running_requests=keep"], True, 0.05),
    ],
)
def test_the_mismatch_that_is_allowed_follows_from_how_both_compute(
    overrides: list[str], on_cpu: bool, expected: float
) -> None:
    assert default_mismatch(config(*overrides), on_cpu) == expected
    judge = Alarms(config(*overrides, "alarms.max_mismatch=0.3"), on_cpu)
    assert next(limit for rule, limit in judge.rules.items() if rule.name == "mismatch") == 0.3

"""Metrics as values: merging is exact in any grouping, and only catalogued keys of the right kind are taken."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.metrics import CATALOGUE, Metrics, find_row
from async_rl.metrics.values import quantile

MEAN, SUM, MAX, LAST, HISTOGRAM = "reward/mean", "loss/tokens", "staleness/max", "step", "staleness/tokens"


def recorded(entries: list[tuple[float, int]]) -> Metrics:
    """Metrics of (value, weight) entries, as one process would record them."""
    metrics = Metrics()
    for value, weight in entries:
        metrics.mean(MEAN, value * weight, weight)
        metrics.sum(SUM, value)
        metrics.max(MAX, value)
        metrics.last(LAST, value)
        metrics.histogram(HISTOGRAM, [value] * weight)
    return metrics


def test_means_weigh_by_items_and_are_never_averaged_early() -> None:
    long, short = Metrics(), Metrics()
    long.mean(MEAN, total=300.0, weight=300)
    short.mean(MEAN, total=0.0, weight=100)
    long.merge(short)
    assert long.resolve() == {MEAN: 0.75}


def test_each_kind_resolves_to_its_number() -> None:
    assert recorded([(2.0, 1), (5.0, 3), (3.0, 0)]).resolve() == {
        MEAN: 17 / 4, SUM: 10.0, MAX: 5.0, LAST: 3.0,
        f"{HISTOGRAM}/p10": 2.0, f"{HISTOGRAM}/p50": 5.0, f"{HISTOGRAM}/p90": 5.0,
    }  # fmt: skip


def test_what_has_no_items_is_left_out() -> None:
    metrics = Metrics()
    metrics.mean(MEAN, 0.0, 0)
    metrics.histogram(HISTOGRAM, [])
    assert metrics.resolve() == {}
    metrics.mean(MEAN, 3.0, 2)
    assert metrics.resolve() == {MEAN: 1.5}


entries = st.lists(st.tuples(st.integers(-50, 50).map(float), st.integers(0, 4)), max_size=12)


@given(entries, st.integers(0, 12), st.integers(0, 12))
def test_merging_in_any_grouping_equals_recording_in_one_place(items: list[tuple[float, int]], i: int, j: int) -> None:
    i, j = sorted((i, j))
    left, middle, right = recorded(items[:i]), recorded(items[i:j]), recorded(items[j:])
    middle.merge(right)
    left.merge(middle)
    assert left.resolve() == recorded(items).resolve()


@given(entries, entries)
def test_the_wire_keeps_everything(here: list[tuple[float, int]], there: list[tuple[float, int]]) -> None:
    metrics = recorded(here)
    metrics.merge(Metrics.from_wire(recorded(there).to_wire()))
    assert metrics.resolve() == recorded([*here, *there]).resolve()


def test_a_merge_leaves_the_other_set_as_it_was() -> None:
    one, other = recorded([(1.0, 2)]), recorded([(3.0, 2)])
    one.merge(other)
    one.histogram(HISTOGRAM, [9.0])
    one.mean(MEAN, 100.0, 1)
    assert other.resolve() == recorded([(3.0, 2)]).resolve()


def test_garbage_on_the_wire_is_refused() -> None:
    for data in (b"\xc1", msgspec.msgpack.encode({"reward/mean": ["median", 1.0]}), msgspec.msgpack.encode([1])):
        with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
            Metrics.from_wire(data)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 99))
def test_quantiles_are_the_smallest_value_that_covers_the_share(values: list[int], percent: int) -> None:
    distinct, counts = np.unique(values, return_counts=True)
    found = quantile(distinct.tolist(), counts.tolist(), percent / 100)
    below = [value for value in values if value < found]
    upto = [value for value in values if value <= found]
    assert found in values
    assert len(below) * 100 < percent * len(values) <= len(upto) * 100


def test_a_key_without_a_row_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"reward/median.*catalogue"):
        Metrics().mean("reward/median", 1.0, 1.0)


def test_the_wrong_kind_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"'reward/mean' is a mean in the catalogue, but was recorded as last"):
        Metrics().last(MEAN, 1.0)


def test_not_a_number_stays_visible() -> None:
    metrics = Metrics()
    metrics.mean(MEAN, math.nan, 1)
    metrics.mean(MEAN, 1.0, 1)
    assert math.isnan(metrics.resolve()[MEAN])


def test_rows_by_reason() -> None:
    metrics = Metrics()
    metrics.last("ledger/dropped_reward_failed", 3)
    assert metrics.resolve() == {"ledger/dropped_reward_failed": 3.0}
    assert find_row("ledger/dropped_Reward failed") is None
    assert find_row("ledger/dropped") is not find_row("ledger/dropped_failed")


def test_every_row_is_unique_and_says_something() -> None:
    keys = [row.key for row in CATALOGUE]
    assert len(keys) == len(set(keys))
    for row in CATALOGUE:
        assert row.meaning.endswith("."), row.key
        assert row.advice == "" or row.advice.endswith("."), row.key
        assert row.unit, row.key


@pytest.mark.parametrize(
    "key",
    [
        "step", "policy_version", "reward/mean", "eval/accuracy", "staleness/mean", "staleness/max",
        "throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s", "time/step_s", "time/wait_for_batch_s",
        "time/publish_s", "generator/idle_share", "correction/effective_sample_size", "mismatch/logprob_abs_mean",
    ],
)  # fmt: skip
def test_keys_that_were_promised(key: str) -> None:
    assert find_row(key) is not None

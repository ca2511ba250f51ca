"""A set of metric values: recorded by kind, merged without loss, resolved to numbers at the very end."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from async_rl.metrics.catalogue import Kind, find_row

QUANTILES = (10, 50, 90)
"""Percentiles that a histogram resolves to, as key/p10 and so on."""


class _Value(msgspec.Struct, array_like=True):
    """State of one key. `a` is the value, or the total of a mean; `b` is the weight of a mean."""

    kind: Kind
    a: float = 0.0
    b: float = 0.0
    values: list[float] = []
    """Distinct values of a histogram, ascending."""
    counts: list[int] = []


class Metrics:
    """A set of metric values that can be merged across micro-batches, ranks and processes without loss."""

    def __init__(self) -> None:
        self._values: dict[str, _Value] = {}

    def mean(self, key: str, total: float, weight: float) -> None:
        """Add `total` (a sum) over `weight` items; the value is sum(total) / sum(weight)."""
        assert weight >= 0, f"{key}: weight {weight} is negative"
        self._add(key, _Value("mean", float(total), float(weight)))

    def sum(self, key: str, value: float) -> None:
        """Add to a total."""
        self._add(key, _Value("sum", float(value)))

    def max(self, key: str, value: float) -> None:
        """Keep the largest value."""
        self._add(key, _Value("max", float(value)))

    def min(self, key: str, value: float) -> None:
        """Keep the smallest value."""
        self._add(key, _Value("min", float(value)))

    def last(self, key: str, value: float) -> None:
        """Keep the latest value; in a merge that of the other set."""
        self._add(key, _Value("last", float(value)))

    def histogram(self, key: str, values: Iterable[float]) -> None:
        """Count values; exact, so meant for few distinct ones (staleness) or few in all (lengths of a batch)."""
        array = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
        distinct, counts = np.unique(array.astype(np.float64), return_counts=True)
        self._add(key, _Value("histogram", values=distinct.tolist(), counts=counts.tolist()))

    def merge(self, other: Metrics) -> None:
        """Add everything that another set holds; the order matters for `last` only."""
        for key, value in other._values.items():
            self._add(key, value)

    def _add(self, key: str, new: _Value) -> None:
        row = find_row(key)
        assert row is not None, f"metric {key!r} has no row in async_rl/metrics/catalogue.py; add one"
        assert row.kind == new.kind, f"metric {key!r} is a {row.kind} in the catalogue, but was recorded as {new.kind}"
        old = self._values.get(key)
        self._values[key] = new if old is None else _combine(old, new)

    def to_wire(self) -> bytes:
        """msgpack bytes that `from_wire` turns into an equal set."""
        return msgspec.msgpack.encode(self._values)

    @classmethod
    def from_wire(cls, data: bytes) -> Metrics:
        """The set that `to_wire` was called on; raises msgspec.ValidationError for anything else."""
        metrics = cls()
        for key, value in msgspec.msgpack.decode(data, type=dict[str, _Value]).items():
            metrics._add(key, value)
        return metrics

    def resolve(self) -> dict[str, float]:
        """Final numbers; a mean with weight 0 and an empty histogram are left out."""
        numbers: dict[str, float] = {}
        for key, value in self._values.items():
            if value.kind == "mean":
                if value.b > 0:
                    numbers[key] = value.a / value.b
            elif value.kind == "histogram":
                numbers |= {
                    f"{key}/p{q}": quantile(value.values, value.counts, q / 100) for q in QUANTILES if value.values
                }
            else:
                numbers[key] = value.a
        return numbers


def _combine(old: _Value, new: _Value) -> _Value:
    """One value out of two of the same kind."""
    match old.kind:
        case "mean" | "sum":
            return _Value(old.kind, old.a + new.a, old.b + new.b)
        case "max":
            return _Value("max", max(old.a, new.a))
        case "min":
            return _Value("min", min(old.a, new.a))
        case "last":
            return new
        case "histogram":
            counts: dict[float, int] = dict(zip(old.values, old.counts, strict=True))
            for value, count in zip(new.values, new.counts, strict=True):
                counts[value] = counts.get(value, 0) + count
            ordered = sorted(counts)
            return _Value("histogram", values=ordered, counts=[counts[value] for value in ordered])


def quantile(values: list[float], counts: list[int], share: float) -> float:
    """The smallest value such that at least `share` of all counted items are not above it."""
    reached = np.searchsorted(np.cumsum(counts), share * sum(counts), side="left")
    return values[int(reached)]

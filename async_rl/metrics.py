"""Metrics as values: each has a kind, is merged exactly, and is averaged only when it is written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Metrics:
    """A set of metric values that can be merged across micro-batches, ranks and processes without loss."""

    def mean(self, key: str, total: float, weight: float) -> None:
        """Add `total` (a sum) over `weight` items; the value is sum(total) / sum(weight)."""

    def sum(self, key: str, value: float) -> None: ...

    def max(self, key: str, value: float) -> None: ...

    def min(self, key: str, value: float) -> None: ...

    def last(self, key: str, value: float) -> None: ...

    def histogram(self, key: str, values: Iterable[float]) -> None: ...

    def merge(self, other: "Metrics") -> None: ...

    def to_wire(self) -> bytes: ...

    @classmethod
    def from_wire(cls, data: bytes) -> "Metrics": ...

    def resolve(self) -> dict[str, float]:
        """Final numbers; a mean with weight 0 is left out."""

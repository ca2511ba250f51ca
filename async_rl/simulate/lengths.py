"""Lengths and chances of simulated members: drawn by ticket, so that settings are compared on the same problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

BLOCK = 4096
"""Lengths drawn at once."""

LengthsOf = Callable[[int, int], tuple[int, ...]]
"""(ticket, number of members) -> tokens of each member; called once per ticket, in order."""


class Lognormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """exp(N(log median, sigma)), rounded, at least 1 and at most `longest` tokens."""

    median: float
    sigma: float
    longest: int

    def draw(self, random: np.random.Generator, num: int) -> np.ndarray:
        """int64 [num]."""
        tokens = self.median * np.exp(self.sigma * random.standard_normal(num))
        return _whole(tokens, self.longest)

    def mean(self) -> float:
        """Tokens; exact but for the rounding: E[min(X, longest)] of a lognormal X."""
        if self.sigma == 0:
            return min(max(self.median, 1.0), float(self.longest))
        edge = math.log(self.longest / self.median) / self.sigma
        whole = self.median * math.exp(self.sigma**2 / 2) * _normal_cdf(edge - self.sigma)
        return max(1.0, whole + self.longest * (1 - _normal_cdf(edge)))


class Quantiles(msgspec.Struct, frozen=True, tag="quantiles"):
    """A distribution by its quantile function: log tokens, linear between the knots."""

    shares: tuple[float, ...]
    """Ascending from 0 to 1."""
    tokens: tuple[float, ...]
    """Length that the share of all completions does not exceed."""
    longest: int

    def draw(self, random: np.random.Generator, num: int) -> np.ndarray:
        """int64 [num]."""
        return _whole(self._at(random.random(num)), self.longest)

    def mean(self) -> float:
        """Tokens, by the midpoint rule."""
        return float(np.minimum(self._at((np.arange(BLOCK) + 0.5) / BLOCK), self.longest).mean())

    def _at(self, shares: np.ndarray) -> np.ndarray:
        return np.exp(np.interp(shares, self.shares, np.log(self.tokens)))


Lengths = Lognormal | Quantiles


def lengths_by_ticket(lengths: Lengths, seed: int | Sequence[int]) -> LengthsOf:
    """Draw tickets in order; the k-th member of a run has the same length whatever the other settings are."""
    random = np.random.default_rng(seed)
    store: list[int] = []

    def draw(ticket: int, members: int) -> tuple[int, ...]:
        while len(store) < members:
            store.extend(reversed(lengths.draw(random, BLOCK).tolist()))
        return tuple(store.pop() for _ in range(members))

    return draw


def chance_by_ticket(share: float, seed: int | Sequence[int]) -> Callable[[int], bool]:
    """Draw for each ticket whether it is one of a share of all, whatever the other settings are."""
    random = np.random.default_rng(seed)
    drawn: list[bool] = []

    def one_of_them(ticket: int) -> bool:
        while ticket >= len(drawn):
            drawn.extend((random.random(BLOCK) < share).tolist())
        return drawn[ticket]

    return one_of_them


def _whole(tokens: np.ndarray, longest: int) -> np.ndarray:
    return np.clip(np.rint(tokens), 1, longest).astype(np.int64)


def _normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))

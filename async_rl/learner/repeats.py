"""Copies among the completions of a group, and how improbable they are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from async_rl.protocol import Trajectory


def all_identical(members: Sequence[Trajectory]) -> bool:
    """Whether two or more completions are there, and all are the same."""
    return len(members) > 1 and len(_copies(members)) == 1


def repeated_nats(members: Sequence[Trajectory]) -> float:
    """-log of a bound on the probability that independent samples repeat each other as much; 0 where they may well.

    Of n independent samples, k are a completion of probability p with probability at most C(n, k) p^k, which given
    the first of them is C(n, k) p^(k - 1). A policy that is sure of its answer repeats it with p near 1: no surprise.
    """
    found = 0.0
    for copies in _copies(members).values():
        number = len(copies)
        if number > 1:
            surprise = (number - 1) * min(copies) - math.log(math.comb(len(members), number))
            found = max(found, surprise)
    return found


def _copies(members: Sequence[Trajectory]) -> dict[bytes, list[float]]:
    """Completion -> -log probability of each member that has it, in nats."""
    found: dict[bytes, list[float]] = defaultdict(list)
    for member in members:
        sampled = np.asarray(member.completion_mask, dtype=bool)
        logprob = float(np.asarray(member.behavior_logprobs, dtype=np.float64)[sampled].sum())
        found[np.asarray(member.completion_ids, dtype=np.int32).tobytes()].append(-logprob)
    return found

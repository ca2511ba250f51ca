"""Which sequences share a forward/backward: the token budget, kept by every micro-batch and balanced over ranks.

Every rank computes the same plan from the same batch, so nothing is exchanged, and all ranks run the same number of
forwards: FSDP's collectives need that. Pure numpy; the loss does not depend on the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.learner.batch import PreparedBatch, TrainSequence

Plan = list[list[tuple["Unit", ...]]]
"""plan[i][rank]: the units of micro-batch i on that rank, possibly none."""


@dataclass(frozen=True)
class Unit:
    """Sequences of one group that run behind one copy of their prompt; never split."""

    sequences: tuple[int, ...]
    tokens: int
    """Input tokens: the prompt once, each completion without its last token (nothing is predicted from it)."""


def make_units(batch: PreparedBatch, chosen: Iterable[int], budget: int, share_prompts: bool) -> list[Unit]:
    """Group the chosen sequences into units of at most `budget` tokens; a longer sequence is a unit of its own."""
    units: list[Unit] = []
    pending: list[int] = []
    tokens = 0
    for index in chosen:
        sequence = batch.sequences[index]
        own = len(sequence.completion_ids) - 1
        joins = share_prompts and pending and batch.sequences[pending[-1]].group == sequence.group
        if pending and not (joins and tokens + own <= budget):
            units.append(Unit(tuple(pending), tokens))
            pending, tokens = [], 0
        tokens += own if pending else input_tokens(sequence)
        pending.append(index)
    return [*units, Unit(tuple(pending), tokens)] if pending else units


def input_tokens(sequence: TrainSequence) -> int:
    """Tokens that a model reads to score one sequence on its own."""
    return len(sequence.prompt_ids) + len(sequence.completion_ids) - 1


def plan_packed(units: Sequence[Unit], budget: int, world: int) -> Plan:
    """Spread units over world x n micro-batches of about equal tokens, n as small as the budget allows; n >= 1."""
    total = sum(unit.tokens for unit in units)
    count = max(1, -(-total // (budget * world)))
    while True:
        bins = _spread(units, count * world)
        fits = all(len(items) <= 1 or sum(unit.tokens for unit in items) <= budget for items in bins)
        if fits or count * world >= len(units):
            break
        count += 1
    # Neighbours in this order differ least, so the ranks of one micro-batch wait for each other least.
    bins.sort(key=lambda items: -sum(unit.tokens for unit in items))
    return [[tuple(items) for items in bins[i : i + world]] for i in range(0, len(bins), world)]


def _spread(units: Sequence[Unit], num_bins: int) -> list[list[Unit]]:
    """Longest first into the emptiest bin (Graham 1969); each bin's units in batch order."""
    bins: list[list[Unit]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.sequences)):
        load, number = heapq.heappop(heap)
        bins[number].append(unit)
        heapq.heappush(heap, (load + unit.tokens, number))
    return [sorted(items, key=lambda unit: unit.sequences) for items in bins]


def plan_padded(units: Sequence[Unit], budget: int, world: int) -> Plan:
    """Rows of similar length together, rows x longest row <= budget, dealt to the ranks; at least one micro-batch."""
    ordered = sorted(units, key=lambda unit: (-unit.tokens, unit.sequences))
    widest = ordered[0].tokens if ordered else 0
    limit = min(budget, widest * -(-len(ordered) // world))
    rows: list[list[Unit]] = []
    for unit in ordered:
        if not rows or (len(rows[-1]) + 1) * rows[-1][0].tokens > limit:
            rows.append([])
        rows[-1].append(unit)
    rows += [[] for _ in range(-len(rows) % world or (0 if rows else world))]
    return [[tuple(items) for items in rows[i : i + world]] for i in range(0, len(rows), world)]


def plan_tokens(batch: PreparedBatch, units: Iterable[Unit]) -> np.ndarray:
    """int64 [N], the tokens in the loss that the units' sequences own, in the units' order."""
    offsets = batch.offsets
    ranges = [np.arange(offsets[s], offsets[s + 1]) for unit in units for s in unit.sequences]
    return np.concatenate([np.zeros(0, np.int64), *ranges]).astype(np.int64, copy=False)

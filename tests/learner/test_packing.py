"""Plans of micro-batches: every sequence once, budget kept, equal counts on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.learner.batch import PreparedBatch, TrainSequence
from async_rl.learner.packing import input_tokens, make_units, plan_packed, plan_padded
from async_rl.metrics import Metrics


def make_batch(groups: list[tuple[int, list[int]]]) -> PreparedBatch:
    """Groups of (prompt length, completion lengths); token ids do not matter here."""
    sequences = [
        TrainSequence(slot, group, np.zeros(prompt, np.int32), np.zeros(n, np.int32), np.arange(n), 1.0)
        for group, (prompt, lengths) in enumerate(groups)
        for slot, n in enumerate(lengths)
    ]
    total = sum(len(s.positions) for s in sequences)
    offsets = np.cumsum([0, *(len(s.positions) for s in sequences)])
    ages = np.zeros(total, np.int64)
    return PreparedBatch(1, len(sequences), tuple(sequences), offsets, np.zeros(total, np.float32), ages, Metrics())


batches = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=0, max_size=6
).map(make_batch)


@given(batch=batches, budget=st.integers(1, 120), world=st.integers(1, 3), share=st.booleans())
def test_packed_plan(batch: PreparedBatch, budget: int, world: int, share: bool) -> None:
    units = make_units(batch, range(len(batch.sequences)), budget, share)
    plan = plan_packed(units, budget, world)
    planned = [index for row in plan for items in row for unit in items for index in unit.sequences]
    assert sorted(planned) == list(range(len(batch.sequences)))
    assert plan and all(len(row) == world for row in plan)
    for items in (items for row in plan for items in row):
        tokens = sum(unit.tokens for unit in items)
        assert tokens <= budget or (len(items) == 1 and len(items[0].sequences) == 1)
    for unit in units:
        sequences = [batch.sequences[index] for index in unit.sequences]
        assert len({sequence.group for sequence in sequences}) == 1
        prompt = len(sequences[0].prompt_ids)
        assert unit.tokens == prompt + sum(input_tokens(sequence) - prompt for sequence in sequences)


@given(batch=batches, budget=st.integers(1, 120), world=st.integers(1, 3))
def test_padded_plan(batch: PreparedBatch, budget: int, world: int) -> None:
    units = make_units(batch, range(len(batch.sequences)), budget, share_prompts=False)
    plan = plan_padded(units, budget, world)
    planned = [index for row in plan for items in row for unit in items for index in unit.sequences]
    assert sorted(planned) == list(range(len(batch.sequences)))
    assert plan and all(len(row) == world for row in plan)
    for items in (items for row in plan for items in row):
        assert len(items) <= 1 or len(items) * max(unit.tokens for unit in items) <= budget


def test_prompts_are_counted_once_for_each_unit() -> None:
    batch = make_batch([(10, [3, 3, 3])])
    assert [unit.tokens for unit in make_units(batch, range(3), 100, share_prompts=True)] == [16]
    assert [unit.tokens for unit in make_units(batch, range(3), 14, share_prompts=True)] == [14, 12]
    assert [unit.tokens for unit in make_units(batch, range(3), 100, share_prompts=False)] == [12, 12, 12]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_are_balanced(world: int) -> None:
    """With many units no rank has more than one typical unit above another."""
    rng = np.random.default_rng(0)
    batch = make_batch([(20, rng.integers(5, 60, 8).tolist()) for _ in range(32)])
    units = make_units(batch, range(len(batch.sequences)), 4096, share_prompts=True)
    plan = plan_packed(units, 4096, world)
    loads = [sum(unit.tokens for row in plan for unit in row[rank]) for rank in range(world)]
    assert max(loads) - min(loads) <= max(unit.tokens for unit in units)
    assert len(plan) == -(-sum(loads) // (4096 * world))

"""Attention over packed tokens is that of whole sequences, however a bucket lays them out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from async_rl.learner.attention import PackedSequences, PackedUnit, UnsupportedAttention, packed_attention

HEADS, KV_HEADS, SIZE = 4, 2, 8


def make_units(rng: np.random.Generator) -> tuple[list[PackedUnit], int]:
    """Prompts of 1 to 12 tokens with up to 6 completions of 0 to 20 tokens each, in the order of the packed row."""
    units: list[PackedUnit] = []
    size = 0
    for _ in range(int(rng.integers(1, 5))):
        lengths = [int(rng.integers(1, 13)), *rng.integers(0, 21, int(rng.integers(0, 7))).tolist()]
        prompt, *completions = (
            np.arange(size + a, size + a + n) for a, n in zip(_starts(lengths), lengths, strict=True)
        )
        units.append((prompt, completions))
        size += sum(lengths)
    return units, size


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, units: list[PackedUnit]) -> Tensor:
    """softmax(q k / sqrt(size)) v of each token over its prompt and what stands before it; [1, N, H, D]."""
    result = torch.full((1, query.shape[2], HEADS, SIZE), torch.nan, dtype=query.dtype)
    for prompt, completions in units:
        for own in [prompt[:0], *completions]:
            tokens = [*prompt.tolist(), *own.tolist()]
            for place, token in enumerate(tokens):
                seen = tokens[: place + 1]
                for head in range(HEADS):
                    group = head * KV_HEADS // HEADS
                    scores = key[0, group, seen] @ query[0, head, token] / math.sqrt(SIZE)
                    result[0, token, head] = torch.softmax(scores, 0) @ value[0, group, seen]
    return result


@pytest.mark.parametrize("seed", range(12))
def test_packed_tokens_see_what_whole_sequences_see(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units, size = make_units(rng)
    packed = PackedSequences.build(units, size, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, SIZE))
    inputs = [
        torch.randn(1, heads, size, width, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, width in shapes
    ]
    weights = torch.randn(1, size, HEADS, SIZE, generator=generator, dtype=torch.float64)
    result, _ = packed_attention(nn.Identity(), *inputs, None, scaling=1 / math.sqrt(SIZE), packed=packed)
    expected = one_by_one(*inputs, units)
    torch.testing.assert_close(result, expected)
    gradients = torch.autograd.grad((result * weights).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), inputs))


def queries(prompt: int, completions: list[int]) -> int:
    """Queries that are computed for one unit, padding included."""
    lengths = [prompt, *completions]
    first, *own = (np.arange(a, a + n) for a, n in zip(_starts(lengths), lengths, strict=True))
    packed = PackedSequences.build([(first, own)], sum(lengths), torch.device("cpu"))
    return sum(bucket.rows * bucket.width for bucket in packed.buckets)


def test_the_queries_of_a_shared_prompt_are_computed_once_for_short_completions() -> None:
    assert queries(100, [20] * 8) == 100 + 8 * 20
    assert queries(100, [20]) == 120
    # With completions longer than the prompt a mask would cost more than the prompt's queries.
    assert queries(10, [80] * 8) == 8 * 90
    assert queries(10, [80, 5, 5]) == 90 + 2 * 5


def test_another_kind_of_attention_is_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 4)
    packed = PackedSequences.build([(np.zeros(1, np.int64), [])], 1, torch.device("cpu"))
    with pytest.raises(UnsupportedAttention, match="sliding_window"):
        packed_attention(nn.Identity(), tensor, tensor, tensor, None, packed=packed, sliding_window=4)

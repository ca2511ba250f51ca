"""Random packed micro-batches whose ratios stand on both sides of every clip, cap and band."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_rl.algos.losses import LossInputs

EDGES = tuple(math.log(ratio) for ratio in (0.5, 0.8, 1.0, 1.2, 1.28, 2.0, 3.0, 5.0))
"""Log-ratios at which some loss of these tests changes its branch; a sequence takes them or their negatives."""


@dataclass(frozen=True)
class Packed:
    """Whole sequences, one behind the other; float32 values, so that float64 references see the same numbers."""

    logprobs: Tensor
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor
    index: Tensor
    num_sequences: int

    def inputs(self, logprobs: Tensor | None = None, weight: Tensor | None = None) -> LossInputs:
        """What a loss takes, with `logprobs` in place of the packed ones."""
        return LossInputs(
            logprobs=self.logprobs if logprobs is None else logprobs,
            proximal_logprobs=self.proximal,
            behavior_logprobs=self.behavior,
            advantages=self.advantages,
            mask=self.mask,
            sequence_index=self.index,
            num_sequences=self.num_sequences,
            behavior_weight=weight,
        )

    def take(self, sequences: list[int]) -> Packed:
        """These sequences alone, in this order, renumbered from 0."""
        tokens = torch.cat([torch.nonzero(self.index == sequence)[:, 0] for sequence in sequences])
        new = {old: number for number, old in enumerate(sequences)}
        index = torch.tensor([new[int(old)] for old in self.index[tokens]])
        return replace(
            self.map(lambda values: values[tokens]), mask=self.mask[tokens], index=index, num_sequences=len(new)
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Everything but the mask and the packing, changed."""
        return replace(
            self,
            logprobs=change(self.logprobs),
            proximal=change(self.proximal),
            behavior=change(self.behavior),
            advantages=change(self.advantages),
        )

    def valid(self, sequence: int) -> list[int]:
        """Positions of one sequence's valid tokens."""
        return [int(t) for t in torch.nonzero((self.index == sequence) & self.mask)[:, 0]]


def packed(seed: int, lengths: tuple[int, ...] = (40, 1, 17, 3, 60, 9), scale: float = 1.0) -> Packed:
    """Random sequences; the last but one is masked whole. `scale` shrinks every log-ratio."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def log_ratios() -> Tensor:
        edges = torch.tensor(EDGES)[torch.randint(len(EDGES), (total,), generator=generator)]
        near = edges + torch.randn(total, generator=generator) * 0.03
        wide = torch.randn(total, generator=generator) * 1.5
        chosen = torch.where(torch.rand(total, generator=generator) < 0.6, near, wide)
        some_equal = torch.where(torch.rand(total, generator=generator) < 0.2, 0.0, chosen)
        sign = torch.where(torch.rand(len(lengths), generator=generator) < 0.5, -1.0, 1.0)
        return some_equal * sign[index] * scale

    behavior = -1e-3 - 4 * torch.rand(total, generator=generator)
    proximal = (behavior + log_ratios()).clamp(max=-1e-3)
    logprobs = (proximal + log_ratios()).clamp(max=-1e-3)
    advantages = torch.randn(len(lengths), generator=generator)[index]
    mask = (torch.rand(total, generator=generator) < 0.8) & (index != len(lengths) - 2)
    return Packed(logprobs, proximal, behavior, advantages, mask, index, len(lengths))

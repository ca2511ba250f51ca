"""A micro-batch as tensors: packed with shared prompts, or padded with one sequence a row.

Packed: one row holds, for each unit, its prompt once and then its completions; position ids restart behind the prompt
for every completion. All layers but attention work on these tokens alone. Attention gathers what each token sees
(`attention.py`), so its results are those of separate sequences.

      tokens      p0 p1 p2 | a0 a1 | b0 b1 b2        two completions a, b of one prompt
      positions    0  1  2 |  3  4 |  3  4  5
      sequences   p0 p1 p2 a0 a1      and      p0 p1 p2 b0 b1 b2

The first token of every completion is predicted from p2; a completion's last token predicts nothing and is no input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.learner.attention import PackedSequences, PackedUnit
from async_rl.learner.batch import PreparedBatch
from async_rl.learner.packing import Unit, input_tokens, plan_tokens


@dataclass(frozen=True)
class MicroBatch:
    """What one forward/backward takes. N input tokens, T tokens in the loss, S sequences."""

    tokens: Tensor
    """int64 [T], indices into the batch's tokens; empty for a placeholder."""
    sequence_index: Tensor
    """int64 [T], 0..num_sequences-1: the sequence of each token within this micro-batch."""
    num_sequences: int
    input_ids: Tensor
    """int64 [rows, N / rows]."""
    predictors: Tensor
    """int64 [max(T, 1)], the input token (rows flattened) whose hidden state predicts each token in the loss."""
    targets: Tensor
    """int64 [max(T, 1)], the tokens in the loss."""
    position_ids: Tensor | None = None
    """int64 [1, N] of the packed layout."""
    packed: PackedSequences | None = None
    """How attention finds whole sequences in the packed layout; None: each row is a sequence, padded at its right."""


@dataclass
class _Builder:
    """Collects input tokens and, for each sequence, where its tokens and its predictors are."""

    input_ids: list[np.ndarray]
    position_ids: list[np.ndarray]
    units: list[PackedUnit]
    """For each unit the indices of its prompt's input tokens and of its completions'."""
    size: int = 0

    def append(self, ids: np.ndarray, first_position: int) -> np.ndarray:
        """Add input tokens; return their indices."""
        self.input_ids.append(ids)
        self.position_ids.append(np.arange(first_position, first_position + len(ids)))
        indices = np.arange(self.size, self.size + len(ids))
        self.size += len(ids)
        return indices


def packed_micro_batch(batch: PreparedBatch, units: Sequence[Unit], device: torch.device) -> MicroBatch:
    """Lay units out in one row without padding; no unit gives a placeholder."""
    if not units:
        return placeholder(device, packed=True)
    build = _Builder([], [], [])
    predictors: list[np.ndarray] = []
    for unit in units:
        prompt_ids = batch.sequences[unit.sequences[0]].prompt_ids
        prompt = build.append(prompt_ids, 0)
        completions: list[np.ndarray] = []
        for index in unit.sequences:
            sequence = batch.sequences[index]
            completions.append(build.append(sequence.completion_ids[:-1], len(prompt_ids)))
            predictors.append(np.concatenate([prompt[-1:], completions[-1]])[sequence.positions])
        build.units.append((prompt, completions))
    return _micro_batch(
        batch,
        units,
        input_ids=_tensor(build.input_ids, device)[None],
        predictors=_tensor(predictors, device),
        position_ids=_tensor(build.position_ids, device)[None],
        packed=PackedSequences.build(build.units, build.size, device),
    )


def padded_micro_batch(batch: PreparedBatch, units: Sequence[Unit], device: torch.device) -> MicroBatch:
    """One sequence a row, padded at the right with token 0, which no real token can see."""
    if not units:
        return placeholder(device, packed=False)
    sequences = [batch.sequences[index] for unit in units for index in unit.sequences]
    width = max(input_tokens(sequence) for sequence in sequences)
    input_ids = np.zeros((len(sequences), width), np.int64)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: input_tokens(sequence)] = np.concatenate([sequence.prompt_ids, sequence.completion_ids[:-1]])
    predictors = [
        row * width + len(sequence.prompt_ids) - 1 + sequence.positions for row, sequence in enumerate(sequences)
    ]
    return _micro_batch(
        batch, units, input_ids=torch.from_numpy(input_ids).to(device), predictors=_tensor(predictors, device)
    )


def placeholder(device: torch.device, packed: bool) -> MicroBatch:
    """One input token and no token in the loss, for a rank that has nothing left while others run."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens=zero[:0],
        sequence_index=zero[:0],
        num_sequences=0,
        input_ids=zero[None],
        predictors=zero,
        targets=zero,
        position_ids=zero[None] if packed else None,
        packed=PackedSequences.build([(np.zeros(1, np.int64), [])], 1, device) if packed else None,
    )


def _micro_batch(
    batch: PreparedBatch,
    units: Sequence[Unit],
    input_ids: Tensor,
    predictors: Tensor,
    position_ids: Tensor | None = None,
    packed: PackedSequences | None = None,
) -> MicroBatch:
    sequences = [batch.sequences[index] for unit in units for index in unit.sequences]
    device = input_ids.device
    counts = [len(sequence.positions) for sequence in sequences]
    return MicroBatch(
        tokens=torch.from_numpy(plan_tokens(batch, units)).to(device),
        sequence_index=torch.from_numpy(np.repeat(np.arange(len(sequences)), counts)).to(device),
        num_sequences=len(sequences),
        input_ids=input_ids,
        predictors=predictors,
        targets=_tensor([sequence.completion_ids[sequence.positions] for sequence in sequences], device),
        position_ids=position_ids,
        packed=packed,
    )


def _tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """One int64 tensor of all parts."""
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

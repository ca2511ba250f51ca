"""A batch of running requests on a transformers model: they join and leave between two tokens.

Rows are left-padded to one length and share one KV cache. A row's cache holds all of its tokens but the last;
a step feeds that one and samples the next. A row without a cache (new, or after `forget`) is fed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from async_rl.engines.base import Sample, SampleRequest
from async_rl.protocol import VersionSpan

PREFILL_TOKENS = 16384
"""Most tokens, padding included, of one forward pass over whole rows."""


class Row:
    """One running request."""

    def __init__(self, request: SampleRequest, end_ids: frozenset[int]) -> None:
        self.request = request
        self.tokens: list[int] = request.prompt_ids.tolist()
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.finish: Literal["stop", "length"] | None = None
        self.aborted = False
        """Set by another thread; the row leaves before the next step."""
        self._end_ids = end_ids | frozenset(request.sampling.stop_ids)
        generator = torch.Generator().manual_seed(request.sampling.seed)
        # One number per position, drawn up front: what is sampled does not depend on who else is in the batch.
        self.uniforms = torch.rand(request.sampling.max_tokens, generator=generator, dtype=torch.float64)

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token."""
        return float(self.uniforms[len(self.logprobs)])

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take the next token, sampled by `version`."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        end = len(self.logprobs)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
        else:
            self.spans.append(VersionSpan(version, end - 1, end))
        if token in self._end_ids:
            self.finish = "stop"
        elif end == self.request.sampling.max_tokens:
            self.finish = "length"

    def sample(self) -> Sample:
        """What was sampled, once it is finished."""
        assert self.finish is not None, "the row still runs"
        return Sample(
            completion_ids=np.asarray(self.tokens[len(self.request.prompt_ids) :], dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=tuple(self.spans),
            finish=self.finish,
        )


class Batch:
    """Running requests and their KV cache; one thread calls everything."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = model.device
        self._new: list[Row] = []
        self._cached: list[Row] = []
        self._cache: Any = None
        self._mask = torch.empty(0, 0, dtype=torch.long, device=self._device)
        """[rows, cached tokens], 0 at padding."""

    def __len__(self) -> int:
        return len(self._new) + len(self._cached)

    @property
    def rows(self) -> list[Row]:
        """Everything that runs."""
        return [*self._cached, *self._new]

    def add(self, row: Row) -> None:
        """Let a request join at the next step."""
        self._new.append(row)

    def forget(self) -> None:
        """Drop the KV cache: every row is fed whole at the next step."""
        self._new, self._cached, self._cache = self.rows, [], None

    def drop(self, rows: Sequence[Row]) -> None:
        """Let requests leave."""
        self._new = [row for row in self._new if row not in rows]
        stay = [index for index, row in enumerate(self._cached) if row not in rows]
        if len(stay) < len(self._cached):
            self._keep(stay)

    @torch.inference_mode()
    def step(self, version: int) -> list[Row]:
        """Sample one token for every row; return those that are finished, which have left."""
        logits = [self._decode()] if self._cached else []
        while self._new:
            logits.append(self._prefill(self._next_chunk()))
        for row, token, logprob in zip(self._cached, *self._choose(torch.cat(logits)), strict=True):
            row.append(token, logprob, version)
        finished = [row for row in self._cached if row.finish]
        self.drop(finished)
        return finished

    def _decode(self) -> torch.Tensor:
        """Feed the last token of every cached row; logits [rows, V] of the next one."""
        self._mask = pad(self._mask, (0, 1), value=1)
        tokens = torch.tensor([[row.tokens[-1]] for row in self._cached], device=self._device)
        return self._forward(tokens, self._mask, self._mask.sum(1, keepdim=True) - 1, self._cache)

    def _next_chunk(self) -> list[Row]:
        """Take the first new rows, as many as one forward pass may hold."""
        count, longest = 0, 0
        for row in self._new:
            longest = max(longest, len(row.tokens))
            if count and longest * (count + 1) > PREFILL_TOKENS:
                break
            count += 1
        chunk, self._new = self._new[:count], self._new[count:]
        return chunk

    def _prefill(self, rows: list[Row]) -> torch.Tensor:
        """Feed whole rows and let them join the cached ones; logits [rows, V] of their next token."""
        longest = max(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, longest - len(row.tokens) :] = torch.tensor(row.tokens)
            mask[index, longest - len(row.tokens) :] = 1
        mask, cache = mask.to(self._device), DynamicCache()
        logits = self._forward(tokens.to(self._device), mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        self._join(rows, mask, cache)
        return logits

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _choose(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Sample by inverting the distribution at each row's uniform; temperature 0 takes the most likely token."""
        temperature = torch.tensor([row.request.sampling.temperature for row in self._cached], device=self._device)
        greedy = temperature == 0
        logprobs = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
        cumulative = logprobs.double().exp_().cumsum_(-1)
        uniform = torch.tensor([[row.uniform] for row in self._cached], dtype=torch.float64, device=self._device)
        # Relative to the last sum, so that rounding leaves no gap at the end; right=True skips tokens of weight 0.
        sampled = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens = torch.where(
            greedy[:, None], logprobs.argmax(-1, keepdim=True), sampled.clamp_(max=logits.shape[-1] - 1)
        )
        return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()

    def _join(self, rows: list[Row], mask: torch.Tensor, cache: Any) -> None:
        """Append rows to the cached ones, padding the shorter side on the left."""
        if self._cache is None:
            self._cached, self._mask, self._cache = list(rows), mask, cache
            return
        length = max(mask.shape[1], self._mask.shape[1])
        self._mask = torch.cat([_pad_left(self._mask, length, -1), _pad_left(mask, length, -1)])
        for here, there in zip(self._cache.layers, cache.layers, strict=True):
            here.keys = torch.cat([_pad_left(here.keys, length, -2), _pad_left(there.keys, length, -2)])
            here.values = torch.cat([_pad_left(here.values, length, -2), _pad_left(there.values, length, -2)])
        self._cached = [*self._cached, *rows]

    def _keep(self, indices: list[int]) -> None:
        """Keep some of the cached rows, and no more padding than they need."""
        self._cached = [self._cached[index] for index in indices]
        if not self._cached:
            self._cache = None
            return
        chosen = torch.tensor(indices, device=self._device)
        mask = self._mask[chosen]
        start = mask.shape[1] - int(mask.sum(1).max())
        self._mask = mask[:, start:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[chosen, :, start:]
            layer.values = layer.values[chosen, :, start:]


def _pad_left(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """Zeros before dimension `dim` (-1 or -2) until it has `length` entries."""
    missing = length - tensor.shape[dim]
    return pad(tensor, (0, 0, missing, 0) if dim == -2 else (missing, 0)) if missing else tensor

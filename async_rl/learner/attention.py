"""Attention over packed tokens: whole sequences are gathered from them, so a shared prompt is stored once.

Registered with transformers as an attention implementation of its own. The rest of the model works on N packed
tokens; here queries, keys and values are gathered into padded rows of similar length and given to
scaled_dot_product_attention. Causality is the only mask: a padded token is behind all real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "async_rl_packed"
MIN_FILL = 0.75
"""Sequences share a bucket of rows when the shortest fills at least this share of the longest's row."""
PLAIN_ARGUMENTS = frozenset({"position_ids", "use_cache", "is_causal", "cache_position", "output_attentions"})
"""Arguments of attention that change nothing here; another one that is set means an unknown kind of attention."""


class UnsupportedAttention(Exception):
    """The model's attention is not plain causal attention; the message says what it asks for."""


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length whose last tokens ask and whose tokens are all seen by them, causally.

    Indices into the packed tokens, row by row; short rows are padded with their last token, behind all real ones.
    """

    query: Tensor
    """int64 [rows * width]: the tokens that ask."""
    key: Tensor
    """int64 [rows * seen]: the tokens that are seen, those that ask included, as the last ones."""
    rows: int
    width: int
    mask: Tensor | None
    """bool [width, seen], True: sees; None where width = seen, which the kernels know as causal."""


@dataclass(frozen=True)
class PackedSequences:
    """Where each sequence's tokens are, and where each token's result is."""

    buckets: tuple[Bucket, ...]
    inverse: Tensor
    """int64 [N], for each packed token one place in the buckets' queries (all buckets concatenated)."""

    @classmethod
    def build(cls, units: Sequence[PackedUnit], num_tokens: int, device: torch.device) -> PackedSequences:
        """Lay the units' sequences out as rows; together they must name all of 0..num_tokens-1.

        A completion that is no longer than its prompt and shares it asks alone: the prompt's queries would be computed
        again for each of its completions. A longer one runs with its prompt, which spares its kernel the mask.
        """
        whole: list[np.ndarray] = []
        alone: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for prompt, completions in units:
            shares = [len(completions) > 1 and len(own) <= len(prompt) for own in completions]
            for own, alone_ in zip(completions, shares, strict=True):
                if not alone_:
                    whole.append(np.concatenate([prompt, own]))
                elif len(own):
                    alone.setdefault(len(prompt), []).append((prompt, own))
            if all(shares):
                whole.append(prompt)
        inverse = np.full(num_tokens, -1, np.int64)
        buckets: list[Bucket] = []
        base = 0
        nothing = np.zeros(0, np.int64)
        for pairs in ([(nothing, sequence) for sequence in whole], *alone.values()):
            for rows in _similar(pairs):
                width = len(rows[0][1])
                for row, (_, asking) in enumerate(rows):
                    inverse[asking] = base + row * width + np.arange(len(asking))
                buckets.append(_bucket(rows, width, device))
                base += len(rows) * width
        assert (inverse >= 0).all(), "a packed token belongs to no sequence"
        return cls(tuple(buckets), torch.from_numpy(inverse).to(device))


PackedUnit = tuple[np.ndarray, Sequence[np.ndarray]]
"""Indices of a prompt's tokens, and of each of its completions' own tokens, possibly none."""


def _similar(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """(seen before, asking) pairs in buckets of about equally many asking tokens, longest first."""
    ordered = sorted(pairs, key=lambda pair: -len(pair[1]))
    while ordered:
        rows = sum(len(asking) >= MIN_FILL * len(ordered[0][1]) for _, asking in ordered)
        yield ordered[:rows]
        ordered = ordered[rows:]


def _bucket(rows: list[tuple[np.ndarray, np.ndarray]], width: int, device: torch.device) -> Bucket:
    query = np.stack([np.pad(asking, (0, width - len(asking)), mode="edge") for _, asking in rows])
    key = np.concatenate([np.stack([before for before, _ in rows]), query], axis=1)
    seen = key.shape[1]
    mask = None if seen == width else torch.ones(width, seen, dtype=torch.bool, device=device).tril(seen - width)
    query_index, key_index = (torch.from_numpy(index.reshape(-1)).to(device) for index in (query, key))
    return Bucket(query_index, key_index, len(rows), width, mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every packed sequence; query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D].

    Raises UnsupportedAttention for windows, sinks, soft caps, biases and whatever else is not plain.
    """
    unknown = sorted(k for k, v in kwargs.items() if k not in PLAIN_ARGUMENTS and v is not None and v is not False)
    if packed is None or unknown or attention_mask is not None or dropout:
        raise UnsupportedAttention(f"{type(module).__name__} asks for {', '.join(unknown) or 'a mask or dropout'}")
    # Grouped heads are left to the kernel, which has them on CPU too; repeating keys and values costs a third more.
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
    outputs = [
        scaled_dot_product_attention(
            _rows(query, bucket.query, bucket.rows),
            _rows(key, bucket.key, bucket.rows),
            _rows(value, bucket.key, bucket.rows),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            **options,
        )
        .transpose(1, 2)
        .reshape(bucket.rows * bucket.width, query.shape[1], value.shape[3])
        for bucket in packed.buckets
    ]
    return torch.cat(outputs).index_select(0, packed.inverse)[None], None


def _rows(tensor: Tensor, index: Tensor, rows: int) -> Tensor:
    """[1, H, N, D] -> [rows, H, width, D], a view of gathered tokens."""
    _, heads, tokens, size = tensor.shape
    flat = tensor.transpose(1, 2).reshape(tokens, heads * size)
    return flat.index_select(0, index).view(rows, -1, heads, size).transpose(1, 2)


def register() -> None:
    """Make the implementation known to transformers; callable more than once."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)

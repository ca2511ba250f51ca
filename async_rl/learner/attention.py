"""Attention over packed tokens: whole sequences are gathered from them, so a shared prompt is stored once.

Registered with transformers as an attention implementation of its own. The rest of the model works on N packed
tokens; here query, key and value of every sequence (prompt and completion) are gathered into padded rows of similar
length and given to causal scaled_dot_product_attention, which needs no mask: a padded token is behind all real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Sequences of similar length as rows of indices into the packed tokens."""

    index: Tensor
    """int64 [rows * width], row by row; padded with the row's last token."""
    rows: int
    width: int


@dataclass(frozen=True)
class PackedSequences:
    """Where each sequence's tokens are, and where each token's result is."""

    buckets: tuple[Bucket, ...]
    inverse: Tensor
    """int64 [N], for each packed token one place in the buckets' rows (all buckets concatenated)."""

    @classmethod
    def build(cls, sequences: Sequence[np.ndarray], num_tokens: int, device: torch.device) -> PackedSequences:
        """Bucket sequences given as index arrays; together they must name all of 0..num_tokens-1."""
        inverse = np.full(num_tokens, -1, np.int64)
        buckets: list[Bucket] = []
        base = 0
        ordered = sorted(sequences, key=len, reverse=True)
        while ordered:
            width = len(ordered[0])
            rows = sum(len(sequence) >= MIN_FILL * width for sequence in ordered)
            index = np.stack([np.pad(s, (0, width - len(s)), mode="edge") for s in ordered[:rows]])
            for row, sequence in enumerate(ordered[:rows]):
                inverse[sequence] = base + row * width + np.arange(len(sequence))
            buckets.append(Bucket(torch.from_numpy(index.reshape(-1)).to(device), rows, width))
            base += rows * width
            ordered = ordered[rows:]
        assert (inverse >= 0).all(), "a packed token belongs to no sequence"
        return cls(tuple(buckets), torch.from_numpy(inverse).to(device))


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
    options: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
    outputs = [
        scaled_dot_product_attention(_rows(query, bucket), _rows(key, bucket), _rows(value, bucket), **options)
        .transpose(1, 2)
        .reshape(bucket.rows * bucket.width, query.shape[1], value.shape[3])
        for bucket in packed.buckets
    ]
    return torch.cat(outputs).index_select(0, packed.inverse)[None], None


def _rows(tensor: Tensor, bucket: Bucket) -> Tensor:
    """[1, H, N, D] -> [rows, H, width, D], a view of gathered tokens."""
    _, heads, tokens, size = tensor.shape
    flat = tensor.transpose(1, 2).reshape(tokens, heads * size)
    return flat.index_select(0, bucket.index).view(bucket.rows, bucket.width, heads, size).transpose(1, 2)


def register() -> None:
    """Make the implementation known to transformers; callable more than once."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)

"""Send buffers, checksums and errors that every way of moving weights shares."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
import xxhash

from async_rl.protocol import Manifest, TensorInfo
from async_rl.weights.errors import WeightsError


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def manifest_digest(tensors: Sequence[TensorInfo]) -> str:
    """Hash of names, dtypes and shapes in order: equal digests mean that bytes will land in the right places."""
    return hashlib.sha256(msgspec.msgpack.encode(tuple(tensors))).hexdigest()[:32]

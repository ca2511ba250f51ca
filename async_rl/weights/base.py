"""Send buffers, checksums and errors that every way of moving weights shares.

A publication is a list of tensors in wire type, packed into byte buckets. Both ends derive the same
layout from the manifest, so nothing but bytes travels, and a receiver reads tensors as views.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import xxhash

from async_rl.protocol import Manifest, TensorInfo
from async_rl.weights.errors import WeightsError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 16
"""Bytes; a tensor may be viewed in any wire type where its bytes start at a multiple of this."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left() == 0.0


def manifest_digest(tensors: Sequence[TensorInfo]) -> str:
    """Hash of names, dtypes and shapes in order: equal digests mean that bytes will land in the right places."""
    return hashlib.sha256(msgspec.msgpack.encode(tuple(tensors))).hexdigest()[:32]


def tensor_bytes(info: TensorInfo) -> int:
    """Bytes of one tensor on the wire."""
    if info.dtype not in DTYPES:
        raise WeightsError(f"{info.name}: wire type {info.dtype!r} is not one of {', '.join(DTYPES)}")
    return math.prod(info.shape) * DTYPES[info.dtype].itemsize


def check_manifest(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise WeightsError if the manifest contradicts itself or the names and shapes that the model here has."""
    digest = manifest_digest(manifest.tensors)
    if digest != manifest.digest:
        raise WeightsError(f"version {manifest.version}: digest {manifest.digest} does not fit its tensors ({digest})")
    total = sum(map(tensor_bytes, manifest.tensors))
    if total != manifest.num_bytes:
        raise WeightsError(
            f"version {manifest.version}: {manifest.num_bytes} bytes announced, its tensors have {total}"
        )
    if shapes is None:
        return
    sent = {info.name: tuple(info.shape) for info in manifest.tensors}
    wrong = [f"{name} {sent.get(name, 'absent')} (here {shapes.get(name, 'absent')})"
             for name in sorted({*sent, *shapes}) if sent.get(name) != shapes.get(name)]  # fmt: skip
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise WeightsError(
            f"version {manifest.version} is of another model: {'; '.join(wrong[:3])}{more}; "
            "learner and generators must load the same model.path"
        )


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor; a copy only if it lies on a GPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data


class Checksum:
    """xxh3_128 over the bytes of tensors in the order of the manifest (padding between them does not count)."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, tensor: torch.Tensor) -> None:
        """Add one contiguous tensor; on a GPU its bytes are copied to the host for this."""
        self._hash.update(host_bytes(tensor))

    def hexdigest(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()


def empty_bytes(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Fresh uint8 [size].

    Host memory comes from numpy, which asks for huge pages: touching them costs a quarter of touching small ones.
    """
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.empty(size, dtype=np.uint8))
    return torch.empty(size, dtype=torch.uint8, device=device)


class BucketLayout:
    """Where each tensor lies: in order, in buckets of at most `bucket_bytes`; a larger tensor has its own bucket."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.sizes: list[int] = []
        """Bytes of each bucket."""
        self.places: list[tuple[int, int]] = []
        """(bucket, first byte) of each tensor."""

    @classmethod
    def of(cls, tensors: Sequence[TensorInfo], bucket_bytes: int) -> BucketLayout:
        """The layout of all tensors of a manifest."""
        layout = cls(bucket_bytes)
        for info in tensors:
            layout.place(tensor_bytes(info))
        return layout

    def place(self, num_bytes: int) -> tuple[int, int]:
        """Append a tensor; return its bucket and first byte."""
        start = -(-self.sizes[-1] // _ALIGNMENT) * _ALIGNMENT if self.sizes else 0
        if not self.sizes or start + num_bytes > self.bucket_bytes:
            self.sizes.append(0)
            start = 0
        self.sizes[-1] = start + num_bytes
        self.places.append((len(self.sizes) - 1, start))
        return self.places[-1]

    def allocate(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Fresh uint8 buckets."""
        return [empty_bytes(size, device) for size in self.sizes]


def tensor_view(bucket: torch.Tensor, start: int, info: TensorInfo) -> torch.Tensor:
    """The tensor `info` that begins at byte `start` of a uint8 bucket, without a copy."""
    return bucket[start : start + tensor_bytes(info)].view(DTYPES[info.dtype]).view(info.shape)


@dataclass(frozen=True)
class ReceivedWeights:
    """A publication in the receiver's memory."""

    manifest: Manifest
    buckets: list[torch.Tensor]
    checksum: str
    """Of the bytes as they arrived; equal to the manifest's, or `receive` would have raised."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) in the order of the manifest."""
        layout = BucketLayout.of(self.manifest.tensors, self.manifest.bucket_bytes)
        for info, (bucket, start) in zip(self.manifest.tensors, layout.places, strict=True):
            yield info.name, tensor_view(self.buckets[bucket], start, info)


class SendBuffers:
    """The sender's copy of its last publication; refilled in place, never while a send of it is running."""

    def __init__(self, bucket_bytes: int, device: torch.device | str = "cpu") -> None:
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self._layout = BucketLayout(bucket_bytes)
        self._tensors: list[TensorInfo] = []
        self._storage: list[torch.Tensor] = []
        self._complete = False
        """Whether the layout is known: one fill came to its end."""
        self._checksum: str | None = None

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (name, full tensor in wire type), in an order that is the same every time.

        Raises ValueError when a name, type, shape or the order differs from the first fill.
        """
        self._checksum = None
        first = not self._complete
        if first:
            self._layout, self._tensors = BucketLayout(self.bucket_bytes), []
        checksum, count = Checksum(), 0
        for count, (name, tensor) in enumerate(tensors, start=1):
            info = _describe(name, tensor)
            if first:
                self._append(info)
            elif count > len(self._tensors) or self._tensors[count - 1] != info:
                expected = self._tensors[count - 1] if count <= len(self._tensors) else "no further tensor"
                raise ValueError(f"publication changed its layout at tensor {count}: {info}, before it was {expected}")
            view = self._view(count - 1)
            view.copy_(tensor)
            checksum.update(view)
        if count != len(self._tensors) or not count:
            raise ValueError(f"publication has {count} tensors, expected {len(self._tensors) or 'at least one'}")
        self._complete, self._checksum = True, checksum.hexdigest()

    def manifest(self, run_id: str, version: int) -> Manifest:
        """The manifest of what was filled last."""
        assert self._checksum is not None, "manifest() before a complete fill()"
        return Manifest(
            run_id=run_id,
            version=version,
            tensors=tuple(self._tensors),
            num_bytes=sum(map(tensor_bytes, self._tensors)),
            digest=manifest_digest(self._tensors),
            checksum=self._checksum,
            bucket_bytes=self.bucket_bytes,
        )

    @property
    def buckets(self) -> list[torch.Tensor]:
        """uint8 buckets as they go on the wire."""
        return [storage[:size] for storage, size in zip(self._storage, self._layout.sizes, strict=False)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) in order."""
        for index, info in enumerate(self._tensors):
            yield info.name, self._view(index)

    def _append(self, info: TensorInfo) -> None:
        """Make room for one more tensor."""
        num_bytes = tensor_bytes(info)
        bucket, _ = self._layout.place(num_bytes)
        self._tensors.append(info)
        size = max(num_bytes, self.bucket_bytes)
        if bucket == len(self._storage):
            self._storage.append(empty_bytes(size, self.device))
        elif self._storage[bucket].numel() < size:
            self._storage[bucket] = empty_bytes(size, self.device)

    def _view(self, index: int) -> torch.Tensor:
        bucket, start = self._layout.places[index]
        return tensor_view(self._storage[bucket], start, self._tensors[index])


def _describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Name, type and shape of a tensor on the wire."""
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"{name}: {tensor.dtype} cannot be published; cast it to one of {', '.join(DTYPES)}")
    return TensorInfo(name=name, dtype=_DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape))

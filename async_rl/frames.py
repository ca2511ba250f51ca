"""Plain values with numpy arrays to byte frames and back: one msgpack header, then each array's raw bytes.

In the header an array is an extension object that holds (frame index, dtype, shape). Decoding trusts
nothing: every frame must be used exactly once and hold exactly the bytes that dtype and shape say.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Frame = bytes | bytearray | memoryview

DTYPES = ("int32", "int64", "uint8", "float32", "float64")
_LITTLE = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _LITTLE.items()}
"""A dtype's own `name` costs microseconds."""
_ARRAY_CODE = 1
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 40
_ALIGNMENT = 16


class ProtocolError(Exception):
    """A peer sent something that the protocol does not allow."""


class _ArrayRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where an array's bytes are, and how to read them."""

    frame: int
    dtype: str
    shape: tuple[int, ...]


_REF_ENCODER = msgspec.msgpack.Encoder()
_REF_DECODER = msgspec.msgpack.Decoder(_ArrayRef)


def value_to_frames(value: Any) -> list[Frame]:
    """Frames of a value: structs, plain data, numpy scalars and arrays (which are viewed, not copied).

    Raises TypeError for anything else and for arrays of a dtype outside `DTYPES`.
    """
    frames: list[Frame] = [b""]

    def hook(item: Any) -> Any:
        if isinstance(item, np.generic):
            return item.item()
        if not isinstance(item, np.ndarray):
            raise TypeError(f"cannot encode a {type(item).__name__}; use plain data, structs or numpy arrays")
        reference = _ArrayRef(len(frames), dtype_name(item), item.shape)
        frames.append(_array_bytes(item))
        return msgspec.msgpack.Ext(_ARRAY_CODE, _REF_ENCODER.encode(reference))

    frames[0] = msgspec.msgpack.encode(value, enc_hook=hook)
    return frames


def dtype_name(array: np.ndarray) -> str:
    """The name of an array's dtype, such as 'int32', whatever its byte order."""
    return _NAMES.get(array.dtype) or array.dtype.name


def _array_bytes(array: np.ndarray) -> Frame:
    """The array's bytes in C order, little-endian."""
    if not array.size:
        if dtype_name(array) not in DTYPES:
            raise _unknown_dtype(array)
        return b""
    if array.dtype not in _NAMES:
        if array.dtype.name not in DTYPES:
            raise _unknown_dtype(array)
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).data.cast("B").toreadonly()


def _unknown_dtype(array: np.ndarray) -> TypeError:
    return TypeError(f"cannot encode an array of {array.dtype}; convert it to one of {', '.join(DTYPES)}")


def value_from_frames(
    frames: Sequence[Frame], kind: Any = Any, *, max_header_bytes: int | None = None, max_frames: int | None = None
) -> Any:
    """The value of `kind` (any msgspec type) in `frames`; its arrays are read-only views of them.

    Without a `kind` structs come back as dicts and tuples as lists. Raises ProtocolError, and nothing else,
    for whatever is not what `value_to_frames` writes.
    """
    if not frames:
        raise ProtocolError("no frames; expected a header")
    if max_frames is not None and len(frames) > max_frames:
        raise ProtocolError(f"{len(frames)} frames exceed the limit of {max_frames}")
    header = memoryview(frames[0])
    if max_header_bytes is not None and header.nbytes > max_header_bytes:
        raise ProtocolError(f"header of {header.nbytes} bytes exceeds the limit of {max_header_bytes}")
    try:
        value, unused = _reader(kind).read(header, frames)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(one_line(f"malformed header: {error}")) from None
    if unused:
        raise ProtocolError(f"frame {min(unused)} of {len(frames)} is not used by the header")
    return value


def _expect(kind: type, item: Any) -> Any:
    """Called by msgspec for types that it does not know: only arrays are allowed, and they are read already."""
    if kind is np.ndarray and isinstance(item, np.ndarray):
        return item
    raise msgspec.ValidationError(f"Expected `{kind.__name__}`, got `{type(item).__name__}`")


class _Reader:
    """Decodes headers of one type, one at a time; reads their array references and keeps account of the frames."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_expect, ext_hook=self._array)
        self._frames: Sequence[Frame] = ()
        self._unused: set[int] = set()

    def read(self, header: memoryview, frames: Sequence[Frame]) -> tuple[Any, set[int]]:
        """(value, numbers of the frames that it does not use)."""
        self._frames, self._unused = frames, set(range(1, len(frames)))
        try:
            return self._decoder.decode(header), self._unused
        finally:
            self._frames = ()

    def _array(self, code: int, data: memoryview) -> np.ndarray:
        if code != _ARRAY_CODE:
            raise msgspec.ValidationError(f"unknown extension code {code}")
        reference = _REF_DECODER.decode(data)
        if reference.frame not in self._unused:
            raise msgspec.ValidationError(f"frame {reference.frame} does not exist or is used twice")
        self._unused.remove(reference.frame)
        return _view(memoryview(self._frames[reference.frame]), reference)


class _Readers(threading.local):
    """By type, for each thread: to make the decoder of a union costs more than to decode a message."""

    def __init__(self) -> None:
        self.of: dict[Any, _Reader] = {}


_READERS = _Readers()


def _reader(kind: Any) -> _Reader:
    found = _READERS.of.get(kind)
    if found is None:
        found = _READERS.of[kind] = _Reader(kind)
    return found


def _view(frame: memoryview, reference: _ArrayRef) -> np.ndarray:
    """A read-only array over `frame`, copied only where its memory is not aligned for the dtype."""
    dtype = _LITTLE.get(reference.dtype)
    if dtype is None:
        raise msgspec.ValidationError(f"dtype {reference.dtype!r} is not one of {', '.join(DTYPES)}")
    shape = reference.shape
    if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0 or math.prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise msgspec.ValidationError(f"shape {shape} is out of bounds")
    expected = math.prod(shape) * dtype.itemsize
    if expected != frame.nbytes:
        text = f"frame {reference.frame} has {frame.nbytes} bytes, {reference.dtype}{list(shape)} has {expected}"
        raise msgspec.ValidationError(text)
    array: np.ndarray = np.ndarray(shape, dtype, buffer=frame)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def join_frames(frames: Sequence[Frame]) -> bytes:
    """All frames as one block (for a file or a broadcast): a table of lengths, then each frame, aligned."""
    return b"".join(block_parts(frames))


def block_parts(frames: Sequence[Frame]) -> list[Frame]:
    """What `join_frames` joins, the frames themselves uncopied."""
    table = msgspec.msgpack.encode([memoryview(frame).nbytes for frame in frames])
    parts: list[Frame] = [len(table).to_bytes(8, "little"), table]
    position = 8 + len(table)
    for frame in frames:
        padding = -position % _ALIGNMENT
        parts += [bytes(padding), frame]
        position += padding + memoryview(frame).nbytes
    return parts


def split_frames(block: Frame) -> list[memoryview]:
    """The frames of a block made by `join_frames`, as views of it; raises ProtocolError if it is damaged."""
    view = memoryview(block).cast("B").toreadonly()
    position = 8 + int.from_bytes(view[:8], "little")
    if len(view) < 8 or position > len(view):
        raise ProtocolError(f"block of {len(view)} bytes ends within its table of lengths")
    try:
        lengths = msgspec.msgpack.decode(view[8:position], type=list[int])
    except msgspec.MsgspecError as error:
        raise ProtocolError(one_line(f"malformed table of lengths: {error}")) from None
    frames = []
    for length in lengths:
        position += -position % _ALIGNMENT
        if length < 0 or position + length > len(view):
            raise ProtocolError(f"frame of {length} bytes at {position} is outside the block of {len(view)} bytes")
        frames.append(view[position : position + length])
        position += length
    if position != len(view):
        raise ProtocolError(f"{len(view) - position} bytes follow the last frame")
    return frames


def encode_value(value: Any) -> bytes:
    """A value as one block of bytes, for a checkpoint or a broadcast; see `value_to_frames` for what it may hold."""
    return join_frames(value_to_frames(value))


def decode_value(block: Frame, kind: Any = Any) -> Any:
    """The value in a block of `encode_value`, its arrays as views of the block. Raises only ProtocolError."""
    return value_from_frames(split_frames(block), kind)


def one_line(text: str, limit: int = 300) -> str:
    """Text of a peer made safe to print: one line, printable characters only, bounded."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text[: 4 * limit].split()))[:limit]

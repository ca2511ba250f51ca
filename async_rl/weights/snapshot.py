"""A publication as one safetensors file, for late members: written whole or not at all, verified when read."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

from async_rl.protocol import Manifest
from async_rl.weights.base import (
    BucketLayout,
    Checksum,
    Deadline,
    ReceivedWeights,
    SendBuffers,
    check_manifest,
    host_bytes,
    tensor_bytes,
)
from async_rl.weights.errors import WeightsError

_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of the wire types in safetensors."""
_PARTIAL = ".partial"
_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
_SILENCE_S = 10.0
"""A server that sends nothing for this long is given up."""


def write_snapshot(path: Path, manifest: Manifest, buffers: SendBuffers) -> None:
    """Write what `buffers` hold; the file appears under its name only when it is complete and on disk.

    Raises WeightsError (disk full, no permission); an earlier file of that name is intact then.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _atomic(path) as file:
            file.write(_header(manifest))
            for _, tensor in buffers.tensors():
                file.write(host_bytes(tensor))
    except OSError as error:
        raise WeightsError(f"{path}: snapshot of version {manifest.version} cannot be written: {error}") from error


def read_snapshot(path: Path, manifest: Manifest) -> ReceivedWeights:
    """Read and verify a snapshot; raises WeightsError for another version, other tensors or damaged bytes."""
    check_manifest(manifest)
    layout = BucketLayout.of(manifest.tensors, manifest.bucket_bytes)
    received = ReceivedWeights(manifest, layout.allocate(), manifest.checksum)
    checksum = Checksum()
    try:
        with safe_open(path, framework="pt") as file:
            _check_metadata(path, file.metadata(), manifest)
            for info, (name, view) in zip(manifest.tensors, received.tensors(), strict=True):
                tensor = file.get_tensor(name)
                if tensor.dtype != view.dtype or tensor.shape != view.shape:
                    raise WeightsError(f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {info}")
                view.copy_(tensor)
                checksum.update(view)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read as a snapshot of version {manifest.version}: {error}") from error
    if checksum.hexdigest() != manifest.checksum:
        raise WeightsError(f"{path}: checksum {checksum.hexdigest()}, announced {manifest.checksum}: damaged bytes")
    return received


def fetch_snapshot(path: Path, url: str | None, manifest: Manifest, deadline_s: float, into_dir: Path) -> Path:
    """The file at `path` if it is visible and the one announced, else a download of `url` into `into_dir`.

    Only the label of the file is checked here; `read_snapshot` verifies its bytes. Raises WeightsError.
    """
    try:
        with safe_open(path, framework="pt") as file:
            _check_metadata(path, file.metadata(), manifest)
            return path
    except (SafetensorError, OSError, WeightsError) as error:
        if url is None:
            raise WeightsError(f"snapshot of version {manifest.version}: {path} is no use ({error}), no url") from error
    into_dir.mkdir(parents=True, exist_ok=True)
    target = into_dir / f"version-{manifest.version:08d}-{manifest.checksum[:8]}.safetensors"
    _download(url, target, manifest, Deadline(deadline_s))
    return target


def prune_snapshots(directory: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` files written last, and what interrupted writes left; return what was deleted."""
    assert keep >= 1, "the last snapshot must stay"
    files = sorted(directory.glob("*.safetensors"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    doomed = [*files[:-keep], *directory.glob(f"*{_PARTIAL}")]
    for file in doomed:
        file.unlink(missing_ok=True)
    return doomed


def _header(manifest: Manifest) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON padded to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": _metadata(manifest)}
    start = 0
    for info in manifest.tensors:
        end = start + tensor_bytes(info)
        entries[info.name] = {"dtype": _TYPES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _metadata(manifest: Manifest) -> dict[str, str]:
    """What a file says about itself; "format" lets transformers load it."""
    return {
        "format": "pt",
        "run_id": manifest.run_id,
        "policy_version": str(manifest.version),
        "digest": manifest.digest,
        "checksum": manifest.checksum,
    }


def _check_metadata(path: Path, found: dict[str, str] | None, manifest: Manifest) -> None:
    for key, value in _metadata(manifest).items():
        if (found or {}).get(key) != value:
            raise WeightsError(f"{path}: {key} is {(found or {}).get(key)!r}, announced {value!r}")


def _download(url: str, target: Path, manifest: Manifest, deadline: Deadline) -> None:
    """Stream `url` into `target`, within the deadline and not much more than the announced bytes."""
    what = f"snapshot of version {manifest.version} from {url.partition('?')[0]}"
    if not url.startswith(("http://", "https://")):
        raise WeightsError(f"{what}: only http and https are fetched")
    # The learner is reached directly, as its socket is; a proxy of the environment is not meant.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limit, size = manifest.num_bytes + _MAX_HEADER_BYTES, 0
    try:
        with opener.open(url, timeout=min(_SILENCE_S, deadline.seconds)) as answer, _atomic(target) as file:
            while chunk := answer.read1(_CHUNK_BYTES):
                size += file.write(chunk)
                if deadline.passed():
                    raise WeightsError(f"{what}: {size} of {manifest.num_bytes} bytes within {deadline.seconds:g} s")
                if size > limit:
                    raise WeightsError(f"{what}: more than {limit} bytes, announced {manifest.num_bytes}")
    except (OSError, urllib.error.URLError) as error:
        raise WeightsError(f"{what}: {error}") from error


@contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well, after its bytes and its folder are on disk."""
    handle, partial = tempfile.mkstemp(prefix=path.name, suffix=_PARTIAL, dir=path.parent)
    with ExitStack() as undo:
        undo.callback(os.unlink, partial)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        undo.pop_all()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

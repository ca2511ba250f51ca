"""A checkpoint's weights as a Hugging Face folder, shard by shard: the whole model is never in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rl.checkpoints import names
from async_rl.checkpoints.find import Checkpoint
from async_rl.checkpoints.tensors import MODEL_PREFIX, read_tensors, stored_tensors
from async_rl.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class Stored:
    """One parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    source: torch.dtype
    """In the checkpoint."""
    dtype: torch.dtype
    """As it is written."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def export_checkpoint(
    checkpoint: Checkpoint, out: Path, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Write weights (safetensors), config and tokenizer to `out`; returns the weight files.

    `dtype` is one of DTYPES, by default the run's model.dtype. Holds one shard in memory. Raises InputError when `out`
    is there already, CheckpointError when the checkpoint cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists; export to a folder that does not, or remove it first")
    chosen = dtype or _run_dtype(checkpoint.path)
    draft = out.with_name(f"{out.name}.tmp")
    if draft.exists():
        shutil.rmtree(draft)
    shutil.copytree(checkpoint.path / names.MODEL, draft)
    shards = list(plan_shards(_stored(checkpoint.path, DTYPES[chosen]), max_shard_bytes))
    files = [draft / _shard_name(index, len(shards)) for index in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file({item.name: _read(checkpoint.path, item) for item in shard}, file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_index(draft, dict(zip(files, shards, strict=True)))
    _set_dtype(draft / names.CONFIG, chosen)
    if out.exists():
        out.rmdir()
    draft.rename(out)
    return [out / file.name for file in files]


def plan_shards(items: list[Stored], max_bytes: int) -> Iterator[list[Stored]]:
    """The tensors in order, in shards of at most `max_bytes`; a larger tensor is a shard of its own."""
    shard: list[Stored] = []
    for item in items:
        if shard and sum(other.num_bytes for other in shard) + item.num_bytes > max_bytes:
            yield shard
            shard = []
        shard.append(item)
    if shard:
        yield shard


def _stored(checkpoint: Path, dtype: torch.dtype) -> list[Stored]:
    """The model's tensors by name; whole numbers keep their type."""
    found = []
    for name, (shape, stored) in sorted(stored_tensors(checkpoint / names.TENSORS).items()):
        if name.startswith(MODEL_PREFIX):
            wanted = dtype if stored.is_floating_point else stored
            found.append(Stored(name.removeprefix(MODEL_PREFIX), shape, stored, wanted))
    return found


def _read(checkpoint: Path, item: Stored) -> Tensor:
    """One tensor, put together from its shards."""
    tensor = torch.empty(item.shape, dtype=item.source)
    read_tensors({MODEL_PREFIX + item.name: tensor}, checkpoint / names.TENSORS, None)
    return tensor.to(item.dtype)


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors"


def _write_index(folder: Path, shards: Mapping[Path, list[Stored]]) -> None:
    index = {
        "metadata": {"total_size": sum(item.num_bytes for shard in shards.values() for item in shard)},
        "weight_map": {item.name: file.name for file, shard in shards.items() for item in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _set_dtype(config: Path, dtype: str) -> None:
    """Name the type of the weights, under the old key too where the model's config has that."""
    settings: dict[str, Any] = json.loads(config.read_text())
    settings["dtype"] = dtype
    if "torch_dtype" in settings:
        settings["torch_dtype"] = dtype
    config.write_text(json.dumps(settings, indent=2) + "\n")


def _run_dtype(checkpoint: Path) -> str:
    saved: dict[str, Any] = json.loads((checkpoint / names.CONFIG).read_text())
    return str(saved["config"]["model"]["dtype"])

"""Model and optimizer of all ranks, to and from a folder: torch.distributed.checkpoint over our own disk.

Every tensor is stored once, under `model.<name>` or `optimizer.<moment>.<name>`, in shards as the ranks hold them;
it loads on any number of ranks. Functions marked collective run on all ranks of `group` alike.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from async_rl.checkpoints.disk import Disk
from async_rl.checkpoints.names import CheckpointError
from async_rl.errors import InputError

# Said for every use by one process alone, which is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")

MODEL_PREFIX, OPTIMIZER_PREFIX = "model.", "optimizer."


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once under their first name."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything to be saved, by stored name; views of what is trained, not copies."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model_tensors(model).items():
        tensors[MODEL_PREFIX + name] = tensor.detach()
        state = optimizer.state.get(tensor, {})
        tensors |= {f"{OPTIMIZER_PREFIX}{key}.{name}": value for key, value in state.items()}
    return tensors


class Staging:
    """Copies in host memory, made while training stands still and written while it goes on; reused by every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._meshes: dict[int, Any] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors in host memory, sharded alike. The copies of the call before are overwritten."""
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda and local.numel() > 0)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        mesh = self._meshes.get(tensor.device_mesh.size())
        if mesh is None:
            mesh = self._meshes[tensor.device_mesh.size()] = init_device_mesh("cpu", (tensor.device_mesh.size(),))
        return DTensor.from_local(
            buffer, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, disk: Disk, group: dist.ProcessGroup | None) -> None:
    """Write all ranks' shards into a folder that exists; without a group for this process alone. Collective.

    Raises CheckpointError on every rank when one of them failed.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    writer.fs = _Files(disk)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: {_cause(error)}") from error


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill tensors in place from a folder, whatever number of ranks wrote it. Collective. Raises CheckpointError."""
    try:
        dcp.load(dict(tensors), storage_reader=FileSystemReader(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_cause(error)}") from error


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor in a folder, by stored name."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (tuple(item.size), item.properties.dtype)
        for name, item in metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def load_model_and_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Put a checkpoint's tensors into a model and a fresh AdamW. Collective.

    Raises InputError, with both sides, when the checkpoint is of another model.
    """
    stored = stored_tensors(folder)
    _check_same_model({name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}, stored)
    for name, tensor in model_tensors(model).items():
        moments = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{OPTIMIZER_PREFIX}{key}.{name}" in stored]
        if moments:
            optimizer.state[tensor] = {key: _empty_moment(key, tensor) for key in moments}
    read_tensors(all_tensors(model, optimizer), folder, group)


def _empty_moment(key: str, parameter: Tensor) -> Tensor:
    if key == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()


def _check_same_model(model: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    saved = {
        name.removeprefix(MODEL_PREFIX): shape for name, (shape, _) in stored.items() if name.startswith(MODEL_PREFIX)
    }
    for name in [*saved, *model]:
        before, now = saved.get(name), model.get(name)
        if before != now:
            raise InputError(
                f"the checkpoint is of another model: {name} is {_shape(before)} there and {_shape(now)} in "
                "model.path; resume with the model as it was, or start another run.dir from that model"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _cause(error: CheckpointException) -> str:
    """The first rank's failure; torch hides an error of the disk behind one of its own that follows from it."""
    first = next(iter(error.failures.values()))[0]
    found: BaseException | None = first
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    cause = found or first
    return f"{type(cause).__name__}: {cause}"


class _Files(FileSystem):
    """torch's file system, with every change made by our disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with Path(path).open(mode) as stream:
                yield stream
            return
        with self._disk.create(Path(path)) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._disk.rename(Path(path), Path(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._disk.mkdir(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._disk.remove_file(Path(path))

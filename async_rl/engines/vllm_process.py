"""vLLM's processes: their environment and arguments, what they were started from, and their end."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from safetensors import safe_open

from async_rl.config import schema
from async_rl.engines.vllm_memory import kv_cache_bytes
from async_rl.errors import InputError
from async_rl.leftovers import OwnedFolder, sweep

BACKEND = "async_rl"
"""Name of our weight-transfer engine in vLLM's registry."""
OWNER_VARIABLE = "ASYNC_RL_ENGINE_OWNER"
"""Environment variable with the pid of the generator; vLLM's processes end with it, however it ends."""
SOCKET_NAME_BYTES = 36
"""vLLM names its sockets by a UUID."""
GRACE_S = 1.0
"""Seconds that a process gets to end by itself, and to be gone once killed."""


def prepare_environment(threads: int) -> OwnedFolder:
    """Set what vLLM reads from the environment, before its first import; return the folder of its sockets.

    Raises InputError where no folder is short enough for them.
    """
    sweep()
    sockets = OwnedFolder(room=SOCKET_NAME_BYTES)
    # Left to itself it strews its sockets over the temporary folder.
    os.environ["VLLM_RPC_BASE_PATH"] = str(sockets.path)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads: a forked child could deadlock
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine takes the same cores
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    return sockets


def end_with_owner() -> None:
    """In a process of vLLM: end it when its owner is gone, not before, and fast when it is told to.

    Left to itself vLLM's engine core outlives a killed parent with its memory and cores, and a Ctrl-C in the owner's
    terminal ends it under running requests. Python's own end, module by module, takes it seconds of computing.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, os.getpid()))
    if owner == os.getpid():
        return
    threading.Thread(target=_kill_after, args=(owner,), name="owner-watch", daemon=True).start()
    if multiprocessing.parent_process() is not None:  # an engine core or a worker, no helper that returns a status
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit.register(_exit_at_once)


def keep_files_together() -> None:
    """In a process of vLLM: temporary files lie in the folder of its sockets, and so go with it."""
    if OWNER_VARIABLE in os.environ and os.environ[OWNER_VARIABLE] != str(os.getpid()):
        tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"]


def _exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _kill_after(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def engine_arguments(
    config: schema.VllmEngine, model: Path, *, max_model_len: int, slots: int, seed: int, worker_extension: str
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` on this machine; imports vllm."""
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    dtype = "float32" if config.dtype == "auto" and cpu else config.dtype  # bfloat16 is slow without AVX512
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": slots,
        "block_size": config.block_size,
        "enforce_eager": cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": worker_extension,
    }
    if cpu:
        itemsize = 4 if dtype == "float32" else 2
        size = kv_cache_bytes(config, model, max_model_len=max_model_len, slots=slots, itemsize=itemsize)
        arguments["kv_cache_memory_bytes"] = size
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments


def published_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a publication of the model in this folder must have; only the files' headers are read.

    They are compared before a byte is received: vLLM's loader keeps old weights without an error where a tensor lacks.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if not shapes:
        raise InputError(f"model.path {str(model)!r} holds no *.safetensors file; write it with save_pretrained")
    if json.loads((model / "config.json").read_text()).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some files hold it, but it is the embedding
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}


class ProcessWatch:
    """The processes of one engine, by name: to tell which one died and to leave none behind."""

    def __init__(self, roots: Sequence[int]):
        """`roots` are the pids that the engine's client started; their descendants belong to it."""
        self.roots = [psutil.Process(pid) for pid in roots]
        self.workers = [child for root in self.roots for child in root.children(recursive=True)]
        self.names = {process: process.name() for process in (*self.roots, *self.workers)}

    def pids(self) -> list[int]:
        """All of them."""
        return [process.pid for process in self.names]

    def dead(self) -> list[str]:
        """Those that ended."""
        return sorted(f"{name} (pid {process.pid})" for process, name in self.names.items() if not _alive(process))

    def kill(self) -> None:
        """Kill those that are still there after a moment."""
        _, alive = psutil.wait_procs([*self.roots, *self.workers], timeout=GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=GRACE_S)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

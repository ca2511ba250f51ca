"""What runs inside vLLM's own processes: the weight-transfer engine and the worker calls that drive it.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). A worker joins groups and
receives bytes in a background thread while it samples; only `weights_load` needs a paused scheduler.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from async_rl.engines.vllm_process import BACKEND, end_with_owner, keep_files_together, published_shapes
from async_rl.engines.vllm_seeds import repair_cpu_generators
from async_rl.engines.vllm_waiting import sleep_instead_of_spinning
from async_rl.protocol import EpochInfo, Manifest
from async_rl.weights.base import ReceivedWeights, check_manifest
from async_rl.weights.broadcast import Receiver
from async_rl.weights.errors import WeightsError
from async_rl.weights.snapshot import read_snapshot

logger = logging.getLogger("vllm.async_rl")


@functools.cache
def register() -> None:
    """Make the transfer engine known to vLLM and tie this process to its owner; more calls change nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, __name__, "HeldWeightsEngine")
    # Its warnings name layers that no checkpoint holds, at every update; names are compared before a transfer instead.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    sleep_instead_of_spinning()
    keep_files_together()
    end_with_owner()


class Job(threading.Thread):
    """One transfer in the background; `outcome` is a checksum or None, `error` a text."""

    def __init__(self, name: str, work: Callable[[], str | None]):
        super().__init__(name=name, daemon=True)
        self.work = work
        self.outcome: str | None = None
        self.error: str | None = None

    def run(self) -> None:
        try:
            self.outcome = self.work()
        except WeightsError as error:
            self.error = str(error)
        except Exception as error:  # boundary of the worker: logged here, raised as WeightsError in the generator
            logger.exception("%s failed", self.name)
            self.error = f"{self.name}: {type(error).__name__}: {error}"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """An `EpochInfo`, encoded; vLLM hands over plain data only."""

    epoch_info: bytes


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """The version to load, which must be the one that is held."""

    version: int


class HeldWeightsEngine(WeightTransferEngine[JoinInfo, LoadInfo]):
    """Receives a whole publication into fresh buffers, holds it, and loads it when told."""

    init_info_cls = JoinInfo
    update_info_cls = LoadInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        repair_cpu_generators()  # not in `register`: only workers, which have one of these each, need its imports
        self.shapes = published_shapes(Path(self.model_config.model))
        self.job: Job | None = None
        self.receiver: Receiver | None = None
        self.held: ReceivedWeights | None = None

    def busy(self) -> str | None:
        """Name of the transfer under way."""
        return self.job.name if self.job is not None and self.job.is_alive() else None

    def begin(self, name: str, work: Callable[[], str | None]) -> None:
        """Start `work` in the background; the caller has seen that nothing else runs."""
        assert self.busy() is None, f"{self.busy()} is still running"
        self.job = Job(name, work)
        self.job.start()

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Begin to join a broadcast group; this worker's rank in it is the member's first rank plus its own."""
        info = msgspec.msgpack.decode(init_info.epoch_info, type=EpochInfo)
        device = self.device if info.backend == "nccl" else torch.device("cpu")

        def join() -> None:
            self._use_device()
            if self.receiver is None or self.receiver.device != device:
                self.shutdown()
                self.receiver = Receiver(device)
                self.receiver.expect(self.shapes)
            self.receiver.join(info, rank_offset=self.parallel_config.rank)

        self.begin(f"join epoch {info.epoch}", join)

    def begin_receive(self, manifest: Manifest, deadline_s: float) -> None:
        """Begin to receive a publication."""

        def receive() -> str:
            self._use_device()
            self.held = None
            if self.receiver is None:
                raise WeightsError(f"version {manifest.version}: this engine stands in no group; join an epoch first")
            self.held = self.receiver.receive(manifest, deadline_s)
            return self.held.checksum

        self.begin(f"receive version {manifest.version}", receive)

    def begin_snapshot(self, path: Path, manifest: Manifest) -> None:
        """Begin to read a snapshot file."""

        def read() -> str:
            self.held = None
            check_manifest(manifest, self.shapes)
            self.held = read_snapshot(path, manifest)
            return self.held.checksum

        self.begin(f"read snapshot of version {manifest.version}", read)

    def _use_device(self) -> None:
        if self.device.type == "cuda":  # the current device belongs to a thread
            torch.cuda.set_device(self.device)

    def start_weight_update(self) -> None:
        """Put the model's parameters in order for loading; from here on only a finished load makes it usable."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Load what is held. The buffers stay referenced until the loader has used each layer."""
        held = self.held
        assert held is not None and held.manifest.version == update_info.version, f"{update_info.version} is not held"
        model: Any = self.model
        model.load_weights(held.tensors())

    def finish_weight_update(self) -> None:
        """Let vLLM process the loaded layers, renew heads that it forgets, and let the buffers be filled again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)
        if self.receiver is not None and self.held is not None:
            self.receiver.recycle(self.held)
        self.held = None

    def shutdown(self) -> None:
        """Leave the broadcast group."""
        if self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            receiver.close()


def repack_heads(model: torch.nn.Module) -> None:
    """Pack the LM head again: on CPU it computes with a packed copy, which for a tied head no loader renews.

    Without this a tied model goes on with the old head after an update and only a log line says so.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Calls added to vLLM's worker for `collective_rpc`: begin-calls return at once, `weights_poll` tells the end."""

    weight_transfer_engine: HeldWeightsEngine

    def weights_begin_join(self, epoch_info: bytes) -> str | None:
        """Begin to join; returns the name of a transfer that still runs (then nothing was begun)."""
        if busy := self.weight_transfer_engine.busy():
            return busy
        self.weight_transfer_engine.init_transfer_engine(JoinInfo(epoch_info))
        return None

    def weights_begin_receive(self, manifest: bytes, deadline_s: float) -> str | None:
        """Begin to receive; returns as `weights_begin_join`."""
        if busy := self.weight_transfer_engine.busy():
            return busy
        self.weight_transfer_engine.begin_receive(msgspec.msgpack.decode(manifest, type=Manifest), deadline_s)
        return None

    def weights_begin_snapshot(self, path: str, manifest: bytes) -> str | None:
        """Begin to read a snapshot; returns as `weights_begin_join`."""
        if busy := self.weight_transfer_engine.busy():
            return busy
        self.weight_transfer_engine.begin_snapshot(Path(path), msgspec.msgpack.decode(manifest, type=Manifest))
        return None

    def weights_poll(self) -> dict[str, Any]:
        """State of the last transfer: {running, checksum, error}."""
        job = self.weight_transfer_engine.job
        if job is None:
            return {"running": False, "checksum": None, "error": "no transfer was begun"}
        return {"running": job.is_alive(), "checksum": job.outcome, "error": job.error}

    def weights_load(self, version: int) -> None:
        """Load what is held; the scheduler must be paused. An error leaves the model unusable."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({"version": version})
        worker.finish_weight_update()

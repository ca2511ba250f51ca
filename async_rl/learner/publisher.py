"""Rank 0's end of publication: fills send buffers from the policy and moves them, on a thread of its own.

The coordinator decides who receives what and when; this class only does the blocking work it asks for
(join a broadcast group, send a publication, write a snapshot), one job at a time, and reports each through a future.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from async_rl.config import Config
from async_rl.protocol import Manifest
from async_rl.weights.base import SendBuffers
from async_rl.weights.broadcast import Sender
from async_rl.weights.errors import WeightsError
from async_rl.weights.snapshot import prune_snapshots, write_snapshot

SNAPSHOTS_KEPT = 2


class Publisher:
    """Send buffers of the last publication and the one thread that sends them."""

    def __init__(self, config: Config, run_id: str, device: torch.device, host: str) -> None:
        self.run_id = run_id
        self.backend = config.weights.backend
        if self.backend == "auto":
            self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.snapshot_dir = Path(config.run.dir) / "snapshots"
        self._buffers = SendBuffers(config.weights.bucket_bytes)
        self._sender = Sender(host, self.backend, device, port=config.weights.port)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")
        self._busy = threading.Lock()
        self._manifest: Manifest | None = None

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the rendezvous store."""
        return self._sender.host, self._sender.port

    def fill(self, version: int, stream: Iterable[tuple[str, torch.Tensor]], deadline_s: float) -> Manifest:
        """Copy a version into the send buffers; waits for jobs that still read them.

        Raises WeightsError when a job holds the buffers for longer than `deadline_s`.
        """
        started = time.monotonic()
        if not self._busy.acquire(timeout=deadline_s):
            raise WeightsError(
                f"send buffers are still read by an earlier publication after {time.monotonic() - started:.0f} s "
                f"(limit {deadline_s:g} s); raise weights.deadline_s or publish less often"
            )
        try:
            self._buffers.fill(stream)
            self._manifest = self._buffers.manifest(self.run_id, version)
            return self._manifest
        finally:
            self._busy.release()

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        """Build the group of an epoch; the future gives seconds or WeightsError."""
        return self._pool.submit(self._timed, self._sender.join, epoch, size, deadline_s)

    def send(self, manifest: Manifest, deadline_s: float) -> Future[float]:
        """Broadcast the buffers in the current group; the future gives seconds or WeightsError."""
        return self._pool.submit(self._locked, self._send, manifest, deadline_s)

    def abandon(self, epoch: int, reason: str) -> None:
        """Have the work for an epoch, under way or to come, fail soon; safe from every thread."""
        self._sender.abandon(epoch, reason)

    def snapshot(self, manifest: Manifest) -> Future[Path]:
        """Write the buffers as a safetensors file, once per version; the future gives its path."""
        return self._pool.submit(self._locked, self._snapshot, manifest)

    def close(self) -> None:
        """Stop the thread and leave the group."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._sender.close()

    def _timed(self, job, *args) -> float:  # type: ignore[no-untyped-def]
        started = time.monotonic()
        job(*args)
        return time.monotonic() - started

    def _locked(self, job, *args):  # type: ignore[no-untyped-def]
        with self._busy:
            return job(*args)

    def _check(self, manifest: Manifest) -> None:
        held = self._manifest
        if held is None or held.version != manifest.version:
            raise WeightsError(
                f"version {manifest.version} is no longer in the send buffers (they hold {held and held.version})"
            )

    def _send(self, manifest: Manifest, deadline_s: float) -> float:
        self._check(manifest)
        return self._timed(self._sender.send, self._buffers, manifest, deadline_s)

    def _snapshot(self, manifest: Manifest) -> Path:
        # A run that starts anew in the same directory announces its own id with the same weights.
        name = f"version-{manifest.version:08d}-{manifest.checksum[:8]}-{manifest.run_id}.safetensors"
        path = self.snapshot_dir / name
        if not path.exists():
            self._check(manifest)
            self.snapshot_dir.mkdir(parents=True, exist_ok=True)
            write_snapshot(path, manifest, self._buffers)
            prune_snapshots(self.snapshot_dir, SNAPSHOTS_KEPT)
        return path

"""A transformers model as an engine, for machines without vLLM: continuous batching, weights loaded between tokens.

One thread owns the model. It samples token after token for all running requests, and takes requests, cancellations
and new weights between two tokens; the asyncio side only leaves notes for it. Transfers run in threads of their own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.config import schema
from async_rl.engines.base import Engine, EngineError, LoadReport, Sample, SampleRequest
from async_rl.engines.hf_batch import Batch, Row
from async_rl.errors import InputError
from async_rl.protocol import EpochInfo, Manifest
from async_rl.weights.base import ReceivedWeights, check_manifest
from async_rl.weights.broadcast import Receiver
from async_rl.weights.errors import WeightsError
from async_rl.weights.snapshot import read_snapshot

GRACE_S = 5.0
"""A transfer ends by its own deadline; this much later its thread counts as stuck and is left behind."""
SNAPSHOT_TIMEOUT_S = 600.0
"""Longest time for reading a snapshot from disk."""
CLOSE_S = 30.0
"""Longest wait for the token under way when the engine closes."""
T = TypeVar("T")


class HfEngine(Engine):
    """One model in this process; up to `slots` requests run at once, others wait in order."""

    def __init__(
        self,
        config: schema.HfEngine,
        model: schema.ModelConfig,
        *,
        slots: int,
        threads: int,
        running_requests: Literal["recompute", "keep", "finish"] = "recompute",
        device: str | None = None,
    ) -> None:
        self.config, self.model_path = config, Path(model.path)
        self.slots, self.threads, self.running_requests = slots, threads, running_requests
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model: PreTrainedModel
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._waiting: deque[tuple[Row, Future[Sample]]] = deque()
        self._running: dict[Row, Future[Sample]] = {}
        self._job: tuple[ReceivedWeights, Future[LoadReport]] | None = None
        self._closing = False
        self._failure: EngineError | None = None
        self._receiver = Receiver(self.device)
        self._held: ReceivedWeights | None = None

    async def start(self) -> None:
        """Load the model and start its thread."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="hf-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(ready)

    # --- the asyncio side ---------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one completion; cancelling the task frees its slot before the next token."""
        self._check_request(request)
        row, future = Row(request, self._end_ids), Future[Sample]()
        with self._wake:
            self._raise_failure()
            self._waiting.append((row, future))
            self._wake.notify()
        try:
            return await asyncio.wrap_future(future)
        finally:
            row.aborted = not row.finish

    async def join_epoch(self, info: EpochInfo) -> None:
        """Join the group of an epoch in the background."""
        self._held = None
        device = torch.device("cuda" if info.backend == "nccl" else "cpu")
        if self._receiver.device != device:
            self._receiver = self._new_receiver(device)
        receiver = self._receiver
        await self._transfer(lambda: receiver.join(info), info.deadline_s, f"joining epoch {info.epoch}")

    async def receive(self, epoch: int, manifest: Manifest, deadline_s: float) -> str:
        """Receive in the background while sampling goes on."""
        self._held, receiver = None, self._receiver
        if receiver.epoch != epoch:
            raise WeightsError(f"version {manifest.version} comes in epoch {epoch}, this engine is in {receiver.epoch}")
        what = f"receiving version {manifest.version}"
        self._held = await self._transfer(lambda: receiver.receive(manifest, deadline_s), deadline_s, what)
        return self._held.checksum

    async def load(self, manifest: Manifest) -> LoadReport:
        """Load what is held between two tokens; running requests are treated as `running_requests` says."""
        held, self._held = self._held, None
        if held is None or held.manifest != manifest:
            raise EngineError(f"version {manifest.version} was not received; it cannot be loaded")
        future = Future[LoadReport]()
        with self._wake:
            self._raise_failure()
            assert self._job is None, "two loads at once"
            self._job = (held, future)
            self._wake.notify()
        return await asyncio.wrap_future(future)

    async def load_snapshot(self, path: Path, manifest: Manifest) -> LoadReport:
        """Read and verify the file in the background, then load it."""
        check_manifest(manifest, self._shapes)
        what = f"reading {path}"
        self._held = await self._transfer(lambda: read_snapshot(path, manifest), SNAPSHOT_TIMEOUT_S, what)
        return await self.load(manifest)

    async def close(self) -> None:
        """Stop after the token under way; requests that still run raise EngineError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
        self._receiver.close()
        self._held = None

    def _check_request(self, request: SampleRequest) -> None:
        length, limit = len(request.prompt_ids) + request.sampling.max_tokens, self._max_length
        if not len(request.prompt_ids):
            raise InputError(
                f"request {request.request_id!r} has an empty prompt; the model needs a token to start from"
            )
        lowest, highest = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            raise InputError(
                f"request {request.request_id!r} has prompt tokens {lowest}..{highest}, the model knows "
                f"0..{self._vocab_size - 1}; learner and generator must use the tokenizer of the same model.path"
            )
        if limit is not None and length > limit:
            raise InputError(
                f"request {request.request_id!r} needs {length} prompt and completion tokens, the model holds {limit}; "
                "lower sampling.max_completion_tokens or data.max_prompt_tokens"
            )

    async def _transfer(self, work: Callable[[], T], deadline_s: float, what: str) -> T:
        """Run a blocking transfer in a thread; one that ignores its deadline is left behind with its receiver."""
        future = Future[T]()
        threading.Thread(target=_complete, args=(future, work), name=what, daemon=True).start()
        try:
            # Not wait_for: it swallows a cancellation that comes together with the result (before Python 3.12).
            async with asyncio.timeout(deadline_s + GRACE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            self._receiver = self._new_receiver(self._receiver.device)
            raise WeightsError(
                f"{what}: no end within {deadline_s + GRACE_S:g} s; the learner seems cut off"
            ) from error

    def _new_receiver(self, device: torch.device) -> Receiver:
        receiver = Receiver(device)
        receiver.expect(self._shapes)
        return receiver

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing or self._thread is None:
            raise EngineError("the hf engine is not running; call start() first, and nothing after close()")

    # --- the model's thread -------------------------------------------------------------------

    def _main(self, ready: Future[None]) -> None:
        """Build the model, then serve until closed; whatever goes wrong reaches everybody who waits."""
        try:
            torch.set_num_threads(self.threads)
            self._build()
            ready.set_result(None)
            self._serve(Batch(self._model))
            self._end(EngineError("the hf engine was closed"))
        except Exception as error:  # the thread's boundary: forwarded to every waiter, in whose task it is raised
            failure = EngineError(f"hf engine with model {str(self.model_path)!r}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
            if not ready.done():
                _reject(ready, failure)

    def _build(self) -> None:
        dtype = getattr(torch, self.config.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=dtype)
        self._model = model.to(self.device).eval().requires_grad_(False)
        layers = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
        if layers:
            raise EngineError(f"the hf engine batches full attention only, the model has {sorted(layers)}; use vllm")
        ends = model.generation_config.eos_token_id
        self._end_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._max_length: int | None = getattr(model.config, "max_position_embeddings", None)
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._receiver.expect(self._shapes)

    def _serve(self, batch: Batch) -> None:
        """Between two tokens: load, let requests leave and join."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._job or self._waiting or len(batch))
                if self._closing:
                    return
            for row in [row for row in batch.rows if row.aborted]:
                batch.drop([row])
                self._running.pop(row).cancel()
            if self._job and not (self.running_requests == "finish" and len(batch)):
                self._load(batch)
            if not self._job:
                self._admit(batch)
            if len(batch):
                for row in batch.step(self.policy_version or 0):
                    _resolve(self._running.pop(row), row.sample())

    def _admit(self, batch: Batch) -> None:
        """Fill free slots with waiting requests."""
        while self._waiting and len(batch) < self.slots:
            row, future = self._waiting.popleft()
            if not row.aborted:
                self._running[row] = future
                batch.add(row)

    @torch.no_grad()
    def _load(self, batch: Batch) -> None:
        """Copy the new weights into the model; an error half way leaves no usable model and ends the thread."""
        assert self._job is not None
        began, (weights, future) = time.perf_counter(), self._job
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights.tensors():
            parameters[name].copy_(tensor)
        self._receiver.recycle(weights)
        if self.running_requests != "keep":
            batch.forget()
        self.policy_version, self._job = weights.manifest.version, None
        took_s = time.perf_counter() - began
        _resolve(future, LoadReport(checksum=weights.checksum, load_s=took_s, paused_s=took_s))

    def _end(self, failure: EngineError) -> None:
        """Nothing runs any more: tell everybody who waits, and refuse whoever comes."""
        with self._wake:
            self._failure = failure
            futures: list[Future] = [*self._running.values(), *(future for _, future in self._waiting)]
            if self._job:
                futures.append(self._job[1])
            self._running.clear()
            self._waiting.clear()
        for future in futures:
            _reject(future, failure)


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` in this thread for whoever waits for `future`."""
    try:
        result = work()
    except Exception as error:  # the thread's boundary: raised where the future is awaited
        _reject(future, error)
    else:
        _resolve(future, result)


def _resolve(future: Future[T], result: T) -> None:
    """Set a result, unless the one who asked has gone."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _reject(future: Future, error: Exception) -> None:
    """Set an error, unless the one who asked has gone."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)

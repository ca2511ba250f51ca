"""vLLM's AsyncLLM as an engine: exact versions and logprobs per token, weights loaded while requests run.

An update, from outside to inside:
`receive` has the bytes in the workers -> `load` closes the gate for new requests -> pause at a token boundary ->
`weights_load` in every worker -> new version label -> resume -> gate open, new requests salted with the new version.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from async_rl.config import schema
from async_rl.engines import vllm_process
from async_rl.engines.awake import within
from async_rl.engines.base import Engine, EngineError, LoadReport, Sample, SampleRequest
from async_rl.errors import InputError
from async_rl.leftovers import OwnedFolder
from async_rl.protocol import EpochInfo, Manifest, SamplingParams, VersionSpan
from async_rl.weights.errors import WeightsError

RPC_TIMEOUT_S = 180.0
"""A worker answers between two forward passes, which take minutes on a machine with many more processes than cores;
one that takes longer is counted as dead."""
GRACE_S = 5.0
"""A background transfer ends by its own deadline; this much later it counts as stuck."""
CLOSE_S = 10.0
FINISH: dict[str, Literal["stop", "length", "aborted"]] = {"stop": "stop", "length": "length", "abort": "aborted"}


class VllmEngine(Engine):
    """One AsyncLLM in this process (three processes in all)."""

    worker_extension = "async_rl.engines.vllm_plugin.WorkerExtension"
    """Class that vLLM mixes into its worker, by name."""

    def __init__(
        self,
        config: schema.VllmEngine,
        model: schema.ModelConfig,
        *,
        max_model_len: int,
        slots: int,
        threads: int,
        running_requests: Literal["recompute", "keep", "finish"] = "recompute",
        seed: int = 0,
        load_timeout_s: float = 120.0,
    ):
        """`max_model_len` holds where the config names none; `load_timeout_s` bounds pausing and loading each."""
        self.config = config
        self.model = Path(model.path)
        self.max_model_len = config.max_model_len or max_model_len
        self.slots = slots
        self.threads = threads
        self.running_requests = running_requests
        self.seed = seed
        self.load_timeout_s = load_timeout_s
        self.receivers = config.tensor_parallel
        self._llm: Any = None
        self._sockets: OwnedFolder | None = None
        self._watch: vllm_process.ProcessWatch | None = None
        self._failure: EngineError | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._label = 0
        self._received: tuple[int, str] | None = None

    async def start(self) -> None:
        """Start vLLM's processes (about 30 s); the loop stays free meanwhile. Raises EngineError with the cause."""
        try:
            self._sockets = vllm_process.prepare_environment(self.threads)
            self._llm = await asyncio.to_thread(self._build)
        except Exception as error:  # anything that keeps vLLM from starting, with its own words
            limit = "generator.engine.max_model_len, else data.max_prompt_tokens + sampling.max_completion_tokens"
            raise EngineError(
                f"vLLM did not start with model {str(self.model)!r} and {self.max_model_len} tokens a request "
                f"({limit}): {error}"
            ) from error
        self._watch = vllm_process.ProcessWatch([p.pid for p in self._processes()])
        self._sockets.note_segments([os.getpid(), *self._watch.pids()])
        await self._set_label(0)

    def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = vllm_process.engine_arguments(
            self.config,
            self.model,
            max_model_len=self.max_model_len,
            slots=self.slots,
            seed=self.seed,
            worker_extension=self.worker_extension,
        )
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def _processes(self) -> list[Any]:
        return list(self._llm.engine_core.resources.engine_manager.processes)

    # --- sampling -----------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one completion; new requests wait while weights load (bounded by the load's own timeouts)."""
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._check_length(request)
        await self._gate.wait()
        self._check_alive()
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=str(self._label))
        try:
            outputs = [o async for o in self._llm.generate(prompt, _parameters(request.sampling), request.request_id)]
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._fail(f"sampling {request.request_id!r}: {error.__cause__ or error}") from error
        self._check_alive()
        assert len(outputs) == 1 and outputs[0].finished, "FINAL_ONLY sends one output"
        return _sample(outputs[0].outputs[0])

    def _check_length(self, request: SampleRequest) -> None:
        prompt, completion = len(request.prompt_ids), request.sampling.max_tokens
        if prompt + completion > self.max_model_len:
            raise InputError(
                f"request {request.request_id!r} needs {prompt} prompt + {completion} completion tokens, the engine "
                f"holds {self.max_model_len}; raise generator.engine.max_model_len"
            )

    # --- weights ------------------------------------------------------------------------------

    async def join_epoch(self, info: EpochInfo) -> None:
        """Join the group in the workers' background; sampling goes on."""
        self._received = None
        await self._transfer("weights_begin_join", (msgspec.msgpack.encode(info),), info.deadline_s)

    async def receive(self, epoch: int, manifest: Manifest, deadline_s: float) -> str:
        """Receive in the workers' background; sampling goes on."""
        arguments = (msgspec.msgpack.encode(manifest), deadline_s)
        return await self._hold(manifest, "weights_begin_receive", arguments, deadline_s)

    async def load_snapshot(self, path: Path, manifest: Manifest) -> LoadReport:
        """Read and verify in the workers' background, then load as a publication."""
        arguments = (str(path), msgspec.msgpack.encode(manifest))
        await self._hold(manifest, "weights_begin_snapshot", arguments, self.load_timeout_s)
        return await self.load(manifest)

    async def load(self, manifest: Manifest) -> LoadReport:
        """Load what is held; an error in it leaves no usable model, so the engine is stopped instead of resumed."""
        assert self._received == (manifest.version, manifest.checksum), f"version {manifest.version} was not received"
        self._received = None
        self._check_alive()
        self._gate.clear()
        try:
            began = time.perf_counter()
            async with self._paused():
                paused = time.perf_counter()
                await self._load_held(manifest.version)
                loaded = time.perf_counter()
            resumed = time.perf_counter()
        finally:
            self._gate.set()
        self.policy_version = manifest.version
        stood_still = paused if self.running_requests == "finish" else began
        return LoadReport(checksum=manifest.checksum, load_s=loaded - paused, paused_s=resumed - stood_still)

    async def _load_held(self, version: int) -> None:
        try:
            await self._rpc("weights_load", (version,), self.load_timeout_s)
            await self._set_label(version)
        except asyncio.CancelledError:  # what the workers hold now is unknown
            self._fail(f"loading version {version} was interrupted")
            raise

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Hold the scheduler; running requests are treated as `running_requests` says."""
        mode = "wait" if self.running_requests == "finish" else "keep"
        clear = self.running_requests != "keep"
        await self._bounded("pause", self._llm.pause_generation(mode=mode, clear_cache=clear), self.load_timeout_s)
        try:
            yield
        finally:
            if self._failure is None:
                await self._bounded("resume", self._llm.resume_generation(), RPC_TIMEOUT_S)

    async def _set_label(self, version: int) -> None:
        """Name the version of every token from now on, and keep its prefixes apart from other versions'."""
        await self._bounded("label", self._llm.update_weight_version(str(version)), RPC_TIMEOUT_S)
        self._label = version

    async def _hold(self, manifest: Manifest, method: str, arguments: tuple, deadline_s: float) -> str:
        self._received = None
        checksum = await self._transfer(method, arguments, deadline_s)
        assert checksum == manifest.checksum
        self._received = (manifest.version, checksum)
        return checksum

    async def _transfer(self, method: str, arguments: tuple, deadline_s: float) -> str | None:
        """Run one background transfer in every worker and return the checksum that they agree on."""
        self._check_alive()
        limit = time.monotonic() + deadline_s + GRACE_S
        while any(busy := await self._rpc(method, arguments)):
            # An earlier transfer, abandoned by its caller, runs until its own deadline.
            await self._pace(limit, f"{method} waits for {busy[0]!r} to end")
        delay_s = 0.002
        states = await self._rpc("weights_poll")
        while any(state["running"] for state in states):
            await self._pace(limit, f"{method} is still running", delay_s)
            delay_s = min(1.5 * delay_s, 0.05)
            states = await self._rpc("weights_poll")
        errors = [state["error"] for state in states if state["error"]]
        if errors:
            raise WeightsError(errors[0])
        checksums = {state["checksum"] for state in states}
        if len(checksums) != 1:
            raise WeightsError(f"{method}: the engine's {len(states)} workers received different bytes: {checksums}")
        return checksums.pop()

    async def _pace(self, limit: float, what: str, delay_s: float = 0.05) -> None:
        if time.monotonic() > limit:
            raise WeightsError(f"{what} {GRACE_S} s after its deadline; the engine keeps its old weights")
        await asyncio.sleep(delay_s)

    # --- calls and their failures -------------------------------------------------------------

    async def _rpc(self, method: str, arguments: tuple = (), timeout_s: float = RPC_TIMEOUT_S) -> list[Any]:
        """Call a method of every worker; an error or a timeout ends the engine (its answers would be out of step).

        vLLM is given no timeout of its own: its core would count the time for which all of them were stopped.
        """
        return await self._bounded(method, self._llm.collective_rpc(method, args=arguments), timeout_s)

    async def _bounded(self, what: str, call: Any, timeout_s: float) -> Any:
        try:
            return await within(call, timeout_s)
        except TimeoutError as error:
            raise self._fail(f"{what} was not answered within {timeout_s:g} s") from error
        except Exception as error:  # vLLM forwards a worker's error as a plain Exception
            raise self._fail(f"{what}: {error}") from error

    def _fail(self, cause: str) -> EngineError:
        """Count the engine as dead: every sample that runs or comes raises the returned error."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._failure is None:
            dead = self._watch.dead() if self._watch else []
            ended = f"; ended: {', '.join(dead)}" if dead else ""
            self._failure = EngineError(f"vLLM cannot go on ({cause}{ended}); restart the generator")
            self._llm.output_processor.propagate_error(EngineDeadError())
        return self._failure

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._llm is not None, "start() comes first"

    async def close(self) -> None:
        """Stop vLLM and wait until none of its processes is left."""
        try:
            await self._stop()
        finally:
            if self._sockets is not None:
                self._sockets.remove()

    async def _stop(self) -> None:
        if self._llm is None:
            return
        self._fail("the engine was closed")
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it logs the end of its process as an error
        assert self._watch is not None
        await asyncio.to_thread(llm.shutdown, CLOSE_S)
        await asyncio.to_thread(self._watch.kill)
        llm.shutdown = lambda: None  # its destructor calls it once more, at interpreter exit too late for its imports


def _parameters(sampling: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_ids),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sample(completion: Any) -> Sample:
    """Turn vLLM's completion into ours; spans must cover every token."""
    length = len(completion.token_ids)
    spans = tuple(VersionSpan(int(s.version), s.start, s.end) for s in completion.weight_versions or ())
    edges = [0, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1] and edges[-1] == length, f"{spans} do not cover {length} tokens"
    if completion.finish_reason not in FINISH:
        raise EngineError(f"vLLM ended a request with {completion.finish_reason!r}, which is none of {sorted(FINISH)}")
    return Sample(
        completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs if length else (), dtype=np.float32),
        versions=spans,
        finish=FINISH[completion.finish_reason],
    )

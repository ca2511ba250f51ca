"""What only rank 0 of the learner does: coordinator, publications, evaluation results, metrics and the console."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from async_rl.advice import Predictions, advice_after, devices_here
from async_rl.alarms import Alarms
from async_rl.buffer import TrajectoryGroup
from async_rl.checkpoints import Disk, names
from async_rl.checkpoints.differences import changed_settings
from async_rl.checkpoints.finished import clear_finished
from async_rl.checkpoints.lineage import write_lineage
from async_rl.checkpoints.state import RunState, read_state
from async_rl.config import Config
from async_rl.console import Console
from async_rl.coordinator.handle import CoordinatorProcess
from async_rl.coordinator.resumed import Resumed
from async_rl.evaluation import EvaluationResult
from async_rl.learner.checkpointing import resolved_settings
from async_rl.learner.evaluations import record_evaluation, write_samples
from async_rl.learner.publisher import Publisher
from async_rl.learner.start import Start
from async_rl.metrics import Metrics, open_sinks
from async_rl.metrics.sinks import LOST_METRICS, METRICS, Sink, cut_jsonl
from async_rl.protocol import encode_value
from async_rl.report import draw_report

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a wait looks at the stop flag and at the coordinator's health."""


class Lead:
    """Rank 0's own part; every method is called from the training thread."""

    def __init__(self, config: Config, resolved_from: str, device: torch.device, start: Start) -> None:
        self.config, self.resolved_from, self.from_start = config, resolved_from, start
        self.run_dir = Path(config.run.dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.run_id = start.lineage.run_id
        state = None if start.checkpoint is None else read_state(Path(start.checkpoint))
        resumed = None if state is None else Resumed(state.work, start.step, start.lineage.ancestors)
        self.coordinator = CoordinatorProcess(config, self.run_id, self._show, resumed)
        self.console = Console(config)
        self._show_start()
        for reason, number in self.coordinator.dropped.items():
            self.console.message(f"{number} problems are not used: {reason}")
        self.publisher = Publisher(config, self.run_id, device, config.transport.host)
        self.alarms = Alarms(config, on_cpu=device.type == "cpu")
        self.devices = devices_here(config, torch.cuda.device_count() if device.type == "cuda" else 0)
        self.predictions = Predictions(self.run_dir, config, self.devices)
        self.sinks: list[Sink] = []
        self.last_values: dict[str, float] = {}
        self.accuracies: list[tuple[int, float]] = state.accuracies if state else []
        self.evaluated = state.evaluated if state else -1
        """Newest version with a finished evaluation."""
        self._fresh_results: list[EvaluationResult] = []
        self._wait_s = 0.0
        self._gather_s: float | None = None
        self._step_started = time.monotonic()
        self._closed = False

    def _show_start(self) -> None:
        """What is resumed, what was passed over and why, and which settings differ."""
        start = self.from_start
        lines = [*start.notes]
        if start.checkpoint is not None:
            saved = msgspec.json.decode((Path(start.checkpoint) / names.CONFIG).read_bytes())["config"]
            changed = changed_settings(saved, msgspec.to_builtins(self.config))
            verb = "forked" if start.fork else "resumed"
            lines += [f"{verb} from {start.checkpoint}: {start.step} steps are done", *self.coordinator.given_up]
            lines += [f"changed since the checkpoint: {line}" for line in changed]
        for line in lines:
            self.console.message(line)

    def _show(self, text: str) -> None:
        """A line of the coordinator; none comes before `start`."""
        self.console.message(text)

    def start(self) -> None:
        """Take over the run directory and open the port; generators may come from now on."""
        clear_finished(self.run_dir)
        write_lineage(self.run_dir, self.from_start.lineage, Disk())
        (self.run_dir / names.CONFIG).write_bytes(resolved_settings(self.config, self.resolved_from, self.run_id))
        # At the very beginning there is no line that could stay, not even one of step 0.
        last = self.from_start.step if self.from_start.checkpoint is not None else -1
        if lost := cut_jsonl(self.run_dir / METRICS, last):
            self.console.message(f"{lost} lines of metrics beyond this run's beginning moved to {LOST_METRICS}")
        self.sinks = open_sinks(self.config, self.run_dir, self.from_start.lineage.root)
        address = self.coordinator.start(self.publisher)
        (self.run_dir / "address").write_text(json.dumps(address) + "\n")
        self.console.message(f"learner {os.getpid()} listens on {address['learner']} (run {self.run_id})")
        self._step_started = time.monotonic()

    # --- one step ---------------------------------------------------------------------------

    def next_batch(self, step: int, stop: Callable[[], bool]) -> tuple[TrajectoryGroup, ...] | None:
        """The groups of `step`, or None: interrupted, data at its end, or the accuracy to stop at is reached."""
        started = time.monotonic()
        wanted = self.coordinator.request_batch()
        try:
            while not wanted.wait(POLL_S):
                self._take_evaluations()
                self.console.update(step - 1, self.last_values, self._status())
                if stop() or self._reached():
                    self.coordinator.withdraw()
                    return None
            self._take_evaluations()
            return None if stop() or self._reached() else self._whole_batch(step, wanted.result())
        finally:
            self._wait_s = time.monotonic() - started

    def _whole_batch(self, step: int, groups: tuple[TrajectoryGroup, ...] | None) -> tuple[TrajectoryGroup, ...] | None:
        """The batch; at the end of the data a message, or an error when not even one batch came of it."""
        if groups is None:
            dropped = self.coordinator.status()["ledger"]["dropped"]
            why = ", ".join(f"{number} {reason}" for reason, number in dropped.items()) or "none"
            text = f"the data ended after {step - 1} of {self.config.run.steps} steps; problems dropped: {why}"
            if step == 1:
                raise RuntimeError(f"{text}. Nothing was trained: see the first errors above")
            self.console.message(text)
        return groups

    def work(self) -> bytes:
        """Ledger and problems of this moment, for a checkpoint."""
        return self.coordinator.snapshot_state()

    def shared(self, step: int, work: bytes, updater: dict[str, Any], evaluation_begun: int) -> dict[str, bytes]:
        """The files of a checkpoint that rank 0 writes: state and settings."""
        self._take_evaluations()
        # Results that the checkpoint calls done are lines of its step: those of later ones are cut on resume.
        results, self._fresh_results = self._fresh_results, []
        for result in results:
            self._write_evaluation(step, result)
        state = RunState(
            step=step,
            work=np.frombuffer(work, np.uint8),
            updater=updater,
            accuracies=self.accuracies,
            evaluated=self.evaluated,
            evaluation_begun=evaluation_begun,
        )
        settings = resolved_settings(self.config, self.resolved_from, self.run_id)
        return {names.STATE: encode_value(state), names.CONFIG: settings}

    def trained(self) -> None:
        """The batch in flight made the next version."""
        self.coordinator.trained()

    def publish(self, version: int, stream: Iterable[tuple[str, torch.Tensor]], evaluate: bool) -> None:
        """Copy a version into the send buffers and let the coordinator send it; returns once buffers are full."""
        self.coordinator.wait_for_publication()
        started = time.monotonic()
        manifest = self.publisher.fill(version, stream, self.config.weights.deadline_s * 2)
        self._gather_s = time.monotonic() - started
        self.coordinator.publish(manifest, evaluate)

    def report(self, step: int, metrics: Metrics) -> None:
        """Write one line of metrics for `step`."""
        now = time.monotonic()
        step_s = now - self._step_started
        self._step_started = now
        metrics.last("step", step)
        metrics.last("policy_version", step)
        metrics.last("time/step_s", step_s)
        metrics.last("time/wait_for_batch_s", self._wait_s)
        if self._gather_s is not None:
            metrics.last("time/gather_s", self._gather_s)
            self._gather_s = None
        metrics.mean("learner/wait_share", self._wait_s, step_s)
        metrics.mean("throughput/trained_tokens_per_s", metrics.resolve().get("loss/tokens", 0.0), step_s)
        for reason, number in self.coordinator.dropped.items():
            metrics.last(f"data/dropped_{reason}", number)
        metrics.merge(self.coordinator.collect(step_s))
        self._take_evaluations()
        for line in self.alarms.check(step, metrics.resolve()):
            log.warning("%s", line)
        for name, steps in self.alarms.counts().items():
            metrics.last(f"alarm/{name}", steps)
        self._write(step, metrics)
        if ending := self.alarms.ends_run():
            raise RuntimeError(ending)

    def _write(self, step: int, metrics: Metrics) -> None:
        results, self._fresh_results = self._fresh_results, []
        for result in results[:-1]:  # Two rounds ended within one step: a line holds one.
            self._write_evaluation(step, result)
        if results:
            record_evaluation(metrics, results[-1])
        values = metrics.resolve()
        self.last_values = {**self.last_values, **values}
        for sink in self.sinks:
            sink.write(step, values)
        if self.config.metrics.console != "off":
            self._aside("predicted gain", lambda: self.predictions.update(step, self.last_values))
        self.console.update(step, self.last_values, self._status())

    def _status(self) -> dict[str, Any]:
        """The coordinator's, with what the best changes would gain."""
        return {**self.coordinator.status(), "predicted": self.predictions.sentence}

    def _write_evaluation(self, step: int, result: EvaluationResult) -> None:
        """A line of metrics with nothing but a round's result."""
        metrics = Metrics()
        metrics.last("step", step)
        metrics.last("policy_version", step)
        record_evaluation(metrics, result)
        values = metrics.resolve()
        self.last_values = {**self.last_values, **values}
        for sink in self.sinks:
            sink.write(step, values)

    # --- evaluation -------------------------------------------------------------------------

    def _take_evaluations(self) -> None:
        for result in self.coordinator.take_evaluations():
            self._fresh_results.append(result)
            self.evaluated = max(self.evaluated, result.version)
            write_samples(self.run_dir / "evaluations", result)
            if result.accuracy is None:
                self.console.message(
                    f"version {result.version}: evaluation found nothing ({result.failed} failed, {result.missing} "
                    f"missing after {result.seconds:.1f} s; the limit is run.stall_timeout_s)"
                )
                continue
            self.accuracies.append((result.version, result.accuracy))
            error = "" if result.stderr is None else f" +- {result.stderr:.3f}"
            self.console.message(
                f"version {result.version}: held-out accuracy {result.accuracy:.3f}{error} "
                f"({result.scored} completions, {result.failed} failed, {result.missing} missing)"
            )

    def _reached(self) -> bool:
        goal = self.config.run.stop_at_accuracy
        return goal is not None and bool(self.accuracies) and max(self.accuracies)[1] >= goal

    # --- the end ----------------------------------------------------------------------------

    def finish(self, step: int, evaluate: bool, stop: Callable[[], bool] = lambda: False, dismiss: bool = True) -> None:
        """Last publication and evaluation, given up when `stop` says so; then the fleet is told to stop.

        Not `dismiss`: the run is pre-empted, and generators wait for it to be resumed.
        """
        self.coordinator.wait_for_publication()
        if evaluate:
            self._await_evaluations(stop)
            if self.evaluated < step and not stop():
                self.coordinator.evaluate(step)
                self._await_evaluations(stop)
        if self._fresh_results:
            final = Metrics()
            final.last("step", step)
            final.last("policy_version", step)
            self._write(step, final)
        self.coordinator.stop("the run is complete", dismiss=dismiss)

    def _await_evaluations(self, stop: Callable[[], bool]) -> None:
        """Rounds under way end by themselves: they have a deadline."""
        while self.coordinator.evaluating():
            if stop():
                self.console.message("interrupted: the evaluation of the last version is given up")
                break
            time.sleep(0.05)
        self._take_evaluations()

    def abort(self) -> None:
        """After a failure: tell the fleet, close files, draw nothing."""
        if not self._closed:
            self._closed = True
            self.coordinator.stop("the learner failed")
            self._close_outputs()

    def close(self) -> None:
        """Close everything and draw the report."""
        self._closed = True
        self._close_outputs()
        if self.config.metrics.report:
            self._aside("advice", self._advise)
            self._aside("report", self._draw_report)

    def _aside(self, what: str, make: Callable[[], None]) -> None:
        """Make something that the run can do without; one that cannot be made is a line in the log."""
        try:
            make()
        except Exception as error:  # whatever a simulation or a drawing raises, it says nothing about the training
            log.warning("no %s: %s: %s", what, type(error).__name__, error)
            log.debug("no %s", what, exc_info=True)

    def _draw_report(self) -> None:
        draw_report(self.run_dir / "metrics.jsonl", self.run_dir / "report.png", self.config)

    def _advise(self) -> None:
        """Print what would have made the run faster, and write it to <run_dir>/advice.txt."""
        lines = advice_after(self.run_dir, self.config, self.devices)
        if lines:
            (self.run_dir / "advice.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.console.message("what a simulation of this run says would be faster, or as fast for less:")
            for line in lines:
                self.console.message(line)

    def _close_outputs(self) -> None:
        self.publisher.close()
        for sink in self.sinks:
            sink.close()
        self.console.close()

"""The end of a run on rank 0: every wait ends, and says why."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from async_rl.alarms import Alarms
from async_rl.checkpoints import names
from async_rl.checkpoints.finished import FINISHED, mark_finished
from async_rl.checkpoints.lineage import Lineage
from async_rl.checkpoints.state import RunState
from async_rl.evaluation import EvaluationResult, EvaluationSettings
from async_rl.learner.lead import Lead
from async_rl.learner.start import Start
from async_rl.metrics import Metrics
from async_rl.protocol import decode_value
from tests.loop.rig import Learner, make_config, manifest


def make_lead(tmp_path: Path, deadline_s: float) -> tuple[Lead, list[str]]:
    """Rank 0's part without a model; nobody is connected and version 0 is published."""
    learner = Learner(make_config(tmp_path))
    learner.coordinator.evaluations.settings = EvaluationSettings(samples=1, deadline_s=deadline_s)
    notes: list[str] = []
    lead = Lead.__new__(Lead)
    lead.config, lead.run_dir, lead.coordinator = learner.config, tmp_path, learner.coordinator
    lead.console = SimpleNamespace(message=notes.append, update=lambda *_: None)  # type: ignore[assignment]
    lead.predictions = no_predictions()
    lead.evaluated, lead.accuracies, lead.sinks = -1, [], []
    lead.last_values, lead._fresh_results = {}, []
    lead.coordinator.start()
    lead.coordinator.publish(manifest("run-1", 0), evaluate=True)
    return lead, notes


def no_predictions() -> Any:
    """Nothing is simulated beside the run."""
    return SimpleNamespace(update=lambda *_: None, sentence=None)


async def test_the_last_evaluation_without_generators_ends_and_says_what_is_missing(tmp_path: Path) -> None:
    lead, notes = make_lead(tmp_path, deadline_s=0.5)
    async with asyncio.timeout(150):
        await asyncio.to_thread(lead.finish, 0, True)
    assert len(notes) == 1
    assert re.fullmatch(r"version 0: evaluation found nothing \(0 failed, 6 missing after \d+\.\d s; .*_s\)", notes[0])


async def test_a_signal_ends_the_wait_for_the_last_evaluation(tmp_path: Path) -> None:
    """A supervisor kills 30 s after its signal; an evaluation may take run.stall_timeout_s."""
    lead, notes = make_lead(tmp_path, deadline_s=1000.0)
    polls = iter(range(10))
    async with asyncio.timeout(150):
        await asyncio.to_thread(lead.finish, 0, True, lambda: next(polls, 10) > 2)
    assert notes == ["interrupted: the evaluation of the last version is given up"]
    assert not lead.coordinator._thread.is_alive()


def result(version: int, accuracy: float) -> EvaluationResult:
    none: dict[str, Any] = {"stderr": None, "failed": 0, "missing": 0, "version_min": 0, "version_max": 0}
    return EvaluationResult(version=version, accuracy=accuracy, scored=1, seconds=1.0, samples=(), **none)


def test_a_slow_round_of_an_older_version_does_not_pass_for_the_newest(tmp_path: Path) -> None:
    lead, _ = make_lead(tmp_path, deadline_s=1000.0)
    lead.config = msgspec.structs.replace(
        lead.config, run=msgspec.structs.replace(lead.config.run, stop_at_accuracy=0.9)
    )
    lead.coordinator._results = [result(6, 0.95), result(3, 0.1)]
    lead._take_evaluations()
    assert lead.evaluated == 6
    assert lead._reached()
    lead.coordinator.stop("test")


def test_two_rounds_that_end_within_one_step_have_a_line_each(tmp_path: Path) -> None:
    lead, _ = make_lead(tmp_path, deadline_s=1.0)
    rows: list[dict[str, float]] = []
    sink: Any = SimpleNamespace(write=lambda step, values: rows.append(dict(values)))
    lead.sinks = [sink]
    lead._fresh_results = [result(3, 0.25), result(6, 0.75)]
    lead._write(7, Metrics())
    lead.coordinator.stop("test")
    assert [row["eval/accuracy"] for row in rows] == [0.25, 0.75]


def test_a_run_that_begins_is_not_finished_by_the_one_before_it(tmp_path: Path) -> None:
    """Both end after the same step; the second is killed during its last evaluation, and must go on there."""
    lead = Lead.__new__(Lead)
    lead.config, lead.resolved_from, lead.run_dir = make_config(tmp_path), "config.toml", tmp_path
    lead.run_id, lead.publisher, lead.from_start = "run-2", None, Start(Lineage.first())  # type: ignore[assignment]
    lead.console = SimpleNamespace(message=lambda _: None)  # type: ignore[assignment]
    lead.coordinator = SimpleNamespace(start=lambda _: {"learner": "127.0.0.1:1"})  # type: ignore[assignment]
    mark_finished(tmp_path, 4)
    lead.start()
    for sink in lead.sinks:
        sink.close()
    assert not (tmp_path / FINISHED).exists()


def fail(*_: Any) -> Any:
    """What a simulation may do."""
    raise ValueError("publish_every = 1 gives run_ahead = -1")


def test_no_prediction_advice_or_report_that_fails_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lead = Lead.__new__(Lead)
    lead.config, lead.run_dir, lead.sinks, lead.devices = make_config(tmp_path), tmp_path, [], None
    lead._fresh_results, lead.last_values = [], {}
    lead.predictions = SimpleNamespace(update=fail, sentence="")  # type: ignore[assignment]
    lead.coordinator = SimpleNamespace(status=dict)  # type: ignore[assignment]
    lead.publisher = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    lead.console = SimpleNamespace(update=lambda *_: None, close=lambda: None)  # type: ignore[assignment]
    lead.config = msgspec.structs.replace(
        lead.config, metrics=msgspec.structs.replace(lead.config.metrics, console="plain", report=True)
    )
    monkeypatch.setattr("async_rl.learner.lead.advice_after", fail)
    monkeypatch.setattr("async_rl.learner.lead.draw_report", fail)
    lead._write(16, Metrics())
    lead.close()
    why = "ValueError: publish_every = 1 gives run_ahead = -1"
    assert caplog.messages == [f"no predicted gain: {why}", f"no advice: {why}", f"no report: {why}"]


def test_an_evaluation_that_a_checkpoint_calls_done_is_a_line_of_its_step(tmp_path: Path) -> None:
    """A line of the step after it would be cut when a killed run goes on, and the round not be made again."""
    lead, _ = make_lead(tmp_path, deadline_s=1000.0)
    lead.run_id, lead.resolved_from = "run-1", "config.toml"
    rows: list[tuple[int, float]] = []
    sink: Any = SimpleNamespace(write=lambda step, values: rows.append((step, values["eval/accuracy"])))
    lead.sinks = [sink]
    lead.coordinator._results = [result(3, 0.25)]
    lead._take_evaluations()
    lead.coordinator._results = [result(4, 0.75)]
    state = decode_value(lead.shared(4, b"", {}, 4)[names.STATE], RunState)
    assert state.evaluated == 4 and state.accuracies == [(3, 0.25), (4, 0.75)]
    assert rows == [(4, 0.25), (4, 0.75)]
    lead.finish(4, evaluate=False)
    assert len(rows) == 2, "once each"


def test_an_alarm_is_counted_said_and_written_before_it_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, alarms={"patience": 1, "stop": ("failures",)})
    written: list[dict[str, float]] = []
    lead = Lead.__new__(Lead)
    lead.config, lead.alarms, lead.predictions = config, Alarms(config, on_cpu=True), no_predictions()
    lead._step_started = lead._wait_s = 0.0
    lead._gather_s, lead._fresh_results, lead.last_values = None, [], {}
    lead.console = SimpleNamespace(update=lambda *_: None)  # type: ignore[assignment]
    lead.sinks = [SimpleNamespace(write=lambda step, values: written.append(dict(values)))]  # type: ignore[list-item]
    lead.coordinator = SimpleNamespace(  # type: ignore[assignment]
        dropped={}, collect=lambda _: Metrics(), take_evaluations=lambda: [], status=lambda: {}
    )
    healthy, broken = Metrics(), Metrics()
    healthy.mean("reward/failed_share", 0, 8)
    broken.mean("reward/failed_share", 8, 8)
    lead.report(1, healthy)
    assert caplog.messages == [] and written[-1]["alarm/failures"] == 0
    with pytest.raises(RuntimeError, match=r"alarms\.stop ends the run: failures"):
        lead.report(2, broken)
    assert written[-1]["alarm/failures"] == 1 and written[-1]["reward/failed_share"] == 1.0
    assert [message.split(":")[0] for message in caplog.messages] == ["ALARM failures"]

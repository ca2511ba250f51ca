"""Where numbers go; a tracker that fails is left alone, training goes on."""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from async_rl.config import Config, build_config
from async_rl.metrics import open_sinks
from async_rl.metrics.sinks import JsonlSink, OptionalSink


def config(*overrides: str) -> Config:
    return build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}}, overrides)


def lines(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_one_line_per_step_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"step": 1.0, "reward/mean": 0.25})
    assert lines(path) == [{"step": 1, "reward/mean": 0.25}]
    sink.write(2, {"reward/mean": math.nan, "staleness/max": math.inf})
    sink.close()
    assert lines(path)[1] == {"step": 2, "reward/mean": None, "staleness/max": None}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        (sink,) = open_sinks(config(), tmp_path, "run")
        sink.write(step, {"step": step})
        sink.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    for sink in open_sinks(config("metrics.tensorboard=true"), tmp_path, "run"):
        sink.write(3, {"reward/mean": 0.5})
        sink.write(4, {"reward/mean": 0.75})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("reward/mean")]
    assert read == [(3, 0.5), (4, 0.75)]


@pytest.mark.slow
def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    for sink in open_sinks(config("metrics.wandb=offline", "run.name=offline-test"), tmp_path, "run"):
        sink.write(1, {"reward/mean": 0.4375})
        sink.close()
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while b"offline-test" not in (written := record.read_bytes()) or b"reward/mean" not in written:
        assert time.monotonic() < deadline, written  # Its own process writes the file, after finish too.
        time.sleep(0.1)
    assert b"reward/mean" in written and b"0.4375" in written
    assert b"offline-test" in written


class Failing:
    """A tracker whose server is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("server gone")

    def close(self) -> None:
        raise AssertionError("a tracker that failed is left alone")


def test_a_failing_tracker_is_reported_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    sink = OptionalSink("Tracker", lambda: failing)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sink.write(step, {"reward/mean": 1.0})
        sink.close()
    assert failing.calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Tracker stopped taking metrics (ConnectionError: server gone); training goes on"
    ]


def test_a_tracker_that_cannot_be_opened_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> Failing:
        raise ImportError("no module named tracker")

    with caplog.at_level(logging.WARNING):
        sink = OptionalSink("Tracker", missing)
        sink.write(1, {})
        sink.close()
    assert len(caplog.records) == 1
    assert "no module named tracker" in caplog.text

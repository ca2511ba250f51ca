"""Where resolved metrics go: metrics.jsonl always, trackers when asked for.

A tracker that fails is reported once and left alone from then on; it never stops training. A full disk under
metrics.jsonl does: a run without its record is not worth its time.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from async_rl.config.schema import Config

log = logging.getLogger(__name__)


METRICS, LOST_METRICS = "metrics.jsonl", "metrics.lost.jsonl"


class Sink(Protocol):
    """Takes the numbers of one step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line, appended and flushed; a number that is not finite becomes null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        line: dict[str, float | None] = {"step": step}
        line |= {key: value if math.isfinite(value) else None for key, value in values.items() if key != "step"}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def cut_jsonl(path: Path, step: int) -> int:
    """Move the lines after `step` to metrics.lost.jsonl beside it: their steps are made again. Returns how many.

    A last line that a killed process left unfinished is dropped.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    lost: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            of_step = json.loads(line)["step"]
        except ValueError:
            continue
        (kept if of_step <= step else lost).append(line)
    if lost:
        with path.with_name(LOST_METRICS).open("ab") as file:
            file.writelines(lost)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(b"".join(kept))
    draft.replace(path)
    return len(lost)


class WandbSink:
    """Weights & Biases, online or offline (files under <run_dir>/wandb); a resumed run goes on under the same id."""

    def __init__(self, config: Config, run_dir: Path, run_id: str) -> None:
        import wandb

        assert config.metrics.wandb != "off"
        self._run = wandb.init(
            project=config.metrics.wandb_project,
            name=config.run.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            mode=config.metrics.wandb,
            config=msgspec.to_builtins(config),
            settings=wandb.Settings(silent=True),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """Event files under <run_dir>/tensorboard, written without torch or TensorFlow."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class OptionalSink:
    """A tracker whose first failure is logged and ends its use."""

    def __init__(self, name: str, open_sink: Any) -> None:
        self._name = name
        self._sink: Sink | None = None
        self._sink = self._try(open_sink)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._sink is not None:
            self._try(self._sink.write, step, values)

    def close(self) -> None:
        if self._sink is not None:
            self._try(self._sink.close)

    def _try(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # a process boundary: third-party trackers raise anything
            self._sink = None
            log.warning("%s stopped taking metrics (%s: %s); training goes on", self._name, type(error).__name__, error)
            return None


def open_sinks(config: Config, run_dir: Path, run_id: str) -> list[Sink]:
    """The sinks of a run, metrics.jsonl first; trackers know it by `run_id`, which a resumed run keeps."""
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS)]
    if config.metrics.wandb != "off":
        sinks.append(OptionalSink("Weights & Biases", lambda: WandbSink(config, run_dir, run_id)))
    if config.metrics.tensorboard:
        sinks.append(OptionalSink("TensorBoard", lambda: TensorBoardSink(run_dir)))
    return sinks

"""How the learner's ranks wait and end: what was learned is saved before anything that can fail or take long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.checkpoints import CheckpointError
from async_rl.checkpoints.finished import FINISHED
from async_rl.checkpoints.lineage import Lineage
from async_rl.learner import loop
from async_rl.learner.ranks import RankContext
from async_rl.learner.start import Start
from tests.loop.rig import make_config


class Ends:
    """Stands in for policy and lead: notes what the end of a run does, in order."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.done: list[Any] = []
        self.failure = failure

    def save_pretrained(self, directory: str) -> None:
        self.done.append("save")

    def full_parameters(self, dtype: str) -> list[Any]:
        return []

    def publish(self, version: int, stream: Any, evaluate: bool) -> None:
        self.done.append(f"publish {version}")

    def work(self) -> bytes:
        return b"work"

    def shared(self, step: int, work: bytes, updater: Any, evaluation_begun: int) -> dict[str, bytes]:
        return {"state": work}

    def state(self) -> dict[str, Any]:
        return {}

    def finish(self, step: int, evaluate: bool, stop: Any, dismiss: bool = True) -> None:
        self.done.append(f"finish {step} {evaluate}{'' if dismiss else ', to be resumed'}")
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.done.append("close")


class Saves:
    """Stands in for the checkpoints of a rank; the last one was of step 2."""

    def __init__(self, parts: Ends, enabled: bool, error: CheckpointError | None = None) -> None:
        self.parts, self.enabled, self.last_step, self.error = parts, enabled, 2, error

    def save(self, step: int, shared: dict[str, bytes] | None) -> None:
        self.parts.done.append(f"checkpoint {step} {sorted(shared or ())}")

    def close(self) -> None:
        pass


def end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: Ends,
    *,
    rank: int = 0,
    interrupted: bool = False,
    number: int | None = None,
    checkpoints: bool = False,
    error: CheckpointError | None = None,
) -> None:
    """The end of a run after step 3, of which version 2 was the last to be published."""
    monkeypatch.setattr(loop, "agree", lambda ok: ok)
    config = make_config(tmp_path, staleness={"max_staleness": 2, "publish_every": 2})
    Path(config.run.dir).mkdir()
    run = loop.Loop.__new__(loop.Loop)
    run.config, run.ctx, run.policy = config, RankContext(rank, 2, "cpu"), parts  # type: ignore[assignment, arg-type]
    run.lead, run.wire_dtype = parts if rank == 0 else None, "float32"  # type: ignore[assignment]
    run._evaluated = run._published = 2
    run.updater, run.checkpoints = parts, Saves(parts, checkpoints, error)  # type: ignore[assignment]
    flag = loop._InterruptFlag()
    flag._set, flag.number = interrupted, number
    run._end(3, flag)


def test_the_last_version_is_saved_published_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends()
    end(tmp_path, monkeypatch, parts)
    assert parts.done == ["save", "publish 3", "finish 3 True", "close"]
    assert (tmp_path / "run" / FINISHED).read_text() == "3\n"


def test_a_run_is_complete_before_its_report_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Ends):
        def close(self) -> None:
            raise SystemExit("killed while it draws")

    with pytest.raises(SystemExit):
        end(tmp_path, monkeypatch, Killed())
    assert (tmp_path / "run" / FINISHED).read_text() == "3\n"


def test_a_failing_last_evaluation_does_not_cost_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends(TimeoutError("no answer"))
    with pytest.raises(TimeoutError):
        end(tmp_path, monkeypatch, parts)
    assert parts.done[0] == "save"


def test_an_interrupted_rank_0_says_so_after_it_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends()
    with pytest.raises(KeyboardInterrupt):
        end(tmp_path, monkeypatch, parts, interrupted=True)
    assert parts.done == ["save", "finish 3 False", "close"]
    assert not (tmp_path / "run" / FINISHED).exists(), "it can go on"


def test_other_ranks_end_without_an_error_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code of theirs would have the launcher stop, and then kill, rank 0 while it writes the model."""
    parts = Ends()
    end(tmp_path, monkeypatch, parts, rank=1, interrupted=True)
    assert parts.done == ["save"]


def test_the_checkpoint_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends()
    end(tmp_path, monkeypatch, parts, checkpoints=True)
    assert parts.done == ["checkpoint 3 ['state']", "save", "publish 3", "finish 3 True", "close"]


def test_sigterm_saves_leaves_the_fleet_waiting_and_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends()
    end(tmp_path, monkeypatch, parts, interrupted=True, number=signal.SIGTERM, checkpoints=True)
    assert parts.done == ["checkpoint 3 ['state']", "save", "finish 3 False, to be resumed", "close"]


def test_ctrl_c_saves_dismisses_the_fleet_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends()
    with pytest.raises(KeyboardInterrupt):
        end(tmp_path, monkeypatch, parts, interrupted=True, number=signal.SIGINT, checkpoints=True)
    assert parts.done == ["checkpoint 3 ['state']", "save", "finish 3 False", "close"]


def test_a_last_checkpoint_that_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Ends()
    with pytest.raises(CheckpointError, match=r"step 3 is not saved: disk full"):
        end(tmp_path, monkeypatch, parts, checkpoints=True, error=CheckpointError("disk full"))
    assert parts.done[-1] == "close", "the fleet is told and the files are closed first"
    assert not (tmp_path / "run" / FINISHED).exists(), "its last step is lost"


# --- a signal while the model loads ----------------------------------------------------------------


class Unhandled(BaseException):
    """A signal reached the handler that was there before the learner's."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals that the learner does not catch are errors here, and do not end the tests."""

    def unhandled(number: int, _: Any) -> None:
        raise Unhandled(number)

    before = {number: signal.signal(number, unhandled) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def load_until(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int | str, list[str]]:
    """A learner that gets a signal while its model loads: what comes of it, and what became of its coordinator."""
    done: list[str] = []

    class Opened:
        def __init__(self, *_: Any) -> None:
            done.append("start")

        def abort(self) -> None:
            done.append("abort")

    def load(*_: Any) -> None:
        signal.raise_signal(number)
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(loop, "init_ranks", lambda config: RankContext(0, 1, "cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "share_start", lambda config, ctx: Start(Lineage.first()))
    monkeypatch.setattr(loop, "Lead", Opened)
    monkeypatch.setattr(loop, "load_policy", load)
    try:
        return loop.run_learner(make_config(tmp_path), "config.toml"), done
    except KeyboardInterrupt:
        return "interrupted", done


@pytest.mark.usefixtures("handlers")
def test_sigterm_while_the_model_loads_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_until(signal.SIGTERM, tmp_path, monkeypatch) == (0, ["start", "abort"])
    assert capsys.readouterr().out == "SIGTERM before the first step: there is nothing to save\n"
    with pytest.raises(Unhandled):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_while_the_model_loads_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_until(signal.SIGINT, tmp_path, monkeypatch) == ("interrupted", ["start", "abort"])

"""The learner suite: its completions, its workers, its arithmetic, and a tiny run with and without TRL."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks import learner, learner_data, learner_figure, workers
from benchmarks.learner_data import Shape
from benchmarks.workers import Meter, Worker, peers_missing
from tests.tiny_models import tiny_model

WAIT_S = 600.0


def test_completions_have_the_lengths_and_rewards_that_were_asked_for(tmp_path: Path) -> None:
    shape = Shape(batches=50, groups=4, median=64, sigma=1.0, longest=100_000, solved=1)
    batches = learner_data.draw(shape, vocabulary=49152)
    lengths = [len(member["completion_ids"]) for batch in batches for group in batch for member in group["members"]]
    assert len(lengths) == 50 * 4 * 8
    assert np.median(lengths) == pytest.approx(64, rel=0.1)
    # The mean of a lognormal is median * exp(sigma^2 / 2), its 90th percentile median * exp(1.2816 sigma).
    assert np.mean(lengths) == pytest.approx(64 * np.exp(0.5), rel=0.15)
    assert np.quantile(lengths, 0.9) == pytest.approx(64 * np.exp(1.2816), rel=0.15)
    rewards = [[member["reward"] for member in group["members"]] for group in batches[0]]
    assert rewards == [[1.0] * 8, *[[0.0, 1.0] * 4] * 3]
    assert batches == learner_data.draw(shape, vocabulary=49152)
    assert batches != learner_data.draw(Shape(**asdict(shape) | {"seed": 1}), vocabulary=49152)
    path = tmp_path / "completions.json"
    learner_data.save(path, shape, batches)
    assert learner_data.load(path) == (asdict(shape), batches)
    assert learner_data.describe(batches)["completions"] == 1600
    assert sum(map(learner_data.tokens, batches)) == sum(lengths)


def test_no_completion_is_longer_than_the_longest() -> None:
    batches = learner_data.draw(Shape(batches=5, sigma=2.0, longest=99), vocabulary=80)
    lengths = [len(member["completion_ids"]) for batch in batches for group in batch for member in group["members"]]
    assert max(lengths) == 99 and min(lengths) >= 1


def step(wall_s: float, grad_norm: float = 1.0, peak_bytes: int = 100) -> dict[str, float]:
    values = {"wall_s": wall_s, "processor_s": 2 * wall_s, "peak_bytes": peak_bytes}
    return values | {"loss": 0.1, "grad_norm": grad_norm}


def rounds_of(ours: list[float], theirs: list[float]) -> list[dict[str, dict[str, float]]]:
    names = (*learner.WAYS.values(), learner.DEFAULTS)
    return [{**{name: step(a) for name in names}, learner.BEST: step(b, peak_bytes=400)}
            for a, b in zip(ours, theirs, strict=True)]  # fmt: skip


def test_sides_are_compared_within_a_round(tmp_path: Path) -> None:
    rounds = rounds_of([1.0, 2.0, 4.0], [2.0, 8.0, 4.0])
    rows = learner.summarize(rounds, [100, 200, 300], learner.BEST)
    ours = rows[learner.WAYS["whole"]]
    assert (ours["times_wall"].median, ours["times_wall"].min, ours["times_wall"].max) == (2.0, 1.0, 4.0)
    assert ours["tokens_per_s"].median == 100.0 and ours["tokens_per_processor_s"].median == 50.0
    said = {headline.what: headline for headline in learner.headlines(rows, {"grad_norm": 1e-7})}
    assert said["trained tokens/s, times TRL's: async_rl, every sequence run"].target == ">= 1.5"
    assert said["peak memory, share of TRL's"].value == 0.25
    defaults = said["TRL's best setting, times its defaults"].value
    assert (defaults.median, defaults.min, defaults.max) == (0.5, 0.25, 1.0)
    batches = learner_data.draw(Shape(batches=1), vocabulary=100)
    written = json.dumps({"sides": rows, "lengths": learner_data.describe(batches)}, default=asdict)
    result = json.loads(written)
    learner_figure.draw(result, tmp_path / "learner.json")
    assert (tmp_path / "learner.png").read_bytes().startswith(b"\x89PNG")
    lines = learner_figure.table(result).splitlines()
    assert "| async_rl | 100 (75 to 100) | 2 (1 to 4) | 2 (1 to 4) | 0.00 |" in lines
    assert len(lines) == 2 + len(rows)


def test_another_step_is_not_compared() -> None:
    same = [{"a": step(1.0, 2.0), "b": step(1.0, 2.0 + 1e-6)}]
    assert learner.check_equal(same)["grad_norm"] == pytest.approx(5e-7)
    other = [*same, {"a": step(1.0, 2.0), "b": step(1.0, 2.1)}]
    with pytest.raises(RuntimeError, match=r"do not take the same step: gradient norms differ by 0\.05"):
        learner.check_equal(other)


def test_completions_of_another_number_of_rounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "completions.json"
    shape = Shape(batches=3)
    learner_data.save(path, shape, learner_data.draw(shape, 100))
    arguments = learner.parse(["--completions", str(path), "--rounds", "2"])
    assert learner.make_completions(arguments, tmp_path / "unused") == path
    with pytest.raises(SystemExit, match="holds 3 batches, which are --rounds 2"):
        learner.make_completions(learner.parse(["--completions", str(path)]), path)


def test_memory_of_a_step_is_its_own_peak() -> None:
    before = np.ones(32 << 20, np.uint8)
    del before
    small = Meter().stop()
    meter = Meter()
    large = np.ones(64 << 20, np.uint8)
    use = meter.stop()
    assert use.peak_bytes >= small.peak_bytes + len(large) // 2
    assert use.wall_s > 0 and use.processor_s >= 0


@pytest.fixture
def echo() -> Iterator[Worker]:
    worker = Worker(sys.executable, "tests.benchmarks.echo", {"a": 1}, threads=1)
    yield worker
    worker.close()


def test_a_worker_answers_in_turn(echo: Worker) -> None:
    assert echo.ready() == {"settings": {"a": 1}}
    assert [echo.ask({"n": n}, WAIT_S)["heard"]["n"] for n in range(3)] == [0, 1, 2]


def test_a_worker_that_ends_says_why(echo: Worker) -> None:
    echo.ready()
    with pytest.raises(RuntimeError, match=r"ended with exit code 1\n[\s\S]*ended as told: no memory"):
        echo.ask({"exit": "no memory"}, WAIT_S)
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        echo.ask({"n": 1}, WAIT_S)


def test_a_worker_that_takes_too_long_is_named(echo: Worker) -> None:
    echo.ready()
    with pytest.raises(RuntimeError, match=r"tests\.benchmarks\.echo took more than 0\.1 s to answer"):
        echo.ask({"sleep_s": 2}, 0.1)


def tiny_run(tmp_path: Path, *more: str) -> dict:
    tiny_model(tmp_path / "model", tied=True)
    output = tmp_path / "learner.json"
    small = ["--groups", "4", "--median", "10", "--longest", "40", "--threads", "1", "--rounds", "1", *more]
    arguments = ["--model", str(tmp_path / "model"), "--timeout-s", str(WAIT_S), "--output", str(output)]
    assert learner.main([*arguments, *small, "--allow-dirty"]) == 0
    assert output.with_suffix(".png").exists()
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_run_without_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PEERS", tmp_path / ".venv-peers")
    result = tiny_run(tmp_path)
    assert result["skipped"] == "TRL is not installed in .venv-peers: run `make peers`"
    assert list(result["sides"]) == list(learner.WAYS.values())
    assert result["differences"]["grad_norm"] < 1e-5, "packing, shared prompts and skipping change no gradient"
    assert all(side["tokens_per_s"]["median"] > 0 for side in result["sides"].values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(peers_missing()), reason=peers_missing())
def test_a_tiny_run_against_trl(tmp_path: Path) -> None:
    result = tiny_run(tmp_path, "--trl-each", "8")
    assert {learner.BEST, learner.DEFAULTS} <= result["sides"].keys()
    assert result["differences"]["grad_norm"] < 1e-5, "loss and step of TRL are ours"
    assert result["differences"]["loss"] < 1e-5

"""The same command again after a crash: nothing is lost, nothing is trained twice, and the numbers are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.checkpoints import names
from async_rl.checkpoints.find import choose_checkpoint, complete, find_named
from async_rl.checkpoints.tensors import read_tensors, stored_tensors
from async_rl.cli import run as cli
from async_rl.config import load_config
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import load_tokenizer
from tests.e2e.conftest import Run
from tests.e2e.doom import PLACES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SYNCHRONOUS = ("staleness.max_staleness=0", "evaluation.every=0", "generator.slots=1", "learner.decay=cosine")
"""One slot: the engine computes one row at a time, whatever else is waiting, and so the same bits."""


LONG = "ASYNC_RL_LONG" in os.environ


def newest(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 without any."""
    return max((found.step for found in complete(run_dir, None)), default=0)


def tensors_at(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = find_named(f"{run_dir}@{step}").path / names.TENSORS
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(folder).items()}
    read_tensors(tensors, folder, None)
    return tensors


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(120)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss/policy" in row]


def test_twenty_steps_equal_ten_and_a_kill_and_ten(run: Run) -> None:
    straight, broken = run.folder / "straight", run.folder / "broken"
    common = (*SYNCHRONOUS, "run.steps=20", "checkpoint.every=10")
    run.wait(run.start("train", str(run.config), *common, f"run.dir={straight}"))
    learner = run.learner(*common, f"run.dir={broken}")
    generator = run.generator("g0", *common)
    run.until(lambda: newest(broken) >= 10)
    kill(learner)
    kill(generator)
    resumed = run.learner(*common, f"run.dir={broken}")
    run.generator("g0", *common)
    run.wait(resumed)
    assert "resumed from" in run.output() and "10 steps are done" in run.output()
    # Not ledger/issued: the version is out when a step is reported, and the next tickets may be too.
    keys = ("loss/policy", "optimizer/lr", "optimizer/grad_norm", "reward/mean", "ledger/trained")
    assert [{key: row[key] for key in ("step", *keys)} for row in rows(broken)] == [
        {key: row[key] for key in ("step", *keys)} for row in rows(straight)
    ]
    assert [row["step"] for row in rows(broken)] == list(range(1, 21))
    expected, found = tensors_at(straight, 20), tensors_at(broken, 20)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    before = tensors_at(broken, 10)
    assert all(not torch.equal(before[name], found[name]) for name in before if name.startswith("model.")), "trained"


def start_recorded(run: Run, *overrides: str, place: str = "nowhere", seed: int = 0) -> subprocess.Popen[str]:
    """A learner that writes what it trains to trained.jsonl, and dies at a place."""
    log = (run.folder / f"process-{len(run.processes)}.log").open("w")
    argv = [sys.executable, "-m", "tests.e2e.recording_learner", str(run.folder / "trained.jsonl"), place, str(seed)]
    process = run.spawn([*argv, "learner", str(run.config), *overrides], stdout=log, stderr=log)
    run.processes.append(process)
    return process


def trained(run: Run) -> list[dict[str, Any]]:
    """What counts of the record: of a step that was made again only the last time."""
    lines = [json.loads(line) for line in (run.folder / "trained.jsonl").read_text().splitlines()]
    runs = list(dict.fromkeys((line["run"], line["from"]) for line in lines))
    last = {run: min((start for _, start in runs[i + 1 :]), default=sys.maxsize) for i, (run, _) in enumerate(runs)}
    return [line for line in lines if line["step"] <= last[line["run"]]]


def uninterrupted(run: Run, tickets: int) -> list[str]:
    """Problems in the order in which a run that nothing interrupts draws them."""
    config = load_config(run.config)
    source = build_environment(config).problems(load_tokenizer(config.model.path))
    problems = [source.draw() for _ in range(tickets)]
    return [problem.id for problem in problems if problem is not None]


@pytest.mark.timeout(3600 if LONG else 900)
def test_a_learner_killed_in_every_place_trains_every_problem_once(run: Run) -> None:
    """In the middle of the tensors, between rename and marker, right after the marker, in a publication, anywhere."""
    kills = 20 if LONG else 5
    steps = 8 * kills + 8
    overrides = (
        f"run.steps={steps}", "checkpoint.every=1", "evaluation.every=0", "weights.bucket_bytes=65536",
        "transport.connect_timeout_s=600",
    )  # fmt: skip
    generators = [run.generator(name, *overrides) for name in ("g0", "g1")]
    for number in range(kills):
        learner = start_recorded(run, *overrides, place=PLACES[number % len(PLACES)], seed=number)
        run.wait(learner, -signal.SIGKILL)
        assert [generator.poll() for generator in generators] == [None, None], "generators outlive it"
    run.wait(start_recorded(run, *overrides))
    for generator in generators:
        run.wait(generator)
    counted = trained(run)
    tickets = [line["ticket"] for line in counted]
    assert [line["step"] for line in counted] == [step for step in range(1, steps + 1) for _ in range(4)]
    last = rows(run.folder / "run")[-1]
    assert last["ledger/trained"] == last["ledger/issued"] == steps * 4 and last["ledger/dropped"] == 0
    assert sorted(tickets) == list(range(steps * 4)), "none is trained twice, and none is lost"
    problems = uninterrupted(run, steps * 4)
    assert all(problems[line["ticket"]] == line["problem"] for line in counted)
    assert [row["step"] for row in rows(run.folder / "run")] == list(range(1, steps + 1))
    assert len({line["run"] for line in counted}) > 3 * kills // 5, "who died in its second save had made its first"
    assert "is another run" not in run.output(), "generators kept their work"


def test_a_run_that_is_complete_says_so_when_it_is_started_again(run: Run, capsys: Any) -> None:
    overrides = ("run.steps=2", "data.eval_problems=4", "evaluation.every=2")
    run.wait(run.start("train", str(run.config), *overrides))
    assert "is complete" not in run.output()
    run.wait(run.learner(*overrides))
    said = f"{run.folder / 'run'} is complete: all 2 steps of run.steps are trained"
    assert said in run.output()
    logs = {file: file.stat().st_size for file in (run.folder / "run" / "logs").iterdir()}
    assert cli(["train", str(run.config), *overrides]) == 0
    assert said in capsys.readouterr().out
    assert logs == {file: file.stat().st_size for file in (run.folder / "run" / "logs").iterdir()}, "no generator began"
    assert [row["step"] for row in rows(run.folder / "run")] == [1, 2]


def test_sigterm_saves_and_a_generator_waits_for_the_learner_to_come_back(run: Run, capsys: Any) -> None:
    overrides = ("run.steps=12", "checkpoint.every=0", "checkpoint.every_s=1000", "evaluation.every=0")
    generator = run.generator("g0", *overrides)
    learner = run.learner(*overrides)
    run.until(lambda: len(run.metrics()) >= 3)
    learner.send_signal(signal.SIGTERM)
    run.wait(learner)
    choice = choose_checkpoint(run.folder / "run")
    assert choice.checkpoint is not None and 3 <= choice.checkpoint.step < 12
    assert choice.checkpoint.step == max(row["step"] for row in run.metrics())
    assert cli(["inspect", str(run.folder / "run")]) == 0
    assert f"step {choice.checkpoint.step}: " in capsys.readouterr().out
    run.wait(run.learner(*overrides))
    run.wait(generator)
    assert newest(run.folder / "run") == 12
    assert cli(["export", f"{run.folder / 'run'}@12", str(run.folder / "out")]) == 0
    assert (run.folder / "out" / "model.safetensors").stat().st_size > 10_000


def test_two_ranks_save_beside_training_and_one_goes_on(run: Run) -> None:
    common = ("checkpoint.every=1", "evaluation.every=0", "run.save_model=false")
    run.wait(run.start("train", str(run.config), *common, "run.steps=3", "learner.ranks=2"))
    path = find_named(f"{run.folder / 'run'}@3").path
    assert sorted(file.name for file in path.glob("rank-*.bin")) == ["rank-00000.bin", "rank-00001.bin"]
    assert len(list((path / names.TENSORS).glob("__*.distcp"))) == 2, "each rank wrote its shards"
    run.wait(run.start("train", str(run.config), *common, "run.steps=5"))
    assert [row["step"] for row in rows(run.folder / "run")] == [1, 2, 3, 4, 5]
    assert [row["optimizer/updates"] for row in rows(run.folder / "run")] == [1] * 5


def test_a_fork_goes_on_in_another_folder_and_a_step_back_is_made_again(run: Run) -> None:
    first, fork = run.folder / "run", run.folder / "fork"
    common = (*SYNCHRONOUS, "learner.decay=constant", "checkpoint.every=2", "checkpoint.keep_last=9")
    run.wait(run.start("train", str(run.config), *common, "run.steps=4"))
    run.wait(run.start("train", str(run.config), *common, "run.steps=6", f"run.dir={fork}", f"run.fork_from={first}@2"))
    assert [found.step for found in complete(fork, None)] == [6, 4]
    assert newest(first) == 4, "the run forked from is left alone"
    run.wait(run.start("train", str(run.config), *common, "run.steps=6", "run.resume=2"))
    assert sorted(path.name for path in names.folder_of(first).iterdir() if path.name.startswith("step-00000004")) != [
        "step-00000004"
    ], "the abandoned step 4 is set aside"
    expected, found = tensors_at(fork, 6), tensors_at(first, 6)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert [row["step"] for row in rows(first)] == list(range(1, 7))
    assert [row["step"] for row in map(json.loads, (first / "metrics.lost.jsonl").read_text().splitlines())] == [3, 4]

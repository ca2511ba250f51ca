"""The whole system with real vLLM engines on two CPU cores: publications in flight, failures, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl import leftovers
from async_rl.recipes.summary import read_rows
from tests.e2e.conftest import Run
from tests.e2e.proxy import proxy
from tests.e2e.test_failures import ENDLESS, address, end, goes_on, lines, status
from tests.e2e.traces import Traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VLLM = "generator.engine.type=vllm"
LONG = pytest.mark.skipif("ASYNC_RL_LONG" not in os.environ, reason="minutes: set ASYNC_RL_LONG=1")


def test_the_loop_with_vllm(run: Run) -> None:
    """Staleness occurs and keeps its bound, engine and learner agree, the last samples are the saved model's."""
    overrides = (
        VLLM,
        "run.steps=12",
        "sampling.max_completion_tokens=24",
        "generator.slots=16",
    )
    traces = Traces(run)
    train = run.start("train", str(run.config), *overrides)
    run.until(lambda: train.poll() is not None or len(run.metrics()) >= 2, timeout_s=600)
    traces.look()
    run.wait(train, timeout_s=600)
    traces.assert_nothing_left()
    assert traces.pids, "it was looked at while it ran"
    rows = [row for row in run.metrics() if "reward/mean" in row]
    assert len(rows) == 12
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    mismatches = [row["mismatch/logprob_abs_mean"] for row in rows if "mismatch/logprob_abs_mean" in row]
    assert mismatches and max(mismatches) < 1e-4
    assert any(row["generator/idle_share"] < 1 for row in rows if "generator/idle_share" in row)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"], "the policy should have learned to prefer even digits"
    assert_sampled_by_the_saved_model(run.folder / "run")


@LONG
def test_vllm_generators_through_every_failure(run: Run) -> None:
    """Stopped and continued, cut off and mended, a new learner, killed alone, killed whole in a publication.

    One chain, so that two starts of vLLM are enough; a third generator without vLLM keeps the run going meanwhile.
    """
    traces = Traces(run)
    patient = (*ENDLESS, "transport.connect_timeout_s=600", "run.stall_timeout_s=600", "weights.deadline_s=60")
    impatient, lenient = (f"transport.heartbeat_timeout_s={seconds}" for seconds in (8, 120))
    learner = run.learner(*patient, impatient)
    steady = run.generator("steady", *patient, impatient)
    near = run.generator("near", *patient, impatient, VLLM)
    with proxy(address(run)) as wire:
        words = ("generator", str(run.config), *patient, impatient, VLLM, "--name", "far", "--learner", wire.address)
        far = run.start(*words)
        run.until(lambda: works(run, "near") and works(run, "far") and works(run, "steady"), timeout_s=600)
        traces.look()
        stop_and_continue(run, near)
        cut_and_mend(run, wire)
        learner = another_learner(run, learner, *patient, lenient)
        run.until(lambda: works(run, "near") and works(run, "far"))
        assert {member(run, "near")["pid"], member(run, "far")["pid"]} == {near.pid, far.pid}, "the same processes"
        kill_alone(run, far)
        kill_whole_in_a_publication(run, near)
    end(run, learner)
    run.wait(steady)
    leftovers.sweep()  # as the next generator does at its start
    traces.assert_nothing_left()


def member(run: Run, name: str) -> dict[str, Any]:
    """What the learner says of a generator; empty if it is not there."""
    return next((member for member in status(run)["generators"] if member["name"] == name), {})


def works(run: Run, name: str, before: int = 0) -> bool:
    """It has the weights, and finished more members than before."""
    found = member(run, name)
    return found.get("state") == "active" and found["finished"] > before


def stop_and_continue(run: Run, generator: subprocess.Popen[str]) -> None:
    """The generator's own process stands, vLLM's go on; then all of them stand."""
    for stop in (os.kill, os.killpg):
        joined, gone = lines(run, "generator near joined"), lines(run, "generator near left: ")
        stop(generator.pid, signal.SIGSTOP)
        run.until(lambda gone=gone: lines(run, "generator near left: ") > gone)
        goes_on(run, 2)
        stop(generator.pid, signal.SIGCONT)
        run.until(lambda joined=joined: lines(run, "generator near joined") > joined and works(run, "near"))


def cut_and_mend(run: Run, wire: Any) -> None:
    joined, gone = lines(run, "generator far joined"), lines(run, "generator far left: silent")
    wire.cut()
    run.until(lambda: lines(run, "generator far left: silent") > gone)
    goes_on(run, 2)
    wire.mend()
    run.until(lambda: lines(run, "generator far joined") > joined and works(run, "far"))


def another_learner(run: Run, first: subprocess.Popen[str], *settings: str) -> subprocess.Popen[str]:
    """The learner is killed, and the same command is given again."""
    first.send_signal(signal.SIGKILL)
    first.wait(120)
    run.until(lambda: lines(run, "no word from the learner") >= 3)
    (run.folder / "run" / "address").unlink()
    second = run.learner(*settings)
    address(run)
    return second


def kill_alone(run: Run, generator: subprocess.Popen[str]) -> None:
    """Only the generator's own process is killed; vLLM's end with it."""
    engine = psutil.Process(generator.pid).children(recursive=True)
    assert len(engine) >= 2, engine
    gone = lines(run, "generator far left: ")
    generator.kill()
    generator.wait(120)
    run.until(lambda: lines(run, "generator far left: ") > gone)
    goes_on(run, 2)
    assert psutil.wait_procs(engine, timeout=120)[1] == []


def kill_whole_in_a_publication(run: Run, generator: subprocess.Popen[str]) -> None:
    """All its processes stand until a publication waits for it, then all are killed."""
    gone = lines(run, "generator near left: ")
    os.killpg(generator.pid, signal.SIGSTOP)
    run.until(lambda: "publication of version" in status(run)["wait"] and "near" in status(run)["wait"])
    os.killpg(generator.pid, signal.SIGKILL)
    run.until(lambda: lines(run, "generator near left: ") > gone)
    goes_on(run, 2)


def assert_sampled_by_the_saved_model(run_dir: Path) -> None:
    """The last evaluation's completions are likely under the final weights: the engine had them, not older ones."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(run_dir.parent / "model", dtype=torch.float32)
    last = sorted((run_dir / "evaluations").glob("*.jsonl"))[-1]
    gains = []
    for row in read_rows(last):
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        completion = tokenizer.encode(row["completion"], add_special_tokens=False)
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            after, before = (mean_logprob(m, ids, len(prompt)) for m in (model, start))
        gains.append(after - before)
    assert sum(gains) / len(gains) > 0.2, gains


def mean_logprob(model: AutoModelForCausalLM, ids: torch.Tensor, start: int) -> float:
    """Nats per token of a completion that begins at position `start`."""
    scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)  # type: ignore[operator]
    return float(scores.gather(1, ids[0, 1:, None])[start - 1 :].mean())

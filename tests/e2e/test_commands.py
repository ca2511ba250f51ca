"""The commands as users run them, in any order, with kills: real processes, real sockets, real weights."""

from __future__ import annotations

import json
import signal

import pytest

from tests.e2e.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEYS = {
    "step", "policy_version", "reward/mean", "staleness/mean", "staleness/max", "staleness/overdue_token_share",
    "throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s", "time/step_s", "time/wait_for_batch_s",
    "time/publish_s", "correction/effective_sample_size",
}  # fmt: skip


def test_generator_first_then_learner_then_more_generators(run: Run) -> None:
    """Any order of starting works, a killed generator is not missed, and everything a run leaves is there."""
    overrides = ("run.steps=100000", "staleness.max_staleness=2")
    first = run.generator("first", *overrides)
    learner = run.learner(*overrides)
    run.until(lambda: len(run.metrics()) >= 2)
    second = run.generator("second", *overrides)
    run.until(lambda: "generator second joined" in run.output())
    first.send_signal(signal.SIGKILL)
    run.until(lambda: "generator first left: " in run.output())
    steps = len(run.metrics())
    run.until(lambda: len(run.metrics()) >= steps + 5)
    learner.send_signal(signal.SIGINT)
    run.wait(learner, code=130)
    run.wait(second)
    rows = [row for row in run.metrics() if "reward/mean" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert set(rows[-1]) >= KEYS
    assert max(row["staleness/max"] for row in rows) <= 2
    assert any("eval/accuracy" in row for row in run.metrics())
    assert any("generator/idle_share" in row for row in rows)
    mismatches = [row["mismatch/logprob_abs_mean"] for row in rows if "mismatch/logprob_abs_mean" in row]
    assert mismatches and max(mismatches) < 1e-4, "engine and learner disagree"
    assert json.loads((run.folder / "run" / "config.json").read_text())["config"]["run"]["steps"] == 100000
    for name in ("report.png", "model/config.json", "model/model.safetensors"):
        assert (run.folder / "run" / name).stat().st_size > 0, name


def test_two_ranks_train_like_one(run: Run) -> None:
    """The same synchronous run on one and on two ranks gives the same losses."""
    losses = []
    for ranks in (1, 2):
        overrides = ("staleness.max_staleness=0", f"learner.ranks={ranks}", f"run.dir={run.folder}/run-{ranks}")
        run.wait(run.start("train", str(run.config), *overrides))
        lines = (run.folder / f"run-{ranks}" / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss/policy"] for row in map(json.loads, lines) if "loss/policy" in row])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_stops_everything_cleanly(run: Run, ranks: int) -> None:
    train = run.start("train", str(run.config), "run.steps=100000", f"learner.ranks={ranks}")
    run.until(lambda: len(run.metrics()) >= 2)
    train.send_signal(signal.SIGINT)
    run.wait(train, code=130)
    assert (run.folder / "run" / "model" / "model.safetensors").exists(), "what was learned is kept"
    assert "stopping the other ranks" not in run.output()
    assert (run.folder / "run" / "report.png").exists()


def test_a_reward_that_always_raises_ends_the_run_with_its_error(run: Run) -> None:
    (run.folder / "rewards.py").write_text("def score(completion, answer, **p):\n    raise KeyError('no such thing')\n")
    train = run.start("train", str(run.config), "run.stall_timeout_s=120", "rewards.max_attempts=1", "data.epochs=1")
    run.wait(train, code=1)
    assert "KeyError: 'no such thing'" in run.output()
    assert "the data ended after 0 of 6 steps; problems dropped: " in run.output()


def test_evaluation_only(run: Run) -> None:
    run.wait(run.start("train", str(run.config), "run.steps=0"))
    rows = run.metrics()
    assert len(rows) == 1 and rows[0]["step"] == 0 and rows[0]["eval/num_problems"] == 8
    assert not (run.folder / "run" / "model").exists(), "nothing was trained"


def test_the_last_version_is_published_and_evaluated_whatever_publish_every_is(run: Run) -> None:
    run.wait(run.start("train", str(run.config), "run.steps=5", "staleness.publish_every=2", "evaluation.every=100"))
    assert [row["eval/policy_version_min"] for row in run.metrics() if "eval/accuracy" in row] == [0, 5]

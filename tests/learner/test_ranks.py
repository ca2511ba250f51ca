"""Two real processes over gloo: the same losses and weights as one, decisions taken alike, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.learner.ranks import spawn_ranks
from async_rl.learner.update import Updater
from tests.learner.helpers import make_groups

EPS = 1e-4


def command(**job: Any) -> list[str]:
    return [sys.executable, "-m", "tests.learner.rank_job", json.dumps(job)]


def run_ranks(tmp_path: Path, ranks: int, **job: Any) -> list[Any]:
    """Run a job on real ranks; what each wrote."""
    assert spawn_ranks(command(out=str(tmp_path), **job), ranks) == 0
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "one_micro_batch": ("tied", {"learner": {"eps": EPS}}),
    "minibatches": ("untied", {"learner": {"eps": EPS, "micro_batch_tokens": 25, "minibatches": 2}}),
    "padded": ("untied", {"learner": {"eps": EPS, "micro_batch_tokens": 40}, "model": {"attention": "eager"}}),
    "recomputed": (
        "tied",
        {"learner": {"eps": EPS, "micro_batch_tokens": 40}, "model": {"gradient_checkpointing": True}},
    ),
    "kl_in_loss": (
        "tied",
        {
            "learner": {"eps": EPS, "micro_batch_tokens": 40, "epochs": 2},
            "algorithm": {
                "entropy_coefficient": 0.02,
                "kl": {"coefficient": 0.1, "target": 0.01},
                "correction": {"mode": "mask", "floor": 0.4, "cap": 2.0, "normalize": True},
                "denominator": "kept",
            },
        },
    ),
    "kl_in_reward": (
        "untied",
        {
            "learner": {"eps": EPS, "micro_batch_tokens": 25},
            "algorithm": {
                "kl": {"coefficient": 0.1, "place": "reward", "target": 0.01},
                "correction": {"rejections": [{"estimator": "k3", "level": "sequence_mean", "high": 1.1}]},
                "denominator": "kept",
                "reduction": "sequence_mean_token_mean",
                "proximal": "loglinear",
            },
        },
    ),
}


@dataclass(frozen=True)
class Trained:
    """What two ranks made of each run, in one pair of processes."""

    metrics: list[dict[str, list[dict[str, float]]]]
    """[rank][run][step - 1][key]."""
    folder: Path

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / run / "model.safetensors")


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("ranks")
    runs: dict[str, Any] = {
        name: {"model": str(models[kind]), "sections": sections} for name, (kind, sections) in RUNS.items()
    }
    runs["broken"] = {"model": str(models["tied"]), "sections": {}, "broken_step": 2}
    return Trained(run_ranks(folder, 2, task="train", runs=runs), folder)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_one(load: Callable, trained: Trained, run: str) -> None:
    kind, sections = RUNS[run]
    policy, config = load(kind, **sections)
    updater = Updater(policy, config, policy.ctx)
    for step, (values, others) in enumerate(zip(*(rank[run] for rank in trained.metrics), strict=True), start=1):
        assert values == others
        alone = updater.step(updater.prepare(make_groups(seed=step), step), step).resolve()
        assert values.keys() == alone.keys()
        for key in values.keys() - {"memory/learner_rss_bytes"}:
            # A gradient that ranks sum instead of average, or average twice, shows in grad_norm.
            assert values[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), key
    torch.testing.assert_close(trained.weights(run), dict(policy.full_parameters("float32")), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_both(trained: Trained) -> None:
    for values in (rank["broken"] for rank in trained.metrics):
        assert [v["optimizer/skipped_updates"] for v in values] == [0, 1, 0]
        assert [v["optimizer/updates"] for v in values] == [1, 0, 1]
        assert "optimizer/grad_norm" not in values[1]
        assert values[2]["optimizer/grad_norm"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in trained.weights("broken").values())


@pytest.mark.slow
def test_ranks_exchange_bytes_and_agree(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 2, task="talk")
    assert results == [[6000, b"\x00batch".hex(), "", True, False]] * 2


@pytest.mark.slow
def test_a_batch_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    """Rank 0 waits as long as anything moves; the others must not run into the time limit of their collective."""
    first, second = run_ranks(tmp_path, 2, task="wait")
    assert first == second and first


@pytest.mark.slow
def test_the_first_error_stops_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 exits with 3 at once; rank 0 waits for it in the rendezvous and is stopped."""
    monkeypatch.setattr("async_rl.learner.ranks.GRACE_S", 1.0)
    assert spawn_ranks(command(task="fail", out=str(tmp_path)), 2) == 3
    assert "learner rank 1 ended with exit code 3; stopping the other ranks" in caplog.text


@pytest.mark.slow
def test_ranks_die_with_their_parent(spawn: Callable, tmp_path: Path) -> None:
    """The parent is killed with SIGKILL and can do nothing for its children."""
    argv = command(task="sleep", out=str(tmp_path))
    code = f"from async_rl.learner.ranks import spawn_ranks; spawn_ranks({argv!r}, 2)"
    parent = spawn([sys.executable, "-c", code])
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60.0, "both ranks have started")
    children = [int(file.read_text()) for file in files]
    assert all(map(is_alive, children))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=10)
    wait_until(lambda: not any(map(is_alive, children)), 10.0, "the ranks of a killed parent have ended")


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.05)

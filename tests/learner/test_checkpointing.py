"""Model, optimizer and random generators across a checkpoint: bit for bit, on any number of ranks, and exported."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.checkpoints.disk import Disk
from async_rl.checkpoints.export import Stored, export_checkpoint, plan_shards
from async_rl.checkpoints.find import find_named
from async_rl.checkpoints.finished import is_finished, mark_finished
from async_rl.checkpoints.names import CheckpointError
from async_rl.checkpoints.tensors import all_tensors
from async_rl.config import Config
from async_rl.errors import InputError
from async_rl.learner.checkpointing import Checkpoints, random_state, restore_random_state
from async_rl.learner.model import Policy, load_policy
from async_rl.learner.ranks import RankContext
from async_rl.learner.start import find_start
from async_rl.learner.update import Updater
from async_rl.metrics import Metrics
from tests.checkpoints.rig import Countdown, disk_full
from tests.learner.helpers import make_config
from tests.learner.resumed import shared, train_on
from tests.learner.test_ranks import run_ranks


def settings(models: dict[str, Path], tmp_path: Path, kind: str = "tied", **sections: dict[str, Any]) -> Config:
    return make_config(models[kind], **{"run": {"dir": str(tmp_path / "run"), "steps": 10}, **sections})


def without_memory(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if not key.startswith("memory/")} for row in rows]


def tensors(policy: Policy, updater: Updater) -> dict[str, torch.Tensor]:
    return all_tensors(policy.model, updater.optimizer.adamw)


# --- one rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("background", [True, False])
def test_three_and_three_steps_equal_six_bit_for_bit(
    models: dict[str, Path], ctx: RankContext, tmp_path: Path, kind: str, background: bool
) -> None:
    schedule = {"learner": {"warmup_steps": 2, "decay": "cosine"}, "checkpoint": {"background": background}}
    straight, *whole = train_on(settings(models, tmp_path / "a", kind, **schedule), ctx, 6)
    config = settings(models, tmp_path / "b", kind, **schedule)
    first, *_ = train_on(config, ctx, 3)
    second, *parts = train_on(config, ctx, 6)
    assert len(first) == len(second) == 3
    assert without_memory(first + second) == without_memory(straight)
    expected, found = tensors(*whole), tensors(*parts)
    assert expected.keys() == found.keys() and any("exp_avg_sq" in name for name in found)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_training_that_goes_on_changes_nothing_in_a_save_under_way(
    models: dict[str, Path], ctx: RankContext, tmp_path: Path
) -> None:
    config = settings(models, tmp_path)
    policy = load_policy(config.model, config.learner, ctx)
    updater = Updater(policy, config, ctx)
    checkpoints = Checkpoints(config, ctx, policy, updater, find_start(config))
    before = {name: tensor.clone() for name, tensor in tensors(policy, updater).items()}
    write = checkpoints._writer.write

    def train_then_write(contents: Any) -> Any:
        with torch.no_grad():
            for tensor in policy.model.parameters():
                tensor.add_(1.0)
        return write(contents)

    checkpoints._writer.write = train_then_write  # type: ignore[method-assign]
    checkpoints.save(1, shared(config, 1, updater))
    checkpoints.close()
    policy = load_policy(config.model, config.learner, ctx)
    updater = Updater(policy, config, ctx)
    Checkpoints(config, ctx, policy, updater, find_start(config)).load(find_named(config.run.dir).path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(policy, updater).items())


def test_the_checkpoint_of_another_model_is_refused(models: dict[str, Path], ctx: RankContext, tmp_path: Path) -> None:
    train_on(settings(models, tmp_path, "tied"), ctx, 1)
    with pytest.raises(InputError, match=r"another model: .* is \[.*\] there and absent in model.path"):
        train_on(settings(models, tmp_path, "untied"), ctx, 2)


def test_a_checkpoint_is_due_by_steps_or_by_time(models: dict[str, Path], ctx: RankContext, tmp_path: Path) -> None:
    now = [0.0]

    def make(**values: Any) -> Checkpoints:
        config = settings(models, tmp_path, checkpoint=values)
        policy = load_policy(config.model, config.learner, ctx)
        updater = Updater(policy, config, ctx)
        return Checkpoints(config, ctx, policy, updater, find_start(config), clock=lambda: now[0])

    by_steps = make(every=3, every_s=None)
    assert [step for step in range(1, 10) if by_steps.due(step)] == [3, 6, 9]
    by_time = make(every=0, every_s=10.0)
    found = []
    for step in range(1, 10):
        now[0] += 4.0
        if by_time.due(step):
            by_time._last_time = now[0]
            found.append(step)
    assert found == [3, 6, 9]
    off = make(every=0, every_s=None)
    assert not off.enabled and not any(off.due(step) for step in range(1, 99))


def test_a_full_disk_is_told_and_counted_and_training_goes_on(
    models: dict[str, Path], ctx: RankContext, tmp_path: Path
) -> None:
    config = settings(models, tmp_path)
    policy = load_policy(config.model, config.learner, ctx)
    updater = Updater(policy, config, ctx)
    notes: list[str] = []
    checkpoints = Checkpoints(config, ctx, policy, updater, find_start(config), notes.append)
    checkpoints._writer.disk = Countdown(8, disk_full)
    for step in (1, 2):
        checkpoints.save(step, shared(config, step, updater))
    checkpoints.wait()
    metrics = Metrics()
    checkpoints.record(metrics)
    values = metrics.resolve()
    assert values["checkpoint/failed"] == 1 and values["checkpoint/step"] == 2 and values["checkpoint/bytes"] > 1e5
    assert len(notes) == 1 and "step 1 could not be written" in notes[0]
    assert f"[Errno {errno.ENOSPC}] No space left" in notes[0]
    assert find_named(config.run.dir).step == 2 and checkpoints.error is None


class HungDisk(Disk):
    """Never comes back from a sync, until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def sync(self, folder: Path) -> None:
        self.let_go.wait(120)


def test_a_disk_that_hangs_ends_the_run_with_an_error_that_names_the_wait(
    models: dict[str, Path], ctx: RankContext, tmp_path: Path
) -> None:
    train_on(settings(models, tmp_path), ctx, 1)
    config = settings(models, tmp_path, checkpoint={"deadline_s": 0.2})
    policy = load_policy(config.model, config.learner, ctx)
    updater = Updater(policy, config, ctx)
    checkpoints = Checkpoints(config, ctx, policy, updater, find_start(config))
    disk = checkpoints._writer.disk = HungDisk()
    checkpoints.save(2, shared(config, 2, updater))
    with pytest.raises(CheckpointError, match=r"step 2 is not written after 0.2 s .*/run/checkpoints hangs"):
        checkpoints.save(3, shared(config, 3, updater))
    with pytest.raises(CheckpointError, match=r"step 2 is not written .* start the same command again"):
        checkpoints.close()
    assert find_named(config.run.dir).step == 1, "the one before is intact"
    disk.let_go.set()


def test_the_end_of_the_process_waits_for_a_save_but_not_for_a_disk_that_hangs(tmp_path: Path) -> None:
    program = f"""
import pathlib, sys, time
from async_rl.checkpoints.writing import Writing
seconds, limit = map(float, sys.argv[1:])
def write():
    time.sleep(seconds)
    pathlib.Path({str(tmp_path / "written")!r}).touch()
Writing(1, pathlib.Path("run"), limit, write)
sys.exit(3)
"""
    for seconds, limit in ((1000, 0.1), (0.5, 100)):
        assert not (tmp_path / "written").exists()
        ended = subprocess.run([sys.executable, "-c", program, str(seconds), str(limit)], timeout=300, check=False)
        assert ended.returncode == 3, "and says how it ended"
    assert (tmp_path / "written").exists()


def test_a_run_is_finished_once_it_said_so_and_no_step_is_left(
    models: dict[str, Path], ctx: RankContext, tmp_path: Path
) -> None:
    def start(steps: int, **run: Any) -> tuple[int, bool]:
        values = {"dir": str(tmp_path / "run"), "steps": steps, **run}
        config = settings(models, tmp_path, run=values)
        found = find_start(config)
        assert is_finished(config) is found.finished, "launchers and the learner agree"
        return found.step, found.finished

    train_on(settings(models, tmp_path), ctx, 2)
    assert start(2) == (2, False), "killed before its last evaluation"
    mark_finished(tmp_path / "run", 2)
    assert start(2) == (2, True)
    assert start(3) == (2, False), "more steps are wanted"
    assert start(2, resume=2) == (2, False) and start(2, resume="never") == (0, False)
    mark_finished(tmp_path / "run", 1)
    assert start(2) == (2, False), "of an earlier end"


def test_random_generators_go_on() -> None:
    torch.manual_seed(5)
    random.seed(5)
    random.gauss(0, 1)
    saved = random_state()
    expected = (torch.rand(3).tolist(), random.random(), random.gauss(0, 1))
    restore_random_state(saved)
    assert (torch.rand(3).tolist(), random.random(), random.gauss(0, 1)) == expected


# --- several ranks -------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_rank_then_two_then_one(models: dict[str, Path], ctx: RankContext, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"learner": {"eps": 1e-4}}
    straight, *whole = train_on(settings(models, tmp_path / "a", **sections), ctx, 6)
    config = settings(models, tmp_path / "b", **sections)
    first, *_ = train_on(config, ctx, 2)
    job = {"model": str(models["tied"]), "sections": {**sections, "run": {"dir": config.run.dir, "steps": 10}}}
    second = run_ranks(tmp_path, 2, task="resume", last=4, **job)
    third, *parts = train_on(config, ctx, 6)
    assert [len(part) for part in (first, second[0], second[1], third)] == [2] * 4
    for ours, alone in zip(first + second[0] + third, straight, strict=True):
        for key in ("loss/policy", "optimizer/grad_norm", "optimizer/lr"):
            assert ours[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), key
    expected, found = tensors(*whole), tensors(*parts)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=1e-3, msg=name)


# --- export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_exported_logits_are_the_learner_s(
    models: dict[str, Path], ctx: RankContext, tmp_path: Path, kind: str
) -> None:
    config = settings(models, tmp_path, kind)
    _, policy, _ = train_on(config, ctx, 2)
    files = export_checkpoint(find_named(config.run.dir), tmp_path / "out")
    assert [file.name for file in files] == ["model.safetensors"]
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(2, 22).unsqueeze(0)
    with torch.no_grad():
        # The learner's own model takes packed micro-batches only: its weights, in a model of the same folder.
        plain: Any = AutoModelForCausalLM.from_pretrained(models[kind])
        before = plain(input_ids=ids).logits
        plain.load_state_dict(policy.model.state_dict())
        ours = plain(input_ids=ids).logits
        assert torch.equal(exported(input_ids=ids).logits, ours)
        assert not torch.allclose(before, ours, atol=1e-3), "training changed something"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("3+4=")["input_ids"] == AutoTokenizer.from_pretrained(models[kind])("3+4=")["input_ids"]


def test_export_in_shards_and_another_type(models: dict[str, Path], ctx: RankContext, tmp_path: Path) -> None:
    config = settings(models, tmp_path)
    _, policy, _ = train_on(config, ctx, 1)
    files = export_checkpoint(find_named(config.run.dir), tmp_path / "out", "bfloat16", max_shard_bytes=60_000)
    assert len(files) > 2
    names = []
    for file in files:
        with safe_open(file, framework="pt") as handle:
            inside = list(handle.keys())
            sizes = [handle.get_tensor(name).nbytes for name in inside]
            names += inside
        assert sum(sizes) <= 60_000 or len(sizes) == 1
    assert len(names) == len(set(names)) == len(list(policy.model.named_parameters()))
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter.detach().to(torch.bfloat16)), name


def test_nothing_is_overwritten_by_an_export(models: dict[str, Path], ctx: RankContext, tmp_path: Path) -> None:
    config = settings(models, tmp_path)
    train_on(config, ctx, 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"out exists; export to a folder that does not"):
        export_checkpoint(find_named(config.run.dir), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_shards_hold_at_most_their_limit() -> None:
    items = [Stored(str(n), (n,), torch.float32, torch.float32) for n in (5, 5, 30, 1, 2, 3)]
    shards = [[item.name for item in shard] for shard in plan_shards(items, 40)]
    assert shards == [["5", "5"], ["30"], ["1", "2", "3"]]

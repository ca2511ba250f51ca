"""A save that is cut off anywhere leaves the checkpoint before it whole, and that one is resumed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from async_rl.checkpoints import CheckpointError, choose_checkpoint, names
from async_rl.checkpoints.find import candidates
from tests.checkpoints.rig import Countdown, die, disk_full, in_child, loads, save


def changes_of_a_save(run_dir: Path) -> int:
    """How many changes to the disk the save of step 20 after step 10 makes, with the removal of step 10's elder."""
    disk = Countdown(-1, disk_full)
    save(run_dir, 5)
    save(run_dir, 10)
    save(run_dir, 20, disk=disk, keep_last=2)
    return disk.count


def chosen(run_dir: Path) -> int:
    """The step that would be resumed; its files are read."""
    checkpoint = choose_checkpoint(run_dir).checkpoint
    assert checkpoint is not None
    assert loads(checkpoint.path, checkpoint.step)
    return checkpoint.step


@pytest.mark.slow
def test_a_full_disk_at_every_change_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    total = changes_of_a_save(tmp_path / "count")
    assert total > 30, "the rig sees every file, write, sync and rename"
    outcomes = []
    for at in range(1, total + 1):
        run_dir = tmp_path / f"full-{at}"
        save(run_dir, 10)
        try:
            save(run_dir, 20, disk=Countdown(at, disk_full), keep_last=2)
        except CheckpointError as error:
            assert "No space left on device" in str(error)
        outcomes.append(chosen(run_dir))
        # Space again: the next save works, whatever the failed one left.
        save(run_dir, 30)
        assert chosen(run_dir) == 30
        assert not [path for path in candidates(run_dir) if not (path / names.MARKER).exists()]
    assert set(outcomes) == {10, 20}
    assert outcomes == sorted(outcomes), "complete from one moment on, and never before it"


@pytest.mark.slow
def test_a_kill_at_every_change_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    total = changes_of_a_save(tmp_path / "count")
    outcomes = []
    before = tmp_path / "before"
    save(before, 5)
    save(before, 10)
    for at in range(1, total + 1):
        run_dir = shutil.copytree(before, tmp_path / f"kill-{at}")
        disk = Countdown(at, die)
        code = in_child(lambda run_dir=run_dir, disk=disk: save(run_dir, 20, disk=disk, keep_last=2))
        assert code == -signal.SIGKILL
        outcomes.append(chosen(run_dir))
        save(run_dir, 30, keep_last=2)
        assert chosen(run_dir) == 30
        assert not [path for path in candidates(run_dir) if not (path / names.MARKER).exists()]
    assert set(outcomes) == {10, 20}
    assert outcomes == sorted(outcomes)


@pytest.mark.parametrize("file", ["tensors/__0_0.distcp", "tensors/.metadata", "state.bin", "rank-00000.bin"])
@pytest.mark.parametrize("fault", ["truncated", "changed", "missing"])
def test_a_damaged_file_is_never_chosen(tmp_path: Path, file: str, fault: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20).path / file
    data = path.read_bytes()
    match fault:
        case "truncated":
            path.write_bytes(data[:-1])
        case "changed":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "missing":
            path.unlink()
    choice = choose_checkpoint(tmp_path)
    assert choice.checkpoint is not None and choice.checkpoint.step == 10
    assert len(choice.skipped) == 1 and file in choice.skipped[0] and "step-00000020" in choice.skipped[0]


def test_when_all_complete_ones_are_damaged_starting_over_must_be_said(tmp_path: Path) -> None:
    (save(tmp_path, 10).path / "state.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"state.bin has 0 bytes, not \d+; .*run.resume=never"):
        choose_checkpoint(tmp_path)

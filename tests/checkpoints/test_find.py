"""Which checkpoint is chosen, and which are removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.checkpoints import Disk, Lineage, choose_checkpoint, names
from async_rl.checkpoints.find import checkpoint_at, find_named
from async_rl.checkpoints.lineage import read_lineage, write_lineage
from async_rl.checkpoints.retention import expendable
from async_rl.errors import InputError
from tests.checkpoints.rig import LINE, loads, save


def mark(path: Path, **changes: object) -> None:
    """Change a checkpoint's marker."""
    marker = names.read_marker(path)
    assert isinstance(marker, names.Marker)
    (path / names.MARKER).write_bytes(msgspec.json.encode(msgspec.structs.replace(marker, **changes)))


def steps_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in names.folder_of(run_dir).iterdir())


# --- lineage -------------------------------------------------------------------------------------


def test_a_line_includes_each_run_up_to_where_the_next_one_went_on() -> None:
    first = Lineage.first()
    second = first.resumed(10)
    third = second.resumed(14)
    back = second.resumed(4)
    assert len({first.run_id, second.run_id, third.run_id, back.run_id}) == 4
    assert {line.root for line in (first, second, third, back)} == {first.run_id}
    assert third.includes(first.run_id, 10) and not third.includes(first.run_id, 11)
    assert third.includes(second.run_id, 14) and not third.includes(second.run_id, 15)
    assert back.includes(first.run_id, 4) and not back.includes(first.run_id, 5)
    assert not third.includes(back.run_id, 0) and third.includes(third.run_id, 99)


def test_a_damaged_lineage_file_says_what_to_do(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) is None
    write_lineage(tmp_path, LINE, Disk())
    assert read_lineage(tmp_path) == LINE
    (tmp_path / "lineage.json").write_text("{")
    with pytest.raises(InputError, match=r"lineage.json is damaged .*remove it"):
        read_lineage(tmp_path)


# --- choice --------------------------------------------------------------------------------------


def test_a_run_without_checkpoints_begins_at_step_0(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path).checkpoint is None


def test_the_newest_complete_one_is_chosen_and_the_others_are_named_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path, 10)
    paths = {step: save(tmp_path, step).path for step in (20, 30, 40, 50)}
    (paths[20] / names.MARKER).unlink()
    (paths[30] / names.MARKER).write_text("{")
    mark(paths[40], format=99)
    mark(paths[50], step=51)
    choice = choose_checkpoint(tmp_path)
    assert choice.checkpoint is not None and choice.checkpoint.step == 10
    reasons = [reason.partition(": ")[2] for reason in choice.skipped]
    assert reasons[0] == "it holds step 51"
    assert reasons[1].startswith("it has format 99")
    assert reasons[2].startswith("its COMPLETE.json cannot be read")
    assert reasons[3] == "it was not completed"


def test_a_higher_step_of_an_abandoned_future_is_not_chosen(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 30)
    back = LINE.resumed(10)
    write_lineage(tmp_path, back, Disk())
    choice = choose_checkpoint(tmp_path)
    assert choice.checkpoint is not None and choice.checkpoint.step == 10
    assert "step-00000030: it belongs to run run-a, which this line does not continue" in choice.skipped[0]
    save(tmp_path, 20, lineage=back)
    choice = choose_checkpoint(tmp_path)
    assert choice.checkpoint is not None and choice.checkpoint.step == 20


def test_another_run_s_checkpoint_is_not_chosen(tmp_path: Path) -> None:
    save(tmp_path / "here", 10)
    write_lineage(tmp_path / "here", LINE, Disk())
    other = save(tmp_path / "there", 99, lineage=Lineage.first()).path
    shutil.copytree(other, names.folder_of(tmp_path / "here") / other.name)
    choice = choose_checkpoint(tmp_path / "here")
    assert choice.checkpoint is not None and choice.checkpoint.step == 10


def test_a_step_that_is_made_again_sets_the_old_one_aside(tmp_path: Path) -> None:
    save(tmp_path, 10)
    old = save(tmp_path, 20).path
    (old / "mine.txt").write_text("kept")
    save(tmp_path, 20, lineage=LINE.resumed(10))
    assert loads(old, 20) and not (old / "mine.txt").exists()
    aside = old.with_name("step-00000020.run-a")
    assert (aside / "mine.txt").read_text() == "kept"


def test_a_checkpoint_is_named_by_run_and_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run@home"
    save(run_dir, 10)
    save(run_dir, 20)
    assert find_named(f"{run_dir}@10").step == 10
    shutil.move(run_dir, tmp_path / "run")
    assert find_named(f"{tmp_path / 'run'}").step == 20
    with pytest.raises(InputError, match=r"no such folder; complete checkpoints of .*: 10, 20"):
        checkpoint_at(tmp_path / "run", 15)
    with pytest.raises(InputError, match=r"expected RUN or RUN@STEP"):
        find_named(f"{tmp_path / 'run'}@last")
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        find_named("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no complete checkpoint"):
        find_named(str(tmp_path / "empty"))


# --- retention -----------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 60)), st.integers(1, 5), st.integers(0, 7))
def test_the_last_ones_and_the_multiples_stay(steps: set[int], keep_last: int, keep_every: int) -> None:
    gone = expendable(steps, keep_last, keep_every)
    kept = steps - set(gone)
    assert gone == sorted(gone) and set(gone) <= steps
    assert set(sorted(steps)[-keep_last:]) <= kept
    assert all(step in kept for step in steps if keep_every and step % keep_every == 0)
    for step in kept:
        newer = sum(other > step for other in steps)
        assert newer < keep_last or (keep_every and step % keep_every == 0), "nothing else stays"


def test_old_ones_go_after_the_new_one_and_strangers_stay(tmp_path: Path) -> None:
    folder = names.folder_of(tmp_path)
    for name in ("notes", "step-12", "step-00000007", "step-00000008.tmp", "backup-step-00000001"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").write_text("mine")
    save(tmp_path, 3, lineage=Lineage.first())
    for step in range(10, 70, 10):
        save(tmp_path, step, keep_last=2, keep_every=20)
    assert steps_in(tmp_path) == [
        "backup-step-00000001", "notes", "step-00000003", "step-00000007", "step-00000008.tmp", "step-00000020",
        "step-00000040", "step-00000050", "step-00000060", "step-12",
    ]  # fmt: skip
    assert all((folder / name / "mine.txt").exists() for name in ("notes", "step-12", "step-00000007"))

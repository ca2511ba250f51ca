"""Key files: private, whole, of the right role, never replaced."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from async_rl.errors import InputError
from async_rl.keys import create_keys, load_keys


def test_the_two_files_fit_each_other_and_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    assert create_keys(folder) == (folder / "learner.key", folder / "generator.key")
    learner, generator = load_keys(folder, "learner"), load_keys(folder, "generator")
    assert (learner.peer, generator.peer) == (generator.public, learner.public)
    assert len({learner.secret, generator.secret, learner.public, generator.public}) == 4
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert learner.secret.decode() not in (folder / "generator.key").read_text()


@pytest.mark.parametrize("role", ["learner", "generator"])
def test_key_files_are_never_replaced(tmp_path: Path, role: str) -> None:
    (tmp_path / f"{role}.key").write_text("in use")
    with pytest.raises(InputError, match=rf"{role}.key exists; delete it"):
        create_keys(tmp_path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["in use"]


def test_a_missing_file_is_named_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"no key file at {tmp_path}/generator.key.*`async-rl keys {tmp_path}`"):
        load_keys(tmp_path, "generator")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path, _ = create_keys(tmp_path)
    path.chmod(mode)
    with pytest.raises(InputError, match=rf"mode {mode:o}.*chmod 600 {path}"):
        load_keys(tmp_path, "learner")


@pytest.mark.parametrize(
    "changes",
    [{"secret": "short"}, {"secret": '"' * 40}, {"peer": ""}, {"peer": '"' * 40}, {"role": "boss"}, {"extra": 1}],
    ids=str,
)
def test_a_damaged_file_is_refused_and_its_secret_not_shown(tmp_path: Path, changes: dict[str, str]) -> None:
    path, _ = create_keys(tmp_path)
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="is not a key file") as refused:
        load_keys(tmp_path, "learner")
    assert content["secret"] not in str(refused.value)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not a key file"):
        load_keys(tmp_path, "learner")


def test_mixed_up_files_are_named(tmp_path: Path) -> None:
    learner, generator = create_keys(tmp_path)
    generator.write_bytes(learner.read_bytes())
    with pytest.raises(InputError, match="holds the key of a learner"):
        load_keys(tmp_path, "generator")

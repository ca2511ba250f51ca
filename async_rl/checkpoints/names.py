"""What a checkpoint is on disk: names, the marker that makes it complete, and whether its files are whole.

<run.dir>/checkpoints/step-00000010/
    OWNER             first file: this folder is ours, and may be removed by us
    tensors/          model and optimizer, sharded (torch.distributed.checkpoint)
    rank-00000.bin    random generators of each rank
    state.bin         ledger, problems, what the learner remembers
    config.json       resolved settings
    model/            what a Hugging Face folder has besides weights
    COMPLETE.json     last file: the marker
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from async_rl.checkpoints.disk import checksum
from async_rl.checkpoints.lineage import Lineage

FORMAT = 1
OWNER, MARKER = "OWNER", "COMPLETE.json"
STATE, CONFIG, TENSORS, MODEL = "state.bin", "config.json", "tensors", "model"
OWNER_TEXT = b"A checkpoint of async_rl; complete once COMPLETE.json is here.\n"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class FileSum(msgspec.Struct, frozen=True, array_like=True):
    """What a file must hold."""

    size: int
    crc32: int


class Marker(msgspec.Struct, frozen=True):
    """Content of COMPLETE.json."""

    format: int
    step: int
    lineage: Lineage
    """Of the run that wrote it."""
    ranks: int
    """Learner ranks that wrote it; any number can read it."""
    files: dict[str, FileSum]
    """By path within the checkpoint, the marker left out."""
    versions: dict[str, str]
    """Of the software that wrote it."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files.values())


def folder_of(run_dir: Path) -> Path:
    """Where the checkpoints of a run lie."""
    return run_dir / "checkpoints"


def name_of(step: int) -> str:
    """Name of a step's checkpoint."""
    return f"step-{step:08d}"


def draft_of(step: int) -> str:
    """Its name while it is written."""
    return f"{name_of(step)}.tmp"


def rank_file(rank: int) -> str:
    """Name of what one rank keeps for itself."""
    return f"rank-{rank:05d}.bin"


def step_of(name: str) -> int | None:
    """The step that a name stands for, drafts included; None for a name that is not ours."""
    match = re.fullmatch(r"step-(\d{8,})(\.tmp)?", name)
    return int(match[1]) if match else None


def read_marker(path: Path) -> Marker | str:
    """The marker of a checkpoint, or in words why there is none to go by."""
    try:
        marker = msgspec.json.decode((path / MARKER).read_bytes(), type=Marker)
    except FileNotFoundError:
        return "it was not completed"
    except (OSError, msgspec.MsgspecError) as error:
        return f"its {MARKER} cannot be read: {error}"
    if marker.format != FORMAT:
        return f"it has format {marker.format}, this version of async_rl reads format {FORMAT}"
    if marker.step != step_of(path.name):
        return f"it holds step {marker.step}"
    return marker


def sums_of(path: Path) -> dict[str, FileSum]:
    """Size and checksum of every file of a checkpoint but its marker."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != MARKER)
    return {file.relative_to(path).as_posix(): FileSum(*checksum(file)) for file in files}


def damage(path: Path, marker: Marker) -> str | None:
    """In words what is wrong with a checkpoint's files, None when all is well; reads all of them, sizes first."""
    for name, expected in marker.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            return f"{name} is missing"
        if size != expected.size:
            return f"{name} has {size} bytes, not {expected.size}"
    for name, expected in marker.files.items():
        if checksum(path / name)[1] != expected.crc32:
            return f"the content of {name} has changed"
    return None

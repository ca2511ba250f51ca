"""Writing one checkpoint: a draft folder, every file synced, renamed, the marker last; then old ones may go."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoints import names
from async_rl.checkpoints.disk import Disk
from async_rl.checkpoints.lineage import Lineage
from async_rl.checkpoints.names import CheckpointError, Marker
from async_rl.checkpoints.retention import clear_unfinished, thin_out
from async_rl.checkpoints.tensors import write_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """What one rank puts into a checkpoint; rank 0 alone has `shared`."""

    step: int
    tensors: Mapping[str, Tensor]
    rank_state: bytes
    """Random generators of this rank."""
    shared: Mapping[str, bytes] | None
    """Files by name: state and settings."""
    model_files: Path | None = None
    """Folder whose files, but for weights, are kept with the checkpoint."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, as rank 0 reports it."""

    path: Path
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    keep_last: int
    keep_every: int = 0


class Writer:
    """Writes checkpoints of one run, one call at a time; several ranks call it alike, over a group of its own."""

    def __init__(
        self,
        run_dir: Path,
        lineage: Lineage,
        retention: Retention,
        *,
        versions: Mapping[str, str] | None = None,
        keep_model_file: Callable[[Path], bool] = lambda file: True,
        disk: Disk | None = None,
        rank: int = 0,
        ranks: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert (group is None) == (ranks == 1), "several ranks need a group, one needs none"
        self.run_dir, self.lineage, self.retention = run_dir, lineage, retention
        self.versions, self.keep_model_file = dict(versions or {}), keep_model_file
        self.disk = disk or Disk()
        self.rank, self.ranks, self.group = rank, ranks, group

    def write(self, contents: Contents) -> Saved:
        """Write, complete and thin out; raises CheckpointError on every rank when one of them failed."""
        started = time.monotonic()
        folder = names.folder_of(self.run_dir)
        draft = folder / names.draft_of(contents.step)
        try:
            self._together(lambda: self._begin(draft))
            self._together(lambda: write_tensors(contents.tensors, draft / names.TENSORS, self.disk, self.group))
            self._together(lambda: self._write_files(draft, contents))
            final = folder / names.name_of(contents.step)
            marker = self._together(lambda: self._complete(draft, final, contents.step))
        except CheckpointError:
            self._give_up(draft)
            raise
        self._thin_out()
        return Saved(final, marker.num_bytes if marker else 0, time.monotonic() - started)

    def _thin_out(self) -> None:
        if self.rank != 0:
            return
        try:
            thin_out(self.run_dir, self.lineage, self.retention.keep_last, self.retention.keep_every, self.disk)
        except OSError as error:
            log.warning("old checkpoints could not be removed (%s); the new one is complete", error)

    def _begin(self, draft: Path) -> None:
        """An empty draft with our sign in it."""
        if self.rank != 0:
            return
        clear_unfinished(self.run_dir, self.disk)
        self.disk.mkdir(draft)
        self.disk.write(draft / names.OWNER, names.OWNER_TEXT)
        self.disk.mkdir(draft / names.TENSORS)
        self.disk.sync(draft.parent)

    def _write_files(self, draft: Path, contents: Contents) -> None:
        self.disk.write(draft / names.rank_file(self.rank), contents.rank_state)
        if contents.shared is None:
            return
        for name, data in contents.shared.items():
            self.disk.write(draft / name, data)
        if contents.model_files is not None:
            self.disk.mkdir(draft / names.MODEL)
            for file in sorted(contents.model_files.iterdir()):
                if file.is_file() and self.keep_model_file(file):
                    with self.disk.create(draft / names.MODEL / file.name) as target, file.open("rb") as source:
                        shutil.copyfileobj(source, target)

    def _complete(self, draft: Path, final: Path, step: int) -> Marker | None:
        """Rename, then put the marker in; rank 0 sees the files of all ranks by now."""
        if self.rank != 0:
            return None
        for folder in [*(path for path in draft.rglob("*") if path.is_dir()), draft]:
            self.disk.sync(folder)
        marker = Marker(
            format=names.FORMAT,
            step=step,
            lineage=self.lineage,
            ranks=self.ranks,
            files=names.sums_of(draft),
            versions=self.versions,
        )
        self._set_aside(final)
        self.disk.rename(draft, final)
        self.disk.replace(final / names.MARKER, msgspec.json.format(msgspec.json.encode(marker)) + b"\n")
        return marker

    def _set_aside(self, final: Path) -> None:
        """A complete checkpoint of the same step is of another line: it keeps its files, under another name."""
        before = names.read_marker(final) if final.exists() else None
        if before is not None:
            owner = before.lineage.run_id if isinstance(before, Marker) else "unknown"
            target, number = final.with_name(f"{final.name}.{owner}"), 1
            while target.exists():
                target, number = final.with_name(f"{final.name}.{owner}-{number}"), number + 1
            self.disk.rename(final, target)

    def _give_up(self, draft: Path) -> None:
        """Free the space of a draft that cannot be completed; what is left is cleared by the next save."""
        if self.rank == 0:
            # The first error is the one to be told.
            with contextlib.suppress(OSError):
                clear_unfinished(self.run_dir, self.disk)

    def _together(self, action: Callable[[], Marker | None]) -> Marker | None:
        """Run one phase; every rank learns whether all of them did well before any goes on."""
        error: Exception | None = None
        result = None
        try:
            result = action()
        except (OSError, CheckpointError) as raised:
            error = raised
        if self.group is not None:
            failed = self._failed_ranks(error is not None)
            if failed and error is None:
                raise CheckpointError(f"rank {', '.join(map(str, failed))} could not write its part; see its log")
        if error is not None:
            raise CheckpointError(str(error)) from error
        return result

    def _failed_ranks(self, failed: bool) -> list[int]:
        """Ranks that say they failed."""
        flags = torch.zeros(self.ranks, dtype=torch.int64)
        flags[self.rank] = failed
        dist.all_reduce(flags, group=self.group)
        return flags.nonzero().flatten().tolist()

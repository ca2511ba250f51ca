"""Every change that a save makes to the disk goes through here, so that tests can fail each one of them."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 16 << 20


class Disk:
    """Durable operations: when one returns, its effect outlives a power failure. All raise OSError."""

    def mkdir(self, path: Path) -> None:
        """Make a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """A new file to write to; synced when the block ends well, unless it was closed there by who synced it."""
        with path.open("wb") as file:
            yield file
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())

    def write(self, path: Path, data: bytes) -> None:
        """A file with this content."""
        with self.create(path) as file:
            file.write(data)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name, at once and for good."""
        source.rename(target)
        self.sync(target.parent)

    def replace(self, path: Path, data: bytes) -> None:
        """Change a file's whole content at once: readers see the old or the new one."""
        draft = path.with_name(path.name + ".tmp")
        self.write(draft, data)
        self.rename(draft, path)

    def sync(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_file(self, path: Path) -> None:
        """Remove one file for good; nothing happens when it is not there."""
        path.unlink(missing_ok=True)
        self.sync(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(path)


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, crc32) of a file's content."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc

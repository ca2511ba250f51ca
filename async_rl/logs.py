"""Log files: the one format of their lines, and their ends for people."""

from __future__ import annotations

import os
from pathlib import Path

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Format of a line in <run.dir>/logs."""
_TAIL_BYTES = 16 << 10


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file, at most `count`; none where there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]

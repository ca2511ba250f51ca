"""Ends a supervisor's process groups when the supervisor is gone, however it ended.

The supervisor writes the groups that it starts and ends into a pipe (`123`, `-123`, one a line). When the pipe closes,
whatever is still in those groups gets SIGTERM and, after a grace, SIGKILL. Unlike a parent-death signal this reaches
grandchildren too, and needs no code in a forked child. It runs as `python -I guard.py GRACE_S SWEEPER` and becomes
`python -I SWEEPER` at the end: what those processes left behind is removed (`leftovers.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

KILL_S = 5.0
"""Longest wait for killed processes to be gone."""
_POLL_S = 0.05


def group_lives(group: int) -> bool:
    """Whether any process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end_groups(groups: Iterable[int], grace_s: float) -> None:
    """SIGTERM to every group, and SIGKILL to those that still live after `grace_s`."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        groups = [group for group in groups if group_lives(group)]
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        deadline = time.monotonic() + patience_s
        while any(map(group_lives, groups)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def main() -> None:
    """Read the pipe (standard input) to its end, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line)
        groups.add(group) if group > 0 else groups.discard(-group)
    end_groups(groups, float(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, "-I", sys.argv[2]])


if __name__ == "__main__":
    main()

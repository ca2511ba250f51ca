"""The learner's command, with a record of what it trained: a line per group, on disk before the step counts as done.

python -m tests.e2e.recording_learner FILE PLACE SEED learner CONFIG [SECTION.KEY=VALUE]...

It dies at PLACE of `tests/e2e/doom.py`, a moment by SEED; "nowhere": it lives.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from async_rl.cli import run
from async_rl.learner.loop import Loop
from tests.e2e.doom import doom

FILE, PLACE, SEED = (sys.argv.pop(1) for _ in range(3))


def record(loop: Loop, step: int, groups: Any) -> None:
    """Append the groups of a step."""
    with open(FILE, "a", encoding="utf-8") as file:
        for group in groups:
            lengths = [len(member.completion_ids) for member in group.members]
            line = {"run": loop.start.lineage.run_id, "from": loop.start.step, "step": step, "ticket": group.ticket}
            file.write(json.dumps({**line, "problem": group.problem.id, "lengths": lengths}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    step_of = Loop._step

    def recorded(loop: Loop, step: int, groups: Any) -> None:
        record(loop, step, groups)
        step_of(loop, step, groups)

    Loop._step = recorded  # type: ignore[method-assign]
    if PLACE != "nowhere":
        doom(PLACE, int(SEED))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

"""The end of asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""A task that has not ended by then is cancelled again: what it awaited may have taken the cancellation for its own."""


async def end_tasks(tasks: Collection[asyncio.Task[Any]], deadline_s: float) -> None:
    """Cancel tasks and wait until they have ended, at most `deadline_s`; what they raise is nobody's any more."""
    until = asyncio.get_running_loop().time() + deadline_s
    while pending := [task for task in tasks if not task.done()]:
        if asyncio.get_running_loop().time() >= until:
            names = ", ".join(task.get_name() for task in pending)
            log.error("left behind after %g s, deaf to their cancellation: %s", deadline_s, names)
            break
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()

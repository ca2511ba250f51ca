"""How vLLM's processes wait for each other on CPU: asleep, instead of spinning on cores that compute.

vLLM 0.32 polls shared memory between its engine core and its workers in a loop, for a second after each message. The
core so burns a whole CPU while its worker computes a step, and an idle worker one for a second after every step: cores
that the worker's or the learner's own threads need. Here a waiting process sleeps until the writer's notification.

Two messages within a millisecond can lose the second notification (the writer's socket holds one and takes back its
credit only now and then), and vLLM would then sleep for 5 s. So in that first second sleeps are short.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

SLEEP_MS = 2
"""Longest sleep during the second in which vLLM would spin: what a lost notification costs."""


@functools.cache
def sleep_instead_of_spinning() -> None:
    """Let this process's readers sleep; more calls, and calls on GPUs, where cores are plenty, change nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    condition_class: Any = SpinCondition
    wait = condition_class.wait

    @functools.wraps(wait)
    def wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
        spins_for_s = condition.busy_loop_s
        if time.monotonic() > condition.last_read + spins_for_s:
            wait(condition, timeout_ms)
            return
        condition.busy_loop_s = -math.inf
        try:
            wait(condition, SLEEP_MS if timeout_ms is None else min(SLEEP_MS, timeout_ms))
        finally:
            condition.busy_loop_s = spins_for_s

    condition_class.wait = wait_asleep

"""How vLLM's processes wait for each other on CPU: asleep, instead of spinning on cores that compute.

vLLM 0.32 polls shared memory between its engine core and its workers in a loop, for a second after each message. The
core so burns a whole CPU while its worker computes a step, and an idle worker one for a second after every step: cores
that the worker's or the learner's own threads need. A waiting process can sleep until the writer's notification as
well, which vLLM sends with every message and does itself once the second is over.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def sleep_instead_of_spinning() -> None:
    """Let this process's readers sleep at once; more calls, and calls on GPUs, where cores are plenty, change nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    condition_class: Any = SpinCondition
    wait = condition_class.wait

    @functools.wraps(wait)
    def wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = -1.0  # the spinning ends this long after the last message: before it
        wait(condition, timeout_ms)

    condition_class.wait = wait_asleep

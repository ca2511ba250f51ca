"""vLLM's processes sleep while they wait for each other."""

from __future__ import annotations

import time
from typing import Any

import pytest

from async_rl.engines.vllm_waiting import SLEEP_MS, sleep_instead_of_spinning


class Poller:
    """Counts how often somebody went to sleep in it."""

    def __init__(self) -> None:
        self.timeouts_ms: list[int | None] = []

    def poll(self, timeout: int | None) -> list[Any]:
        self.timeouts_ms.append(timeout)
        return []


def sleeps(condition_class: Any, since_message_s: float, timeout_ms: int | None) -> list[int | None]:
    """Timeouts with which a reader goes to sleep that had its last message some time ago; vLLM spins for a second."""
    condition = object.__new__(condition_class)
    condition.is_reader, condition.busy_loop_s = True, 1.0
    condition.last_read = time.monotonic() - since_message_s
    condition.poller = Poller()
    condition.read_cancel_socket = condition.local_notify_socket = None
    condition.wait(timeout_ms=timeout_ms)
    assert condition.busy_loop_s == 1.0
    return condition.poller.timeouts_ms


@pytest.mark.slow
def test_a_reader_sleeps_at_once_and_only_shortly_while_a_notification_can_be_lost() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("on GPUs vLLM's processes spin")
    sleep_instead_of_spinning()
    just_now = -60.0  # a minute ahead of the clock: no pause of this machine makes it long ago
    assert sleeps(SpinCondition, just_now, timeout_ms=5000) == [SLEEP_MS]
    assert sleeps(SpinCondition, just_now, timeout_ms=None) == [SLEEP_MS]
    assert sleeps(SpinCondition, just_now, timeout_ms=1) == [1]
    assert sleeps(SpinCondition, 100.0, timeout_ms=5000) == [5000]

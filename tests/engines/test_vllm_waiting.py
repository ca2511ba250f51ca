"""vLLM's processes sleep while they wait for each other."""

from __future__ import annotations

import time
from typing import Any

import pytest

from async_rl.engines.vllm_waiting import sleep_instead_of_spinning


class Poller:
    """Counts how often somebody went to sleep in it."""

    def __init__(self) -> None:
        self.timeouts_ms: list[int | None] = []

    def poll(self, timeout: int | None) -> list[Any]:
        self.timeouts_ms.append(timeout)
        return []


def wait_just_after_a_message(condition_class: Any) -> list[int | None]:
    """Timeouts of the sleeps of a reader that had a message a moment ago."""
    condition = object.__new__(condition_class)
    condition.is_reader, condition.busy_loop_s, condition.last_read = True, 60, time.monotonic()
    condition.poller = Poller()
    condition.read_cancel_socket = condition.local_notify_socket = None
    condition.wait(timeout_ms=250)
    return condition.poller.timeouts_ms


@pytest.mark.slow
def test_a_reader_sleeps_at_once_and_keeps_its_timeout() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("on GPUs vLLM's processes spin")
    sleep_instead_of_spinning()
    assert wait_just_after_a_message(SpinCondition) == [250]

"""A coordinator that stood still: by hand, and one over real sockets whose clock leaps."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import pytest

from async_rl.coordinator.clock import ObservedClock
from async_rl.coordinator.core import MAX_GAP_S, TELL_GAP_S, TURN_S
from async_rl.membership import Membership
from async_rl.protocol import GeneratorStats, Heartbeat, Hello
from tests.loop.rig import Learner, fleet, make_config
from tests.loop.test_fleet import check_account

LEAP_S = 3600.0
"""Longer than any deadline of the rig."""


def test_a_gap_counts_up_to_the_limit_and_is_told_once() -> None:
    times = iter([100.0, 100.25, 110.25, 110.5, 110.5])
    clock = ObservedClock(lambda: next(times), 0.5)
    assert [clock(), clock(), clock(), clock()] == [100.25, 100.75, 101.0, 101.0]
    assert clock.take_longest_gap() == 10.0
    assert clock.take_longest_gap() == 0.0


def test_who_reads_often_reads_the_clock_below() -> None:
    rng = random.Random(0)
    times = list(itertools.accumulate([50.0, *(rng.uniform(0.0, 0.5) for _ in range(1000))]))
    readings = iter(times)
    clock = ObservedClock(lambda: next(readings), 0.5)
    assert [clock() for _ in times[1:]] == pytest.approx(times[1:])


def test_an_idle_coordinator_reads_its_clock_often_enough() -> None:
    assert TURN_S < MAX_GAP_S < TELL_GAP_S


def test_only_silence_that_was_observed_expires_a_member() -> None:
    now = [0.0]
    clock, members = ObservedClock(lambda: now[0], 0.5), Membership(heartbeat_timeout_s=2.0)
    for name in ("heard", "silent"):
        members.hello(
            Hello(
                protocol=1, name=name, incarnation="1", run_id=None, policy_version=None, slots=1, receivers=0,
                engine="simulated", host="here", pid=1,
            ),
            clock(),
        )  # fmt: skip
    now[0] += LEAP_S
    assert members.expired(clock()) == [], "it was not looked for"
    for _ in range(8):
        now[0] += 0.25
        heartbeat = Heartbeat(accepting=True, holding=(), policy_version=None, stats=GeneratorStats())
        members.heartbeat("heard", heartbeat, clock())
    assert members.expired(clock()) == ["silent"]


async def test_a_coordinator_that_stood_still_puts_out_nobody(tmp_path: Path) -> None:
    """In the middle of a publication, with leases out and the learner waiting: none of their deadlines has passed."""
    leap = [0.0]
    learner = Learner(make_config(tmp_path, run={"steps": 1_000_000}))
    coordinator = learner.coordinator
    coordinator.clock._clock = lambda: time.monotonic() + leap[0]
    async with fleet(learner.config, learner.start(), "g0", "g1") as workers:
        await learner.until(1)
        relabel, go_on = workers[1].engine.relabel, asyncio.Event()

        async def slow(version: int) -> None:
            await go_on.wait()
            await relabel(version)

        workers[1].engine.relabel = slow  # type: ignore[method-assign]
        async with asyncio.timeout(120):
            while "loading: g1" not in coordinator.status()["wait"]:
                await asyncio.sleep(0.01)
        coordinator.server.call(lambda: leap.__setitem__(0, LEAP_S))
        async with asyncio.timeout(120):
            while not any("stood still for 36" in note for note in learner.notes):
                await asyncio.sleep(0.01)
        go_on.set()
        at = len(learner.batches)
        await learner.until(at + 4)
        status = coordinator.status()
        notes = list(learner.notes)
    coordinator.stop("test")
    assert sorted(member["name"] for member in status["generators"]) == ["g0", "g1"]
    assert not any("left" in note or "open to others" in note for note in notes), notes
    assert coordinator.members.num_evicted == learner.ledger.events["expired_leases"] == 0
    check_account(learner)

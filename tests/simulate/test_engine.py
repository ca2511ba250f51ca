"""The virtual engine: by hand, and request for request against the engine that sleeps."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from async_rl.config.schema import SimulatedEngine as Settings
from async_rl.engines.base import SampleRequest
from async_rl.engines.simulated import SimulatedEngine
from async_rl.protocol import LeaseKey, SamplingParams, VersionSpan
from async_rl.simulate.clock import EventQueue
from async_rl.simulate.engine import VirtualEngine
from tests.engines.virtual_time import VirtualTime


def key(number: int) -> LeaseKey:
    return LeaseKey(kind="train", ticket=number, member=0, attempt=1)


def finish(engine: VirtualEngine) -> list[tuple[float, int, tuple[VersionSpan, ...]]]:
    """(time, ticket, spans) of everything, in the order in which it ends."""
    ends = []
    while (due := engine.next_end()) is not None:
        engine.advance(due)
        ends += [(due, request.key.ticket, engine.spans(request)) for request in engine.take_ended()]
        engine.fill()
    return ends


def test_requests_share_the_engine_and_wait_for_slots() -> None:
    # Alone 10 tokens/s, two together 5 each.
    engine = VirtualEngine(2, lambda running: 10.0 / running, 0, 0.0)
    for number, length in enumerate((10, 20, 10)):
        engine.begin(key(number), length)
    engine.fill()
    # 0 ends after 10 / 5 s; 1 has 10 left and 2 begins: both end 2 s later.
    assert [(time, ticket) for time, ticket, _ in finish(engine)] == [(2.0, 0), (4.0, 1), (4.0, 2)]
    assert engine.busy_slot_s == 8.0


def test_a_pause_stops_every_request_and_divides_its_tokens_by_version() -> None:
    engine = VirtualEngine(4, lambda running: 10.0, 3, 0.0)
    engine.begin(key(0), 20)
    engine.fill()
    engine.advance(0.55)
    engine.pause()
    assert engine.next_end() is None
    engine.begin(key(1), 5)
    engine.advance(1.55)
    engine.load(4)
    engine.fill()
    # 5 whole tokens are of version 3; the request that came in the pause began under version 4.
    assert finish(engine) == [
        (pytest.approx(2.05), 1, (VersionSpan(4, 0, 5),)),
        (pytest.approx(3.0), 0, (VersionSpan(3, 0, 5), VersionSpan(4, 5, 20))),
    ]


def test_a_cancelled_request_makes_room() -> None:
    engine = VirtualEngine(1, lambda running: 10.0, 0, 0.0)
    for number in range(3):
        engine.begin(key(number), 10)
    engine.fill()
    engine.advance(0.5)
    engine.cancel(key(0))
    engine.cancel(key(1))
    engine.cancel(key(7))
    engine.fill()
    assert [(time, ticket) for time, ticket, _ in finish(engine)] == [(1.5, 2)]
    assert engine.idle


SCHEDULE = [(0.0, n) for n in range(5)] + [(0.013 * n, n) for n in range(5, 40)]
UPDATES = [(0.11 * n + 0.05, n) for n in range(1, 8)]
LOAD_S, RATE, SLOTS = 0.03, 200.0, 6


@pytest.mark.parametrize("seed", [0, 1])
async def test_it_agrees_with_the_engine_that_sleeps(seed: int) -> None:
    """Same requests, same updates: the same ends and exactly the same versions of every token."""
    slept, lengths = await sleep_through(seed)
    assert virtual(lengths) == {n: (pytest.approx(end, abs=1e-4), spans) for n, (end, spans) in slept.items()}
    assert any(len(spans) > 2 for _, spans in slept.values()), "no request lived through two updates"


async def sleep_through(seed: int) -> tuple[dict[int, tuple[float, tuple[VersionSpan, ...]]], dict[int, int]]:
    time = VirtualTime()
    settings = Settings(median_tokens=40.0, sigma=0.8, tokens_per_s=RATE, load_s=LOAD_S)
    engine = SimulatedEngine(settings, slots=SLOTS, clock=time.now, sleep=time.sleep)
    engine.policy_version = 0
    ends: dict[int, tuple[float, tuple[VersionSpan, ...]]] = {}
    lengths: dict[int, int] = {}

    async def one(start: float, number: int) -> None:
        await time.sleep(start)
        sampling = SamplingParams(max_tokens=500, temperature=1.0, seed=100 * seed + number)
        sample = await engine.sample(SampleRequest(str(number), np.zeros(1, np.int32), sampling))
        ends[number], lengths[number] = (time.now(), sample.versions), len(sample.completion_ids)

    async def update(start: float, version: int) -> None:
        await time.sleep(start)
        await engine.relabel(version)

    tasks = [asyncio.create_task(one(*item)) for item in SCHEDULE]
    tasks += [asyncio.create_task(update(*item)) for item in UPDATES]
    await time.run_until(60.0)
    assert all(task.done() for task in tasks)
    return ends, lengths


def virtual(lengths: dict[int, int]) -> dict[int, tuple[float, tuple[VersionSpan, ...]]]:
    events, engine = EventQueue(), VirtualEngine(SLOTS, lambda running: RATE, 0, 0.0)
    ends: dict[int, tuple[float, tuple[VersionSpan, ...]]] = {}

    def plan() -> None:
        engine.fill()
        if (due := engine.next_end()) is not None:
            generation = engine.generation
            events.at(due, lambda: ended(generation))

    def ended(generation: int) -> None:
        if engine.generation == generation:
            engine.advance(events.now)
            for request in engine.take_ended():
                ends[request.key.ticket] = (events.now, engine.spans(request))
            plan()

    def begin(number: int) -> None:
        engine.advance(events.now)
        engine.begin(key(number), lengths[number])
        plan()

    def pause(version: int) -> None:
        engine.advance(events.now)
        engine.pause()
        events.after(LOAD_S, lambda: load(version))

    def load(version: int) -> None:
        engine.advance(events.now)
        engine.load(version)
        plan()

    for start, number in SCHEDULE:
        events.at(start, lambda number=number: begin(number))
    for start, version in UPDATES:
        events.at(start, lambda version=version: pause(version))
    while events.run_instant():
        pass
    return ends

"""Learner and generators over real sockets: every problem once, the bound kept, whoever joins, leaves or dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from async_rl.config import ConfigError
from async_rl.coordinator import StallError
from async_rl.engines.base import Sample, SampleRequest
from async_rl.engines.simulated import SimulatedEngine
from async_rl.protocol import PROTOCOL_VERSION, Alive, GeneratorStats, Goodbye, Heartbeat, Hello, LeaseKey, Refused
from async_rl.transport import Client
from tests.loop.rig import Learner, Scorer, fleet, make_config, problem


def check_account(learner: Learner) -> None:
    """Every problem was trained once or dropped with a reason; with overdue='wait' no token was too old."""
    trained = learner.trained_problems()
    assert len(trained) == len(set(trained)), "a problem was trained twice"
    learner.ledger.check()
    counts = learner.ledger.counts()
    assert counts.trained == len(trained)
    assert counts.issued == counts.trained + sum(counts.dropped.values()) + counts.leased + counts.buffered
    if learner.config.staleness.overdue == "wait":
        assert max(learner.staleness()) <= learner.config.staleness.max_staleness


async def test_every_problem_is_trained_once_within_the_bound(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path))
    async with fleet(learner.config, learner.start(), "g0", "g1"):
        await learner.done()
    check_account(learner)
    assert len(learner.batches) == 12
    assert set(learner.trained_problems()) == {f"p{i}" for i in range(48)}
    assert learner.ledger.counts().dropped == {}
    assert max(learner.staleness()) > 0, "generators never ran ahead: this was not asynchronous"


async def test_synchronous_training_uses_only_the_newest_version(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path, staleness={"max_staleness": 0, "overdue": "mask"}))
    async with fleet(learner.config, learner.start(), "g0", "g1"):
        await learner.done()
    assert set(learner.staleness()) == {0}
    assert learner.trained_problems() == [f"p{i}" for i in range(48)]


async def test_members_of_a_killed_generator_are_leased_again(tmp_path: Path) -> None:
    slow = {"type": "simulated", "median_tokens": 30.0, "sigma": 0.0, "tokens_per_s": 300.0}
    config = make_config(tmp_path, generator={"engine": slow})
    learner = Learner(config)
    async with fleet(config, learner.start(), "g0", "g1") as workers:
        await learner.until(2)
        await workers[0].kill()
        await learner.done()
    check_account(learner)
    assert len(learner.batches) == 12
    assert any(f"g0 left: {why}" in note for note in learner.notes for why in ("silent", "its connection")), (
        learner.notes
    )


async def test_a_late_generator_works_with_the_version_of_the_moment(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path, run={"steps": 20}))
    address = learner.start()
    async with fleet(learner.config, address, "g0"):
        await learner.until(5)
        published = learner.coordinator.status()["published"]
        async with fleet(learner.config, address, "late") as (late,):
            await learner.done()
            assert late.generator.counts["finished"] > 0
    first = min(v.version for batch in learner.batches[5:] for g in batch for m in g.members for v in m.versions)
    assert published >= 3 and first >= published - 3
    check_account(learner)


async def test_a_leaving_generator_returns_its_leases_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is given no others while it waits for the acknowledgement of its last result."""
    monkeypatch.setattr("async_rl.generator.LEAVE_DEADLINE_S", 0.5)
    endless = {"type": "simulated", "median_tokens": 32.0, "sigma": 0.0, "tokens_per_s": 0.1}
    config = make_config(tmp_path)
    learner = Learner(config)
    address = learner.start()
    stuck = make_config(tmp_path, generator={"engine": endless})
    async with fleet(stuck, address, "stuck") as (worker,):
        async with asyncio.timeout(150):
            while not worker.generator.work:
                await asyncio.sleep(0.01)
        worker.generator.unacknowledged[LeaseKey("train", 0, 0, 99)] = None  # type: ignore[assignment]
        await worker.generator.leave("test")
        assert await worker.task == "test"
        async with fleet(config, address, "g1"):
            await learner.done()
    check_account(learner)
    assert any("stuck left: test; 0 leases" in note for note in learner.notes), learner.notes


async def test_greedy_completions_are_sampled_at_temperature_zero_and_never_trained(tmp_path: Path) -> None:
    config = make_config(tmp_path, sampling={"group_size": 2}, algorithm={"advantage": {"type": "remax"}})
    learner, temperatures = Learner(config), Counter[tuple[bool, float]]()
    async with fleet(config, learner.start(), "g0") as (worker,):
        sample = worker.engine.sample

        async def watched(request: SampleRequest) -> Sample:
            kind, _, member, _, _ = request.request_id.split("-")
            temperatures[kind == "train" and member == "2", request.sampling.temperature] += 1
            return await sample(request)

        worker.engine.sample = watched  # type: ignore[method-assign]
        await learner.done()
    check_account(learner)
    assert set(temperatures) == {(False, 1.0), (True, 0.0)}
    groups = [group for batch in learner.batches for group in batch]
    assert len(groups) == 12 * 4
    assert all(len(group.members) == 2 and group.baseline is not None for group in groups)


async def test_a_problem_without_its_greedy_completion_is_dropped(tmp_path: Path) -> None:
    config = make_config(tmp_path, sampling={"group_size": 2}, algorithm={"advantage": {"type": "remax"}})
    learner = Learner(config)
    async with fleet(config, learner.start(), "g0") as (worker,):
        sample = worker.engine.sample

        async def picky(request: SampleRequest) -> Sample:
            if request.request_id.startswith("train-5-2-"):
                raise ValueError("no greedy completion")
            return await sample(request)

        worker.engine.sample = picky  # type: ignore[method-assign]
        await learner.done()
    check_account(learner)
    assert learner.ledger.counts().dropped == {"failed_baseline": 1}
    assert "p5" not in learner.trained_problems()


async def test_a_failing_reward_is_retried_then_dropped_and_counted(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    learner = Learner(config)
    async with fleet(config, learner.start(), "g0", scorer=Scorer(frozenset({"p3", "p7"}))):
        await learner.done()
    check_account(learner)
    assert learner.ledger.counts().dropped == {"failed_members": 2}
    assert not {"p3", "p7"} & set(learner.trained_problems())
    assert any("no reward for p3" in note for note in learner.notes)
    assert sum("failed on g0" in note for note in learner.notes) <= 5, "errors are shown in full only at first"


async def test_the_end_of_the_data_ends_the_run(tmp_path: Path) -> None:
    rows = iter([problem(i) for i in range(7)])
    learner = Learner(make_config(tmp_path, learner={"batch_groups": 2}), draw=lambda: next(rows, None))
    async with fleet(learner.config, learner.start(), "g0"):
        await learner.done()
    assert len(learner.batches) == 3
    assert learner.ledger.counts().dropped == {"tail": 1}


async def test_evaluation_runs_beside_training(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path))
    async with fleet(learner.config, learner.start(), "g0"):
        await learner.done()
    assert [result.version for result in learner.results] == [0, 4]
    assert all(result.scored == 6 and result.missing == 0 for result in learner.results)
    assert learner.results[1].version_min >= 4
    assert not any(group.problem.id.startswith("p100") for batch in learner.batches for group in batch)


async def test_without_generators_the_stall_names_what_is_missing(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path, run={"stall_timeout_s": 0.5}))
    address = learner.start()
    with pytest.raises(StallError, match=f"no generator is connected to {address}"):
        await learner.done()


async def test_publish_every_two_keeps_the_bound(tmp_path: Path) -> None:
    config = make_config(tmp_path, staleness={"max_staleness": 2, "publish_every": 2})
    learner = Learner(config)
    async with fleet(config, learner.start(), "g0", "g1"):
        await learner.done()
    check_account(learner)
    versions = {v.version for batch in learner.batches for g in batch for m in g.members for v in m.versions}
    assert versions <= {0, 2, 4, 6, 8, 10}


async def test_another_protocol_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path, run={"stall_timeout_s": 3.0}))
    client = Client("old", "1", 1 << 20)
    client.connect(learner.start())
    hello = {"name": "old", "incarnation": "1", "run_id": None, "policy_version": None, "slots": 1, "receivers": 0}
    await client.send(Hello(protocol=99, engine="simulated", host="h", pid=1, **hello))  # type: ignore[arg-type]
    answer = await client.receive(10.0)
    assert isinstance(answer, Refused) and not answer.retry
    assert f"it speaks protocol 99, this learner {PROTOCOL_VERSION}" in answer.reason
    client.close()
    with pytest.raises(StallError):
        await learner.done()
    assert learner.coordinator.server.refused["hello"] == 1


async def test_a_generator_that_is_refused_for_good_ends_with_the_reason(tmp_path: Path) -> None:
    learner = Learner(make_config(tmp_path))
    async with fleet(learner.config, learner.start(), "g0") as (worker,):
        with pytest.raises(ConfigError, match="because of this test"):
            await worker.generator._handle(Refused(reason="because of this test", retry=False))
        await learner.done()


async def test_a_restarted_learner_gets_its_generators_back(tmp_path: Path) -> None:
    """The learner dies and another run starts on its port: generators reconnect by themselves and drop lost work."""
    first = Learner(make_config(tmp_path, run={"steps": 1000}))
    address = first.start()
    port = int(address.rsplit(":", 1)[1])
    async with fleet(first.config, address, "g0", "g1") as workers:
        await first.until(3)
        first.coordinator._stop_reason = ""  # As a crash would: the socket closes, nobody is told.
        first.coordinator.members._members.clear()
        await asyncio.to_thread(first.coordinator._thread.join, 10)
        before = sum(worker.generator.counts["finished"] for worker in workers)
        second = Learner(make_config(tmp_path, transport={"port": port}), run_id="run-2")
        second.start()
        await second.done()
        assert {worker.generator.run_id for worker in workers} == {"run-2"}
        after = sum(worker.generator.counts["finished"] for worker in workers)
    assert second.coordinator.reports.meter.totals["finished"] <= after - before, "work for the first learner counts"
    check_account(second)
    assert len(second.batches) == 12


async def test_results_of_a_cut_off_generator_are_taken_once(tmp_path: Path) -> None:
    """Cut off for longer than the timeout, then back: finished work is neither lost nor doubled."""
    config = make_config(tmp_path, run={"steps": 16}, transport={"heartbeat_timeout_s": 1.0})
    learner = Learner(config)
    address = learner.start()
    async with fleet(config, address, "g0", "g1") as (cut, _):
        await learner.until(2)
        cut.client._socket.disconnect(f"tcp://{address}")  # type: ignore[union-attr]
        await asyncio.sleep(config.transport.heartbeat_timeout_s * 1.5)
        await learner.done()
    check_account(learner)
    assert len(learner.batches) == 16


def test_simulated_generators_need_no_torch() -> None:
    assert SimulatedEngine.receivers == 0


async def test_totals_of_a_process_are_counted_once_however_often_it_says_hello(tmp_path: Path) -> None:
    """Counted from its start when it is new, from its first totals when it has worked for another learner."""
    learner = Learner(make_config(tmp_path, run={"stall_timeout_s": 600.0}))
    address, totals = learner.start(), learner.coordinator.reports.meter.totals

    async def visit(name: str, run_id: str | None, tokens: int) -> int:
        client = Client(name, "1", 1 << 20)
        client.connect(address)
        hello = {"name": name, "incarnation": "1", "run_id": run_id, "policy_version": None, "slots": 1, "receivers": 0}
        await client.send(Hello(protocol=PROTOCOL_VERSION, engine="simulated", host="h", pid=1, **hello))  # type: ignore[arg-type]
        stats = GeneratorStats(generated_tokens=tokens)
        await client.send(Heartbeat(accepting=False, holding=(), policy_version=None, stats=stats))
        while not isinstance(await client.receive(120.0), Alive):
            pass
        await client.send(Goodbye(reason="test"))
        while any(member["name"] == name for member in learner.coordinator.status()["generators"]):
            await asyncio.sleep(0.01)
        client.close()
        return int(totals["generated_tokens"])

    async with asyncio.timeout(150):
        counted = [
            await visit("new", None, 10),
            await visit("old", "run-0", 100),
            await visit("old", "run-1", 103),
            await visit("new", "run-1", 11),
        ]
    learner.coordinator.stop("test")
    assert counted == [10, 10, 13, 14]

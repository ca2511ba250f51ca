"""A learner that goes on from a checkpoint, with generators that outlived the one before and with some that did not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl import protocol as p
from async_rl.buffer import Ledger, LedgerSettings
from async_rl.checkpoints.work import restore
from async_rl.config import Config
from async_rl.coordinator import Coordinator
from async_rl.coordinator.resumed import Lines, Resumed
from async_rl.engines.base import SampleRequest
from async_rl.evaluation import Evaluations, EvaluationSettings
from async_rl.leasing import Leasing
from async_rl.protocol import Problem
from async_rl.staleness import trajectory_staleness
from tests.checkpoints.rig import Problems
from tests.ledger_world import make_trajectory
from tests.loop.rig import Learner, NoTransfer, Worker, fleet, make_config, problem
from tests.loop.test_generator import Wire, quiet_worker, welcome


class Going(Learner):
    """The rig's learner with a source of problems that is part of its state, from a checkpoint if there is one."""

    def __init__(self, config: Config, run_id: str, resumed: Resumed | None = None) -> None:
        self.source, self.resumed = Problems(), resumed
        self.states: list[bytes] = []
        super().__init__(config, run_id=run_id, evaluates=False)
        self.first_step = 1 if resumed is None else resumed.version + 1

    def make_coordinator(self, draw: Callable[[], Problem | None]) -> Coordinator:
        self.ledger = Ledger(LedgerSettings.of(self.config), lambda: problem(self.source.draw()))
        if self.resumed is not None:
            restore(self.resumed.work.tobytes(), self.ledger, self.source)
        evaluations = Evaluations(EvaluationSettings(samples=1, deadline_s=120.0))
        return Coordinator(
            config=self.config,
            run_id=self.run_id,
            ledger=self.ledger,
            evaluations=evaluations,
            eval_problems=[],
            leasing=Leasing(self.config, self.ledger, evaluations, ()),
            transfer=NoTransfer(),
            problem_state=self.source.state,
            resumed=self.resumed,
            notify=self.notes.append,
        )

    def train(self) -> None:
        """All steps, with the state of each before its publication."""
        self._publish(self.first_step - 1)
        for step in range(self.first_step, self.config.run.steps + 1):
            request = self.coordinator.request_batch()
            assert request.wait(150.0), "no batch within 150 s"
            groups = request.result()
            assert groups is not None
            self.batches.append(groups)
            self.coordinator.trained()
            self.states.append(self.coordinator.snapshot_state())
            self._publish(step)
        self.coordinator.stop("complete")

    def state_after(self, step: int, **ancestors: int) -> Resumed:
        work = np.frombuffer(self.states[step - self.first_step], np.uint8)
        return Resumed(work, version=step, ancestors={name.replace("_", "-"): last for name, last in ancestors.items()})

    async def crash(self) -> None:
        """The socket closes and nobody is told anything."""
        self.coordinator._stop_reason = ""
        self.coordinator.members._members.clear()
        await asyncio.to_thread(self.coordinator._thread.join, 10)


async def test_a_lost_future_is_made_again_and_every_problem_is_trained_once(tmp_path: Path) -> None:
    """Steps 4 and 5 are lost with the first learner: what its generators still hold of them is not taken."""
    first = Going(make_config(tmp_path, run={"steps": 1000}), "run-1")
    address = first.start()
    port = int(address.rsplit(":", 1)[1])
    async with fleet(first.config, address, "g0", "g1") as workers:
        await first.until(5)
        await first.crash()
        lost_versions = {worker.engine.policy_version for worker in workers}
        second = Going(make_config(tmp_path, transport={"port": port}), "run-2", first.state_after(3, run_1=3))
        second.start()
        await second.done()
        assert {worker.generator.run_id for worker in workers} == {"run-2"}
    assert max(version or 0 for version in lost_versions) > 3, "a generator had a version that is lost"
    assert len(second.batches) == 9
    trained = first.trained_problems()[:12] + second.trained_problems()
    assert len(trained) == len(set(trained)) == 48
    counts = second.ledger.counts()
    second.ledger.check()
    assert counts.trained == 48 and counts.dropped == {}
    for step, batch in enumerate(second.batches, start=4):
        members = [member for group in batch for member in group.members]
        assert max(trajectory_staleness(step, member.versions) for member in members) <= 2
        assert max(span.version for member in members for span in member.versions) < step


async def test_leases_of_generators_that_do_not_come_back_are_opened_without_blame(tmp_path: Path) -> None:
    first = Going(make_config(tmp_path, run={"steps": 1000}), "run-1")
    async with fleet(first.config, first.start(), "g0", "g1") as workers:
        for worker in workers:
            sample = worker.engine.sample

            async def endless(request: SampleRequest, sample: Any = sample) -> Any:
                if request.request_id.startswith("train-8-"):  # of step 3: it is out while step 2 is made
                    await asyncio.Event().wait()
                return await sample(request)

            worker.engine.sample = endless  # type: ignore[method-assign]
        async with asyncio.timeout(150):
            while len(first.states) < 2:
                await asyncio.sleep(0.01)
        await first.crash()
    second = Going(make_config(tmp_path), "run-2", first.state_after(2, run_1=2))
    absent = second.ledger.owners()
    assert absent, "leases were out when the state was taken"
    address = second.start()
    second.coordinator._opened_at -= 3600.0  # Longer than any heartbeat may take; g2's are not late for that.
    async with fleet(second.config, address, "g2"):
        await second.done()
    assert len(second.batches) == 10 and second.ledger.counts().dropped == {}
    assert second.ledger.events["lost_leases"] == first.ledger.events["lost_leases"] == 0
    assert sum("has not come back since the resume" in note for note in second.notes) == len(absent)


class Held(Going):
    """Trains nothing beyond the resumed version until the test lets it."""

    def __init__(self, *arguments: Any) -> None:
        self.let_go = threading.Event()
        super().__init__(*arguments)

    def _publish(self, version: int) -> None:
        super()._publish(version)
        assert self.let_go.wait(150.0), "nobody let it go"


class Heard:
    """What a worker was told since it first heard of a run, and the version that its engine had then."""

    def __init__(self, worker: Worker, run_id: str) -> None:
        self.events: list[tuple[str, int | None]] = []
        handle = worker.generator._handle

        async def listened(message: p.Message) -> None:
            if self.events or (isinstance(message, p.Welcome) and message.run_id == run_id):
                version = message.version if isinstance(message, p.RelabelVersion) else worker.engine.policy_version
                self.events.append((type(message).__name__, version))
            await handle(message)

        worker.generator._handle = listened  # type: ignore[method-assign]

    def of(self, kind: str) -> list[tuple[int, int | None]]:
        """(place, version) of each message of a kind."""
        return [(place, version) for place, (name, version) in enumerate(self.events) if name == kind]


async def test_no_lease_after_a_resume_before_exactly_the_resumed_version(tmp_path: Path) -> None:
    """Those that outlived the learner had a version that is lost; one that starts later has none."""
    first = Going(make_config(tmp_path, run={"steps": 1000}), "run-1")
    address = first.start()
    async with fleet(first.config, address, "g0", "g1") as survivors:
        await first.until(6)  # Version 4 is with everybody before version 5 is published.
        await first.crash()
        assert all((worker.engine.policy_version or 0) > 3 for worker in survivors)
        config = make_config(tmp_path, transport={"port": int(address.rsplit(":", 1)[1])})
        second = Held(config, "run-2", first.state_after(3, run_1=3))
        heard = [Heard(worker, "run-2") for worker in survivors]
        second.start()
        async with asyncio.timeout(150), fleet(config, address, "late") as late:
            heard += [Heard(worker, "run-2") for worker in late]
            workers = [*survivors, *late]
            while [worker.engine.policy_version for worker in workers] != [3, 3, 3]:
                await asyncio.sleep(0.01)
            second.let_go.set()
            await second.done()
    for one in heard:
        versions, leases = one.of("RelabelVersion"), one.of("Leases")
        assert versions[0][1] == 3, one.events
        assert leases[0] > versions[0] and leases[0][1] in {version for _, version in versions}, one.events


def test_whose_results_count() -> None:
    lines = Lines("c", Resumed(np.zeros(0, np.uint8), version=7, ancestors={"a": 4, "b": 7}))
    assert lines.continues("c") and lines.continues("a") and not lines.continues("d") and not lines.continues(None)

    def counts(run_id: str, first: int, last: int) -> bool:
        return lines.includes(run_id, make_trajectory(first, last))

    assert counts("a", 3, 4) and not counts("a", 3, 5)
    assert counts("b", 5, 7) and not counts("b", 7, 8)
    assert counts("c", 7, 99) and not counts("d", 0, 0)


# --- the generator's side ------------------------------------------------------------------------


def done(ticket: int, first: int, last: int) -> dict[p.LeaseKey, p.Trajectory]:
    return {p.LeaseKey(kind="train", ticket=ticket, member=0, attempt=1): make_trajectory(first, last)}


def resumed_welcome(**ancestors: int) -> p.Welcome:
    before: Any = welcome("run-2", 4)
    return p.Welcome(
        **{name: getattr(before, name) for name in before.__struct_fields__ if name != "ancestors"}, ancestors=ancestors
    )


async def holding(tmp_path: Path, version: int) -> tuple[Any, Wire, asyncio.Task[None]]:
    """A generator of run-1 with `version` loaded, two finished members and one that is running."""
    worker, wire = quiet_worker(tmp_path)
    generator = worker.generator
    await generator._handle(welcome("run-1", 0))
    worker.engine.policy_version = version
    for finished in (done(0, 3, 4), done(1, 4, 5)):
        generator.unacknowledged |= finished
    running: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(60))
    key = p.LeaseKey(kind="train", ticket=2, member=0, attempt=1)
    generator.work[key] = running
    running.add_done_callback(lambda task: generator._ended(key, task))
    return worker, wire, running


@pytest.mark.parametrize(("version", "goes_on"), [(4, True), (5, False)])
async def test_a_generator_keeps_what_the_resumed_run_shares_with_its_own(
    tmp_path: Path, version: int, goes_on: bool
) -> None:
    worker, wire, running = await holding(tmp_path, version)
    generator = worker.generator
    wire.sent.clear()
    await generator._handle(resumed_welcome(**{"run-1": 4}))
    await asyncio.sleep(0)
    sent = [message for message in wire.sent if isinstance(message, p.Finished)]
    assert [(key.ticket, m.run_id) for m in sent for key in m.keys] == [(0, "run-2")], (
        "version 5 took part in the other"
    )
    assert running.cancelled() is not goes_on
    assert bool(generator.work) is goes_on
    running.cancel()
    await worker.close()


@pytest.mark.parametrize(("theirs", "kept"), [({"run-0": 5}, [0, 1]), ({"run-0": 9}, [0, 1]), ({"run-0": 4}, [0])])
async def test_a_generator_keeps_what_two_runs_inherited_from_a_third(
    tmp_path: Path, theirs: dict[str, int], kept: list[int]
) -> None:
    """run-1 continued run-0 after version 5 and ended before it wrote a checkpoint: run-2 continues run-0 as well."""
    worker, wire, running = await holding(tmp_path, 5)
    worker.generator._line = {"run-0": 5}
    wire.sent.clear()
    await worker.generator._handle(resumed_welcome(**theirs))
    assert [key.ticket for message in wire.sent if isinstance(message, p.Finished) for key in message.keys] == kept
    await worker.close()
    running.cancel()


async def test_what_a_run_inherited_is_learned_from_its_welcome(tmp_path: Path) -> None:
    worker, _, running = await holding(tmp_path, 4)
    await worker.generator._handle(resumed_welcome(**{"run-1": 4}))
    assert worker.generator._line == {"run-1": 4}
    await worker.close()
    running.cancel()


async def test_a_generator_of_no_ancestor_drops_everything(tmp_path: Path) -> None:
    worker, wire, running = await holding(tmp_path, 4)
    wire.sent.clear()
    await worker.generator._handle(resumed_welcome(other=4))
    await asyncio.sleep(0)
    assert not [message for message in wire.sent if isinstance(message, p.Finished)]
    assert running.cancelled() and not worker.generator.unacknowledged
    assert worker.generator.counts["discarded"] == 2
    await worker.close()


async def test_a_key_that_is_leased_again_right_after_it_was_cancelled_is_worked_on(tmp_path: Path) -> None:
    """The resumed ledger issues the same tickets again, and numbers attempts as before."""
    worker, _, running = await holding(tmp_path, 4)
    generator = worker.generator
    key = p.LeaseKey(kind="train", ticket=2, member=0, attempt=1)
    sampling = p.SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    lease = p.Lease(kind="train", ticket=2, member=0, attempt=1, problem=problem(2), sampling=sampling)
    await generator._handle(p.Cancelled(keys=(key,)))
    await generator._handle(p.Leases.of([lease]))
    assert key in generator.work and generator.work[key] is not running
    await asyncio.sleep(0)
    assert running.cancelled() and key in generator.work, "the end of the old request does not take the new one away"
    generator.work[key].cancel()
    await worker.close()

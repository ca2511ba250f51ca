"""Simulated generators: leases by the coordinator's own rule, virtual engines, publications, deaths and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from async_rl.buffer import Ledger
from async_rl.config import Config, prefetch
from async_rl.evaluation import Evaluations, EvaluationSettings
from async_rl.leasing import Leasing
from async_rl.membership import Member
from async_rl.protocol import LeaseKey, Problem, Trajectory
from async_rl.simulate.clock import EventQueue
from async_rl.simulate.costs import Costs
from async_rl.simulate.engine import Request, VirtualEngine
from async_rl.simulate.lengths import chance_by_ticket


class VirtualGenerator:
    """A member of the fleet; `engine` is None while it is dead."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.engine: VirtualEngine | None = None
        self.lives = 0
        self.since = 0.0
        """When its engine began."""
        self.up_s = self.busy_slot_s = 0.0
        """Of engines that died."""


class VirtualFleet:
    """All generators of a run and what they hold; the learner's side is `async_rl.simulate.simulator`."""

    def __init__(self, config: Config, costs: Costs, ledger: Ledger, events: EventQueue, seed: int) -> None:
        self.config, self.costs, self.ledger, self.events = config, costs, ledger, events
        self.evaluations = Evaluations(EvaluationSettings.of(config))
        self.leasing = Leasing(config, ledger, self.evaluations, ())
        self.version = 0
        """Newest version whose transfer is complete: what a generator that comes back loads."""
        self.generators = [self._generator(i) for i in range(config.generator.count)]
        self._by_name = {g.member.name: g for g in self.generators}
        self._hungry: dict[str, Member] = {}
        self._random = np.random.default_rng([seed, 1])
        self._equal = chance_by_ticket(costs.equal_share, [seed, 3])
        longest = config.sampling.max_completion_tokens
        self._ids, self._logprobs = np.zeros(longest, np.int32), np.zeros(longest, np.float32)
        self._mask = np.ones(longest, np.uint8)
        self._loading: set[str] = set()
        """Generators without the version that is being published."""
        self._draining: set[str] = set()
        """Those of them that finish what runs first."""
        self._on_published: Callable[[], None] | None = None
        self.generated_tokens = self.dropped_tokens = self.lost_tokens = self.failures = 0
        """Tokens that arrived; those of them that came unwanted; those that died with their generator."""

    def start(self) -> None:
        """Every generator comes with version 0."""
        for generator in self.generators:
            self._come(generator)

    # --- work -----------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Lease what may be leased to whoever could take more since the last call."""
        for name, key in [*self.ledger.take_cancelled(), *self.evaluations.take_cancelled()]:
            self._cancel(self._by_name[name], key)
        hungry, self._hungry = list(self._hungry.values()), {}
        if not hungry:
            return
        now = self.events.now
        for member, leases in self.leasing.hand_out(hungry, now):
            generator = self._by_name[member.name]
            engine = self._advance(generator)
            for lease in leases:
                key = LeaseKey(kind=lease.kind, ticket=lease.ticket, member=lease.member, attempt=lease.attempt)
                engine.begin(key, lease.problem.answer[lease.member])
            self._plan(generator)

    def _cancel(self, generator: VirtualGenerator, key: LeaseKey) -> None:
        if generator.engine is not None:
            engine = self._advance(generator)
            engine.cancel(key)
            self._plan(generator)
            self._pause_if_drained(generator, engine)
            self._hungry[generator.member.name] = generator.member

    def evaluate(self, version: int, problems: Iterable[Problem]) -> None:
        """Open a round of evaluation."""
        self.evaluations.start(version, tuple(problems), self.events.now)
        self.wake()

    def wake(self) -> None:
        """Something happened that lets any generator take more work."""
        self._hungry.update((g.member.name, g.member) for g in self.generators if g.engine is not None)

    def _plan(self, generator: VirtualGenerator) -> None:
        """Start what may start, and plan the next end."""
        engine = generator.engine
        assert engine is not None, "planned for a dead engine"
        engine.fill()
        due = engine.next_end()
        if due is not None:
            generation = engine.generation
            self.events.at(due, lambda: self._ended(generator, engine, generation))

    def _ended(self, generator: VirtualGenerator, engine: VirtualEngine, generation: int) -> None:
        if generator.engine is not engine or engine.generation != generation:
            return
        self._advance(generator)
        for request in engine.take_ended():
            self._sampled(generator, engine, request)
        self._pause_if_drained(generator, engine)
        self._plan(generator)

    def _sampled(self, generator: VirtualGenerator, engine: VirtualEngine, request: Request) -> None:
        spans, length = engine.spans(request), request.length
        trajectory = Trajectory(
            status="complete" if length < self.config.sampling.max_completion_tokens else "truncated",
            completion_ids=self._ids[:length],
            completion_mask=self._mask[:length],
            behavior_logprobs=self._logprobs[:length],
            versions=spans,
            reward=self._reward(request.key),
        )
        late_s = self.costs.score_s + self.costs.round_trip_s
        if late_s:
            life = generator.lives
            self.events.after(late_s, lambda: self._arrived(generator, life, request.key, trajectory))
        else:
            self._arrived(generator, generator.lives, request.key, trajectory)

    def _reward(self, key: LeaseKey) -> float:
        """Of a group whose rewards differ the first member alone is right; an evaluation's rewards matter to nobody."""
        return float(key.kind == "train" and key.member == 0 and not self._equal(key.ticket))

    def _arrived(self, generator: VirtualGenerator, life: int, key: LeaseKey, trajectory: Trajectory) -> None:
        name, tokens = generator.member.name, len(trajectory.completion_ids)
        if generator.lives != life or generator.engine is None:
            self.lost_tokens += tokens
            return
        book = self.ledger if key.kind == "train" else self.evaluations
        answer = book.finish(name, key.ticket, key.member, key.attempt, trajectory, self.events.now)
        self.generated_tokens += tokens
        self.dropped_tokens += 0 if answer == "stored" else tokens
        self._hungry[name] = generator.member

    # --- weights --------------------------------------------------------------------------------

    def load(self, version: int, on_published: Callable[[], None]) -> None:
        """The bytes of a version are there: every engine stands still, loads and goes on."""
        self.version = version
        self._on_published = on_published
        living = [g for g in self.generators if g.engine is not None]
        self._loading = {g.member.name for g in living}
        for generator in living:
            engine = self._advance(generator)
            if self.config.generator.running_requests == "finish" and not engine.idle:
                engine.hold()
                self._draining.add(generator.member.name)
            else:
                self._pause(generator)
        self._published()

    def _pause_if_drained(self, generator: VirtualGenerator, engine: VirtualEngine) -> None:
        """Its last running request ended or was cancelled: it loads what it has waited to load."""
        if generator.member.name in self._draining and engine.idle:
            self._pause(generator)

    def _pause(self, generator: VirtualGenerator) -> None:
        engine, version = generator.engine, self.version
        assert engine is not None, "a dead engine loads nothing"
        engine.pause()
        self._draining.discard(generator.member.name)
        self.events.after(self.costs.pause_s, lambda: self._loaded(generator, engine, version))

    def _loaded(self, generator: VirtualGenerator, engine: VirtualEngine, version: int) -> None:
        if generator.engine is not engine:
            return
        self._advance(generator).load(version)
        generator.member.version = version
        self._hungry[generator.member.name] = generator.member
        self._plan(generator)
        self._done_loading(generator)

    def _done_loading(self, generator: VirtualGenerator) -> None:
        self._loading.discard(generator.member.name)
        self._draining.discard(generator.member.name)
        self._published()

    def _published(self) -> None:
        if not self._loading and self._on_published is not None:
            call, self._on_published = self._on_published, None
            call()

    # --- life and death -------------------------------------------------------------------------

    def _generator(self, index: int) -> VirtualGenerator:
        member = Member(
            name=f"g{index}",
            incarnation="",
            slots=self.config.generator.slots,
            receivers=0,
            engine="simulated",
            host="",
            pid=0,
            joined=0.0,
            order=index,
            last_seen=0.0,
            prefetch=prefetch(self.config.generator),
        )
        return VirtualGenerator(member)

    def _come(self, generator: VirtualGenerator) -> None:
        now, member = self.events.now, generator.member
        generator.engine = VirtualEngine(member.slots, self.costs.rate, self.version, now)
        generator.lives += 1
        generator.since = now
        member.version, member.accepting = self.version, True
        self._hungry[member.name] = member
        if self.costs.failure_every_s is not None:
            life = generator.lives
            self.events.after(self._random.exponential(self.costs.failure_every_s), lambda: self._die(generator, life))

    def _die(self, generator: VirtualGenerator, life: int) -> None:
        """Whatever it held is lost; the ledger learns of it after a silence, or when the generator is back."""
        engine = self._advance(generator)
        assert generator.lives == life, "only a living generator dies"
        self.failures += 1
        self.lost_tokens += engine.running_tokens()
        generator.busy_slot_s += engine.busy_slot_s
        generator.up_s += self.events.now - generator.since
        generator.engine = None
        generator.member.accepting = False
        self._hungry.pop(generator.member.name, None)
        noticed_s = min(self.config.transport.heartbeat_timeout_s, self.costs.restart_s)
        self.events.after(noticed_s, lambda: self._release(generator))
        self.events.after(self.costs.restart_s, lambda: self._come(generator))
        self._done_loading(generator)

    def _release(self, generator: VirtualGenerator) -> None:
        name, now = generator.member.name, self.events.now
        self.ledger.release(name, now)
        self.evaluations.release(name, now)
        self.wake()

    def _advance(self, generator: VirtualGenerator) -> VirtualEngine:
        assert generator.engine is not None, "time passes for living engines only"
        generator.engine.advance(self.events.now)
        return generator.engine

    # --- account --------------------------------------------------------------------------------

    def slot_seconds(self) -> tuple[float, float]:
        """(all, busy) slot-seconds of living engines up to now."""
        total = busy = 0.0
        for generator in self.generators:
            up_s, busy_s = generator.up_s, generator.busy_slot_s
            if generator.engine is not None:
                up_s += self.events.now - generator.since
                busy_s += self._advance(generator).busy_slot_s
            total += up_s * generator.member.slots
            busy += busy_s
        return total, busy

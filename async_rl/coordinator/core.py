"""The coordinator: one thread that owns the socket, the ledger, the members and the publications.

It wires pure state machines (ledger, membership, publication, evaluation) to the transport and to a clock; it decides
nothing that they decide. It imports no torch: the blocking work of a publication is done by `transfer`, whose futures
come back as calls into this thread. The learner's calls (`facade.py`) are queued for this thread too; all methods but
`post`, `start` and `stop` run on it.

One turn: take messages and calls, expire silent members, advance publication and evaluation, lease, serve the batch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from async_rl import protocol as p
from async_rl import publication as pub
from async_rl.addresses import join_address
from async_rl.buffer import Answer, Ledger, TrajectoryGroup
from async_rl.checkpoints.work import capture
from async_rl.config import Config
from async_rl.coordinator import calls as c
from async_rl.coordinator.clock import ObservedClock
from async_rl.coordinator.facade import STOP_S, Facade
from async_rl.coordinator.publishing import Publishing, Surroundings, Transfer
from async_rl.coordinator.reach import Reach
from async_rl.coordinator.reports import Reports
from async_rl.coordinator.resumed import Lines, Resumed
from async_rl.evaluation import EvaluationResult, Evaluations
from async_rl.frames import one_line
from async_rl.http import StatusServer
from async_rl.keys import keys_of
from async_rl.leasing import LeaseDeadlines, Leasing, lease_timeout_s
from async_rl.membership import Member, Membership
from async_rl.transport import Server, peer_identity

log = logging.getLogger(__name__)

TURN_S = 0.25
"""Longest sleep of a turn; deadlines are seen at this resolution."""
TICK_S = 0.05
"""Between two looks at all members."""
MAX_GAP_S = 2 * TURN_S
"""Longest time between two readings of the clock that counts in full; in a longer one the coordinator stood still."""
TELL_GAP_S = 2.0
"""A standstill as long as this is told."""
MAX_LEASES = 32
"""Leases of one message; fewer where their rows are too long for one."""


class Coordinator(Facade):
    """See the module's docstring."""

    def __init__(
        self,
        *,
        config: Config,
        run_id: str,
        ledger: Ledger,
        evaluations: Evaluations,
        eval_problems: Sequence[p.Problem],
        leasing: Leasing,
        transfer: Transfer,
        problem_state: Callable[[], dict[str, Any]] = dict,
        resumed: Resumed | None = None,
        notify: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resumed`: the run that this one continues; its work is in `ledger` already."""
        self.config = config
        self.run_id = run_id
        self.lines = Lines(run_id, resumed)
        self.ledger = ledger
        self.evaluations = evaluations
        self.eval_problems = eval_problems
        self.leasing = leasing
        self.problem_state = problem_state
        self.notify = notify
        self.clock = ObservedClock(clock, MAX_GAP_S)
        self.members = Membership(config.transport.heartbeat_timeout_s)
        self.publications = pub.Publications(
            pub.PublicationSettings(deadline_s=config.weights.deadline_s), self.members.epochs
        )
        self.deadlines = LeaseDeadlines(lease_timeout_s(config), ledger, evaluations)
        self.reach = Reach()
        self.server = Server(config.transport.max_message_bytes, keys_of(config, "learner"))
        self.reports = Reports(
            config, run_id, ledger, evaluations, self.members, self.publications, self.server, self.notify
        )
        self.publishing = Publishing(
            self.publications,
            transfer,
            Surroundings(
                send_to=self._send_to,
                lose=self._lose,
                call=self.server.call,
                evict=self._evict,
                published=self._published,
                snapshot_url=self._snapshot_url,
                clock=self.clock,
            ),
        )
        self.http = StatusServer(
            self.status, lambda: dict(self.reports.values), self.publishing.snapshot, self._problem
        )
        self.addresses: dict[str, str] = {}
        self._batch: tuple[TrajectoryGroup, ...] | None = None
        self._request: Future[Any] | None = None
        self._idle_waits: list[tuple[float, Future[Any]]] = []
        """(deadline, answer) of calls that wait until no publication needs the send buffers."""
        self._results: list[EvaluationResult] = []
        self._evaluate_after: set[int] = set()
        self._absent = set(ledger.owners())
        """Owners of leases of an earlier run that have not come back yet."""
        self._dismiss = True
        self._work_changed = True
        self._hungry: set[str] = set()
        """Members that may have free slots: whatever frees one is a message of theirs, or a cancelled lease."""
        self._tick_at = -math.inf
        self._progress_at = self._opened_at = self.clock()
        self._progress_mark: Any = None
        self._stop_reason: str | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self.run, name="coordinator", daemon=True)

    # --- begin and end --------------------------------------------------------------------------

    def start(self) -> dict[str, str]:
        """Open the ports and run on a thread of its own; see `open`."""
        addresses = self.open()
        self._thread.start()
        return addresses

    def open(self) -> dict[str, str]:
        """Open the ports; returns the addresses {"learner": "host:port", "http": "host:port"}.

        Raises InputError for an address that must not be bound, TransportError or OSError for one that cannot.
        """
        t = self.config.transport
        port = self.server.bind(t.host, t.port, t.insecure)
        http_port = self.http.start(t.host, t.http_port, t.insecure or t.keys is not None)
        self.addresses = {"learner": join_address(t.host, port), "http": join_address(t.host, http_port)}
        self._progress_at = self._opened_at = self.clock()
        return self.addresses

    def run(self) -> None:
        """Turn after turn until told to stop; what ends it otherwise is kept in `error`."""
        try:
            self.clock()
            self.clock.take_longest_gap()  # From making it until here there was nothing to look at.
            while self._stop_reason is None:
                self._turn()
            for member in self.members.members() if self._dismiss else ():
                self._send(member, p.Stop(reason=self._stop_reason))
        # The boundary of this thread: whatever it was, the learner's next call or wait raises it.
        except BaseException as error:
            log.exception("the coordinator stopped")
            self.error = error
            for answer in (self._request, *(answer for _, answer in self._idle_waits)):
                if answer is not None:
                    answer.set_exception(error)
        finally:
            self.server.close()

    def stop(self, reason: str, timeout_s: float = STOP_S, dismiss: bool = True) -> None:
        """End the thread; see `Facade.stop`."""
        if self._thread.is_alive():
            self.server.call(lambda: self._do(c.Stop(reason=reason, dismiss=dismiss), Future()))
            self._thread.join(timeout_s)
        self.http.close()

    # --- calls of the learner -------------------------------------------------------------------

    def post(self, call: c.Call) -> Future[Any]:
        """Queue a call for the coordinator's thread; see `Facade.post`."""
        self._raise_end()
        answer: Future[Any] = Future()
        self.server.call(lambda: self._do(call, answer))
        return answer

    def _end(self) -> tuple[BaseException | None, str | None]:
        return self.error, self._stop_reason

    def _do(self, call: c.Call, answer: Future[Any]) -> None:
        """Do a call; a failed question is the asker's, whatever else fails ends the coordinator."""
        now = self.clock()
        match call:
            case c.RequestBatch():
                assert self._request is None, "one batch request at a time"
                self._request = answer
                return
            case c.AwaitPublication():
                limit = now + self.publications.longest_wait_s(len(self.members))
                self._idle_waits.append((limit, answer))
                return
            case c.WithdrawBatch() if self._request is not None:
                self._request.set_result(None)
                self._request = None
            case c.Trained():
                self._trained()
            case c.StartPublication():
                self._start_publication(call.manifest, call.evaluate)
            case c.StartEvaluation():
                self._start_evaluation(call.version)
            case c.Stop():
                self._stop_reason, self._dismiss = call.reason, call.dismiss
            case _:
                self._reply(call, answer)
                return
        answer.set_result(None)

    def _reply(self, call: c.Call, answer: Future[Any]) -> None:
        try:
            answer.set_result(self._question(call))
        except Exception as error:  # the asker's thread raises it
            answer.set_exception(error)

    def _question(self, call: c.Call) -> Any:
        match call:
            case c.GetStatus():
                now = self.clock()
                return self.reports.status(self._describe_wait(now), now)
            case c.Collect():
                return self.reports.collect(call.elapsed_s, self.publishing.take_metrics()).to_wire()
            case c.IsEvaluating():
                return self.evaluations.busy or bool(self._evaluate_after)
            case c.TakeEvaluations():
                results, self._results = self._results, []
                return results
            case c.TakeState():
                return capture(self.ledger, self.problem_state())
            case c.WithdrawBatch():
                return None  # It was served in the meantime.
        raise AssertionError(f"no answer to {type(call).__name__}")

    def _trained(self) -> None:
        assert self._batch is not None, "trained without a batch"
        self.ledger.trained(self._batch)
        self._batch = None
        self._work_changed = True

    # --- the thread -----------------------------------------------------------------------------

    def _turn(self) -> None:
        for identity, message in self.server.poll(TURN_S):
            self._handle(identity, message)
        now = self.clock()
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._tick(now)
        self.publishing.act(self.publications.tick(now))
        self._take_results(self.evaluations.tick(now))
        self._lease(now)
        self._serve_batch(now)
        self._serve_idle_waits(now)

    def _tick(self, now: float) -> None:
        """What depends on time alone and looks at every member: not once for every message of a busy fleet."""
        if (gap := self.clock.take_longest_gap()) >= TELL_GAP_S:
            self.notify(f"the coordinator stood still for {gap:.1f} s; that time counts against no deadline of others")
        for name in self.members.expired(now):
            self._gone(name, f"silent for more than {self.members.heartbeat_timeout_s:g} s")
        self._lose(self.reach.look(self.publications.awaited(), self._probe, now))
        self._expire_leases(now)
        self._reopen_absent(now)
        self._watch_progress(now)

    def _expire_leases(self, now: float) -> None:
        num, hung = self.deadlines.tick(self.members.active(), now)
        if num:
            self._work_changed = True
            limit = self.deadlines.timeout_s
            self.notify(f"{num} leases without a result for {limit:g} s (generator.lease_timeout_s) are open to others")
        for name, reason in hung:
            self._evict(pub.Evict(name, reason))

    def _serve_batch(self, now: float) -> None:
        if self._request is None or self._batch is not None:
            return
        groups = self.ledger.take_batch(now)
        if groups is None and not self.ledger.finished:
            return
        self._batch = groups
        self._request.set_result(groups)
        self._request = None
        self._work_changed = True

    def _serve_idle_waits(self, now: float) -> None:
        """A round evicts whoever hangs and so ends by itself; waiting less would end the run for one hung generator."""
        if not self._idle_waits:
            return
        waits, self._idle_waits = self._idle_waits, []
        for deadline, answer in waits:
            if self.publishing.idle:
                answer.set_result(None)
            elif now > deadline:
                what = self.publishing.describe(now)
                answer.set_exception(TimeoutError(f"a publication does not end: {what}; see weights.deadline_s"))
            else:
                self._idle_waits.append((deadline, answer))

    def _watch_progress(self, now: float) -> None:
        """A learner that waits while nothing at all moves gets an error instead of an endless wait."""
        counts = self.ledger.counts()
        mark = (
            counts,
            self.ledger.events.total(),
            self.publications.published,
            self.reports.meter.totals["generated_tokens"],
        )
        if mark != self._progress_mark or self._request is None:
            self._progress_mark, self._progress_at = mark, now
            return
        limit = self.config.run.stall_timeout_s
        if now - self._progress_at > limit:
            raise c.StallError(
                f"nothing moved for {limit:g} s (run.stall_timeout_s): {self._describe_wait(now)}; "
                "start generators or look at their logs"
            )

    def _describe_wait(self, now: float) -> str:
        parts = [self.ledger.describe_wait(now)]
        if self.publications.round is not None:
            parts.append(self.publications.describe(now))
        if not len(self.members):
            parts.append(f"no generator is connected to {self.addresses.get('learner')}")
        return "; ".join(parts)

    # --- messages -------------------------------------------------------------------------------

    def _handle(self, identity: str, message: p.Message) -> None:
        now = self.clock()
        if isinstance(message, p.Hello):
            self._hello(identity, message, now)
            return
        name, _, incarnation = identity.rpartition("/")
        if isinstance(message, p.Finished):
            fault = self._finished(identity, name, message, now)
        if not self.members.is_current(name, incarnation):
            self.server.forget(identity)
            self.server.send(identity, p.Refused(reason="not a member any more; say Hello again", retry=True))
            return
        self.members.seen(name, now)
        self._hungry.add(name)
        match message:
            case p.Finished():
                if fault is not None:
                    self._evict(pub.Evict(name, fault, alarm=True))
            case p.Heartbeat():
                self._heartbeat(identity, name, incarnation, message, now)
            case p.Returned():
                self.members.leaving(name)
                self.ledger.return_leases(name, [k for k in message.keys if k.kind == "train"], now)
                self.evaluations.return_leases(name, [k for k in message.keys if k.kind == "eval"], now)
                self._work_changed = True
            case p.EpochJoined():
                self.publishing.act(self.publications.epoch_joined(name, message.epoch, message.error, now))
            case p.Received():
                self.publishing.act(
                    self.publications.received(name, message.epoch, message.checksum, message.error, now)
                )
            case p.Loaded():
                if message.error is None:
                    self.members.loaded(name, message.version)
                self.publishing.loaded(name, message, now)
                self._work_changed = True
            case p.Goodbye():
                self._gone(name, one_line(message.reason))
            case _:
                pass

    def _hello(self, identity: str, hello: p.Hello, now: float) -> None:
        if hello.protocol != p.PROTOCOL_VERSION:
            self._refuse(identity, f"it speaks protocol {hello.protocol}, this learner {p.PROTOCOL_VERSION}; "
                                   "install the same async_rl on both sides")  # fmt: skip
            return
        worn_out = self.members.worn_out(hello.name, hello.incarnation)
        if worn_out is not None:
            self._refuse(identity, worn_out, restart=True)
            return
        answer = self.members.hello(hello, now)
        if isinstance(answer, str):
            self._refuse(identity, answer)
            return
        member = answer.member
        if answer.replaced is not None:
            self._release(answer.replaced, f"replaced by process {hello.pid} on {hello.host}")
        self.reports.meter.joined(member.name, member.incarnation, is_new=hello.run_id is None)
        self._absent.discard(member.name)
        self._hungry.add(member.name)
        t = self.config.transport
        welcome = p.Welcome(
            run_id=self.run_id,
            policy_version=self._version(),
            heartbeat_s=t.heartbeat_s,
            heartbeat_timeout_s=t.heartbeat_timeout_s,
            max_message_bytes=t.max_message_bytes,
            ancestors=self.lines.ancestors,
        )
        self.server.send(identity, welcome)
        holding = hello.holding if self.lines.continues(hello.run_id) else ()
        self._reconcile(member, holding, now, sent_before=now)
        if not answer.reconnected:
            self.notify(
                f"generator {member.name} joined ({member.engine}, {member.slots} slots, {member.host}:{member.pid})"
            )
            self.members.loading(member.name)
            self.publishing.act(self.publications.joiner(member.name, member.receivers, now))
        self._work_changed = True

    def _refuse(self, identity: str, reason: str, restart: bool = False) -> None:
        log.warning("refused %s: %s", identity, reason)
        self.server.refused["hello"] += 1
        self.server.send(identity, p.Refused(reason=reason, retry=False, restart=restart))
        self.server.forget(identity)

    def _heartbeat(self, identity: str, name: str, incarnation: str, message: p.Heartbeat, now: float) -> None:
        member = self.members.get(name)
        assert member is not None, "is_current was checked"
        self.members.heartbeat(name, message, now)
        self.reports.meter.update(name, incarnation, message.stats)
        self._reconcile(member, message.holding, now, sent_before=now - self.members.heartbeat_timeout_s)
        self.server.send(identity, p.Alive(run_id=self.run_id, policy_version=self._version()))
        self._work_changed = True

    def _reconcile(self, member: Member, holding: Sequence[p.LeaseKey], now: float, sent_before: float) -> None:
        """Agree with a generator on what it works on; what it need not do is cancelled, what was lost is open again."""
        train = [key for key in holding if key.kind == "train"]
        evals = [key for key in holding if key.kind == "eval"]
        unwanted = [
            *self.ledger.reconcile(member.name, train, sent_before, now).unwanted,
            *self.evaluations.reconcile(member.name, evals, sent_before, now).unwanted,
        ]
        if unwanted:
            self._send(member, p.Cancelled(keys=tuple(unwanted)))

    def _finished(self, identity: str, name: str, message: p.Finished, now: float) -> str | None:
        """Take results and acknowledge them; returns what is wrong with the generator that sent them, if anything."""
        fault = None
        outcomes: list[Answer] = []
        for key, trajectory in message.results():
            outcome: Answer = "unknown"
            if self.lines.includes(message.run_id, trajectory):
                book = self.ledger if key.kind == "train" else self.evaluations
                try:
                    outcome = book.finish(name, key.ticket, key.member, key.attempt, trajectory, now)
                except p.ProtocolError as error:
                    self.server.refused["impossible_versions"] += 1
                    fault = str(error)
            baseline = key.kind == "train" and self.ledger.settings.is_baseline(key.member)
            self.reports.meter.arrived(trajectory, "baseline" if baseline else key.kind, wanted=outcome == "stored")
            if outcome == "stored" and trajectory.status == "failed":
                self.reports.failed(name, key, trajectory, now)
            outcomes.append(outcome)
        self.server.send(identity, p.Acknowledged(keys=message.keys, outcomes=tuple(outcomes)))
        if "stored" in outcomes and name in self.members:
            self.members.delivered(name, now)
        self._work_changed = True
        return fault

    def _version(self) -> int:
        """The last published version; before the first publication the one that it will be."""
        published = self.publications.published
        return self.lines.first_version if published is None else published

    def _reopen_absent(self, now: float) -> None:
        """Owners of a resumed ledger's leases that have not come back in time: others may have their work.

        They lost nothing by their own fault, so this does not count towards the losses after which a member fails.
        """
        if not self._absent or now - self._opened_at <= self.config.transport.heartbeat_timeout_s:
            return
        for name in sorted(self._absent):
            lost = self.ledger.reconcile(name, (), now, now).lost
            self.notify(f"generator {name} has not come back since the resume; {len(lost)} leases are open again")
        self._absent.clear()
        self._work_changed = True

    def _gone(self, name: str, reason: str) -> None:
        member = self.members.leave(name, reason)
        if member is not None:
            self._release(member, reason)

    def _evict(self, action: pub.Evict) -> None:
        member = self.members.evict(action.name, action.reason)
        if member is None:
            return
        if action.alarm:
            log.error("ALARM: generator %s has wrong weights: %s", action.name, action.reason)
        self.reports.error(f"evicted {action.name}: {action.reason}", self.clock())
        # It may come back with a new Hello, and then loads a snapshot; one that hangs every time may not.
        worn_out = self.members.worn_out(member.name, member.incarnation)
        reason = f"evicted: {action.reason}" + (f"; {worn_out}" if worn_out else "")
        self._send(member, p.Refused(reason=reason, retry=worn_out is None, restart=worn_out is not None))
        self._release(member, f"evicted: {action.reason}")

    def _release(self, member: Member, reason: str) -> None:
        """A member is gone: its leases are open again, its place in a publication is given up."""
        now = self.clock()
        returned = [*self.ledger.release(member.name, now), *self.evaluations.release(member.name, now)]
        self.reports.meter.forget(member.name, member.incarnation)
        self._hungry.discard(member.name)
        identity = peer_identity(member.name, member.incarnation)
        self.server.forget(identity)
        self.notify(f"generator {member.name} left: {reason}; {len(returned)} leases are open again")
        self.publishing.act(self.publications.member_gone(member.name, reason, now))
        self._work_changed = True

    def _lose(self, names: Iterable[str]) -> None:
        """What was sent to these members cannot arrive: they are out until they say Hello again."""
        for name in names:
            self._gone(name, "its connection is gone")

    def _probe(self, name: str) -> bool:
        """Whether a member is still connected; one that has left needs no second farewell."""
        alive = p.Alive(run_id=self.run_id, policy_version=self._version())
        return name not in self.members or self._send_to(name, alive)

    def _send(self, member: Member, message: p.Message) -> bool:
        return self.server.send(peer_identity(member.name, member.incarnation), message)

    def _send_to(self, name: str, message: p.Message) -> bool:
        member = self.members.get(name)
        return member is not None and self._send(member, message)

    # --- work -----------------------------------------------------------------------------------

    def _lease(self, now: float) -> None:
        """Hand out what may be handed out, to the members with most free slots first."""
        if not self._work_changed:
            return
        self._work_changed = False
        self._tell_cancelled()
        hungry = [member for member in self.members.active() if member.name in self._hungry]
        if self.leasing.has_work(hungry):
            for member, leases in self.leasing.hand_out(hungry, now):
                parts = (leases[i : i + MAX_LEASES] for i in range(0, len(leases), MAX_LEASES))
                if not all(self._send_leases(member, part) for part in parts):
                    self._lose([member.name])
            self._hungry.difference_update([member.name for member in hungry if not self.leasing.free(member)])
            self._tell_cancelled()

    def _send_leases(self, member: Member, leases: Sequence[p.Lease]) -> bool:
        """Long rows fill a message with few leases: halve until it holds them. Raises TooLarge if one row does not."""
        try:
            return self._send(member, p.Leases.of(leases))
        except p.TooLarge:
            if len(leases) == 1:
                raise
        half = len(leases) // 2
        return all(self._send_leases(member, part) for part in (leases[:half], leases[half:]))

    def _tell_cancelled(self) -> None:
        """Tell owners of leases whose result is no longer wanted; their slots are free."""
        for name, key in [*self.ledger.take_cancelled(), *self.evaluations.take_cancelled()]:
            self._send_to(name, p.Cancelled(keys=(key,)))
            self._hungry.add(name)

    # --- publication and evaluation -------------------------------------------------------------

    def _start_publication(self, manifest: p.Manifest, evaluate: bool) -> None:
        if evaluate:
            self._evaluate_after.add(manifest.version)
        self.publishing.start(manifest, self.members.active())

    def _published(self, version: int) -> None:
        if version in self._evaluate_after:
            self._evaluate_after.discard(version)
            self._start_evaluation(version)
        self._work_changed = True

    def _snapshot_url(self, version: int) -> str:
        return f"http://{self.addresses['http']}{self.http.snapshot_path(version)}"

    def _start_evaluation(self, version: int) -> None:
        self.evaluations.start(version, self.eval_problems, self.clock())
        self._work_changed = True

    def _take_results(self, results: Sequence[EvaluationResult]) -> None:
        self._results.extend(results)

    def _problem(self) -> str | None:
        return None if self.error is None else str(self.error)

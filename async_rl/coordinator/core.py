"""The coordinator: one thread that owns the socket, the ledger, the members and the publications.

It wires pure state machines (ledger, membership, publication, evaluation) to the transport and to a clock; it decides
nothing that they decide. It imports no torch: the blocking work of a publication is done by `transfer`, whose futures
come back as calls into this thread. The learner's calls (`facade.py`) are queued for this thread too; all methods but
`post`, `start` and `stop` run on it.

One turn: take messages and calls, expire silent members, advance publication and evaluation, lease, serve the batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from typing import Protocol as TypingProtocol

from async_rl import protocol as p
from async_rl import publication as pub
from async_rl.addresses import join_address
from async_rl.buffer import Ledger, TrajectoryGroup
from async_rl.checkpoints.work import capture
from async_rl.config import Config
from async_rl.coordinator import calls as c
from async_rl.coordinator.facade import STOP_S, Facade
from async_rl.coordinator.resumed import Lines, Resumed
from async_rl.evaluation import EvaluationResult, Evaluations
from async_rl.fleet import FleetMeter
from async_rl.frames import one_line
from async_rl.http import StatusServer
from async_rl.keys import keys_of
from async_rl.leasing import LeaseDeadlines, Leasing, lease_timeout_s
from async_rl.membership import Member, Membership
from async_rl.metrics import Metrics
from async_rl.transport import Server, peer_identity

log = logging.getLogger(__name__)

TURN_S = 0.25
"""Longest sleep of a turn; deadlines are seen at this resolution."""
MAX_LEASES = 32
"""Leases of one message: hundreds of long rows would exceed what a message may hold."""
MAX_SHOWN_ERRORS = 5
"""Failed members whose error is shown; later ones are only counted."""
ERRORS_KEPT = 8
"""Last errors that /status shows."""

STATUS_RATES = (
    "throughput/generated_tokens_per_s",
    "throughput/dropped_tokens_per_s",
    "generator/idle_share",
    "time/publication_s",
)
"""Metrics of the last step that /status repeats."""


class Transfer(TypingProtocol):
    """The blocking half of publication, done elsewhere; futures raise WeightsError."""

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the rendezvous store."""
        ...

    @property
    def backend(self) -> Any:
        """gloo or nccl."""
        ...

    def join(self, epoch: int, size: int, deadline_s: float) -> Future[float]:
        """Build the group of an epoch; gives seconds."""
        ...

    def send(self, manifest: p.Manifest, deadline_s: float) -> Future[float]:
        """Broadcast in the group that stands; gives seconds."""
        ...

    def snapshot(self, manifest: p.Manifest) -> Future[Path]:
        """Write a file of the version; gives its path."""
        ...


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
        self.transfer = transfer
        self.problem_state = problem_state
        self.notify = notify
        self.clock = clock
        self.members = Membership(config.transport.heartbeat_timeout_s)
        self.publications = pub.Publications(
            pub.PublicationSettings(deadline_s=config.weights.deadline_s), self.members.epochs
        )
        self.deadlines = LeaseDeadlines(lease_timeout_s(config), ledger, evaluations)
        self.meter = FleetMeter()
        self.server = Server(config.transport.max_message_bytes, keys_of(config, "learner"))
        self.http = StatusServer(self.status, self._values, self._snapshots_get, self._problem)
        self.addresses: dict[str, str] = {}
        self._manifest: p.Manifest | None = None
        self._snapshots: dict[int, Path] = {}
        self._snapshot_jobs = 0
        self._batch: tuple[TrajectoryGroup, ...] | None = None
        self._request: Future[Any] | None = None
        self._idle_waits: list[tuple[float, Future[Any]]] = []
        """(deadline, answer) of calls that wait until no publication needs the send buffers."""
        self._results: list[EvaluationResult] = []
        self._publication_metrics = Metrics()
        self._loads: list[p.Loaded] = []
        self._evaluate_after: set[int] = set()
        self._last_values: dict[str, float] = {}
        self._num_errors = 0
        self._last_errors: deque[tuple[float, str]] = deque(maxlen=ERRORS_KEPT)
        self._absent = set(ledger.owners())
        """Owners of leases of an earlier run that have not come back yet."""
        self._dismiss = True
        self._work_changed = True
        self._progress_at = self._opened_at = clock()
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

        Raises ValueError for an address that must not be bound, TransportError or OSError for one that cannot.
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
                limit = now + self.publications.longest_round_s(len(self.members))
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
                return self._status()
            case c.Collect():
                return self._collect(call.elapsed_s).to_wire()
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
        for name in self.members.expired(now):
            self._gone(name, f"silent for more than {self.members.heartbeat_timeout_s:g} s")
        self._expire_leases(now)
        self._reopen_absent(now)
        self._act(self.publications.tick(now))
        self._take_results(self.evaluations.tick(now))
        self._lease(now)
        self._serve_batch(now)
        self._serve_idle_waits(now)
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
            if self.publications.round is None and self._snapshot_jobs == 0:
                answer.set_result(None)
            elif now > deadline:
                what = self.publications.describe(now)
                answer.set_exception(TimeoutError(f"a publication does not end: {what}; see weights.deadline_s"))
            else:
                self._idle_waits.append((deadline, answer))

    def _watch_progress(self, now: float) -> None:
        """A learner that waits while nothing at all moves gets an error instead of an endless wait."""
        counts = self.ledger.counts()
        mark = (counts, self.ledger.events.total(), self.publications.published, self.meter.totals["generated_tokens"])
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
                self._act(self.publications.epoch_joined(name, message.epoch, message.error, now))
            case p.Received():
                self._act(self.publications.received(name, message.epoch, message.checksum, message.error, now))
            case p.Loaded():
                self._loaded(name, message, now)
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
        self._absent.discard(member.name)
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
            self._act(self.publications.joiner(member.name, member.receivers, now))
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
        self.meter.update(name, incarnation, message.stats)
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
        """Take a result and acknowledge it; returns what is wrong with the generator that sent it, if anything."""
        key, trajectory = message.key, message.trajectory
        outcome: Any = "unknown"
        stale = None
        if self.lines.includes(message):
            try:
                if key.kind == "train":
                    outcome = self.ledger.finish(name, key.ticket, key.member, key.attempt, trajectory, now)
                else:
                    outcome = self.evaluations.finish(name, key.ticket, key.member, key.attempt, trajectory, now)
            except p.ProtocolError as error:
                self.server.refused["impossible_versions"] += 1
                stale = str(error)
        self.meter.arrived(trajectory, key.kind, wanted=outcome == "stored")
        if outcome == "stored" and trajectory.status == "failed":
            self._show_error(name, key, trajectory)
        self.server.send(identity, p.Acknowledged(key=key, outcome=outcome))
        if outcome == "stored" and name in self.members:
            self.members.delivered(name, now)
        self._work_changed = True
        return stale

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

    def _show_error(self, name: str, key: p.LeaseKey, trajectory: p.Trajectory) -> None:
        self._num_errors += 1
        why = one_line(trajectory.error or "no reason given")
        text = f"member {key.member} of {key.kind} ticket {key.ticket} failed on {name}: {why}"
        self._remember_error(text)
        if self._num_errors <= MAX_SHOWN_ERRORS:
            last = (
                " (further ones are only counted: reward/failed_share)" if self._num_errors == MAX_SHOWN_ERRORS else ""
            )
            self.notify(f"{text}{last}")

    def _remember_error(self, text: str) -> None:
        self._last_errors.append((self.clock(), text))

    def _gone(self, name: str, reason: str) -> None:
        member = self.members.leave(name, reason)
        if member is not None:
            self._release(member, reason)

    def _release(self, member: Member, reason: str) -> None:
        """A member is gone: its leases are open again, its place in a publication is given up."""
        now = self.clock()
        returned = [*self.ledger.release(member.name, now), *self.evaluations.release(member.name, now)]
        self.meter.forget(member.name, member.incarnation)
        identity = peer_identity(member.name, member.incarnation)
        self.server.forget(identity)
        self.notify(f"generator {member.name} left: {reason}; {len(returned)} leases are open again")
        self._act(self.publications.member_gone(member.name, reason, now))
        self._work_changed = True

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
        for member, leases in self.leasing.hand_out(self.members.active(), now):
            parts = (leases[i : i + MAX_LEASES] for i in range(0, len(leases), MAX_LEASES))
            if not all(self._send(member, p.Leases(leases=tuple(part))) for part in parts):
                self._gone(member.name, "its connection is gone")
        for name, key in [*self.ledger.take_cancelled(), *self.evaluations.take_cancelled()]:
            self._send_to(name, p.Cancelled(keys=(key,)))

    # --- publication ----------------------------------------------------------------------------

    def _start_publication(self, manifest: p.Manifest, evaluate: bool) -> None:
        self._manifest = manifest
        self._loads = []
        if evaluate:
            self._evaluate_after.add(manifest.version)
        active = self.members.active()
        self._act(self.publications.start(manifest.version, manifest.checksum, active, self.clock()))

    def _act(self, actions: Sequence[pub.Action]) -> None:
        for action in actions:
            match action:
                case pub.JoinGroup():
                    self._join_group(action)
                case pub.SendWeights():
                    self._send_weights(action)
                case pub.SendRelabel():
                    for name in action.names:
                        self._send_to(name, p.RelabelVersion(version=action.version))
                case pub.SendSnapshot():
                    self._send_snapshot(action)
                case pub.Evict():
                    self._evict(action)
                case pub.Done():
                    self._published(action.report)

    def _join_group(self, action: pub.JoinGroup) -> None:
        host, port = self.transfer.store
        plan = action.plan
        for name, rank in plan.ranks.items():
            info = p.EpochInfo(
                epoch=plan.epoch,
                backend=self.transfer.backend,
                host=host,
                port=port,
                rank=rank,
                size=plan.size,
                deadline_s=action.deadline_s,
            )
            self._send_to(name, p.JoinEpoch(info=info))
        job = self.transfer.join(plan.epoch, plan.size, action.deadline_s)
        self._when_done(job, lambda error: self.publications.sender_joined(plan.epoch, error, self.clock()))

    def _send_weights(self, action: pub.SendWeights) -> None:
        manifest = self._manifest
        assert manifest is not None and manifest.version == action.version, "the buffers hold what is published"
        for name in action.names:
            self._send_to(name, p.Publish(epoch=action.epoch, manifest=manifest, deadline_s=action.deadline_s))
        job = self.transfer.send(manifest, action.deadline_s)
        self._when_done(job, lambda error: self.publications.sender_sent(action.epoch, error, self.clock()))

    def _when_done(self, job: Future[float], event: Callable[[str | None], Sequence[pub.Action]]) -> None:
        """Feed the outcome of a blocking job into the publication, on this thread."""

        def done(future: Future[float]) -> None:
            if future.cancelled():
                return  # The publisher is closed, and with it the run.
            error = future.exception()
            self.server.call(lambda: self._act(event(None if error is None else str(error))))

        job.add_done_callback(done)

    def _send_snapshot(self, action: pub.SendSnapshot) -> None:
        manifest = self._manifest
        assert manifest is not None and manifest.version == action.version, "snapshots are of the last publication"
        self._snapshot_jobs += 1

        def written(future: Future[Path]) -> None:
            if future.cancelled():
                return
            self.server.call(lambda: self._snapshot_written(action, manifest, future))

        self.transfer.snapshot(manifest).add_done_callback(written)

    def _snapshot_written(self, action: pub.SendSnapshot, manifest: p.Manifest, future: Future[Path]) -> None:
        self._snapshot_jobs -= 1
        now = self.clock()
        if (error := future.exception()) is not None:
            log.error("the snapshot of version %d could not be written: %s", manifest.version, error)
            self._act(self.publications.loaded(action.name, manifest.version, None, str(error), now))
            return
        path = future.result()
        self._snapshots = {manifest.version: path}
        url = f"http://{self.addresses['http']}{self.http.snapshot_path(manifest.version)}"
        self._send_to(
            action.name,
            p.LoadSnapshot(manifest=manifest, path=str(path.resolve()), url=url, deadline_s=action.deadline_s),
        )

    def _loaded(self, name: str, message: p.Loaded, now: float) -> None:
        if message.error is None:
            self.members.loaded(name, message.version)
            self._loads.append(message)
        self._act(self.publications.loaded(name, message.version, message.checksum, message.error, now))
        self._work_changed = True

    def _evict(self, action: pub.Evict) -> None:
        member = self.members.evict(action.name, action.reason)
        if member is None:
            return
        if action.alarm:
            log.error("ALARM: generator %s has wrong weights: %s", action.name, action.reason)
        self._remember_error(f"evicted {action.name}: {action.reason}")
        # It may come back with a new Hello, and then loads a snapshot; one that hangs every time may not.
        worn_out = self.members.worn_out(member.name, member.incarnation)
        reason = f"evicted: {action.reason}" + (f"; {worn_out}" if worn_out else "")
        self._send(member, p.Refused(reason=reason, retry=worn_out is None, restart=worn_out is not None))
        self._release(member, f"evicted: {action.reason}")

    def _published(self, report: pub.Report) -> None:
        metrics = self._publication_metrics
        metrics.last("time/publication_s", report.total_s)
        if report.tries:
            metrics.last("time/wire_s", report.transfer_s)
        for loaded in self._loads:
            if loaded.version == report.version and loaded.source == "broadcast":
                metrics.max("time/load_s", loaded.load_s)
                metrics.max("time/pause_s", loaded.paused_s)
        if report.version in self._evaluate_after:
            self._evaluate_after.discard(report.version)
            self._start_evaluation(report.version)
        self._work_changed = True

    # --- evaluation -----------------------------------------------------------------------------

    def _start_evaluation(self, version: int) -> None:
        self.evaluations.start(version, self.eval_problems, self.clock())
        self._work_changed = True

    def _take_results(self, results: Sequence[EvaluationResult]) -> None:
        self._results.extend(results)

    # --- reports --------------------------------------------------------------------------------

    def _collect(self, elapsed_s: float) -> Metrics:
        metrics = self.meter.collect(elapsed_s, self.ledger.dropped_tokens)
        metrics.merge(self._publication_metrics)
        self._publication_metrics = Metrics()
        counts = self.ledger.counts()
        for name in ("issued", "leased", "buffered", "in_batch", "trained"):
            metrics.last(f"ledger/{name}", getattr(counts, name))
        metrics.last("ledger/dropped", sum(counts.dropped.values()))
        for reason, number in counts.dropped.items():
            metrics.last(f"ledger/dropped_{reason}", number)
        for event, number in self.ledger.events.items():
            metrics.last(f"ledger/event_{event}", number)
        metrics.last("buffer/groups", counts.buffered)
        for reason, number in self.server.refused.items():
            metrics.last(f"transport/refused_{reason}", number)
        active = self.members.active()
        metrics.last("generator/count", len(active))
        metrics.last("generator/slots", sum(m.slots for m in active))
        metrics.last("membership/evicted", self.members.num_evicted)
        self._last_values = metrics.resolve()
        return metrics

    def _status(self) -> dict[str, Any]:
        now = self.clock()
        counts = self.ledger.counts()
        return {
            "name": self.config.run.name,
            "run_id": self.run_id,
            "steps": {"trained": self.ledger.steps, "total": self.config.run.steps},
            "published": self.publications.published,
            "wait": self._describe_wait(now),
            "ledger": {
                "issued": counts.issued,
                "leased": counts.leased,
                "buffered": counts.buffered,
                "in_batch": counts.in_batch,
                "trained": counts.trained,
                "dropped": counts.dropped,
            },
            "events": dict(self.ledger.events),
            "refused": dict(self.server.refused),
            "rates": {key: self._last_values[key] for key in STATUS_RATES if key in self._last_values},
            "errors": [{"ago_s": round(now - at, 1), "text": text} for at, text in self._last_errors],
            "generators": [
                {
                    "name": m.name,
                    "state": m.state,
                    "version": m.version,
                    "slots": m.slots,
                    "outstanding": self.ledger.outstanding(m.name) + self.evaluations.outstanding(m.name),
                    "overdue": self.ledger.overdue(m.name) + self.evaluations.overdue(m.name),
                    "finished": m.stats.finished,
                    "last_seen_s": round(now - m.last_seen, 1),
                    "host": m.host,
                    "pid": m.pid,
                }
                for m in self.members.members()
            ],
            "gone": [{"name": m.name, "reason": m.gone_reason} for m in list(self.members.gone)[-8:]],
        }

    def _values(self) -> dict[str, float]:
        return dict(self._last_values)

    def _snapshots_get(self, version: int) -> Path | None:
        return self._snapshots.get(version)

    def _problem(self) -> str | None:
        return None if self.error is None else str(self.error)

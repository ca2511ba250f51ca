"""What the coordinator tells: metrics of a step, what /status shows, and the last errors of the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from async_rl import __version__
from async_rl import protocol as p
from async_rl.buffer import Ledger
from async_rl.config import Config
from async_rl.evaluation import Evaluations
from async_rl.fleet import FleetMeter
from async_rl.frames import one_line
from async_rl.membership import Member, Membership
from async_rl.metrics import Metrics
from async_rl.publication import Publications
from async_rl.transport import Server

MAX_SHOWN_ERRORS = 5
"""Failed members whose error is shown; later ones are only counted."""
ERRORS_KEPT = 8
"""Last errors that /status shows."""
GONE_SHOWN = 8
"""Last members that went, that /status shows."""

STATUS_RATES = (
    "throughput/generated_tokens_per_s",
    "throughput/dropped_tokens_per_s",
    "generator/idle_share",
    "time/publication_s",
)
"""Metrics of the last step that /status repeats."""


class Reports:
    """Reads the state machines; changes none of them but the meter, whose rates begin anew at each `collect`."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        ledger: Ledger,
        evaluations: Evaluations,
        members: Membership,
        publications: Publications,
        server: Server,
        notify: Callable[[str], None],
    ) -> None:
        self.config, self.run_id = config, run_id
        self.meter = FleetMeter(has_baselines=ledger.settings.baseline)
        self.values: dict[str, float] = {}
        """Of the last `collect`, by key."""
        self._ledger, self._evaluations = ledger, evaluations
        self._members, self._publications = members, publications
        self._server, self._notify = server, notify
        self._num_failed = 0
        self._errors: deque[tuple[float, str]] = deque(maxlen=ERRORS_KEPT)

    def failed(self, name: str, key: p.LeaseKey, trajectory: p.Trajectory, now: float) -> None:
        """A member failed on generator `name`: the first few are shown, all are counted elsewhere."""
        self._num_failed += 1
        why = one_line(trajectory.error or "no reason given")
        text = f"member {key.member} of {key.kind} ticket {key.ticket} failed on {name}: {why}"
        self.error(text, now)
        if self._num_failed <= MAX_SHOWN_ERRORS:
            is_last = self._num_failed == MAX_SHOWN_ERRORS
            self._notify(text + (" (further ones are only counted: reward/failed_share)" if is_last else ""))

    def error(self, text: str, now: float) -> None:
        """Remember something that /status should show."""
        self._errors.append((now, text))

    def collect(self, elapsed_s: float, publication: Metrics) -> Metrics:
        """Metrics of the last `elapsed_s` seconds, with those of publications."""
        metrics = self.meter.collect(elapsed_s, self._ledger.dropped_tokens)
        metrics.merge(publication)
        counts = self._ledger.counts()
        for name in ("issued", "leased", "buffered", "in_batch", "trained"):
            metrics.last(f"ledger/{name}", getattr(counts, name))
        metrics.last("ledger/dropped", sum(counts.dropped.values()))
        for reason, number in counts.dropped.items():
            metrics.last(f"ledger/dropped_{reason}", number)
        for event, number in self._ledger.events.items():
            metrics.last(f"ledger/event_{event}", number)
        metrics.last("buffer/groups", counts.buffered)
        for reason, number in self._server.refused.items():
            metrics.last(f"transport/refused_{reason}", number)
        active = self._members.active()
        metrics.last("generator/count", len(active))
        metrics.last("generator/slots", sum(m.slots for m in active))
        metrics.last("membership/evicted", self._members.num_evicted)
        self.values = metrics.resolve()
        return metrics

    def status(self, wait: str, now: float) -> dict[str, Any]:
        """What /status shows; `wait` says what the learner waits for."""
        counts = self._ledger.counts()
        return {
            "version": __version__,
            "name": self.config.run.name,
            "run_id": self.run_id,
            "steps": {"trained": self._ledger.steps, "total": self.config.run.steps},
            "published": self._publications.published,
            "wait": wait,
            "ledger": {
                "issued": counts.issued,
                "leased": counts.leased,
                "buffered": counts.buffered,
                "in_batch": counts.in_batch,
                "trained": counts.trained,
                "dropped": counts.dropped,
            },
            "events": dict(self._ledger.events),
            "refused": dict(self._server.refused),
            "rates": {key: self.values[key] for key in STATUS_RATES if key in self.values},
            "errors": [{"ago_s": round(now - at, 1), "text": text} for at, text in self._errors],
            "generators": [self._generator(member, now) for member in self._members.members()],
            "gone": [{"name": m.name, "reason": m.gone_reason} for m in list(self._members.gone)[-GONE_SHOWN:]],
        }

    def _generator(self, member: Member, now: float) -> dict[str, Any]:
        name = member.name
        return {
            "name": name,
            "state": member.state,
            "version": member.version,
            "slots": member.slots,
            "outstanding": self._ledger.outstanding(name) + self._evaluations.outstanding(name),
            "overdue": self._ledger.overdue(name) + self._evaluations.overdue(name),
            "finished": member.stats.finished,
            "last_seen_s": round(now - member.last_seen, 1),
            "host": member.host,
            "pid": member.pid,
        }

"""Generators are killed, stopped, cut off, added and removed at random while a run trains; then the account is checked.

    python -m benchmarks.chaos --output benchmarks/results/chaos.json --draw docs/img/chaos.png --table docs/failures.md

First an undisturbed run with two generators, then one with the same settings and seed in which, every few seconds, a
seeded choice of an event befalls one generator. Learner, generators and weights are real processes, engines are `hf`
with the policy of the quickstart, and every generator reaches the learner's port through a proxy that can be cut. What
must hold at the end: the conservation law after every step, every problem trained once or not at all with its place in
the account, no token in the loss older than the bound, the goodbye of every process, and a final accuracy within the
noise of the undisturbed run. `benchmarks.chaos_report` prints, writes and draws the result.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.addresses import free_port
from async_rl.config import load_config
from async_rl.generator import LEAVE_DEADLINE_S
from async_rl.launch import guard
from async_rl.recipes.quickstart import CONFIGS
from async_rl.recipes.tiny_model import build
from async_rl.status import fetch_status
from benchmarks.chaos_report import draw, headlines, read_page, table, write_table
from benchmarks.common import add_result_arguments, check_clean, result_file
from tests.e2e.proxy import Proxy

POLL_S = 0.1
SEEN_S = 0.5
"""For a recovery to show in a status that this program reads."""
HEARTBEAT_TIMEOUT_S = 5.0
WEIGHTS_DEADLINE_S = 15.0
START_S = 120.0
"""Deadline of a start: of the learner's address, and of a generator's first lease."""
EVENTS = ("kill", "strike", "stop", "cut", "reset", "add", "leave")
"""`strike`: stopped until a publication waits for it, then killed."""
PUBLISHING = "publication of version"
"""In the learner's wait while a publication is under way."""
LIMITS_S = {
    "start to first lease": ("deadline of this program", START_S),
    "join to first lease": ("2 x weights.deadline_s", 2 * WEIGHTS_DEADLINE_S),
    "kill to re-lease": ("transport.heartbeat_timeout_s, and half a second to see it", HEARTBEAT_TIMEOUT_S + SEEN_S),
    "stop to re-lease": ("transport.heartbeat_timeout_s, and half a second to see it", HEARTBEAT_TIMEOUT_S + SEEN_S),
    "cut to re-lease": ("transport.heartbeat_timeout_s, and half a second to see it", HEARTBEAT_TIMEOUT_S + SEEN_S),
    "death in a publication to the next good one": ("3 x weights.deadline_s", 3 * WEIGHTS_DEADLINE_S),
    "leave to gone": ("deadline of a goodbye", LEAVE_DEADLINE_S),
}
"""What is waited for -> (the deadline that bounds it, seconds). A joiner's snapshot may wait for a publication under
way; a publication in which somebody died has a stage that fails, a new epoch, and the bytes again."""
MOST_GENERATORS = 4


@dataclass
class Peer:
    """One generator process behind its own proxy."""

    name: str
    process: subprocess.Popen[bytes]
    proxy: Proxy
    started: float
    mend_at: float | None = None
    """When a stopped or cut one goes on."""
    trouble: str = ""

    def mend(self) -> None:
        """End what `stop` and `cut` began."""
        self.mend_at, self.trouble = None, ""
        self.proxy.mend()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)


@dataclass
class Waits:
    """Recoveries that are waited for: what, since when, and how to see in a status that it is there."""

    open: list[tuple[str, float, Callable[[dict[str, Any]], bool]]] = field(default_factory=list)
    """Those without a name only begin another one."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, what: str, seen: Callable[[dict[str, Any]], bool]) -> None:
        self.open.append((what, time.monotonic(), seen))

    def look(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        for what, since, seen in list(self.open):
            if seen(status):
                if what:
                    self.seconds[what].append(now - since)
                self.open.remove((what, since, seen))


class Trial:
    """One run: a learner, a fleet, and (with `rng`) trouble."""

    def __init__(self, folder: Path, steps: int, rng: random.Random | None, *overrides: str) -> None:
        self.folder, self.rng = folder, rng
        port = free_port()
        self.settings = [
            str(CONFIGS / "quickstart.toml"), f"run.dir={folder / 'run'}", f"run.steps={steps}", "run.seed=1",
            "run.stop_at_accuracy=none", "run.save_model=false", "metrics.console=plain", f"transport.port={port}",
            "generator.engine.type=hf", "generator.slots=64", "generator.threads=1", "learner.threads=1",
            "evaluation.every=20", "transport.heartbeat_s=0.5", f"transport.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
            f"weights.deadline_s={WEIGHTS_DEADLINE_S}",
            f"transport.connect_timeout_s={START_S / 2}", *overrides,
        ]  # fmt: skip
        self.target = f"127.0.0.1:{port}"
        self.peers: dict[str, Peer] = {}
        self.waits = Waits()
        self.events: list[dict[str, Any]] = []
        self.num_started = 0
        self.killed: set[str] = set()
        self.progress: list[tuple[float, int]] = []
        """(seconds, steps trained) whenever there was one more."""
        self.struck: Peer | None = None
        """Who is to be killed in the next publication."""
        self.began = time.monotonic()
        self.seconds = 0.0
        """Until the learner ended."""

    # --- processes ------------------------------------------------------------------------------

    def _spawn(self, name: str, *words: str, module: Sequence[str] = ("async_rl.cli",)) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            argv = [sys.executable, "-m", *module, *words]
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def start_generator(self) -> Peer:
        """A further generator; its first lease is waited for."""
        self.num_started += 1
        name, proxy = f"g{self.num_started}", Proxy(self.target)
        words = ("generator", *self.settings, "--name", name, "--learner", proxy.address)
        peer = self.peers[name] = Peer(name, self._spawn(name, *words), proxy, time.monotonic())
        has_lease = self._has_lease(name)
        self.waits.begin("start to first lease", has_lease)
        # Once the learner knows it, the rest of that wait is the learner's.
        self.waits.begin("", lambda status: bool(_member(status, name)) and self._joined(has_lease))
        return peer

    def _has_lease(self, name: str) -> Callable[[dict[str, Any]], bool]:
        return lambda status: _member(status, name).get("outstanding", 0) > 0

    def _joined(self, has_lease: Callable[[dict[str, Any]], bool]) -> bool:
        self.waits.begin("join to first lease", has_lease)
        return True

    @contextmanager
    def processes(self) -> Iterator[subprocess.Popen[bytes]]:
        """Learner and first generators; whatever happens, nothing of them is left."""
        recording = ("tests.e2e.recording_learner", str(self.folder / "trained.jsonl"), "nowhere", "0")
        learner = self._spawn("learner", "learner", *self.settings, module=recording)
        groups = [learner.pid]
        try:
            for _ in range(2):
                groups.append(self.start_generator().process.pid)
            yield learner
        finally:
            groups += [peer.process.pid for peer in self.peers.values()]
            for peer in self.peers.values():
                peer.mend()
            guard.end_groups(groups, 10.0)
            for peer in self.peers.values():
                peer.proxy.close()
                peer.process.wait(10)
            learner.wait(10)

    # --- trouble --------------------------------------------------------------------------------

    def trouble(self, status: dict[str, Any]) -> None:
        """One event to one generator; one at least is always left alone."""
        assert self.rng is not None
        alive = [peer for peer in self.peers.values() if peer.process.poll() is None]
        well = [peer for peer in alive if _member(status, peer.name).get("state") == "active" and not peer.trouble]
        what = self.rng.choice([event for event in EVENTS if event != "strike" or self.struck is None])
        if what == "add" or len(well) < 2:
            if len(alive) < MOST_GENERATORS:
                self._note("add", self.start_generator().name, status)
            return
        peer = self.rng.choice(well)
        self._note(what, peer.name, status)
        getattr(self, f"_{what}")(peer, status)

    def _note(self, what: str, name: str, status: dict[str, Any]) -> None:
        at = round(time.monotonic() - self.began, 1)
        self.events.append({"at_s": at, "event": what, "generator": name, "step": status["steps"]["trained"]})
        print(f"{at:7.1f} s  step {status['steps']['trained']:4}  {what:6} {name}", flush=True)

    def _lost(self, what: str, peer: Peer, status: dict[str, Any]) -> None:
        """Its leases must be open again; in a publication, the others must still get the weights."""
        pid = peer.process.pid
        self.waits.begin(f"{what} to re-lease", lambda now: _member(now, peer.name).get("pid") != pid)
        if PUBLISHING in status["wait"]:
            self._died_publishing(status["published"])

    def _died_publishing(self, published: int | None) -> None:
        what = "death in a publication to the next good one"
        self.waits.begin(what, lambda now: (now["published"] or 0) > (published or 0))

    def _kill(self, peer: Peer, status: dict[str, Any]) -> None:
        peer.process.send_signal(signal.SIGKILL)
        peer.process.wait(10)
        self.killed.add(peer.name)
        self._lost("kill", peer, status)

    def _strike(self, peer: Peer, status: dict[str, Any]) -> None:
        peer.process.send_signal(signal.SIGSTOP)
        peer.trouble, self.struck = "strike", peer

    def _finish_strike(self, status: dict[str, Any]) -> None:
        """Kill who was stopped, as soon as a publication waits for it; else when it was put out before that."""
        assert self.struck is not None
        peer = self.struck
        waited_for = PUBLISHING in status["wait"] and peer.name in status["wait"]
        if waited_for or not _member(status, peer.name):
            self.struck = None
            peer.process.send_signal(signal.SIGKILL)
            peer.process.wait(10)
            self.killed.add(peer.name)
            if waited_for:
                self._died_publishing(status["published"])

    def _stop(self, peer: Peer, status: dict[str, Any]) -> None:
        assert self.rng is not None
        peer.process.send_signal(signal.SIGSTOP)
        peer.trouble, peer.mend_at = "stop", time.monotonic() + HEARTBEAT_TIMEOUT_S * self.rng.uniform(1.5, 3)
        self._lost("stop", peer, status)

    def _cut(self, peer: Peer, status: dict[str, Any]) -> None:
        assert self.rng is not None
        peer.proxy.cut()
        peer.trouble, peer.mend_at = "cut", time.monotonic() + HEARTBEAT_TIMEOUT_S * self.rng.uniform(1.5, 3)
        self._lost("cut", peer, status)

    def _reset(self, peer: Peer, status: dict[str, Any]) -> None:
        peer.proxy.reset()

    def _leave(self, peer: Peer, status: dict[str, Any]) -> None:
        peer.process.send_signal(signal.SIGTERM)
        self.waits.begin("leave to gone", lambda now: not _member(now, peer.name))

    # --- the run --------------------------------------------------------------------------------

    def run(self, limit_s: float) -> dict[str, Any]:
        """Until the learner has ended; raises AssertionError when something that must hold does not."""
        with self.processes() as learner:
            address = self._http_address(learner)
            next_trouble = time.monotonic() + 5.0
            while learner.poll() is None:
                assert time.monotonic() - self.began < limit_s, f"not done after {limit_s:g} s: {self.folder}"
                time.sleep(POLL_S)
                try:
                    status = fetch_status(address)
                except ConnectionError:
                    continue  # It is ending.
                self.waits.look(status)
                self._note_progress(status["steps"]["trained"])
                if self.struck is not None:
                    self._finish_strike(status)
                for peer in self.peers.values():
                    if peer.mend_at is not None and time.monotonic() >= peer.mend_at:
                        peer.mend()
                if self.rng and status["steps"]["trained"] >= 1 and time.monotonic() >= next_trouble:
                    self.trouble(status)
                    next_trouble = time.monotonic() + self.rng.uniform(2.0, 6.0)
            self.seconds = round(time.monotonic() - self.began, 1)
            assert learner.returncode == 0, f"the learner ended with {learner.returncode}: {self._log('learner')}"
            self._await_goodbyes()
            return self._check()

    def _note_progress(self, step: int) -> None:
        if not self.progress or self.progress[-1][1] != step:
            self.progress.append((round(time.monotonic() - self.began, 1), step))

    def _await_goodbyes(self) -> None:
        """Every generator that still lives ends by itself, told by the learner or at the end of its patience."""
        for peer in self.peers.values():
            peer.mend()
        self.struck = None
        for peer in self.peers.values():
            if peer.name not in self.killed:
                code = peer.process.wait(START_S)
                assert code in (0, 1, 130), f"{peer.name} ended with {code}: {self._log(peer.name)}"

    def _log(self, name: str) -> str:
        """Where a process wrote, and its last lines: the folder may be a temporary one."""
        file = self.folder / f"{name}.log"
        return "\n".join([str(file), *file.read_text(errors="replace").splitlines()[-20:]])

    def _http_address(self, learner: subprocess.Popen[bytes]) -> str:
        file, deadline = self.folder / "run" / "address", time.monotonic() + START_S
        while not file.exists():
            assert learner.poll() is None and time.monotonic() < deadline, f"no start: {self._log('learner')}"
            time.sleep(POLL_S)
        return str(json.loads(file.read_text())["http"])

    def _check(self) -> dict[str, Any]:
        """The laws, from the lines of metrics.jsonl, and the figures."""
        rows = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        bound = load_config(self.settings[0], self.settings[1:]).staleness.max_staleness
        accounts = [row for row in rows if "ledger/issued" in row]
        for row in accounts:
            located = sum(row[f"ledger/{name}"] for name in ("leased", "buffered", "in_batch", "trained", "dropped"))
            assert row["ledger/issued"] == located, (
                f"step {row['step']}: {row['ledger/issued']} issued, {located} found"
            )
        worst = max(row["staleness/max"] for row in rows if "staleness/max" in row)
        assert worst <= bound, f"staleness {worst}, the bound is {bound}"
        check_trained(self._trained(), int(accounts[-1]["ledger/trained"]))
        evaluated = [row for row in rows if "eval/accuracy" in row]
        last = evaluated[-1]
        return {
            "seconds": self.seconds,
            "steps": rows[-1]["step"],
            "accuracy": last["eval/accuracy"],
            "stderr": last.get("eval/stderr"),
            "max_staleness": worst,
            "ledger": {
                key.partition("/")[2]: value for key, value in accounts[-1].items() if key.startswith("ledger/")
            },
            "num_events": len(self.events),
            "problems_trained_once": len(self._trained()),
            "curve": [[self._seconds_of(row["step"]), row["step"], row["eval/accuracy"]] for row in evaluated],
        }

    def _trained(self) -> list[int]:
        """Tickets in the order in which the learner trained them."""
        return [json.loads(line)["ticket"] for line in (self.folder / "trained.jsonl").read_text().splitlines()]

    def _seconds_of(self, step: int) -> float:
        """When the step was first seen as trained; the end of the run if it ended with it."""
        return next((seconds for seconds, seen in self.progress if seen >= step), self.seconds)


def check_trained(tickets: Sequence[int], counted: int) -> None:
    """Every problem was trained once: no ticket twice, and as many as the ledger counts.

    With the conservation law, every other ticket is leased, buffered or dropped with a counted reason.
    """
    twice = sorted(ticket for ticket, times in Counter(tickets).items() if times > 1)
    assert not twice, f"trained more than once: tickets {twice[:10]}"
    assert len(tickets) == counted, f"{len(tickets)} groups were trained, the ledger counts {counted}"


def _member(status: dict[str, Any], name: str) -> dict[str, Any]:
    """The status of a generator; empty if it is not there."""
    return next((member for member in status["generators"] if member["name"] == name), {})


def spread(what: str, seconds: list[float]) -> dict[str, Any]:
    """A recovery beside the deadline that bounds it."""
    deadline, limit_s = LIMITS_S[what]
    figures = {"n": len(seconds), "median_s": round(statistics.median(seconds), 2), "max_s": round(max(seconds), 2)}
    return figures | {"deadline": deadline, "deadline_s": limit_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--limit-s", type=float, default=560.0, help="of each of the two runs")
    parser.add_argument("--draw", type=Path, help="picture of both runs and of the events, such as docs/img/chaos.png")
    parser.add_argument("--table", type=Path, help="page between whose marks the tables are written")
    parser.add_argument("--keep", type=Path, help="folder for logs and metrics; default: a temporary one")
    add_result_arguments(parser)
    arguments = parser.parse_args()
    check_clean(arguments)
    if arguments.table:
        try:
            read_page(arguments.table)
        except ValueError as error:
            parser.error(str(error))
    build(Path(load_config(CONFIGS / "quickstart.toml").model.path), print)
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        figures = compare(folder, arguments)
        result_file(arguments, "benchmarks.chaos", figures, headlines(figures))
    print(table(figures))
    if found := late(figures):
        print(f"error: later than the deadline: {found}", file=sys.stderr)
    if arguments.draw:
        draw(figures, arguments.draw)
    if arguments.table:
        write_table(figures, arguments.table, arguments.draw)
    return 1 if found else 0


def late(figures: dict[str, Any]) -> str:
    """Recoveries that took longer than what bounds them; empty if there are none."""
    rows = figures["recoveries"].items()
    return ", ".join(f"{what} {row['max_s']:g} s" for what, row in rows if row["max_s"] > row["deadline_s"])


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both runs; the accuracies must agree within three standard errors of their difference."""
    figures: dict[str, Any] = {"seed": arguments.seed}
    for name, rng in (("undisturbed", None), ("disturbed", random.Random(arguments.seed))):
        (folder / name).mkdir(parents=True, exist_ok=True)
        trial = Trial(folder / name, arguments.steps, rng)
        figures[name] = trial.run(arguments.limit_s)
    figures["events"] = trial.events
    seconds = trial.waits.seconds
    figures["recoveries"] = {what: spread(what, seconds[what]) for what in LIMITS_S if seconds[what]}
    figures["not_recovered_at_the_end"] = [what for what, _, _ in trial.waits.open if what]
    one, other = figures["undisturbed"], figures["disturbed"]
    noise = 3 * (one["stderr"] ** 2 + other["stderr"] ** 2) ** 0.5
    figures["accuracy_difference"] = {"value": other["accuracy"] - one["accuracy"], "noise": noise}
    assert abs(other["accuracy"] - one["accuracy"]) <= noise, figures["accuracy_difference"]
    return figures


if __name__ == "__main__":
    raise SystemExit(main())

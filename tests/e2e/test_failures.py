"""Real processes, real signals and cut connections: what docs/failures.md says happens."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from async_rl.addresses import split_address
from async_rl.keys import create_keys
from async_rl.status import fetch_status
from tests.e2e.conftest import Run
from tests.e2e.proxy import proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDLESS = ("run.steps=100000", "evaluation.every=0", "staleness.max_staleness=2")


def steps(run: Run) -> int:
    """Steps in the metrics so far."""
    return max((row["step"] for row in run.metrics()), default=0)


def goes_on(run: Run, number: int = 5) -> None:
    """So many more steps are made."""
    before = steps(run)
    run.until(lambda: steps(run) >= before + number)


def address(run: Run, which: str = "learner") -> str:
    """HOST:PORT that the learner listens on."""
    file = run.folder / "run" / "address"
    run.until(file.exists)
    return str(json.loads(file.read_text())[which])


def status(run: Run) -> dict[str, Any]:
    return fetch_status(address(run, "http"))


def active(run: Run) -> set[str]:
    """Names of the generators that have the weights."""
    return {member["name"] for member in status(run)["generators"] if member["state"] == "active"}


def end(run: Run, learner: subprocess.Popen[str]) -> dict[str, Any]:
    """Check the account and the bound of the run so far, then end it; the last status."""
    last = status(run)
    counts = last["ledger"]
    located = [counts[name] for name in ("leased", "buffered", "in_batch", "trained")]
    assert counts["issued"] == sum(located) + sum(counts["dropped"].values())
    assert max(row["staleness/max"] for row in run.metrics() if "staleness/max" in row) <= 2
    learner.send_signal(signal.SIGINT)
    run.wait(learner, code=130)
    return last


def lines(run: Run, text: str) -> int:
    return run.output().count(text)


def test_a_stopped_generator_loses_its_leases_and_comes_back_under_its_name(run: Run) -> None:
    learner = run.learner(*ENDLESS)
    run.generator("steady", *ENDLESS)
    stopped = run.generator("stopped", *ENDLESS)
    run.until(lambda: lines(run, "generator stopped joined") >= 1)
    goes_on(run, 2)
    joined = lines(run, "generator stopped joined")
    stopped.send_signal(signal.SIGSTOP)
    run.until(lambda: "generator stopped left: silent for more than 8 s" in run.output())
    goes_on(run)
    stopped.send_signal(signal.SIGCONT)
    run.until(lambda: lines(run, "generator stopped joined") > joined)
    goes_on(run)
    run.until(lambda: active(run) == {"steady", "stopped"})
    end(run, learner)
    run.wait(stopped)


def test_a_generator_behind_a_bad_line_comes_back_whenever_it_can(run: Run) -> None:
    """Connections that break off; then silence for longer than the timeout: its leases go to others meanwhile."""
    learner = run.learner(*ENDLESS)
    run.generator("steady", *ENDLESS)
    with proxy(address(run)) as wire:
        far = run.start("generator", str(run.config), *ENDLESS, "--name", "far", "--learner", wire.address)
        run.until(lambda: lines(run, "generator far joined") >= 1)
        goes_on(run, 2)
        for _ in range(3):
            wire.reset()
            goes_on(run, 2)
        run.until(lambda: active(run) == {"steady", "far"})
        gone = lines(run, "generator far left: silent")
        wire.cut()
        run.until(lambda: lines(run, "generator far left: silent") > gone)
        goes_on(run)
        joined = lines(run, "generator far joined")
        wire.mend()
        run.until(lambda: lines(run, "generator far joined") > joined)
        goes_on(run)
        run.until(lambda: active(run) == {"steady", "far"})
        end(run, learner)
        run.wait(far)


@pytest.mark.parametrize("then", ["stays", "is killed"])
def test_a_generator_that_stops_in_a_publication_is_put_out_and_the_rest_gets_the_weights(run: Run, then: str) -> None:
    """Its heartbeat may be late for minutes: the publication's own deadline ends the wait, or the lost connection."""
    deadline_s = 10 if then == "stays" else 400
    overrides = (*ENDLESS, "transport.heartbeat_timeout_s=400", f"weights.deadline_s={deadline_s}")
    learner = run.learner(*overrides)
    steady = run.generator("steady", *overrides)
    hung = run.generator("hung", *overrides)
    run.until(lambda: active(run) == {"steady", "hung"})
    goes_on(run, 2)
    joined = lines(run, "generator hung joined")
    hung.send_signal(signal.SIGSTOP)
    if then == "is killed":
        run.until(lambda: "publication of version" in status(run)["wait"] and "hung" in status(run)["wait"])
        hung.send_signal(signal.SIGKILL)
    why = "its connection is gone" if then == "is killed" else "evicted: did not"
    run.until(lambda: f"generator hung left: {why}" in run.output())
    goes_on(run)
    run.until(lambda: active(run) == {"steady"})
    if then == "stays":
        hung.send_signal(signal.SIGCONT)
        run.until(lambda: lines(run, "generator hung joined") > joined)
        goes_on(run)
    end(run, learner)
    run.wait(steady)


def test_generators_outlive_a_killed_learner_and_work_for_the_next(run: Run) -> None:
    first = run.learner(*ENDLESS)
    generator = run.generator("loyal", *ENDLESS)
    run.until(lambda: steps(run) >= 3)
    joined = lines(run, "generator loyal joined")
    first.send_signal(signal.SIGKILL)
    first.wait(120)
    run.until(lambda: "no word from the learner" in run.output())
    (run.folder / "run" / "address").unlink()
    second = run.learner(*ENDLESS)
    run.until(lambda: lines(run, "generator loyal joined") > joined)
    run.until(lambda: status(run)["ledger"]["trained"] >= 8)
    assert "is back" in run.output(), "it says what it keeps and what it throws away"
    assert [member["pid"] for member in status(run)["generators"]] == [generator.pid]
    second.send_signal(signal.SIGINT)
    run.wait(second, code=130)
    run.wait(generator)


def test_with_keys_the_fleet_works_and_others_stay_out(run: Run) -> None:
    create_keys(run.folder / "keys")
    create_keys(run.folder / "others")
    ours, theirs = (f"transport.keys={run.folder / name}" for name in ("keys", "others"))
    impatient = ("transport.connect_timeout_s=4", "transport.heartbeat_timeout_s=2")
    learner = run.learner(*ENDLESS, ours)
    good = run.generator("good", *ENDLESS, ours)
    run.until(lambda: steps(run) >= 2)
    for name, setting in (("stranger", (theirs,)), ("keyless", ())):
        stranger = run.generator(name, *ENDLESS, *setting, *impatient)
        run.wait(stranger, code=1)
        assert lines(run, f"generator {name} joined") == 0
    assert "see that both ends have key files of the same pair" in run.output()
    goes_on(run, 2)
    refused = end(run, learner)["refused"]
    assert refused["handshake"] > 0
    assert [word for word in refused if word not in ("handshake", "wrong_key")] == []
    run.wait(good)


def test_a_readable_key_file_is_refused_before_anything_starts(run: Run) -> None:
    for path in create_keys(Path(run.folder / "keys")):
        path.chmod(0o644)
    setting = f"transport.keys={run.folder / 'keys'}"
    run.wait(run.learner(setting), code=2)
    run.wait(run.generator("g", setting), code=2)
    assert lines(run, "mode 644, so others can read it; run: chmod 600") == 2


def test_a_learner_without_generators_ends_with_the_reason(run: Run) -> None:
    learner = run.learner(*ENDLESS, "run.stall_timeout_s=3", "weights.deadline_s=2")
    run.wait(learner, code=1)
    host, port = split_address(address(run))
    assert "nothing moved for 3 s (run.stall_timeout_s): step 1 waits for 4 of 4 groups" in run.output()
    assert f"no generator is connected to {host}:{port}; start generators" in run.output()

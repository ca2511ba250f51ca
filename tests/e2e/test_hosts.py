"""Learner and generators on hosts of their own: other addresses, keys, no shared folder, and a cable that is pulled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.addresses import split_address
from async_rl.keys import create_keys
from tests.e2e.conftest import Run
from tests.e2e.namespaces import Host, Network, network, why_not
from tests.e2e.test_failures import ENDLESS, goes_on, lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CUT_S = 20.0 if os.environ.get("ASYNC_RL_LONG") == "1" else 0.0
"""How long the cable stays out at least; the heartbeat timeout of 3 s is waited for in any case."""


@pytest.fixture
def wires() -> Iterator[Network]:
    """A network without hosts. It is made before a run's processes start, and removed when they have ended."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture
def fleet(wires: Network, run: Run) -> Iterator[Fleet]:
    """A run whose learner has the first host."""
    fleet = Fleet(run, wires)
    yield fleet
    fleet.end()


class Fleet:
    """A run over a network; every command has a host and sees nothing of the learner's snapshots or keys."""

    def __init__(self, run: Run, wires: Network) -> None:
        self.run, self.wires = run, wires
        self.learner_host = wires.add("learner")
        create_keys(run.folder / "keys")
        (run.folder / "worker-keys").mkdir(mode=0o700)
        (run.folder / "keys" / "generator.key").rename(run.folder / "worker-keys" / "generator.key")
        self.snapshots = run.folder / "run" / "snapshots"
        self.snapshots.mkdir(parents=True)

    def learner(self, *overrides: str) -> subprocess.Popen[str]:
        words = ("learner", str(self.run.config), *self._settings("keys"), *overrides)
        return self.run.start(*words, within=self.learner_host.within())

    def generator(self, name: str, host: Host, *overrides: str) -> subprocess.Popen[str]:
        own = f"run.dir={self.folder(name)}"
        words = ("generator", str(self.run.config), *self._settings("worker-keys"), own, *overrides, "--name", name)
        return self.run.start(*words, within=host.within(hidden=str(self.snapshots)))

    def folder(self, name: str) -> Path:
        """A generator's own run directory."""
        return self.run.folder / name

    def end(self) -> None:
        """Namespaces go with their last process."""
        for process in self.run.processes:
            if process.poll() is None:
                process.kill()
                process.wait(30)

    def _settings(self, keys: str) -> tuple[str, ...]:
        return (f"transport.host={self.learner_host.address}", f"transport.keys={self.run.folder / keys}")


def check_account(run: Run) -> None:
    """Every problem of the last line is somewhere, and no token was older than allowed."""
    last = [row for row in run.metrics() if "ledger/issued" in row][-1]
    located = [last[f"ledger/{name}"] for name in ("leased", "buffered", "in_batch", "trained", "dropped")]
    assert last["ledger/issued"] == sum(located), last
    assert max(row["staleness/max"] for row in run.metrics() if "staleness/max" in row) <= 2


@pytest.mark.parametrize("netem", ["", "delay 20ms 5ms loss 1%"], ids=["good wire", "delay and loss"])
def test_a_run_over_several_hosts_to_its_end(fleet: Fleet, netem: str) -> None:
    run, hosts = fleet.run, [fleet.wires.add(name) for name in ("g0", "g1")]
    if netem:
        try:
            for host in (fleet.learner_host, *hosts):
                fleet.wires.spoil(host, *netem.split())
        except RuntimeError as error:
            pytest.skip(str(error))
    patient = ("transport.heartbeat_timeout_s=60", "weights.deadline_s=60", "staleness.max_staleness=2")
    learner = fleet.learner(*patient)
    generators = [fleet.generator(f"g{number}", host, *patient) for number, host in enumerate(hosts)]
    run.wait(learner)
    for generator in generators:
        run.wait(generator)
    assert [row["step"] for row in run.metrics() if "loss/tokens" in row] == [1, 2, 3, 4, 5, 6]
    assert max(row.get("membership/evicted", 0) for row in run.metrics()) == 0
    check_account(run)
    addresses = json.loads((run.folder / "run" / "address").read_text())
    assert {split_address(address)[0] for address in addresses.values()} == {fleet.learner_host.address}
    assert all((fleet.folder(name) / "downloads" / name).is_dir() for name in ("g0", "g1")), "snapshots came over HTTP"


def test_a_host_whose_cable_is_pulled_comes_back_under_its_name(fleet: Fleet) -> None:
    """In whatever the run is doing then, a broadcast included: the rest goes on at the heartbeat timeout."""
    run = fleet.run
    overrides = (*ENDLESS, "weights.deadline_s=200", "run.stall_timeout_s=300")
    host = fleet.wires.add("far")
    learner = fleet.learner(*overrides)
    near = fleet.generator("near", fleet.wires.add("near"), *overrides)
    far = fleet.generator("far", host, *overrides)
    run.until(lambda: lines(run, "generator far joined") and lines(run, "generator near joined"))
    goes_on(run, 2)
    left = lines(run, "generator far left")
    fleet.wires.cut(host)
    began = time.monotonic()
    run.until(lambda: lines(run, "generator far left") > left)
    assert re.search(r"generator far left: .*; \d+ leases are open again", run.output())
    goes_on(run, 3)
    run.until(lambda: time.monotonic() - began >= CUT_S)
    joined = lines(run, "generator far joined")
    fleet.wires.mend(host)
    run.until(lambda: lines(run, "generator far joined") > joined)
    goes_on(run, 3)
    learner.send_signal(signal.SIGINT)
    run.wait(learner, code=130)
    check_account(run)
    run.wait(near)
    run.wait(far)

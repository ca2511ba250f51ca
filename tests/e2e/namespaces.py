"""Hosts on one machine: network namespaces with addresses of their own, plugged into a switch of their own.

Everything stands inside of the namespaces; the machine's own network is not touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

COMMAND_S = 60.0
_NUMBERS = itertools.count()


def _ip(*words: str) -> None:
    """Run `ip`, or `tc` where it is the first word; raises RuntimeError with what it said."""
    argv = list(words) if words[0] == "tc" else ["ip", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {' '.join(done.stderr.split())}")


@dataclass(frozen=True)
class Host:
    """One namespace, its address and its plug in the switch."""

    namespace: str
    address: str
    plug: str

    def within(self, hidden: str | None = None) -> tuple[str, ...]:
        """Words before a command that make it run here; `hidden` is a folder that it sees empty."""
        enter = ("ip", "netns", "exec", self.namespace)
        # `ip netns exec` gives its command a mount namespace too: what is mounted there is seen there alone.
        return enter if hidden is None else (*enter, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', hidden)


class Network:
    """A switch and the hosts at it."""

    def __init__(self) -> None:
        self._prefix = f"arl{os.getpid()}-{next(_NUMBERS)}"
        self._namespaces: list[str] = []
        self._switch = self._namespace("switch")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")

    def add(self, name: str) -> Host:
        """A host at 10.77.0.N."""
        namespace = self._namespace(name)
        number = len(self._namespaces) - 1
        host = Host(namespace, f"10.77.0.{number}", f"port{number}")
        _ip("-n", self._switch, "link", "add", host.plug, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._switch, "link", "set", host.plug, "master", "switch", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        return host

    def cut(self, host: Host) -> None:
        """Pull the host's cable: nothing passes, and no connection is told."""
        _ip("-n", self._switch, "link", "set", host.plug, "down")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", host.plug, "up")

    def spoil(self, host: Host, *netem: str) -> None:
        """Delay or lose what the host is sent (tc-netem); RuntimeError with the kernel's words where it cannot."""
        _ip("tc", "-n", self._switch, "qdisc", "replace", "dev", host.plug, "root", "netem", *netem)

    def close(self) -> None:
        """Remove everything; the processes in it must have ended."""
        for namespace in self._namespaces:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "delete", namespace)

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        return namespace


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network that is gone at the end."""
    made = Network()
    try:
        yield made
    finally:
        made.close()


def why_not() -> str | None:
    """Why this machine makes no namespaces; None: it does."""
    if shutil.which("ip") is None:
        return "no `ip` here (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network() as tried:
            tried.add("probe")
    except RuntimeError as error:
        return str(error)
    return None

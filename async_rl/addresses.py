"""Network addresses as users write them, and which of them other machines can reach."""

from __future__ import annotations

import ipaddress
import socket

from async_rl.errors import InputError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` (an IPv6 host in brackets); raises InputError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"address {address!r} is not HOST:PORT, such as 127.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int | str) -> str:
    """`HOST:PORT`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now; another process may still take it before its user does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

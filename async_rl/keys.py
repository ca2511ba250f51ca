"""Key files of a run: CURVE key pairs that let generators into the learner's port and encrypt what passes through it.

`async-rl keys FOLDER` writes two files. learner.key stays on the learner's machine. generator.key goes to every machine
of the fleet: whoever holds it may join the run, and with it alone nobody can pose as the learner.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

import msgspec
import zmq
from zmq.utils import z85

from async_rl.config import Config
from async_rl.errors import InputError

Role = Literal["learner", "generator"]


class Keys(msgspec.Struct, frozen=True):
    """One end's key pair and the other end's public key, each 40 characters of Z85."""

    public: bytes
    secret: bytes
    peer: bytes


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a key file, as JSON."""

    role: Role
    secret: str
    peer: str
    """Public key of the other role."""


def key_path(folder: Path, role: Role) -> Path:
    """Where the key file of a role stands."""
    return folder / f"{role}.key"


def create_keys(folder: Path) -> tuple[Path, Path]:
    """Write new learner.key and generator.key that only their owner can read; returns their paths.

    Raises InputError rather than replacing a key file: runs that use it would lose their fleet.
    """
    paths = (key_path(folder, "learner"), key_path(folder, "generator"))
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists; delete it if no run uses it any more, or name another folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    pairs = (zmq.curve_keypair(), zmq.curve_keypair())
    roles: tuple[Role, Role] = ("learner", "generator")
    for path, role, (_, secret), (peer, _) in zip(paths, roles, pairs, reversed(pairs), strict=True):
        content = msgspec.json.encode(_KeyFile(role, secret.decode(), peer.decode()))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content + b"\n")
    return paths


def load_keys(folder: Path, role: Role) -> Keys:
    """Read the key file of a role; raises InputError if it is not one, or if others than its owner can read it."""
    path = key_path(folder, role)
    if not path.is_file():
        raise InputError(
            f"no key file at {path} (transport.keys); write a pair with `async-rl keys {folder}`, "
            "and copy generator.key to that folder on every machine that runs generators"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(f"key file {path} has mode {mode:o}, so others can read it; run: chmod 600 {path}")
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_KeyFile)
        if len(z85.decode(file.peer)) != 32:
            raise InputError("the other end's key is not 32 bytes")
        keys = Keys(zmq.curve_public(file.secret.encode()), file.secret.encode(), file.peer.encode())
    except (msgspec.MsgspecError, ValueError, KeyError, zmq.ZMQError):
        # The cause is left out: it may quote the secret.
        raise InputError(f"{path} is not a key file as `async-rl keys` writes it; copy it again") from None
    if file.role != role:
        raise InputError(f"{path} holds the key of a {file.role}; the two files were mixed up")
    return keys


def keys_of(config: Config, role: Role) -> Keys | None:
    """The keys that a process of this run uses; None where transport.keys is not set. Raises InputError."""
    return None if config.transport.keys is None else load_keys(Path(config.transport.keys), role)

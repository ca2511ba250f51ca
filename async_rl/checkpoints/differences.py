"""Which settings changed between a checkpoint and the run that resumes from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WITHOUT_WORD = ("run", "transport", "generator", "weights", "checkpoint", "evaluation", "metrics", "rewards")
"""Sections that change nothing in what is learned from the tickets under way."""
ALWAYS_NAMED = ("run.seed", "run.steps")
_MACHINE = ("learner.ranks", "learner.device", "learner.threads", "learner.micro_batch_tokens")


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each setting that may change what is learned: `learner.lr = 1e-06 (was 1e-05)`."""
    before, after = dict(_flat(saved)), dict(_flat(now))
    lines = []
    for path in sorted(before.keys() | after.keys()):
        quiet = path.split(".")[0] in WITHOUT_WORD or path in _MACHINE
        if before.get(path) != after.get(path) and (path in ALWAYS_NAMED or not quiet):
            lines.append(f"{path} = {after.get(path)!r} (was {before.get(path)!r})")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            # Tuples and lists are the same setting once it has been JSON.
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value

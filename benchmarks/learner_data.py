"""The completions of the learner suite: random tokens, lognormal lengths with a long tail, rewards of 0 and 1.

A file of JSON that both sides read: batches of groups, each with `prompt_ids` and members of `completion_ids`,
`behavior_logprobs` and `reward`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Batch = list[dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """What is drawn; lengths in tokens."""

    batches: int
    groups: int = 4
    group_size: int = 8
    median: float = 64.0
    sigma: float = 1.0
    longest: int = 512
    prompt_shortest: int = 40
    prompt_longest: int = 120
    solved: int = 1
    """Groups of each batch whose rewards are all 1: without signal."""
    seed: int = 0


def draw(shape: Shape, vocabulary: int) -> list[Batch]:
    """All batches; tokens are anything but the first ids, where special tokens stand."""
    rng = np.random.default_rng(shape.seed)
    return [
        [_group(rng, shape, vocabulary, i < shape.solved) for i in range(shape.groups)] for _ in range(shape.batches)
    ]


def _group(rng: np.random.Generator, shape: Shape, vocabulary: int, solved: bool) -> dict[str, Any]:
    lengths = rng.lognormal(np.log(shape.median), shape.sigma, shape.group_size)
    rewards = np.ones(shape.group_size) if solved else (np.arange(shape.group_size) % 2).astype(float)
    prompt = int(rng.integers(shape.prompt_shortest, shape.prompt_longest + 1))
    members = [_member(rng, int(np.clip(round(length), 1, shape.longest)), reward, vocabulary)
               for length, reward in zip(lengths, rewards, strict=True)]  # fmt: skip
    return {"prompt_ids": _tokens(rng, prompt, vocabulary), "members": members}


def _member(rng: np.random.Generator, length: int, reward: float, vocabulary: int) -> dict[str, Any]:
    logprobs = (-3 * rng.random(length)).round(4).tolist()
    return {"completion_ids": _tokens(rng, length, vocabulary), "behavior_logprobs": logprobs, "reward": float(reward)}


def _tokens(rng: np.random.Generator, count: int, vocabulary: int) -> list[int]:
    found: list[int] = rng.integers(min(1000, vocabulary // 4), vocabulary, count).tolist()
    return found


def describe(batches: list[Batch]) -> dict[str, float]:
    """What the lengths came out as, over all batches."""
    lengths = np.array([len(m["completion_ids"]) for batch in batches for group in batch for m in group["members"]])
    return {
        "completions": len(lengths),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_median": float(np.median(lengths)),
        "completion_tokens_p90": float(np.quantile(lengths, 0.9)),
        "completion_tokens_longest": int(lengths.max()),
        "prompt_tokens_mean": float(np.mean([len(group["prompt_ids"]) for batch in batches for group in batch])),
    }


def tokens(batch: Batch) -> int:
    """Completion tokens, all of which are in the loss."""
    return sum(len(member["completion_ids"]) for group in batch for member in group["members"])


def save(path: Path, shape: Shape, batches: list[Batch]) -> None:
    path.write_text(json.dumps({"shape": asdict(shape), "batches": batches}) + "\n")


def load(path: Path | str) -> tuple[dict[str, Any], list[Batch]]:
    """Shape and batches of a file."""
    found = json.loads(Path(path).read_text())
    return found["shape"], found["batches"]

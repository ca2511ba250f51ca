"""A worker of the learner suite: one step of async_rl's learner on given completions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config, build_config
from async_rl.learner.model import load_policy
from async_rl.learner.ranks import init_ranks
from async_rl.learner.update import Updater
from async_rl.protocol import Problem, Trajectory, VersionSpan
from benchmarks.learner_data import Batch, load
from benchmarks.workers import Answers, Meter, resident

WAYS = ("whole", "every_sequence", "padded")
"""As users have it; sequences without advantage run too; besides, one sequence a row and no prompt is shared."""


def make_config(settings: dict[str, Any], shape: dict[str, Any]) -> Config:
    """GRPO without KL and without a correction for staleness, which TRL does not make either."""
    return build_config(
        {
            "model": {"path": settings["model"], "dtype": settings["dtype"]},
            "environment": {"type": "arithmetic"},
            "sampling": {"group_size": shape["group_size"], "max_completion_tokens": shape["longest"]},
            "algorithm": {"correction": {"level": "none"}},
            "learner": {
                "batch_groups": shape["groups"],
                "micro_batch_tokens": settings["micro_batch_tokens"],
                "lr": settings["lr"],
                "betas": [0.9, 0.999],
                "device": "cpu",
                "threads": settings["threads"],
            },
        }
    )


def make_groups(batch: Batch, step: int) -> list[TrajectoryGroup]:
    """Groups as the buffer hands them over, sampled by the version that the step starts from."""
    groups = []
    for ticket, group in enumerate(batch):
        members = tuple(_trajectory(member, step) for member in group["members"])
        prompt_ids = np.array(group["prompt_ids"], np.int32)
        groups.append(TrajectoryGroup(ticket, Problem(id=f"p{ticket}", prompt="", prompt_ids=prompt_ids), members))
    return groups


def _trajectory(member: dict[str, Any], step: int) -> Trajectory:
    length = len(member["completion_ids"])
    return Trajectory(
        status="complete",
        completion_ids=np.array(member["completion_ids"], np.int32),
        completion_mask=np.ones(length, np.uint8),
        behavior_logprobs=np.array(member["behavior_logprobs"], np.float32),
        versions=(VersionSpan(step - 1, 0, length),),
        reward=member["reward"],
    )


def make_updater(config: Config, way: str) -> Updater:
    """The learner's own, with what makes it fast taken away as `way` says."""
    ctx = init_ranks(config)
    policy = load_policy(config.model, config.learner, ctx)
    if way == "padded":
        policy.packed = False
        policy.model.set_attn_implementation("sdpa")
    updater = Updater(policy, config, ctx)
    updater.objective.runs_every_sequence |= way != "whole"
    return updater


def work() -> None:
    answers = Answers()
    settings = answers.settings
    shape, batches = load(Path(settings["completions"]))
    updater = make_updater(make_config(settings, shape), settings["way"])
    answers.say(resident_bytes=resident())
    for step, message in enumerate(answers.messages(), start=1):
        groups = make_groups(batches[message["batch"]], step)
        meter = Meter()
        metrics = updater.step(updater.prepare(groups, step), step)
        use = meter.stop()
        values = metrics.resolve()
        answers.say(**asdict(use), loss=values["loss/policy"], grad_norm=values["optimizer/grad_norm"])


if __name__ == "__main__":
    work()

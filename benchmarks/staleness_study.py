"""What staleness costs in learning, and what a correction gives back: the quickstart's task, data of an exact age.

    python -m benchmarks.staleness_study --workers 2 --output benchmarks/results/staleness_study.json
    python -m benchmarks.staleness_study --draw benchmarks/results/staleness_study.json --into docs/staleness_study.md

Every run is one process without a fleet: the batch of step s is sampled by the hf engine's sampler with the weights of
version max(0, s - 1 - k), prepared and trained by the learner's own code. So every token of step s has the staleness
min(k, s - 1), which a fleet only bounds. Batch, group size and learning rate are those of configs/quickstart.toml.

A step makes four updates, not the preset's one: with one, the policy of every update is that of the step's start, no
clip ever acts, and decoupled PPO is REINFORCE with a behavior weight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.buffer import TrajectoryGroup
from async_rl.config import Config, load_config
from async_rl.engines.base import Sample, SampleRequest
from async_rl.engines.hf_batch import Batch, Row
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import completion_text, load_tokenizer
from async_rl.learner.model import Policy, load_policy
from async_rl.learner.ranks import init_ranks
from async_rl.learner.update import Updater
from async_rl.leasing import member_seed
from async_rl.protocol import Problem, SamplingParams, Trajectory
from async_rl.recipes import tiny_model
from async_rl.report import BLUE, GREY, ORANGE, RED, style_axis
from benchmarks import staleness_text
from benchmarks.common import ROOT, add_result_arguments, check_clean, result_file

PRESET = "configs/quickstart.toml"
FIGURE = Path("docs/img/staleness_study.png")
STALENESS = (0, 1, 2, 4, 8, 16)
GOAL = 0.9
EVALUATE_EVERY = 2
"""Steps between evaluations."""
SHARED = ("learner.minibatches=4", "learner.threads=1")


@dataclass(frozen=True)
class Arm:
    """One treatment of old data."""

    label: str
    color: str
    settings: tuple[str, ...]


DECOUPLED, UNWEIGHTED = 'algorithm.loss.type="decoupled_ppo"', 'algorithm.correction.level="none"'
ARMS = {
    "uncorrected": Arm("PPO, data taken for on-policy", RED, (DECOUPLED, UNWEIGHTED)),
    "ppo": Arm("PPO, clipped around the behavior policy", GREY, ('algorithm.loss.type="ppo"',)),
    "truncated": Arm("truncated weight, no clip", ORANGE, ('algorithm.loss.type="reinforce"',)),
    "decoupled": Arm("truncated weight, decoupled clip (default)", BLUE, (DECOUPLED,)),
}
"""Clip around the step's start without a weight; the classic clip; the weight without a clip; both."""


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    arm: str
    staleness: int
    seed: int
    steps: int

    def config(self) -> Config:
        """The preset with this run's settings; steps end where the learning rate's decay does."""
        own = (f"run.seed={self.seed}", f"run.steps={self.steps}", f"staleness.max_staleness={self.staleness}")
        return load_config(str(ROOT / PRESET), [*SHARED, *ARMS[self.arm].settings, *own])


class History:
    """Weights of the last versions, as many as the study's staleness reaches back."""

    def __init__(self, staleness: int) -> None:
        self._kept: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=staleness + 1)

    def add(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the next version; it must outlive the updates that follow."""
        self._kept.append((version, weights))

    def oldest(self) -> tuple[int, Mapping[str, Tensor]]:
        """Version max(0, newest - staleness) and its weights."""
        return self._kept[0]


class Rollouts:
    """Problems in the order of the seed, sampled by any weights and scored."""

    def __init__(self, config: Config) -> None:
        self.config, self.tokenizer = config, load_tokenizer(config.model.path)
        self.environment = build_environment(config)
        self.source = self.environment.problems(self.tokenizer)
        # The learner's model takes packed batches only, so sampling has its own, as in a generator.
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.model.eval().requires_grad_(False)
        self.end_ids = frozenset([self.model.generation_config.eos_token_id])
        held_out = [(problem.prompt, str(problem.answer)) for problem in self.source.eval_problems()]
        self.held_out = tiny_model.encode(self.tokenizer, held_out)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample and evaluate with these from now on."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def groups(self, step: int, version: int) -> list[TrajectoryGroup]:
        """The batch of a step, sampled by what is loaded, which is `version`."""
        count, size = self.config.learner.batch_groups, self.config.sampling.group_size
        problems = {ticket: self.source.draw() for ticket in range((step - 1) * count, step * count)}
        rows = [self._row(problem, ticket, member) for ticket, problem in problems.items() for member in range(size)]
        batch = Batch(self.model)
        for row in rows:
            batch.add(row)
        while len(batch):
            batch.step(version)
        posed = [problem for problem in problems.values() for _ in range(size)]
        members = asyncio.run(self._scored(posed, [row.sample() for row in rows]))
        return [
            TrajectoryGroup(ticket, problem, tuple(members[place * size : (place + 1) * size]))
            for place, (ticket, problem) in enumerate(problems.items())
        ]

    def _row(self, problem: Problem, ticket: int, member: int) -> Row:
        sampling = self.config.sampling
        parameters = SamplingParams(
            max_tokens=sampling.max_completion_tokens,
            temperature=sampling.temperature,
            seed=member_seed(self.config.run.seed, "train", ticket, member),
        )
        return Row(SampleRequest(f"{ticket}/{member}", problem.prompt_ids, parameters), self.end_ids)

    async def _scored(self, problems: Sequence[Problem], samples: Sequence[Sample]) -> list[Trajectory]:
        texts = [completion_text(self.tokenizer, sample.completion_ids) for sample in samples]
        results = [await self.environment.score(*pair) for pair in zip(problems, texts, strict=True)]
        return [
            Trajectory(
                status="truncated" if sample.finish == "length" else "complete",
                completion_ids=sample.completion_ids,
                completion_mask=np.ones(len(sample.completion_ids), dtype=np.uint8),
                behavior_logprobs=sample.logprobs,
                versions=sample.versions,
                reward=result.value,
            )
            for sample, result in zip(samples, results, strict=True)
        ]

    def accuracy(self) -> float:
        """Expected accuracy at temperature 1: the probability of the right answer, mean over held-out problems."""
        return float(tiny_model.answer_probabilities(self.model, *self.held_out).mean())


def run(job: Job) -> dict[str, Any]:
    """One run: its curve of held-out accuracy and how far the data was from the policy."""
    began, config = time.monotonic(), job.config()
    ctx = init_ranks(config)
    torch.manual_seed(job.seed)
    policy = load_policy(config.model, config.learner, ctx)
    updater, rollouts, history = Updater(policy, config, ctx), Rollouts(config), History(job.staleness)
    curve, sample_sizes = [(0, rollouts.accuracy())], []
    for step in range(1, job.steps + 1):
        history.add(step - 1, _weights(policy))
        version, weights = history.oldest()
        rollouts.load(weights)
        values = updater.step(updater.prepare(rollouts.groups(step, version), step), step).resolve()
        assert values["staleness/mean"] == values["staleness/max"] == min(job.staleness, step - 1)
        sample_sizes.append(values["ratio/effective_sample_size"])
        if step % EVALUATE_EVERY == 0 or step == job.steps:
            rollouts.load(_weights(policy))
            curve.append((step, rollouts.accuracy()))
    figures = {"effective_sample_size": round(statistics.fmean(sample_sizes[job.steps // 2 :]), 4)}
    return asdict(job) | curve_figures(curve) | figures | {"seconds": round(time.monotonic() - began, 1)}


def _weights(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.full_parameters("float32")}


def curve_figures(curve: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Last, mean (area under the curve over its steps) and lowest accuracy, the first step at the goal, the curve.

    The curve holds (step, accuracy), step rising; accuracies between two of its points are on the line between them.
    """
    steps, values = zip(*curve, strict=True)
    area = sum((b - a) * (x + y) / 2 for a, b, x, y in zip(steps, steps[1:], values, values[1:], strict=False))
    reached = next((step for step, value in curve if value >= GOAL), None)
    return {
        "final": round(values[-1], 4),
        "mean": round(area / (steps[-1] - steps[0]), 4),
        "lowest": round(min(values), 4),
        "steps_to_goal": reached,
        "curve": [round(value, 4) for value in values],
    }


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean, least and largest of each figure over the seeds of an arm and a staleness, in the order of the study."""
    rows = []
    for arm in ARMS:
        for staleness in sorted({run["staleness"] for run in runs if run["arm"] == arm}):
            same = [run for run in runs if (run["arm"], run["staleness"]) == (arm, staleness)]
            row: dict[str, Any] = {"arm": arm, "staleness": staleness, "seeds": len(same)}
            for key in ("final", "mean", "effective_sample_size"):
                values = [run[key] for run in same]
                row[key] = [round(f(values), 4) for f in (statistics.fmean, min, max)]
            row["steps_to_goal"] = [run["steps_to_goal"] for run in same]
            rows.append(row)
    return rows


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Three panels over staleness, a line an arm, bars from the lowest to the highest seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    ages = sorted({row["staleness"] for row in rows})
    titles = {
        "final": "Held-out accuracy after the last step",
        "mean": "Held-out accuracy, mean over the run",
        "effective_sample_size": "Effective sample size, uncorrected",
    }
    for axis, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for number, (name, arm) in enumerate(ARMS.items()):
            own = [row for row in rows if row["arm"] == name]
            # Side by side, so that bars of arms that agree can be told apart.
            places = [ages.index(row["staleness"]) + 0.06 * (number - 1.5) for row in own]
            values = [row[key] for row in own]
            errors = [[m - low for m, low, _ in values], [high - m for m, _, high in values]]
            label = arm.label if key == "final" else None
            axis.errorbar(places, [mean for mean, _, _ in values], yerr=errors, label=label, color=arm.color,
                          marker="o", markersize=4.5, linewidth=1.6, capsize=2.5, elinewidth=1)  # fmt: skip
        axis.set_title(title, loc="left", fontsize=10.5)
        axis.set_xticks(range(len(ages)), [str(age) for age in ages])
        axis.set_xlabel("staleness of every token (steps)")
        axis.set_ylim(0, 1.03)
        style_axis(axis)
        if axis.get_legend():
            axis.get_legend().remove()
    figure.legend(loc="outside lower center", ncols=len(ARMS), frameon=False, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def study(jobs: Sequence[Job], workers: int) -> list[dict[str, Any]]:
    """All runs, in the order of `jobs`, in processes of one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"  # Inherited; read when torch is imported.
    tiny_model.build(jobs[0].config().model.path)
    results: dict[Job, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(futures):
            job, result = futures[future], future.result()
            results[job] = result
            print(f"{len(results)}/{len(jobs)} {job.arm}, staleness {job.staleness}, seed {job.seed}: accuracy "
                  f"{result['curve'][0]:.3f} -> {result['final']:.3f}, mean {result['mean']:.3f}, {GOAL:g} at step "
                  f"{result['steps_to_goal']}, {result['seconds']:.0f} s", flush=True)  # fmt: skip
    return [results[job] for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS), help="arms to run")
    parser.add_argument("--staleness", nargs="+", type=int, default=STALENESS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2, help="runs at once, one core each")
    parser.add_argument("--draw", type=Path, metavar="RESULT", help=f"run nothing: draw a result into {FIGURE}")
    parser.add_argument(
        "--into", type=Path, metavar="DOCUMENT", help="with --draw: write the table between the marks there"
    )
    add_result_arguments(parser)
    arguments = parser.parse_args()
    if arguments.draw:
        figures = json.loads(arguments.draw.read_text())
        draw(figures["summary"], FIGURE)
        if arguments.into:
            staleness_text.write(figures, arguments.into)
        return
    check_clean(arguments)
    jobs = [
        Job(arm, staleness, seed, arguments.steps)
        for seed in arguments.seeds
        for staleness in arguments.staleness
        for arm in arguments.only
    ]
    runs = study(jobs, arguments.workers)
    settings = {name: [*SHARED, *arm.settings] for name, arm in ARMS.items() if name in arguments.only}
    figures = {"preset": PRESET, "settings": settings, "evaluated_every": EVALUATE_EVERY, "goal": GOAL}
    figures |= {"summary": summarize(runs), "runs": runs}
    result_file(arguments, "benchmarks.staleness_study", figures, staleness_text.headlines(figures))


if __name__ == "__main__":
    main()

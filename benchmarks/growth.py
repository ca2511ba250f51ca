"""How cost grows: coordinator against generators, step time against batch, publication against parameters.

    python -m benchmarks.growth --output benchmarks/results/growth.json     # about eight minutes on two cores
    python -m benchmarks.growth --draw benchmarks/results/growth.json

Three sweeps, each over powers of something, and each point measured by another suite in a process of its own: `soak`
with a fleet in which every generator samples at the same rate, the learner's step of `learner` on a small Llama, and
`weights` with one receiver. The exponent is the slope of a straight line through the logarithms: 1 is proportional,
less is cheaper by the piece.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import (
    ROOT,
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    result_file,
)
from benchmarks.growth_figure import draw
from benchmarks.learner_data import Shape, save, tokens
from benchmarks.learner_data import draw as draw_completions
from benchmarks.weights import SIZES, make_model
from benchmarks.workers import Worker
from tests.tiny_models import character_tokenizer

LIMIT_S = 900.0
"""Of one point."""
RATE = 10.0
"""Tokens/s of one simulated request: half a trajectory a second from each generator."""
TICK_S = 0.01
Point = dict[str, Any]


def suite(name: str, *words: object) -> dict[str, Any]:
    """The result of another suite, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        argv = [sys.executable, "-m", f"benchmarks.{name}", *map(str, words), "--output", str(output), "--allow-dirty"]
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{name} {words}: exit code {done.returncode}\n{done.stderr.decode()[-2000:]}")
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def coordinator(generators: Sequence[int], seconds: float) -> Iterator[Point]:
    """Processor time and memory against generators; batches grow with the fleet."""
    for number in generators:
        words = ["--generators", number, "--seconds", seconds, "--rate", RATE]
        found = suite("soak", *words, "--batch-groups", max(2, number // 8), "--step-s", 0.1)
        yield {
            "generators": number,
            "trajectories_per_s": rate(found["samples"], "trajectories"),
            "messages_per_s": rate(found["samples"], "messages"),
            "cores": rate(found["samples"], "cpu_s", TICK_S),
            "rss_mb": max(found["rss_mb"].values()),
        }


def rate(samples: Sequence[Mapping[str, float]], key: str, least: float = 0.0) -> float:
    """What was added from the first sample to the last, per second; at least `least` in all, what a clock can tell."""
    first, last = samples[0], samples[-1]
    return max(least, last[key] - first[key]) / (last["at_s"] - first["at_s"])


def step(batches: Sequence[int], rounds: int, threads: int) -> Iterator[Point]:
    """Seconds of a step against groups in a batch, each of eight completions; every batch has a worker of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_policy(Path(folder) / "model")
        for groups in batches:
            shape = Shape(rounds + 1, groups, solved=0)
            drawn = draw_completions(shape, 8192)
            completions = Path(folder) / "completions.json"
            save(completions, shape, drawn)
            settings = {"model": str(model), "completions": str(completions), "lr": 1e-6, "dtype": "float32",
                        "threads": threads, "way": "whole", "micro_batch_tokens": 4096}  # fmt: skip
            worker = Worker(sys.executable, "benchmarks.learner_ours", settings, threads)
            try:
                worker.ready()
                taken = [worker.ask({"batch": number}, LIMIT_S) for number in range(rounds + 1)][1:]
            finally:
                worker.close()
            yield {
                "groups": groups,
                "completion_tokens": float(np.mean([tokens(batch) for batch in drawn[1:]])),
                "step_s": Repeated.of(one["wall_s"] for one in taken),
                "peak_mb": max(one["peak_bytes"] for one in taken) / 1e6,
            }


def make_policy(folder: Path) -> Path:
    """The 10M model of `weights`, as a Hugging Face folder."""
    make_model("10M", torch.float32).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def publication(sizes: Sequence[str], rounds: int) -> Iterator[Point]:
    """Seconds of a publication to one receiver against parameters, in bfloat16."""
    found = suite("weights", "--sizes", *sizes, "--receivers", 1, "--rounds", rounds)
    for one in found["sizes"].values():
        yield {"parameters": one["parameters"], "publication_s": one["fleets"][0]["publication_s"]}


def value(point: Mapping[str, Any], key: str) -> float:
    """A figure of a point; the median of one that was measured several times."""
    found = point[key]
    if isinstance(found, Repeated):
        return found.median
    return float(found["median"] if isinstance(found, dict) else found)


def exponent(points: Sequence[Mapping[str, Any]], x: str, y: str) -> float:
    """Slope of log y over log x, by least squares."""
    logs = np.log([[value(point, x), value(point, y)] for point in points])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


CURVES = (
    ("coordinator", "generators", "cores", "processor time of the coordinator, cores"),
    ("coordinator", "generators", "rss_mb", "memory of the coordinator's process, MB"),
    ("step", "completion_tokens", "step_s", "seconds of a step"),
    ("publication", "parameters", "publication_s", "seconds of a publication"),
)
"""Sweep, what grows, what it costs, and how that is called."""


def headlines(figures: Mapping[str, Any]) -> list[Headline]:
    """The exponent of every curve, and its last point."""
    found = []
    for sweep, x, y, name in CURVES:
        points = figures[sweep]
        last = value(points[-1], x)
        found.append(Headline(f"{name}: exponent over {x.replace('_', ' ')}", exponent(points, x, y)))
        found.append(Headline(f"{name}, at {last:.4g} {x.replace('_', ' ')}", value(points[-1], y)))
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All three sweeps, a line for every point."""
    sweeps = {
        "coordinator": coordinator(arguments.generators, arguments.seconds),
        "step": step(arguments.groups, arguments.rounds, arguments.threads),
        "publication": publication(arguments.sizes, arguments.rounds),
    }
    figures: dict[str, Any] = {}
    for name, points in sweeps.items():
        figures[name] = []
        for point in points:
            figures[name].append(point)
            print(f"{name}: " + ", ".join(f"{key} {value(point, key):.4g}" for key in point), flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", nargs="+", type=int, default=[10, 30, 100, 250, 500])
    parser.add_argument("--seconds", type=float, default=20.0, help="for which a fleet is measured")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], help="groups of a batch")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models published")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    add_draw_argument(parser)
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.draw:
        draw_result(arguments.draw, draw)
        return 0
    check_clean(arguments)
    figures = run(arguments)
    result_file(arguments, "benchmarks.growth", figures, headlines(figures))
    if arguments.output:
        draw_result(arguments.output, draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Trained tokens/s and peak memory of an optimizer step on long-tailed completions, against TRL's GRPOTrainer.

    make peers
    python -m benchmarks.learner --output benchmarks/results/learner.json
    python -m benchmarks.learner --draw benchmarks/results/learner.json
    python -m benchmarks.learner --table benchmarks/results/learner.json

Both sides take the step that GRPO asks for, on the same completions (a file of token ids and rewards), from the same
weights, with the same threads, type and optimizer, and nothing is sampled. Loss and gradient norm of every step must
agree first. The sides take turns in every round, so that a busy machine hits all alike; the first round warms them up
and is left out. Trained tokens are those of all completions of the batch, whichever of them a side has to run.

TRL is given the better of several settings, found before the rounds; its defaults run beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import (
    Headline,
    Repeated,
    add_draw_argument,
    add_result_arguments,
    check_clean,
    draw_result,
    read_result,
    result_file,
)
from benchmarks.learner_data import Shape, describe, draw, load, save, tokens
from benchmarks.learner_figure import draw as draw_figure
from benchmarks.learner_figure import table
from benchmarks.workers import Worker, peer_python, peers_missing

MODEL = "models/smollm2-135m-instruct"
WAYS = {
    "whole": "async_rl",
    "every_sequence": "async_rl, every sequence run",
    "padded": "async_rl, every sequence run, padded",
}
BEST, DEFAULTS = "TRL, its best setting", "TRL, its defaults"
TOLERANCE = 1e-3
"""Largest relative difference of gradient norms: float32, summed in another order, makes about 1e-6."""
Step = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What TRL leaves to its user: completions of one forward, and recomputing activations."""

    completions_each: int
    gradient_checkpointing: bool = False

    def __str__(self) -> str:
        return f"{self.completions_each} a forward{', checkpointing' if self.gradient_checkpointing else ''}"


TRL_DEFAULTS = Setting(8, gradient_checkpointing=True)


class Bench:
    """The sides of one run; each is a process of its own, so that its memory is its own."""

    def __init__(self, common: dict[str, Any], timeout_s: float) -> None:
        self.common, self.timeout_s = common, timeout_s
        self.workers: dict[str, Worker] = {}
        self.resident: dict[str, float] = {}

    def add_ours(self, way: str, micro_batch_tokens: int) -> None:
        settings = self.common | {"way": way, "micro_batch_tokens": micro_batch_tokens}
        self._add(WAYS[way], sys.executable, "benchmarks.learner_ours", settings)

    def add_trl(self, name: str, setting: Setting) -> None:
        python = peer_python()
        assert python is not None, peers_missing()
        self._add(name, python, "benchmarks.learner_trl", self.common | asdict(setting))

    def _add(self, name: str, python: Path | str, module: str, settings: dict[str, Any]) -> None:
        self.workers[name] = Worker(python, module, settings, self.common["threads"])

    def await_ready(self) -> None:
        """Wait until every side has loaded its model."""
        for name in self.workers.keys() - self.resident.keys():
            self.resident[name] = self.workers[name].ready()["resident_bytes"]

    def step(self, name: str, batch: int) -> Step:
        return self.workers[name].ask({"batch": batch}, self.timeout_s)

    def rounds(self, count: int) -> Iterator[dict[str, Step]]:
        """Every side on batch 0, then on the next ones; each round begins with another side."""
        names = list(self.workers)
        for number in range(count):
            first = number % len(names)
            taken = {name: self.step(name, number) for name in names[first:] + names[:first]}
            yield {name: taken[name] for name in names}

    def close(self, *names: str) -> None:
        for name in names or [*self.workers]:
            self.workers.pop(name).close()


def choose(bench: Bench, settings: Sequence[Setting]) -> tuple[Setting, dict[str, Step]]:
    """The fastest setting of TRL in one step of the first batch, and what each took."""
    taken = {}
    for setting in settings:
        try:
            bench.add_trl(str(setting), setting)
            bench.await_ready()
            taken[str(setting)] = bench.step(str(setting), 0)
        finally:
            bench.close()
        print(f"TRL, {setting}: {taken[str(setting)]['wall_s']:.1f} s", flush=True)
    return min(settings, key=lambda setting: taken[str(setting)]["wall_s"]), taken


def summarize(rounds: Sequence[Mapping[str, Step]], counts: Sequence[int], base: str | None) -> dict[str, Any]:
    """A row for each side: rates, times as fast as `base` in the same round, and its largest memory."""
    rows = {}
    for name in rounds[0]:
        steps = [one[name] for one in rounds]
        row: dict[str, Any] = {
            "tokens_per_s": Repeated.of(count / step["wall_s"] for count, step in zip(counts, steps, strict=True)),
            "tokens_per_processor_s": Repeated.of(
                count / step["processor_s"] for count, step in zip(counts, steps, strict=True)
            ),
            "peak_bytes": max(step["peak_bytes"] for step in steps),
        }
        if base is not None:
            row["times_wall"] = Repeated.of(one[base]["wall_s"] / one[name]["wall_s"] for one in rounds)
            row["times_processor"] = Repeated.of(one[base]["processor_s"] / one[name]["processor_s"] for one in rounds)
        rows[name] = row
    return rows


def difference(rounds: Sequence[Mapping[str, Step]], key: str) -> float:
    """Largest difference between two sides in a round."""
    return max(max(step[key] for step in one.values()) - min(step[key] for step in one.values()) for one in rounds)


def check_equal(rounds: Sequence[Mapping[str, Step]]) -> dict[str, float]:
    """How far the sides' steps differ: gradient norms as a share, losses plainly.

    Raises RuntimeError when they are not the same step.
    """
    smallest = min(step["grad_norm"] for one in rounds for step in one.values())
    found = {"grad_norm": difference(rounds, "grad_norm") / smallest, "loss": difference(rounds, "loss")}
    if found["grad_norm"] > TOLERANCE:
        raise RuntimeError(
            f"the sides do not take the same step: gradient norms differ by {found['grad_norm']:.2g} of their size "
            f"(limit {TOLERANCE:g}); nothing is compared"
        )
    return found


def headlines(rows: Mapping[str, Any], equal: Mapping[str, float]) -> list[Headline]:
    """Against TRL's best setting; without TRL, the learner's own rates."""
    if BEST not in rows:
        return [Headline(f"trained tokens/s: {name}", row["tokens_per_s"], "1/s") for name, row in rows.items()]
    found = []
    for name, row in rows.items():
        target = ">= 1.5" if name in (WAYS["whole"], WAYS["every_sequence"]) else ""
        if name not in (BEST, DEFAULTS):
            found.append(Headline(f"trained tokens/s, times TRL's: {name}", row["times_wall"], "", target))
            found.append(Headline(f"the same by processor time: {name}", row["times_processor"]))
    memory = rows[WAYS["every_sequence"]]["peak_bytes"] / rows[BEST]["peak_bytes"]
    found.append(Headline("peak memory, share of TRL's", memory, "", "<= 1"))
    found.append(Headline("TRL's best setting, times its defaults", _over(rows[DEFAULTS]["times_wall"])))
    found.append(Headline("gradient norms, largest relative difference", equal["grad_norm"], "", f"<= {TOLERANCE:g}"))
    return found


def _over(times: Repeated) -> Repeated:
    return Repeated(times.n, 1 / times.median, 1 / times.max, 1 / times.min)


def run(arguments: argparse.Namespace, completions: Path) -> tuple[dict[str, Any], list[Headline]]:
    """Measure everything; (figures, headlines)."""
    shape, batches = load(completions)
    common = {"model": arguments.model, "completions": str(completions), "lr": 1e-6,
              "dtype": arguments.dtype, "threads": arguments.threads}  # fmt: skip
    bench = Bench(common, arguments.timeout_s)
    figures: dict[str, Any] = {"model": arguments.model, "dtype": arguments.dtype, "threads": arguments.threads,
                               "micro_batch_tokens": arguments.micro_batch_tokens, "shape": shape,
                               "lengths": describe(batches)}  # fmt: skip
    try:
        if not (reason := peers_missing()):
            settings = [Setting(each) for each in arguments.trl_each]
            best, figures["trl_trials"] = choose(bench, settings)
            figures["trl_best"] = str(best)
            bench.add_trl(BEST, best)
            bench.add_trl(DEFAULTS, TRL_DEFAULTS)
        figures["skipped"] = reason
        for way in WAYS:
            bench.add_ours(way, arguments.micro_batch_tokens)
        bench.await_ready()
        rounds = []
        for number, one in enumerate(bench.rounds(arguments.rounds + 1)):
            rounds.append(one)
            print(f"round {number}: " + ", ".join(f"{n}: {s['wall_s']:.1f} s" for n, s in one.items()), flush=True)
    finally:
        bench.close()
    equal = check_equal(rounds)
    counts = [tokens(batch) for batch in batches]
    rows = summarize(rounds[1:], counts[1:], None if reason else BEST)
    figures |= {"differences": equal, "resident_bytes": bench.resident, "sides": rows, "rounds": rounds}
    return figures, headlines(rows, equal)


def make_completions(arguments: argparse.Namespace, path: Path) -> Path:
    """The file to measure on: the one given, or one drawn for this model."""
    if arguments.completions and arguments.completions.exists():
        found = len(load(arguments.completions)[1])
        if found != arguments.rounds + 1:
            raise SystemExit(f"error: {arguments.completions} holds {found} batches, which are --rounds {found - 1}")
        return Path(arguments.completions)
    vocabulary = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    shape = Shape(arguments.rounds + 1, arguments.groups, median=arguments.median, sigma=arguments.sigma,
                  longest=arguments.longest, solved=arguments.groups // 4)  # fmt: skip
    target = arguments.completions or path
    save(target, shape, draw(shape, vocabulary))
    return Path(target)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help=f"default: {MODEL}, converted on first use")
    parser.add_argument("--completions", type=Path, help="file of completions: read if it is there, else written")
    parser.add_argument("--groups", type=int, default=4, help="groups of eight in a batch, a quarter without signal")
    parser.add_argument("--median", type=float, default=64.0, help="tokens of the middle completion")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lognormal lengths")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest completion")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="the learner's token budget")
    parser.add_argument(
        "--trl-each", type=int, nargs="+", default=[2, 4, 8], help="completions a forward to try for TRL"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for one step of one side")
    add_draw_argument(parser)
    parser.add_argument("--table", type=Path, metavar="RESULT", help="measure nothing: print a result as Markdown")
    add_result_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.table:
        print(table(read_result(arguments.table)))
        return 0
    if arguments.draw:
        draw_result(arguments.draw, draw_figure)
        return 0
    check_clean(arguments)
    if peers_missing():
        print(f"not compared with TRL: {peers_missing()}", flush=True)
    if arguments.model == MODEL:
        from async_rl.recipes.smollm2 import convert

        convert(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        figures, found = run(arguments, make_completions(arguments, Path(folder) / "completions.json"))
    result_file(arguments, "benchmarks.learner", figures, found)
    if arguments.output:
        draw_result(arguments.output, draw_figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

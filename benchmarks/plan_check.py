"""Predicted against measured throughput: one run of the real loop calibrates the simulator, which predicts others.

    python -m benchmarks.plan_check --output benchmarks/results/plan_check.json
    python -m benchmarks.plan_check --sweep benchmarks/results/sweep.json   # the points of a recorded sweep instead

Every run is `async-rl train`: learner and generator processes, sockets, publications, a policy of 0.3 M parameters that
is really trained; engines sleep as long as sampling would take, so that two cores are enough. Costs are taken from the
metrics of the first run as `async-rl plan --from-run` takes them, lengths included. Tokens/s are those of the batches,
the first step left out. Of a recorded sweep, every run is simulated with the lengths that its members had and for as
many steps; one row of each tail gives the rates and the publication.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config import Config, load_config, schema
from async_rl.engines.simulated import SimulatedEngine
from async_rl.leasing import member_seed
from async_rl.recipes import tiny_model
from async_rl.simulate import Costs, Lognormal, simulate
from async_rl.simulate.calibrate import batch_tokens, costs_from_run, measured
from async_rl.simulate.lengths import LengthsOf
from async_rl.simulate.outcome import summarise
from async_rl.simulate.simulator import Simulation
from benchmarks.common import Headline, add_result_arguments, check_clean, result_file
from benchmarks.sweep_point import MAX_TOKENS, MEDIAN_TOKENS, SLOTS, Pace, Point, make_config

WITHIN = 0.10
LIMIT_S = 600.0
"""Of one run."""
REWARD = '''
def score(completion, answer):
    """Half of the completions, so that groups have a spread and are trained."""
    return float(len(completion) % 2)
'''
BASE: dict[str, Any] = {
    "data": {"path": "problems.jsonl", "eval_problems": 0},
    "environment": {"type": "function", "reward": "rewards.py:score"},
    "sampling": {"group_size": 8, "max_completion_tokens": 400},
    "staleness": {"max_staleness": 2},
    "learner": {"batch_groups": 8},
    "generator": {
        "count": 2,
        "slots": 16,
        "engine": {"type": "simulated", "median_tokens": 60, "sigma": 0.6, "tokens_per_s": 60, "load_s": 0.02},
    },
    "evaluation": {"every": 0},
    "transport": {"port": 0, "heartbeat_s": 0.5},
    "metrics": {"console": "plain", "report": False},
}
CALIBRATING = "as calibrated"
RUNS: dict[str, tuple[str, ...]] = {
    CALIBRATING: (),
    "synchronous": ("staleness.max_staleness=0",),
    "max_staleness 4": ("staleness.max_staleness=4",),
    "one generator": ("generator.count=1",),
    "four times the batch": ("learner.batch_groups=32",),
    "publish_every 2": ("staleness.publish_every=2",),
    "waiting for stragglers": ("staleness.overdue=wait",),
}


def train(folder: Path, name: str, overrides: Sequence[str], steps: int) -> Path:
    """One run of the real loop; returns its directory. Raises RuntimeError with the end of its output if it fails."""
    run_dir = folder / name.replace(" ", "_")
    command = [sys.executable, "-m", "async_rl.cli", "train", str(folder / "check.json"), f"run.dir={run_dir}",
               f"run.steps={steps}", *overrides]  # fmt: skip
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if found.returncode:
        raise RuntimeError(f"{name}: exit code {found.returncode}\n{(found.stdout + found.stderr)[-3000:]}")
    return run_dir


def write_inputs(folder: Path) -> None:
    """Model, problems, reward and settings of all runs."""
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer)
    model.config.max_position_embeddings = 1024
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    problems = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(40) for b in range(40))
    (folder / "problems.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    (folder / "rewards.py").write_text(REWARD)
    settings = BASE | {"model": {"path": "model"}}
    settings["generator"]["engine"]["vocab_size"] = len(tokenizer)
    (folder / "check.json").write_text(json.dumps(settings))


def throughput(run_dir: Path) -> float:
    """Tokens of the batches per second, the first step left out."""
    seen, config = measured(run_dir), load_config(str(run_dir / "config.json"), [])
    return float(batch_tokens(seen, config).sum() / seen.of("time/step_s").sum())


def check_runs(names: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """A row for each run of the real loop; the first calibrates."""
    with tempfile.TemporaryDirectory() as text:
        folder, costs = Path(text), None
        write_inputs(folder)
        for name in names:
            run_dir = train(folder, name, RUNS[name], steps)
            costs = costs or costs_from_run(run_dir)
            config = load_config(str(run_dir / "config.json"), [])
            yield row(name, throughput(run_dir), simulate(config, costs).consumed_tokens_per_s)


def row(name: str, measured_rate: float, predicted: float) -> dict[str, Any]:
    """Measured and predicted tokens/s of the batches."""
    error = predicted / measured_rate - 1
    print(f"{name}: measured {measured_rate:,.0f}, predicted {predicted:,.0f} tokens/s ({error:+.1%})", flush=True)
    return {
        "run": name,
        "measured": round(measured_rate, 1),
        "predicted": round(predicted, 1),
        "error": round(error, 4),
    }


def costs_of_sweep(rows: Sequence[Mapping[str, Any]], sigma: float) -> Costs:
    """Rates and publication of the sweep's row that masks at max_staleness 2 with the largest batch."""
    same = [
        r for r in rows if (r["overdue"], r["max_staleness"], r["publish_every"], r["generators"]) == ("mask", 2, 1, 2)
    ]
    found = max((r for r in same if r["sigma"] == sigma), key=lambda r: r["batch_per_slots"])
    parts = found["publication_s"]
    return Costs(
        tokens_per_s=found["generator_rate"] / (SLOTS * found["generators"]),
        lengths=Lognormal(MEDIAN_TOKENS, sigma, MAX_TOKENS),
        learner_tokens_per_s=found["learner_rate"],
        gather_s=parts.get("gather", 0.0),
        transfer_s=max(0.0, parts.get("publication", 0.0) - parts.get("pause", 0.0)),
        pause_s=parts.get("pause", 0.0),
    )


def same_lengths(config: Config) -> LengthsOf:
    """What the simulated engine draws for each member of a run: luck with a long tail is no error of the model."""
    settings = config.generator.engine
    assert isinstance(settings, schema.SimulatedEngine)
    engine, longest = SimulatedEngine(settings), config.sampling.max_completion_tokens

    def draw(ticket: int, members: int) -> tuple[int, ...]:
        seeds = (member_seed(config.run.seed, "train", ticket, member) for member in range(members))
        return tuple(min(longest, engine.draw_length(np.random.default_rng(seed))) for seed in seeds)

    return draw


def check_sweep(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each run of a recorded sweep: the same problems, and the same steps count."""
    folder = Path("unused")
    for found in result["runs"]:
        point = Point(**{name: found[name] for name in Point.__dataclass_fields__})
        config = make_config(point, Pace(), folder, folder, seed=found["seed"])
        costs, warm_up = costs_of_sweep(result["summary"], point.sigma), point.max_staleness + 2
        simulation = Simulation(config, costs, warm_up + found["steps"], lengths=same_lengths(config))
        simulation.run()
        name = (
            f"{point.overdue}, max_staleness {point.max_staleness}, sigma {point.sigma:g}, batch "
            f"{point.batch_per_slots} x slots, publish_every {point.publish_every}, {point.generators} generators, "
            f"seed {found['seed']}"
        )
        outcome = summarise(config, costs, simulation.records, simulation.marks, warm_up)
        yield row(name, found["trained_tokens_per_s"], outcome.consumed_tokens_per_s)


def headlines(rows: Sequence[Mapping[str, Any]]) -> list[Headline]:
    """How far predictions are off, and how many are within the target."""
    errors = [abs(r["error"]) for r in rows]
    return [
        Headline(
            "predictions within 10 % of the measured tokens/s", sum(e <= WITHIN for e in errors), f"of {len(errors)}"
        ),
        Headline("largest error of a prediction", max(errors), target=f"<= {WITHIN:g}"),
        Headline("median error of a prediction", statistics.median(errors)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", type=Path, metavar="RESULT", help="predict the points of a recorded sweep instead")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="runs; the first calibrates")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    check_clean(arguments)
    if arguments.sweep:
        rows = list(check_sweep(json.loads(arguments.sweep.read_text())))
    else:
        rows = list(check_runs(arguments.only, arguments.steps))
    result_file(arguments, "benchmarks.plan_check", {"runs": rows}, headlines(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The figures of a finished run as a result file: accuracy by time, staleness, rates.

python -m benchmarks.run_result runs/real --command 'make real' --output benchmarks/results/real.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from async_rl.recipes.summary import read_accuracies, read_rows, weighted
from benchmarks.common import add_result_arguments, check_clean, result_file

RATES = {
    "staleness_mean": ("staleness/mean", "loss/tokens"),
    "overdue_token_share": ("staleness/overdue_token_share", "loss/tokens"),
    "generated_tokens_per_s": ("throughput/generated_tokens_per_s", "time/step_s"),
    "trained_tokens_per_s": ("throughput/trained_tokens_per_s", "time/step_s"),
    "learner_wait_share": ("learner/wait_share", "time/step_s"),
    "generator_idle_share": ("generator/idle_share", "time/step_s"),
    "effective_sample_size": ("correction/effective_sample_size", "loss/tokens"),
    "mismatch_logprob_abs_mean": ("mismatch/logprob_abs_mean", "mismatch/tokens"),
}
"""Figure -> (metric, weight of a step); rates leave out the first step, in which engines start."""


def figures(run_dir: Path) -> dict[str, Any]:
    """Everything that the docs say of a run."""
    rows = read_rows(run_dir / "metrics.jsonl")
    trained = [row for row in rows if "time/step_s" in row]
    seconds: dict[int, float] = {0: 0.0}
    for row in trained:
        seconds[int(row["step"])] = max(seconds.values()) + row["time/step_s"]
    curve = [
        {"version": a.version, "seconds": round(seconds[a.version], 1), "accuracy": a.value, "low": a.low,
         "high": a.high, "completions": a.count}
        for a in read_accuracies(run_dir)
    ]  # fmt: skip
    return {
        "run_command": None,
        "steps": len(trained),
        "seconds_of_training_steps": round(max(seconds.values()), 1),
        "seconds_mean": "from the open port to the end of a step; the first step includes the start of the engine",
        "staleness_max": max((row.get("staleness/max", 0) for row in trained), default=None),
        "max_staleness": json.loads((run_dir / "config.json").read_text())["config"]["staleness"]["max_staleness"],
        **{name: weighted(trained[1:], key, weight) for name, (key, weight) in RATES.items()},
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--command", required=True, help="what was run")
    add_result_arguments(parser)
    arguments = parser.parse_args()
    check_clean(arguments)
    result_file(arguments, "benchmarks.run_result", figures(arguments.run_dir) | {"run_command": arguments.command})


if __name__ == "__main__":
    main()

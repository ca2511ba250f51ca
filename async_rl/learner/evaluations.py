"""What the learner keeps of an evaluation: metrics, and every sample for people to read."""

from __future__ import annotations

import json
from pathlib import Path

from async_rl.evaluation import EvaluationResult
from async_rl.metrics import Metrics


def record_evaluation(metrics: Metrics, result: EvaluationResult) -> None:
    """Add a round's result under eval/*."""
    total = result.scored + result.failed + result.missing
    metrics.last("eval/num_problems", len(result.samples))
    metrics.last("eval/failed_share", (result.failed + result.missing) / total)
    metrics.last("time/eval_s", result.seconds)
    optional = {
        "eval/accuracy": result.accuracy,
        "eval/stderr": result.stderr,
        "eval/policy_version_min": result.version_min,
        "eval/policy_version_max": result.version_max,
    }
    for key, value in optional.items():
        if value is not None:
            metrics.last(key, value)
    lengths = [len(t.completion_ids) for _, trajectories in result.samples for t in trajectories]
    if lengths:
        metrics.last("eval/length_mean", sum(lengths) / len(lengths))


def write_samples(folder: Path, result: EvaluationResult) -> Path:
    """Write one line per sample: problem, answer, completion, reward, versions."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"version-{result.version:08d}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for problem, trajectories in result.samples:
            for trajectory in trajectories:
                row = {
                    "problem": problem.id,
                    "prompt": problem.prompt,
                    "answer": problem.answer,
                    "completion": trajectory.text,
                    "reward": trajectory.reward,
                    "versions": sorted({span.version for span in trajectory.versions}),
                    "status": trajectory.status,
                }
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return path

"""What a finished run shows people: accuracy before and after, staleness, rates, completions side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy of one version, with a 95 % interval (Wilson score; rewards are 0 or 1)."""

    version: int
    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(successes: float, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): stays within 0..1, also near its ends."""
    z = 1.959964
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_accuracies(run_dir: Path) -> list[Accuracy]:
    """Every evaluation of a run, in order of versions."""
    found = []
    for path in sorted((run_dir / "evaluations").glob("version-*.jsonl")):
        rewards = [row["reward"] for row in read_rows(path) if row["reward"] is not None]
        if rewards:
            low, high = wilson(sum(rewards), len(rewards))
            version = int(path.stem.removeprefix("version-"))
            found.append(Accuracy(version, sum(rewards) / len(rewards), low, high, len(rewards)))
    return found


def side_by_side(run_dir: Path, count: int = 10) -> list[tuple[Row, Row]]:
    """`count` held-out problems, spread evenly, with their completions at the first and the last evaluated version."""
    files = sorted((run_dir / "evaluations").glob("version-*.jsonl"))
    if len(files) < 2:
        return []
    before = {row["problem"]: row for row in reversed(read_rows(files[0]))}
    after = {row["problem"]: row for row in reversed(read_rows(files[-1]))}
    shared = [problem for problem in reversed(before) if problem in after]
    # Kinds of problem stand one after the other in the file: the first few would be all of one kind.
    chosen = shared[:: max(1, len(shared) // count)][:count]
    return [(before[problem], after[problem]) for problem in chosen]


def weighted(rows: Sequence[Row], key: str, weight: str) -> float | None:
    """Mean of a rate over a run, weighted by the seconds (or tokens) that it held for."""
    pairs = [(row[key], row.get(weight, 0.0)) for row in rows if key in row]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def show(run_dir: Path, seconds: float, max_staleness: int) -> list[Accuracy]:
    """Print the summary of a run and write <run_dir>/completions.md; returns the accuracies."""
    rows = read_rows(run_dir / "metrics.jsonl")
    accuracies = read_accuracies(run_dir)
    trained = [row for row in rows if "time/step_s" in row]
    stalest = max((row["staleness/max"] for row in trained if "staleness/max" in row), default=0)
    table = Table(title=f"{run_dir}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    if accuracies:
        table.add_row("held-out accuracy before", str(accuracies[0]))
        table.add_row(f"held-out accuracy after step {accuracies[-1].version}", str(accuracies[-1]))
    table.add_row("wall time, engine start included", f"{seconds:.0f} s")
    table.add_row("steps", str(len(trained)))
    _rate(table, "staleness, mean over trained tokens", weighted(trained, "staleness/mean", "loss/tokens"), "{:.2f}")
    table.add_row("staleness, largest (bound)", f"{stalest:.0f} ({max_staleness})")
    # The first step waits for engines to start; rates are those of the run under way.
    trained, by_time = trained[1:] or trained, "time/step_s"
    _rate(table, "tokens generated per s", weighted(trained, "throughput/generated_tokens_per_s", by_time), "{:.0f}")
    _rate(table, "tokens trained per s", weighted(trained, "throughput/trained_tokens_per_s", by_time), "{:.0f}")
    _rate(table, "learner waiting", weighted(trained, "learner/wait_share", by_time), "{:.0%}")
    _rate(table, "generator idle", weighted(trained, "generator/idle_share", by_time), "{:.0%}")
    Console().print(table)
    write_completions(run_dir)
    return accuracies


def _rate(table: Table, name: str, value: float | None, form: str) -> None:
    if value is not None:
        table.add_row(name, form.format(value))


def write_completions(run_dir: Path) -> Path | None:
    """Write ten held-out completions, before and after, as a Markdown table."""
    pairs = side_by_side(run_dir)
    if not pairs:
        return None
    lines = ["| problem | answer | before | reward | after | reward |", "|---|---|---|---|---|---|"]
    for old, new in pairs:
        cells = (old["problem"], old["answer"], old["completion"], old["reward"], new["completion"], new["reward"])
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    path = run_dir / "completions.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _cell(value: Any) -> str:
    """Text as one cell shows it: on one line, and nothing in it is Markdown, HTML or mathematics."""
    return re.sub(r"[\\`*_\[\]<|$]", r"\\\g<0>", " ".join(str(value).split())) or "(empty)"

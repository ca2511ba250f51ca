"""The figure and the table of a result of the time_to_reward suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREEN, GREY, ORANGE, style_axis

COLORS = {"asynchronous": BLUE, "synchronous": GREEN, "TRL": ORANGE, "plain loop": GREY}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write NAME.png beside NAME.json: held-out accuracy against wall time, a line for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    named: set[str] = set()
    for run in result["runs"]:
        label = None if run["side"] in named else run["side"]
        named.add(run["side"])
        times, values = [point[1] for point in run["curve"]], [point[2] for point in run["curve"]]
        axis.plot(times, values, color=COLORS[run["side"]], label=label, marker="o", markersize=3, linewidth=1.4)
    axis.axhline(result["goal"], color=GREY, linewidth=0.8, linestyle=":")
    axis.set_xlabel("seconds since the process started")
    axis.set_ylabel("held-out accuracy")
    axis.set_title(f"{result['preset']}: wall time to {result['goal']:g}", loc="left", fontsize=10.5)
    style_axis(axis)
    figure.savefig(path.with_suffix(".png"), dpi=130)


def table(result: dict[str, Any]) -> str:
    """A row for each run, in Markdown."""
    lines = [
        f"| side | seed | step that reached {result['goal']:g} | seconds | from the end of the first step |",
        "|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        if run["seconds"] is None:
            end = run["curve"][-1][1] if run["curve"] else 0.0
            cells = ["not reached", f"> {end:.0f}", ""]
        else:
            cells = [str(run["step"]), f"{run['seconds']:.0f}", f"{run['after_first_step_s']:.0f}"]
        lines.append(f"| {run['side']} | {run['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)

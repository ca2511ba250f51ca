"""The figure and the table of a result of the learner suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREY, style_axis


def draw(result: dict[str, Any], path: Path) -> None:
    """Write NAME.png beside NAME.json: trained tokens/s of every side, and the peak memory of its steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sides, lengths = result["sides"], result["lengths"]
    names = list(sides)
    figure = Figure(figsize=(11, 0.5 * len(names) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    rates, memory = figure.subplots(1, 2, sharey=True)
    colors = [GREY if name.startswith("TRL") else BLUE for name in names]
    spread = [sides[name]["tokens_per_s"] for name in names]
    reach = [[one["median"] - one["min"] for one in spread], [one["max"] - one["median"] for one in spread]]
    rates.barh(names, [one["median"] for one in spread], xerr=reach, color=colors, capsize=3)
    rates.set_xlabel(f"trained tokens/s: median, least to largest, n = {spread[0]['n']}")
    memory.barh(names, [sides[name]["peak_bytes"] / 1e9 for name in names], color=colors)
    memory.set_xlabel("peak memory, GB")
    rates.invert_yaxis()
    rates.set_title(
        f"one optimizer step, completions of {lengths['completion_tokens_median']:.0f} tokens at the median and "
        f"{lengths['completion_tokens_longest']} at most",
        loc="left",
        fontsize=10.5,
    )
    for axis in (rates, memory):
        style_axis(axis)
        if legend := axis.get_legend():
            legend.remove()
    figure.savefig(path.with_suffix(".png"), dpi=130)


def table(result: dict[str, Any]) -> str:
    """A row for each side, in Markdown."""
    lines = [
        "| side | trained tokens/s | times TRL's best | by processor time | peak memory, GB |",
        "|---|---|---|---|---|",
    ]
    for name, side in result["sides"].items():
        cells = [_spread(side["tokens_per_s"]), *(_spread(side.get(key)) for key in ("times_wall", "times_processor"))]
        lines.append(f"| {' | '.join([name, *cells, format(side['peak_bytes'] / 1e9, '.2f')])} |")
    return "\n".join(lines)


def _spread(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

"""The figure of a result of the generator suite: tokens/s of every side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREY, style_axis


def draw(result: dict[str, Any], path: Path) -> None:
    """Write NAME.png beside NAME.json."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sides, update = result["sides"], result["update"]
    names = list(sides)
    spread = [sides[name]["tokens_per_s"] for name in names]
    reach = [[one["median"] - one["min"] for one in spread], [one["max"] - one["median"] for one in spread]]
    figure = Figure(figsize=(8, 0.5 * len(names) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    colors = [GREY if name == "plain" else BLUE for name in names]
    bars = axis.barh(names, [one["median"] for one in spread], xerr=reach, color=colors, capsize=3)
    axis.bar_label(bars, [_share(sides[name]) for name in names], label_type="center", color="white")
    axis.invert_yaxis()
    axis.set_xlabel(f"sampled tokens/s: median, least to largest, n = {spread[0]['n']}")
    axis.set_title(
        f"a whole generator and plain vLLM on one engine; updates every {update['seconds_between']['median']:.2g} s",
        loc="left",
        fontsize=10.5,
    )
    style_axis(axis)
    if legend := axis.get_legend():
        legend.remove()
    figure.savefig(path.with_suffix(".png"), dpi=130)


def _share(side: dict[str, Any]) -> str:
    share = side.get("share_of_plain")
    return "" if share is None else f"{share['median']:.2f} of plain"

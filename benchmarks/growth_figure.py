"""Cost against size on logarithmic axes, drawn from a result of the suite `growth`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREY, style_axis


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write NAME.png beside NAME.json: a panel for each curve, with the line of proportional cost."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from benchmarks.growth import CURVES, exponent, value

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (sweep, x, y, name) in zip(figure.subplots(2, 2).flat, CURVES, strict=True):
        points = result[sweep]
        at = [value(point, x) for point in points]
        costs = [value(point, y) for point in points]
        axis.loglog(at, [costs[-1] * one / at[-1] for one in at], color=GREY, linestyle=":", label="proportional")
        axis.loglog(at, costs, color=BLUE, marker="o", markersize=4, label=f"exponent {exponent(points, x, y):.2f}")
        axis.set_xlabel(x.replace("_", " "))
        axis.set_title(name, loc="left", fontsize=10.5)
        style_axis(axis)
    figure.savefig(file.with_suffix(".png"), dpi=130)

"""The soak's memory and messages over time, drawn from the samples of its result."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from async_rl.report import BLUE, ORANGE, style_axis


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write NAME.png beside NAME.json."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    memory, messages = figure.subplots(1, 2)
    samples = result["samples"]
    at = [sample["at_s"] for sample in samples]
    memory.plot(at, [sample["rss_mb"] for sample in samples], color=BLUE, linewidth=1.6)
    memory.set_title("memory of the coordinator's process, MB", loc="left", fontsize=10.5)
    rates = [
        (after["messages"] - before["messages"]) / (after["at_s"] - before["at_s"])
        for before, after in pairwise(samples)
    ]
    messages.plot(at[1:], rates, color=ORANGE, linewidth=1.6)
    messages.set_title("messages received per second", loc="left", fontsize=10.5)
    for axis in (memory, messages):
        axis.set_ylim(0)
        axis.set_xlabel("seconds")
        style_axis(axis)
        if legend := axis.get_legend():
            legend.remove()
    figure.savefig(file.with_suffix(".png"), dpi=130)

"""What a publication takes beside a raw broadcast and files, drawn from a result of the suite `weights`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREY, ORANGE, style_axis

WAYS = {"raw_s": ("raw broadcast", GREY), "publication_s": ("publication", BLUE), "files_s": ("files", ORANGE)}


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write NAME.png beside NAME.json: a panel for each size, bars for each number of receivers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = result["sizes"]
    figure = Figure(figsize=(1.5 + 2.8 * len(sizes), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (size, one) in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes.items(), strict=True):
        for number, (way, (label, color)) in enumerate(WAYS.items()):
            for place, fleet in enumerate(one["fleets"]):
                value = fleet[way]
                spread = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
                axis.bar(place + 0.27 * (number - 1), value["median"], 0.25, yerr=spread, color=color, capsize=2,
                         label=label if place == 0 else None)  # fmt: skip
        axis.set_xticks(range(len(one["fleets"])), [str(fleet["receivers"]) for fleet in one["fleets"]])
        axis.set_xlabel("receivers")
        axis.set_title(f"{size} ({one['fleets'][0]['bytes'] / 1e6:.0f} MB), seconds", loc="left", fontsize=10.5)
        style_axis(axis)
    figure.savefig(file.with_suffix(".png"), dpi=130)

"""The sweep's result as figures, drawn from the rows of its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.report import BLUE, GREEN, GREY, ORANGE, RED, style_axis
from benchmarks.sweep_text import Row, policy_rows, select, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"mask": BLUE, "wait": ORANGE, "keep": GREEN}
TOKENS_LABEL = "tokens/s"


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write NAME.png (shares by policy) and NAME.rates.png (tokens/s) beside NAME.json."""
    _shares(result["summary"], file.with_suffix(".png"))
    _rates(result["summary"], file.with_suffix(".rates.png"))


def _shares(rows: Sequence[Row], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sigmas, batches = values_of(rows, "sigma"), values_of(rows, "batch_per_slots")
    figure = Figure(figsize=(4 * len(batches) + 1, 4.6 * len(sigmas)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(sigmas), len(batches), squeeze=False, sharex=True,
                           height_ratios=[2, 1] * len(sigmas))  # fmt: skip
    for line, sigma in enumerate(sigmas):
        for column, batch in enumerate(batches):
            share, overdue = axes[2 * line][column], axes[2 * line + 1][column]
            share.set_title(f"sigma {sigma:g}, batch {batch} x slots", loc="left", fontsize=10.5)
            for policy, color in COLORS.items():
                own = policy_rows(rows, policy, sigma, batch)
                _line(share, own, [row["limit_share"] for row in own], policy, color)
                _line(overdue, own, [row["overdue_share"] for row in own], policy, color)
            share.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
            share.set_ylim(0, 1.05)
            for axis in (share, overdue):
                style_axis(axis)
                if legend := axis.get_legend():
                    legend.remove()
        axes[2 * line][0].set_ylabel("share of the ideal limit")
        axes[2 * line + 1][0].set_ylabel("overdue tokens\n(masked by mask)")
        top = max(axis.get_ylim()[1] for axis in axes[2 * line + 1])
        for axis in axes[2 * line + 1]:
            axis.set_ylim(0, top)
    for axis in axes[-1]:
        axis.set_xlabel("max_staleness")
        axis.set_xticks(values_of(rows, "max_staleness"))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, [f'overdue = "{label}"' for label in labels], loc="outside lower center", ncols=3,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.savefig(out, dpi=130)


def _line(axis: Axes, rows: Sequence[Row], values: Sequence[float], label: str, color: str) -> None:
    axis.plot([row["max_staleness"] for row in rows], values, marker="o", markersize=4, linewidth=1.6, color=color,
              label=label)  # fmt: skip


def _rates(rows: Sequence[Row], out: Path) -> None:
    """Tokens/s of the masking policy with the largest batch, a panel for each tail; then generators."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sigmas, batch = values_of(rows, "sigma"), max(values_of(rows, "batch_per_slots"))
    figure = Figure(figsize=(4.2 * (len(sigmas) + 1), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(sigmas) + 1)
    series = {"generated": GREY, "trained": ORANGE, "in_loss": BLUE}
    for axis, sigma in zip(axes, sigmas, strict=False):
        own = policy_rows(rows, "mask", sigma, batch)
        for name, color in series.items():
            values = [row[f"{name}_tokens_per_s"] for row in own]
            _line(axis, own, values, "in the loss" if name == "in_loss" else name, color)
        limits = [min(row["generator_rate"], row["learner_rate"]) for row in own]
        axis.plot([row["max_staleness"] for row in own], limits, color=RED, linewidth=1, linestyle=":", label="limit")
        axis.set_title(f"mask, sigma {sigma:g}, batch {batch} x slots", loc="left", fontsize=10.5)
    for every, color in zip(values_of(rows, "publish_every"), (BLUE, GREEN, ORANGE), strict=False):
        own = [max(found, key=lambda row: row["max_staleness"]) for generators in values_of(rows, "generators")
               if (found := select(rows, sigma=sigmas[-1], batch_per_slots=batch, publish_every=every,
                                   generators=generators, overdue="mask"))]  # fmt: skip
        axes[-1].plot([row["generators"] for row in own], [row["in_loss_tokens_per_s"] for row in own], marker="o",
                      markersize=4, linewidth=1.6, color=color, label=f"publish_every {every}")  # fmt: skip
    axes[-1].set_title("in the loss, by generators (learner: 2)", loc="left", fontsize=10.5)
    for axis in axes:
        axis.set_xlabel("max_staleness")
        axis.set_ylabel(TOKENS_LABEL)
        axis.set_ylim(0)
        style_axis(axis)
        axis.legend(frameon=False, fontsize=8)
        axis.set_xticks(values_of(rows, "max_staleness"))
    axes[-1].set_xlabel("generators")
    axes[-1].set_xticks(values_of(rows, "generators"))
    figure.savefig(out, dpi=130)

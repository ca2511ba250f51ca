"""The curves that show why a plan is as it is: throughput against each knob around the best settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.config import Config
from async_rl.report import BLUE, GREEN, GREY, ORANGE, RED, style_axis
from async_rl.simulate.outcome import Outcome
from async_rl.simulate.search import Candidate, Found, devices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "learner.ranks": "Learner ranks of {devices} devices (the others generate)",
    "staleness.max_staleness": "max_staleness",
    "learner.batch_groups": "Groups of a batch",
    "staleness.publish_every": "Steps between publications",
    "staleness.reorder_window": "Window of overdue = 'wait' (tickets)",
}


def draw_plan(found: Found, config: Config, out: Path) -> None:
    """One panel for each knob, and one for the staleness of the best settings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = len(found.curves) + 1
    rows = -(-panels // 2)
    figure = Figure(figsize=(11, 3.3 * rows), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for index, (axis, (name, curve)) in enumerate(zip(axes, found.curves.items(), strict=False)):
        section, _, key = name.partition(".")
        _curve(axis, curve, float(getattr(getattr(found.best.config, section), key) or 0), labelled=index == 0)
        axis.set_title(TITLES[name].format(devices=devices(config)), loc="left", fontsize=10.5)
    _ages(axes[panels - 1], found.best.outcome)
    for axis in axes[:panels]:
        style_axis(axis)
    for axis in axes[panels:]:
        axis.set_axis_off()
    best, synchronous = (c.outcome.trained_tokens_per_s for c in (found.best, found.synchronous))
    title = f"{config.run.name}: best found {best:,.0f} trained tokens/s, {best / synchronous:.2f} times synchronous"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(out, dpi=130)


def _curve(axis: Axes, curve: list[Candidate], chosen: float, labelled: bool) -> None:
    """Shares of the ideal limit of the best point, so that waiting, idling and loss can be read beside each other."""
    values = [candidate.label for candidate in curve]

    def label(text: str) -> str | None:
        return text if labelled else None

    top = max(candidate.outcome.ideal_tokens_per_s for candidate in curve)
    trained = [candidate.outcome.trained_tokens_per_s / top for candidate in curve]
    axis.plot(
        values, trained, color=GREEN, marker="o", markersize=4, linewidth=2, label=label("trained, of the best limit")
    )
    for name, attribute, color in (
        ("learner waits", "wait_share", BLUE),
        ("generators idle", "idle_share", ORANGE),
        ("overdue", "overdue_share", RED),
    ):
        shares = [getattr(candidate.outcome, attribute) for candidate in curve]
        axis.plot(values, shares, color=color, linewidth=1.3, marker="o", markersize=2.5, label=label(name))
    axis.axvline(chosen, color=GREY, linestyle=":", linewidth=1.2, label=label("best found"))
    axis.set_ylim(-0.02, 1.05)
    axis.set_xticks(values, [f"{value:g}" for value in values])


def _ages(axis: Axes, outcome: Outcome) -> None:
    axis.bar(list(outcome.staleness), list(outcome.staleness.values()), color=BLUE, width=0.7)
    axis.set_title("Staleness of the tokens in the loss, best settings (steps)", loc="left", fontsize=10.5)
    axis.set_xticks(list(outcome.staleness))
    axis.set_ylim(0, 1.05)

"""The sweep's result as figures and as tables in Markdown; both read the rows of its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.report import BLUE, GREEN, GREY, ORANGE, RED, style_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
COLORS = {"mask": BLUE, "wait": ORANGE, "keep": GREEN}
TOKENS_LABEL = "tokens/s"


def draw(rows: Sequence[Row], result: Path) -> None:
    """Write NAME.png (shares by policy) and NAME.rates.png (tokens/s) beside NAME.json."""
    _shares(rows, result.with_suffix(".png"))
    _rates(rows, result.with_suffix(".rates.png"))


def select(rows: Sequence[Row], **settings: Any) -> list[Row]:
    """Rows with these settings, by max_staleness."""
    found = [row for row in rows if all(row[name] == value for name, value in settings.items())]
    return sorted(found, key=lambda row: row["max_staleness"])


def policy_rows(rows: Sequence[Row], policy: str, sigma: float, batch: int) -> list[Row]:
    """A line of the figure; it begins at the synchronous baseline, which all policies share."""
    same = select(rows, sigma=sigma, batch_per_slots=batch, publish_every=1, generators=2)
    return [row for row in same if row["max_staleness"] == 0 or row["overdue"] == policy]


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    return sorted({row[name] for row in rows})


def _shares(rows: Sequence[Row], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sigmas, batches = _values(rows, "sigma"), _values(rows, "batch_per_slots")
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

    sigmas, batch = _values(rows, "sigma"), max(_values(rows, "batch_per_slots"))
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
    for every, color in zip(_values(rows, "publish_every"), (BLUE, GREEN, ORANGE), strict=False):
        own = [max(found, key=lambda row: row["max_staleness"]) for generators in _values(rows, "generators")
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
    axes[-1].set_xlabel("generators")
    figure.savefig(out, dpi=130)


def tables(rows: Sequence[Row]) -> str:
    """Three tables: shares by policy, what both sides do, and publish_every by generators."""
    return "\n\n".join([_share_table(rows), _side_table(rows), _fleet_table(rows)])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def _share_table(rows: Sequence[Row]) -> str:
    bounds = _values(rows, "max_staleness")[1:]
    head = ["sigma", "batch", "`overdue`", "synchronous", *(f"max_staleness {bound}" for bound in bounds)]
    lines = []
    for sigma in _values(rows, "sigma"):
        for batch in _values(rows, "batch_per_slots"):
            for policy in COLORS:
                own = {row["max_staleness"]: row for row in policy_rows(rows, policy, sigma, batch)}
                cells = [_share(own.get(bound), policy) for bound in (0, *bounds)]
                lines.append([f"{sigma:g}", f"{batch} x slots", f'`"{policy}"`', *cells])
    return _table(head, lines)


def _share(row: Row | None, policy: str) -> str:
    if row is None:
        return ""
    if row["max_staleness"] == 0 or policy == "wait":
        return f"{row['limit_share']:.2f}"
    return f"{row['limit_share']:.2f}, {row['overdue_share']:.1%}"


def _side_table(rows: Sequence[Row]) -> str:
    batch = max(_values(rows, "batch_per_slots"))
    head = ["sigma", "max_staleness", "tokens/s generated, trained, in the loss, dropped", "times synchronous",
            "learner waits", "generators idle", "tokens of staleness 0, 1, 2, 3, more"]  # fmt: skip
    lines = []
    for sigma in _values(rows, "sigma"):
        for row in policy_rows(rows, "mask", sigma, batch):
            rates = ", ".join(f"{row[f'{name}_tokens_per_s']:,.0f}" for name in
                              ("generated", "trained", "in_loss", "dropped"))  # fmt: skip
            lines.append([f"{sigma:g}", str(row["max_staleness"]), rates, f"{row['speed_up']['median']:.2f}",
                          f"{row['wait_share']:.1%}", f"{row['idle_share']:.1%}", _ages(row)])  # fmt: skip
    return _table(head, lines)


def _ages(row: Row) -> str:
    shares = {int(age): share for age, share in row["staleness"].items()}
    more = sum(share for age, share in shares.items() if age > 3)
    return ", ".join(f"{share:.0%}" for share in (*(shares.get(age, 0.0) for age in range(4)), more))


def _fleet_table(rows: Sequence[Row]) -> str:
    sigma, batch = max(_values(rows, "sigma")), max(_values(rows, "batch_per_slots"))
    head = ["generators", "max_staleness", "`publish_every`", "share of the limit, overdue", "times synchronous",
            "learner waits", "generators idle", "gather, wire, load, pause of a publication"]  # fmt: skip
    same = select(rows, sigma=sigma, batch_per_slots=batch, overdue="mask")
    lines = []
    for row in sorted(same, key=lambda row: (row["generators"], row["max_staleness"], row["publish_every"])):
        parts = ", ".join(f"{row['publication_s'][name] * 1000:.0f}" for name in ("gather", "wire", "load", "pause"))
        lines.append([str(row["generators"]), str(row["max_staleness"]), str(row["publish_every"]),
                      f"{row['limit_share']:.2f}, {row['overdue_share']:.1%}", f"{row['speed_up']['median']:.2f}",
                      f"{row['wait_share']:.1%}", f"{row['idle_share']:.1%}", f"{parts} ms"])  # fmt: skip
    return _table(head, lines)

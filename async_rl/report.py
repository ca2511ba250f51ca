"""The curves of a run on one page: <run.dir>/report.png, drawn from metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.config import Config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08a1e", "#3a9a5b", "#c43c3c", "#8a8f98"

Series = dict[str, tuple[list[int], list[float]]]
"""Key -> steps and values, where the key was recorded."""


def read_series(metrics_jsonl: Path) -> Series:
    """All series of a metrics file; of two lines with one step (a resumed run) the later wins."""
    points: dict[str, dict[int, float]] = {}
    for line in metrics_jsonl.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for key, value in values.items():
            if value is not None:
                points.setdefault(key, {})[int(values["step"])] = float(value)
    return {key: (sorted(steps), [steps[step] for step in sorted(steps)]) for key, steps in points.items()}


def draw_report(metrics_jsonl: Path, out: Path, config: Config) -> None:
    """Draw eight panels into `out` (a .png or .svg); a run without a step gets an empty page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    series = read_series(metrics_jsonl) if metrics_jsonl.exists() else {}
    figure = Figure(figsize=(11, 12.5), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    FigureCanvasAgg(figure)
    first = figure.add_subplot(4, 2, 1)
    # All but the profile, the last one, are over steps.
    axes = [
        first,
        *(figure.add_subplot(4, 2, place, sharex=first) for place in range(2, 8)),
        figure.add_subplot(4, 2, 8),
    ]
    panels = (_learning, _staleness, _throughput, _waiting, _mismatch, _optimisation, _exploration, _profile)
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis, series, config)
        style_axis(axis)
    for axis in axes[5:7]:
        axis.set_xlabel("step")
    axes[7].set_xlabel("staleness of the token (steps)")
    figure.suptitle(_title(series, config), x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.savefig(out, dpi=130)


def _title(series: Series, config: Config) -> str:
    steps = len(series.get("step", ([], []))[0])
    return (
        f"{config.run.name}: {steps} steps of {config.learner.batch_groups} x {config.sampling.group_size} trajectories"
    )


def _line(axis: Axes, series: Series, key: str, label: str, color: str, **style: Any) -> None:
    if key in series:
        steps, values = series[key]
        marker = {"marker": "o", "markersize": 4} if len(steps) < 3 else {}
        axis.plot(steps, values, label=label, color=color, **{"linewidth": 1.6, **marker, **style})


def style_axis(axis: Axes) -> None:
    """The look of every panel: open frame, light grid, a legend where there are labels."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axis.set_axisbelow(True)
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(frameon=False, fontsize=8.5, ncols=min(len(handles), 3), loc="best")
    if not axis.has_data():
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)


def _learning(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Reward and held-out accuracy", loc="left", fontsize=10.5)
    _line(axis, series, "reward/mean", "reward (training)", BLUE, alpha=0.75)
    goal = config.run.stop_at_accuracy
    if goal is not None:
        axis.axhline(goal, color=GREY, linestyle=":", linewidth=1.2, label=f"goal {goal:g}")
    if "eval/accuracy" in series:
        versions, values, errors = evaluations(series)
        axis.errorbar(versions, values, yerr=[1.96 * error for error in errors], label="held-out, 95 % interval",
                      color=ORANGE, marker="o", markersize=4.5, linewidth=1.6, capsize=2.5, elinewidth=1)  # fmt: skip
    shown = [value for key in ("reward/mean", "eval/accuracy") for value in series.get(key, ([], []))[1]]
    if shown and min(shown) >= 0 and max(shown) <= 1:
        axis.set_ylim(0, 1.03)


def evaluations(series: Series) -> tuple[list[float], list[float], list[float]]:
    """Version evaluated, accuracy and standard error of each evaluation; results come in steps after the version."""
    steps, accuracies = series["eval/accuracy"]
    versions = dict(zip(*series.get("eval/policy_version_max", ([], [])), strict=True))
    errors = dict(zip(*series.get("eval/stderr", ([], [])), strict=True))
    return [versions.get(step, step) for step in steps], accuracies, [errors.get(step, 0.0) for step in steps]


def _staleness(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Staleness of the tokens in the loss (steps)", loc="left", fontsize=10.5)
    bound = config.staleness.max_staleness
    axis.axhline(bound, color=RED, linestyle="--", linewidth=1.2, label=f"bound {bound}", zorder=3)
    _line(axis, series, "staleness/max", "max", ORANGE, drawstyle="steps-mid")
    _line(axis, series, "staleness/mean", "mean", BLUE)
    axis.set_ylim(-0.1, max([bound, *series.get("staleness/max", ([], []))[1]]) * 1.3 + 0.4)


def _throughput(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Completion tokens per second", loc="left", fontsize=10.5)
    _line(axis, series, "throughput/generated_tokens_per_s", "generated", BLUE)
    _line(axis, series, "throughput/trained_tokens_per_s", "trained", GREEN)
    _line(axis, series, "throughput/dropped_tokens_per_s", "dropped", RED)
    axis.set_ylim(bottom=0)


def _waiting(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Share of the time spent waiting", loc="left", fontsize=10.5)
    _line(axis, series, "learner/wait_share", "learner waits", BLUE)
    _line(axis, series, "generator/idle_share", "generators idle", ORANGE)
    axis.set_ylim(0, 1.03)


def _mismatch(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Engine against learner at equal version: |logprob difference| (nats)", loc="left", fontsize=10.5)
    _line(axis, series, "mismatch/logprob_abs_max", "max", ORANGE)
    _line(axis, series, "mismatch/logprob_abs_mean", "mean", BLUE)
    shown = [v for key in ("max", "mean") for v in series.get(f"mismatch/logprob_abs_{key}", ([], []))[1]]
    if shown and min(shown) > 0:
        axis.set_yscale("log")


def _optimisation(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Effective sample size and shares of tokens", loc="left", fontsize=10.5)
    _line(axis, series, "ratio/effective_sample_size", "effective sample size, uncorrected", BLUE)
    _line(axis, series, "correction/truncated_share", "weight truncated", ORANGE)
    _line(axis, series, "staleness/overdue_token_share", "overdue", RED)
    axis.set_ylim(-0.02, 1.05)


def _exploration(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("Entropy (nats per token) and clipped shares", loc="left", fontsize=10.5)
    _line(axis, series, "loss/entropy", "entropy", BLUE)
    _line(axis, series, "loss/clip_share_low", "clipped low", ORANGE)
    _line(axis, series, "loss/clip_share_high", "clipped high", RED)
    axis.set_ylim(bottom=0)


def _profile(axis: Axes, series: Series, config: Config) -> None:
    axis.set_title("By staleness, second half of the run: what age costs", loc="left", fontsize=10.5)
    rows = profile(series)
    if rows:
        style: dict[str, Any] = {"marker": "o", "markersize": 4.5, "linewidth": 1.6}
        ages = [age for age, *_ in rows]
        axis.plot(ages, [share for _, share, _ in rows], label="effective sample size", color=BLUE, **style)
        axis.plot(ages, [distance for *_, distance in rows], label="mean |log ratio| (nats)", color=ORANGE, **style)
        axis.set_xticks(ages)
        axis.set_ylim(bottom=0)


def profile(series: Series) -> list[tuple[int, float, float]]:
    """Staleness, effective sample size and mean |log ratio|, means by tokens over the later half of the steps."""
    begin = max((steps[-1] for steps, _ in series.values()), default=0) / 2
    rows = []
    for key in series:
        age = key.removeprefix("profile/tokens_")
        if age.isdigit():
            tokens = {step: number for step, number in zip(*series[key], strict=True) if step > begin}
            share, distance = (
                _weighted(series.get(f"profile/{name}_{age}", ([], [])), tokens)
                for name in ("effective_sample_size", "log_ratio_abs")
            )
            rows += [(int(age), share, distance)] if tokens else []
    return sorted(rows)


def _weighted(points: tuple[list[int], list[float]], weights: dict[int, float]) -> float:
    chosen = [(value, weights[step]) for step, value in zip(*points, strict=True) if step in weights]
    total = sum(weight for _, weight in chosen)
    return sum(value * weight for value, weight in chosen) / total if total else float("nan")

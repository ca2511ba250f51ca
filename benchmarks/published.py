"""The simulator against tables that others published: one or two numbers fitted to each, everything else named.

    python -m benchmarks.published --output benchmarks/results/published.json --figure docs/img/published.png

Everything happens in virtual time, so the load of the machine changes nothing but how long it takes (about four minutes
of one core). Every number that goes in is `fitted` to the table, `taken` from the publication, or `assumed` because the
publication does not say; `doubts` are assumptions changed one at a time, rates fitted again, the ratio kept.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREY, ORANGE, style_axis
from benchmarks.common import Headline, add_result_arguments, check_clean, result_file
from benchmarks.published_models import Curve, areal, verl

FIGURE = Path("docs/img/published.png")
BEGIN, END = (
    "<!-- begin: python -m benchmarks.published --table RESULT --into docs/simulator.md -->\n",
    "<!-- end -->\n",
)
STEP = 0.12
"""Distance of the ratios that the search begins with, as a log."""


@dataclass(frozen=True)
class Table:
    """What was published, and the model that is fitted to it."""

    title: str
    source: str
    knob: str
    unit: str
    published: Mapping[str, float]
    """Value of the knob -> figure."""
    taken: Mapping[str, str]
    assumed: Mapping[str, str]
    model: Curve
    doubts: Mapping[str, Mapping[str, Any]]
    """Name -> arguments of the model that differ."""
    start: float
    """Ratio at which the search begins."""
    two_sided: bool
    """Whether the scale is fitted too; else the publication says what the learner takes."""


AREAL = Table(
    title="AReaL, 1.5B on 8 GPUs, 8k context",
    source="AReaL (arXiv 2505.24298): effective training throughput by maximum staleness",
    knob="maximum staleness (steps)",
    unit="tokens/s",
    published={"0": 27.1e3, "1": 47.8e3, "2": 47.8e3, "4": 49.0e3, "8": 51.5e3, "16": 52.0e3},
    taken={
        "devices": "8, of which 75 % generate",
        "rule": "tickets are admitted by floor(tickets / batch) <= version + staleness, running requests go on under "
        "new weights, nothing is discarded or masked (overdue = 'keep')",
        "max_completion_tokens": "8192",
    },
    assumed={
        "batch": "512 groups of 16, the batch of that paper's main runs; this row does not name its own",
        "lengths": "lognormal, median 2500, sigma 0.8: not published",
        "slots": "128 for each of 6 generators, each further request stretches the others' tokens by 1 %",
        "publication": "takes no time",
        "size": "a third of fleet and batch is simulated, 40 steps each",
    },
    model=areal,
    doubts={
        "batch of 256 groups": {"groups": 256},
        "sigma 0.5": {"sigma": 0.5},
        "no slowdown by batch occupancy": {"slowdown": 0.0},
    },
    start=1.25,
    two_sided=True,
)
VERL = Table(
    title="verl, 7B on 64 + 64 GPUs, responses up to 28k",
    source="verl documentation, fully asynchronous trainer: stale ablation on 128 cards, total time of 400 steps",
    knob="staleness_threshold",
    unit="hours",
    published={"0": 25 + 53 / 60, "0.1": 19 + 59 / 60, "0.3": 17 + 20 / 60, "0.5": 17 + 22 / 60},
    taken={
        "interval": "512 prompts of 16 between two publications, (1 + threshold) x 512 prompts admitted in each",
        "fleet": "16 engines (64 GPUs, tensor parallel 4), each with at most 16 prompts of 16 at a time",
        "learner": "update_actor 106.07 s for 512 prompts (mean of the rows); publication 4.1 s (step - gen - update)",
        "max_completion_tokens": "28672",
    },
    assumed={
        "lengths": "lognormal, median 2500, sigma 0.8, the same from first to last step; verl says that they change",
        "slowdown": "each further request of an engine stretches the others' tokens by 1 %",
        "learner's batch": "tenths of the interval, where verl takes quarters: thresholds are multiples of a tenth",
        "size": "5 of the 16 engines are simulated, 20 intervals each",
    },
    model=verl,
    doubts={
        "sigma 0.5": {"sigma": 0.5},
        "sigma 1.1": {"sigma": 1.1},
        "no slowdown by batch occupancy": {"slowdown": 0.0},
    },
    start=1.0,
    two_sided=False,
)


def scale_of(table: Table, figures: Sequence[float]) -> float:
    """Factor that brings the figures closest to the published ones, in logs; 1 where nothing is left to fit."""
    if not table.two_sided:
        return 1.0
    return math.exp(sum(math.log(p / f) for p, f in zip(table.published.values(), figures, strict=True)) / len(figures))


def errors(table: Table, figures: Sequence[float]) -> list[float]:
    """Simulated / published - 1."""
    scale = scale_of(table, figures)
    return [scale * f / p - 1 for p, f in zip(table.published.values(), figures, strict=True)]


def misfit(table: Table, figures: Sequence[float]) -> float:
    """Root mean square of the errors."""
    return math.sqrt(sum(e * e for e in errors(table, figures)) / len(figures))


def fit(start: float, cost: Callable[[float], float], rounds: int = 1) -> float:
    """The ratio of the least cost: parabolas in log(ratio); at most 3 + rounds evaluations."""
    known: dict[float, float] = {}

    def at(x: float) -> float:
        if x not in known:
            known[x] = cost(math.exp(x))
        return known[x]

    middle = math.log(start)
    points = [middle - STEP, middle, middle + STEP]
    for _ in range(rounds):
        best = _vertex([(x, at(x)) for x in points])
        at(best)
        points = sorted(known, key=at)[:3]
    return math.exp(min(known, key=at))


def _vertex(points: Sequence[tuple[float, float]]) -> float:
    """Where the parabola through three points is least, at most two steps off the best; one step if it has no least."""
    (a, fa), (b, fb), (c, fc) = sorted(points)
    low = min(points, key=lambda p: p[1])[0]
    curvature = ((fc - fb) / (c - b) - (fb - fa) / (b - a)) / (c - a)
    if curvature <= 0:
        return low - STEP if fa < fc else low + STEP
    slope = (fb - fa) / (b - a)
    vertex = (a + b) / 2 - slope / (2 * curvature)
    return min(max(vertex, low - 2 * STEP), low + 2 * STEP)


def study(table: Table) -> dict[str, Any]:
    """Fit, figures and misfit of one table, and what its doubts do to them."""
    curves: dict[float, list[float]] = {}

    def cost(ratio: float) -> float:
        curves[ratio] = table.model(ratio)
        print(f"{table.title}: ratio {ratio:.3f}, misfit {misfit(table, curves[ratio]):.2%}", flush=True)
        return misfit(table, curves[ratio])

    ratio = fit(table.start, cost)
    figures = curves[ratio]
    doubts = {}
    for name, changes in table.doubts.items():
        other = table.model(ratio, **changes)
        doubts[name] = {"errors": _rounded(errors(table, other)), "misfit": round(misfit(table, other), 4)}
        print(f"{table.title}: {name}, misfit {misfit(table, other):.2%}", flush=True)
    scale = scale_of(table, figures)
    fitted = {"learner_to_generators": round(ratio, 3)}
    if table.two_sided:
        fitted["generators_tokens_per_s"] = round(scale)
    facts = {k: v for k, v in asdict(table).items() if k not in ("model", "doubts", "start", "two_sided")}
    return facts | {
        "fitted": fitted,
        "simulated": {k: round(scale * f, 3) for k, f in zip(table.published, figures, strict=True)},
        "errors": dict(zip(table.published, _rounded(errors(table, figures)), strict=True)),
        "misfit": round(misfit(table, figures), 4),
        "doubts": doubts,
    }


def headlines(result: Mapping[str, Any]) -> list[Headline]:
    """Misfit, and the row that is furthest off."""
    worst = max(result["errors"], key=lambda row: abs(result["errors"][row]))
    return [
        Headline(f"{result['title']}: root mean square error over {len(result['errors'])} rows", result["misfit"]),
        Headline(f"{result['title']}: largest error, at {result['knob']} {worst}", result["errors"][worst]),
    ]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Fit and misfit in Markdown, as docs/simulator.md has them."""
    return "\n\n".join(_table(result) for result in results.values())


def _table(result: Mapping[str, Any]) -> str:
    rows = result["published"]
    fitted = ", ".join(f"{name} = {value:g}" for name, value in result["fitted"].items())

    def line(name: str, cells: Sequence[str]) -> str:
        return f"| {name} | " + " | ".join(cells) + " |"

    def figures(name: str) -> list[str]:
        return [f"{value:,.1f}" if value < 1000 else f"{value:,.0f}" for value in result[name].values()]

    return "\n".join(
        [
            f"**{result['title']}** ({result['unit']}; root mean square error {result['misfit']:.1%})",
            "",
            line(result["knob"], list(rows)),
            "|---" * (len(rows) + 1) + "|",
            line("published", figures("published")),
            line("simulated", figures("simulated")),
            line("error", [f"{error:+.1%}" for error in result["errors"].values()]),
            *(
                line(f"error, {name}", [f"{error:+.1%}" for error in doubt["errors"]])
                for name, doubt in result["doubts"].items()
            ),
            "",
            f"- source: {result['source']}",
            f"- fitted: {fitted}",
            *(f"- taken, {name}: {text}" for name, text in result["taken"].items()),
            *(f"- assumed, {name}: {text}" for name, text in result["assumed"].items()),
        ]
    )


def write(results: Mapping[str, Mapping[str, Any]], document: Path) -> None:
    """Replace what stands between the marks of a document."""
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{tables(results)}\n\n{END}{after}", encoding="utf-8")


def draw(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """One panel a table: published and simulated figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, result in zip(figure.subplots(1, len(results), squeeze=False).flat, results.values(), strict=True):
        places = range(len(result["published"]))
        axis.plot(places, result["published"].values(), color=GREY, marker="s", linewidth=1.6, label="published")
        axis.plot(places, result["simulated"].values(), color=BLUE, marker="o", linewidth=1.6, label="simulated")
        for place, value, error in zip(places, result["simulated"].values(), result["errors"].values(), strict=True):
            axis.annotate(f"{error:+.1%}", (place, value), (0, 8), textcoords="offset points", ha="center",
                          fontsize=8, color=ORANGE)  # fmt: skip
        axis.set_xticks(list(places), list(result["published"]))
        axis.set_xlabel(result["knob"])
        axis.set_ylabel(result["unit"])
        axis.set_ylim(0, 1.15 * max(*result["published"].values(), *result["simulated"].values()))
        axis.set_title(result["title"], loc="left", fontsize=10.5)
        style_axis(axis)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


TABLES = {"areal": AREAL, "verl": VERL}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), help="tables to fit")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw published and simulated figures")
    parser.add_argument("--draw", type=Path, metavar="RESULT", help=f"simulate nothing: draw a result into {FIGURE}")
    parser.add_argument("--table", type=Path, metavar="RESULT", help="simulate nothing: a result in Markdown")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="with --table: between the marks of a document")
    add_result_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.table:
        results = json.loads(arguments.table.read_text())["tables"]
        write(results, arguments.into) if arguments.into else print(tables(results))
        return 0
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text())["tables"], arguments.figure or FIGURE)
        return 0
    check_clean(arguments)
    results = {name: study(TABLES[name]) for name in arguments.only}
    if arguments.figure:
        draw(results, arguments.figure)
    result_file(
        arguments, "benchmarks.published", {"tables": results}, [h for r in results.values() for h in headlines(r)]
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Tables and a picture of a result of benchmarks.chaos.

python -m benchmarks.chaos_report benchmarks/results/chaos.json --draw docs/img/chaos.png --table docs/failures.md
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from async_rl.report import BLUE, GREEN, GREY, ORANGE, RED, style_axis
from benchmarks.common import Headline

BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
"""Marks in a page; what stands between them is written by `write_table`."""
COLORS = {"kill": RED, "strike": RED, "stop": ORANGE, "cut": ORANGE, "reset": GREY, "add": GREEN, "leave": BLUE}
WORDS = {
    "kill": "killed",
    "strike": "killed in a publication",
    "stop": "stopped, later continued",
    "cut": "cut off, later mended",
    "reset": "connection broken off",
    "add": "added",
    "leave": "told to leave",
}


def table(figures: dict[str, Any]) -> str:
    """The result in words and two tables, as Markdown."""
    one, other = figures["undisturbed"], figures["disturbed"]
    difference = figures["accuracy_difference"]
    ledger = other["ledger"]
    events = Counter(event["event"] for event in figures["events"])
    told = ", ".join(f"{number} {WORDS[name]}" for name, number in events.most_common())
    kept = ", ".join(f"{ledger[name]:.0f} {name.replace('_', ' ')}" for name in ("leased", "buffered", "in_batch"))
    lines = [
        f"{other['steps']} steps in {other['seconds']:.0f} s with {other['num_events']} events ({told}). "
        f"{ledger['issued']:.0f} problems were drawn: {other['problems_trained_once']} trained, each once, {kept}, "
        f"{ledger['dropped']:.0f} dropped. The largest staleness was {other['max_staleness']:.0f}. Held-out accuracy "
        f"{other['accuracy']:.3f}; undisturbed {one['accuracy']:.3f} in {one['seconds']:.0f} s (difference "
        f"{difference['value']:+.3f}, noise {difference['noise']:.3f}).",
        "",
        "| from, to | times | median | longest | deadline |",
        "|---|---|---|---|---|",
    ]
    for what, row in figures["recoveries"].items():
        deadline = f"{row['deadline_s']:g} s ({row['deadline']})"
        lines.append(f"| {what} | {row['n']} | {row['median_s']:.1f} s | {row['max_s']:.1f} s | {deadline} |")
    return "\n".join(lines)


def headlines(figures: dict[str, Any]) -> list[Headline]:
    """What stands for the result."""
    one, other, difference = figures["undisturbed"], figures["disturbed"], figures["accuracy_difference"]
    found = [
        Headline("events in the disturbed run", other["num_events"]),
        Headline("problems trained once", other["problems_trained_once"]),
        Headline("largest staleness", other["max_staleness"], "steps", "<= 2"),
        Headline("held-out accuracy, undisturbed", one["accuracy"]),
        Headline("held-out accuracy, disturbed", other["accuracy"]),
        Headline("difference of the two", difference["value"], "", f"within {difference['noise']:.3f}, the noise"),
    ]
    for what, row in figures["recoveries"].items():
        found.append(Headline(f"{what}, longest of {row['n']}", row["max_s"], "s", f"<= {row['deadline_s']:g}"))
    return found


def read_page(page: Path) -> str:
    """A page that has the marks; ValueError for another one."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r}, in this order; add them where the tables belong")
    return text


def write_table(figures: dict[str, Any], page: Path, picture: Path | None) -> None:
    """Replace what stands between the marks of a page. Raises ValueError for a page without them."""
    link = ""
    if picture is not None:
        target = os.path.relpath(picture, page.parent)
        link = f"\n\n![held-out accuracy of both runs, and the events of the disturbed one]({target})"
    text = read_page(page)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{table(figures)}{link}\n{END}{after}", encoding="utf-8")


def draw(figures: dict[str, Any], out: Path) -> None:
    """Held-out accuracy of both runs over time, and below it what befell the fleet of one of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, color in (("undisturbed", BLUE), ("disturbed", ORANGE)):
        curve = figures[name]["curve"]
        top.plot([point[0] for point in curve], [point[2] for point in curve], color=color, marker="o", markersize=3,
                 linewidth=1.6, label=name)  # fmt: skip
    top.set_ylabel("held-out accuracy")
    top.legend(frameon=False, loc="lower right")
    names = [name for name in WORDS if any(event["event"] == name for event in figures["events"])]
    for event in figures["events"]:
        row, color = names.index(event["event"]), COLORS[event["event"]]
        below.plot(event["at_s"], row, color=color, marker="|", markersize=11, markeredgewidth=1.8, linestyle="none")
        top.axvline(event["at_s"], color=GREY, linewidth=0.4, alpha=0.5)
    below.set_yticks(range(len(names)), [WORDS[name] for name in names])
    below.set_ylim(len(names) - 0.4, -0.6)
    below.set_xlabel("seconds from the start of the learner")
    for axis in (top, below):
        style_axis(axis)
    title = f"{len(figures['events'])} events in {figures['disturbed']['steps']} steps"
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--table", type=Path, help="page between whose marks the tables are written")
    arguments = parser.parse_args()
    figures = json.loads(arguments.result.read_text())
    print(table(figures))
    if arguments.draw:
        draw(figures, arguments.draw)
    if arguments.table:
        write_table(figures, arguments.table, arguments.draw)


if __name__ == "__main__":
    main()

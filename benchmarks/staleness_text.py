"""The staleness study's result in Markdown: a table of held-out accuracy, and what its numbers say.

docs/staleness_study.md holds what `write` puts between its marks; a test holds it to the recorded result.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Headline, Repeated

Row = Mapping[str, Any]
BEGIN, END = "<!-- begin: python -m benchmarks.staleness_study --into -->\n", "<!-- end -->\n"
NAMES = {
    "uncorrected": "taken for on-policy",
    "ppo": "PPO's clip",
    "truncated": "weight, no clip",
    "decoupled": "weight and decoupled clip (default)",
}
HALF = 0.5
"""An effective sample size below it: the tokens of a batch count for less than half of them."""
PICTURE = "![held-out accuracy and effective sample size by staleness, a line an arm](img/staleness_study.png)"


def text(figures: Mapping[str, Any]) -> str:
    """Table, then sentences, from a result file of benchmarks.staleness_study."""
    rows = figures["summary"]
    sentences = "\n".join(f"- {_wrap(line)}" for line in _sentences(figures))
    return f"{_table(rows)}\n\n{sentences}\n\n{PICTURE}\n"


def headlines(figures: Mapping[str, Any]) -> list[Headline]:
    """Every arm at the youngest and the oldest data, over the seeds."""
    found = []
    for arm, own in _arms(figures["summary"]).items():
        for age in sorted({min(own), max(own)}):
            runs = [run for run in figures["runs"] if (run["arm"], run["staleness"]) == (arm, age)]
            for key, what in (("final", "held-out accuracy after the last step"), ("mean", "its mean over the run")):
                value = Repeated.of(run[key] for run in runs)
                found.append(Headline(f"{NAMES[arm]}, staleness {age}: {what}", value))
    return found


def write(figures: Mapping[str, Any], document: Path) -> None:
    """Replace what stands between the marks of a document."""
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{text(figures)}\n{END}{after}", encoding="utf-8")


def _wrap(line: str) -> str:
    return "\n  ".join(textwrap.wrap(line, 116, break_long_words=False, break_on_hyphens=False))


def _arms(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """arm -> staleness -> row, both in the order of the study."""
    arms: dict[str, dict[int, Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {})[row["staleness"]] = row
    return arms


def _table(rows: Sequence[Row]) -> str:
    arms = _arms(rows)
    head = ["staleness", *(f"{NAMES[arm]}: last" for arm in arms), *(f"{NAMES[arm]}: mean" for arm in arms)]
    lines = [
        [str(age), *(_cell(own.get(age), key) for key in ("final", "mean") for own in arms.values())]
        for age in sorted({row["staleness"] for row in rows})
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def _cell(row: Row | None, key: str) -> str:
    if row is None:
        return ""
    mean, low, high = row[key]
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" if row["seeds"] > 1 else f"{mean:.3f}"


def _sentences(figures: Mapping[str, Any]) -> list[str]:
    """What the oldest data cost each arm, and where its weights become few."""
    arms, steps = _arms(figures["summary"]), figures["runs"][0]["steps"]
    said = []
    for arm, own in arms.items():
        fresh, old = min(own), max(own)
        if fresh == old:
            continue
        final, mean = (own[fresh][key][0] - own[old][key][0] for key in ("final", "mean"))
        said.append(
            f"**{NAMES[arm][0].upper()}{NAMES[arm][1:]}.** From staleness {fresh} to {old}, held-out accuracy after "
            f"{steps} steps went from {own[fresh]['final'][0]:.3f} to {own[old]['final'][0]:.3f} ({-final:+.3f}), its "
            f"mean over the run from {own[fresh]['mean'][0]:.3f} to {own[old]['mean'][0]:.3f} ({-mean:+.3f}). "
            f"{figures['goal']:g} was reached {_reached(own[fresh])} at staleness {fresh} and {_reached(own[old])} at "
            f"{old}. {_spread(own)}"
        )
    return said


def _reached(row: Row) -> str:
    """By how many seeds, and when."""
    steps = sorted(step for step in row["steps_to_goal"] if step is not None)
    count = f"by {len(steps)} of {row['seeds']} seeds"
    return f"{count} (step {', '.join(map(str, steps))})" if steps else count


def _spread(own: Mapping[int, Row]) -> str:
    """The effective sample size, which needs no training curve to be seen."""
    sizes = ", ".join(f"{row['effective_sample_size'][0]:.2f} at {age}" for age, row in own.items())
    low = [age for age, row in own.items() if row["effective_sample_size"][0] < HALF]
    below = f"below a half from {min(low)} on" if low else "never below a half"
    return f"Effective sample size without correction, by staleness: {sizes}; {below}."

"""Write the page of all results, benchmarks/results/README.md, from the result files beside it.

    python -m benchmarks.results_page

Each file is a table: its headlines, or every number in it. A figure NAME.png or NAME.PART.png beside NAME.json is
shown under it. A test holds the page to the files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import staleness_text
from benchmarks.common import ROOT, Headline, Repeated

RESULTS = ROOT / "benchmarks" / "results"
PAGE = "README.md"
PROVENANCE = ("command", "date", "commit", "dirty", "versions", "machine", "n")
HEADLINES_OF = {"staleness_study": staleness_text.headlines}
"""For results that were recorded without headlines."""
HEAD = """# Results

Written by `python -m benchmarks.results_page`; every table is a JSON file of this folder, with the command that
measured it. Values are the median (least to largest) where a figure was measured several times. Times are those of the
machine named; ratios of two things measured in one run carry over best. What the suites measure, and how to read them:
[docs/benchmarks.md](../../docs/benchmarks.md).
"""


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    suites: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        suites[suite_of(result)].append(section(file, result))
    parts = [f"## {suite}\n\n" + "\n".join(sections) for suite, sections in sorted(suites.items())]
    return "\n".join([HEAD, *parts])


def suite_of(result: dict[str, Any]) -> str:
    """The module of benchmarks/ that its command names."""
    words = str(result["command"]).split()
    return next(word.removeprefix("benchmarks.") for word in words if word.startswith("benchmarks."))


def section(file: Path, result: dict[str, Any]) -> str:
    """One result: where it comes from, its table, its figures."""
    machine = result["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average'][0]:.1f}"
    dirty = ", with changes" if result["dirty"] else ""
    made = ", ".join(filter(None, [result.get("date", ""), f"commit {result['commit'][:7]}{dirty}", where]))
    rows = [headline.row() for headline in headlines(result)]
    images = [f"![{image.stem}]({image.name})" for image in figures_of(file)]
    lines = [f"[{file.name}]({file.name}): {made}", "", "```sh", result["command"], "```", ""]
    lines += ["| figure | value | unit | target |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines + [line for image in images for line in (image, "")])


def figures_of(file: Path) -> list[Path]:
    """NAME.png and NAME.PART.png."""
    return sorted({*file.parent.glob(f"{file.stem}.png"), *file.parent.glob(f"{file.stem}.*.png")})


def headlines(result: dict[str, Any]) -> list[Headline]:
    """Those that the file has, else those of its suite, else one for every number in it."""
    suite = suite_of(result)
    if "headlines" not in result and suite in HEADLINES_OF:
        return HEADLINES_OF[suite](result)
    if "headlines" not in result:
        return list(numbers({key: value for key, value in result.items() if key not in PROVENANCE}, result.get("n", 1)))
    return [Headline(**given | {"value": _value(given["value"])}) for given in result["headlines"]]


def _value(value: Any) -> float | Repeated:
    return Repeated(**value) if isinstance(value, dict) else float(value)


def numbers(figures: dict[str, Any], n: int, prefix: str = "") -> Iterator[Headline]:
    """Every number, named by its path; lists and texts are left to the file."""
    for key, value in figures.items():
        if isinstance(value, dict) and all(isinstance(value.get(part), (int, float)) for part in ("median", "min")):
            spread = Repeated(value.get("n", n), value["median"], value["min"], value["max"])
            yield Headline(f"`{prefix}{key}`", spread)
        elif isinstance(value, dict):
            yield from numbers(value, n, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield Headline(f"`{prefix}{key}`", float(value))


def main() -> int:
    (RESULTS / PAGE).write_text(page(), encoding="utf-8")
    print(f"wrote {(RESULTS / PAGE).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The generated pages of docs/: `python -m async_rl.pages docs` writes them, tests compare them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from async_rl.config.explain import schema_page
from async_rl.metrics import CATALOGUE, Row
from async_rl.metrics.values import QUANTILES

_METRICS_INTRODUCTION = f"""# Metrics

Written by `make docs` from `async_rl/metrics/catalogue.py`.

Every step appends one JSON object to `metrics.jsonl` in the run directory; trackers get the same numbers: TensorBoard
with `metrics.tensorboard = true` (`tensorboard --logdir RUN_DIR/tensorboard`), Weights & Biases with `metrics.wandb`.
`/metrics` of the learner's HTTP port is for Prometheus and has what the coordinator knows of the last step:
`throughput/*` of the fleet, `generator/*`, `ledger/*`, publications, refusals; rewards, losses and staleness are in
the file and the trackers.

A value is kept as what it is made of until that moment: a mean as total and weight, so that means over tokens weigh
by tokens, whatever the micro-batches and ranks. A key without a value in a step is left out; `null` is a number not
finite.

| kind | how values of one step come together |
|---|---|
| mean | sum of totals / sum of weights |
| sum, max, min | the sum, the largest, the smallest |
| last | the latest |
| histogram | {", ".join(f"`KEY/p{q}`" for q in QUANTILES)}: the smallest value that q % of all items do not exceed |

Staleness is counted in steps (docs/staleness.md). `<word>` in a key stands for one lower-case word.
"""


def metrics_page() -> str:
    """docs/metrics.md."""
    parts = [_METRICS_INTRODUCTION]
    for group, members in groupby(sorted(CATALOGUE, key=_order), key=_group):
        parts.append(f"## {group}\n\n| key | kind | unit | meaning | what to do about it |\n|---|---|---|---|---|")
        parts += [
            f"| `{row.key}` | {row.kind} | {row.unit} | {_cell(row.meaning)} | {_cell(row.advice)} |" for row in members
        ]
        parts.append("")
    return "\n".join(parts)


def _group(row: Row) -> str:
    return row.key.split("/")[0] if "/" in row.key else "run"


def _order(row: Row) -> int:
    """Groups in the order in which the catalogue first names them; rows keep theirs."""
    return list(dict.fromkeys(map(_group, CATALOGUE))).index(_group(row))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES: dict[str, Callable[[], str]] = {"configuration.md": schema_page, "metrics.md": metrics_page}


def write_pages(folder: Path) -> None:
    """Write every generated page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))

"""The sweep's result in Markdown, from the rows of its summary: three tables, and examples that read them.

docs/tuning.md holds what `write` puts between its marks; a test holds it to the recorded result.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
POLICIES = ("mask", "wait", "keep")
BEGIN, END = "<!-- begin: python -m benchmarks.sweep --into -->\n", "<!-- end -->\n"


def text(rows: Sequence[Row]) -> str:
    """Tables, then examples."""
    return f"{tables(rows)}\n\n{examples(rows)}\n"


def write(rows: Sequence[Row], document: Path) -> None:
    """Replace what stands between the marks of a document."""
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{text(rows)}\n{END}{after}", encoding="utf-8")


def select(rows: Sequence[Row], **settings: Any) -> list[Row]:
    """Rows with these settings, by max_staleness."""
    found = [row for row in rows if all(row[name] == value for name, value in settings.items())]
    return sorted(found, key=lambda row: row["max_staleness"])


def policy_rows(rows: Sequence[Row], policy: str, sigma: float, batch: int) -> list[Row]:
    """A line of the figure; it begins at the synchronous baseline, which all policies share."""
    same = select(rows, sigma=sigma, batch_per_slots=batch, publish_every=1, generators=2)
    return [row for row in same if row["max_staleness"] == 0 or row["overdue"] == policy]


def values_of(rows: Sequence[Row], name: str) -> list[Any]:
    """The values that a setting has in the sweep, rising."""
    return sorted({row[name] for row in rows})


def tables(rows: Sequence[Row]) -> str:
    """Three tables: shares by policy, what both sides do, and publish_every by generators."""
    return "\n\n".join([_share_table(rows), _side_table(rows), _fleet_table(rows)])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def _share_table(rows: Sequence[Row]) -> str:
    bounds = values_of(rows, "max_staleness")[1:]
    head = ["sigma", "batch", "`overdue`", "synchronous", *(f"max_staleness {bound}" for bound in bounds)]
    lines = []
    for sigma in values_of(rows, "sigma"):
        for batch in values_of(rows, "batch_per_slots"):
            for policy in POLICIES:
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
    batch = max(values_of(rows, "batch_per_slots"))
    head = ["sigma", "max_staleness", "tokens/s generated, trained, in the loss, dropped", "times synchronous",
            "learner waits", "generators idle", "tokens of staleness 0, 1, 2, 3, more"]  # fmt: skip
    lines = []
    for sigma in values_of(rows, "sigma"):
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
    sigma, batch = max(values_of(rows, "sigma")), max(values_of(rows, "batch_per_slots"))
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


def examples(rows: Sequence[Row]) -> str:
    """What to read off the tables, a paragraph for each knob."""
    return "\n".join(
        f"- {_wrap(line)}" for line in (_bound(rows), _batch(rows), _policy(rows), _fleet(rows), _every(rows))
    )


def _wrap(line: str) -> str:
    return "\n  ".join(textwrap.wrap(line, 116, break_long_words=False, break_on_hyphens=False))


def _heavy(rows: Sequence[Row], policy: str = "mask", batch: int | None = None) -> dict[int, Row]:
    """max_staleness -> row of the heaviest tail and, unless another is named, the largest batch."""
    batch = max(values_of(rows, "batch_per_slots")) if batch is None else batch
    return {row["max_staleness"]: row for row in policy_rows(rows, policy, max(values_of(rows, "sigma")), batch)}


def _bound(rows: Sequence[Row]) -> str:
    own = _heavy(rows)
    gains = ", ".join(f"{row['speed_up']['median']:.1f} at {bound}" for bound, row in own.items() if bound)
    return (
        f"**Both sides wait: raise max_staleness.** Synchronous, the learner waits {own[0]['wait_share']:.0%} of the "
        f"time and slots idle {own[0]['idle_share']:.0%}, although the rates are equal: the longest completions hold "
        f"up everything else. Times synchronous, heavy tail, by max_staleness: {gains}."
    )


def _batch(rows: Sequence[Row]) -> str:
    shares = ", ".join(
        f"{_heavy(rows, batch=batch)[2]['limit_share']:.2f} with {batch} x slots"
        for batch in values_of(rows, "batch_per_slots")
    )
    return (
        f"**Or make batches larger.** Share of the limit at max_staleness 2, heavy tail: {shares}. A batch of several "
        "times the slots spreads over more time than its longest completion takes; the price is fewer steps per token."
    )


def _policy(rows: Sequence[Row]) -> str:
    mask, wait = _heavy(rows)[2], _heavy(rows, "wait")[2]
    return (
        f"**mask or wait.** Waiting for stragglers at max_staleness 2 reaches {wait['limit_share']:.2f} of the limit "
        f"with the heavy tail, masking {mask['limit_share']:.2f}, of which {mask['overdue_share']:.1%} of the tokens "
        f"leave the loss: {mask['in_loss_limit_share']:.2f} train. Masked tokens were paid for, so compare what trains."
    )


def _fleet(rows: Sequence[Row]) -> str:
    sigma, batch = max(values_of(rows, "sigma")), max(values_of(rows, "batch_per_slots"))
    same = select(rows, sigma=sigma, batch_per_slots=batch, overdue="mask", publish_every=1, max_staleness=2)
    parts = "; ".join(
        f"{row['generators']}: {row['trained_tokens_per_s']:,.0f} tokens/s, the learner waits {row['wait_share']:.0%}, "
        f"slots idle {row['idle_share']:.0%}"
        for row in sorted(same, key=lambda row: row["generators"])
    )
    return f"**How many generators.** At max_staleness 2, by generators, where two equal the learner: {parts}."


def _every(rows: Sequence[Row]) -> str:
    sigma, batch = max(values_of(rows, "sigma")), max(values_of(rows, "batch_per_slots"))
    largest = max(row["max_staleness"] for row in rows if row["batch_per_slots"] == batch)
    same = select(rows, sigma=sigma, batch_per_slots=batch, generators=2, overdue="mask", max_staleness=largest)
    parts = "; ".join(
        f"every {row['publish_every']}: {row['limit_share']:.2f} of the limit, mean staleness {_mean_age(row):.1f}, "
        f"{row['overdue_share']:.1%} overdue"
        for row in sorted(same, key=lambda row: row["publish_every"])
    )
    return (
        f"**publish_every costs freshness.** At max_staleness {largest}: {parts}. Raise it only where publications "
        "hold the learner or the engines for a good part of a step."
    )


def _mean_age(row: Row) -> float:
    return sum(int(age) * share for age, share in row["staleness"].items())

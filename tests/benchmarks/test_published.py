"""The fit to published tables: closed forms of its models, the search, and what it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.common import ROOT
from benchmarks.published import AREAL, TABLES, VERL, Table, errors, fit, misfit, scale_of
from benchmarks.published_models import AREAL_STALENESS, VERL_THRESHOLDS, areal, verl


def test_even_lengths_in_turns_and_overlapped() -> None:
    """A batch of as many members as slots, equal rates: half of the limit in turns, all of it with staleness."""
    figures = areal(1.0, groups=48, sigma=0.0, slowdown=0.0, median=100.0, steps=8)
    assert figures[0] == pytest.approx(0.5, rel=0.01)
    assert figures[1:] == pytest.approx([1.0] * 5, rel=0.01)


def test_an_interval_that_is_streamed_waits_for_its_first_half() -> None:
    """Slots for half of an interval: the first half arrives after 53 s, the second is sampled while it is trained."""
    synchronous, *others = verl(1.0, sigma=0.0, slowdown=0.0, intervals=4)
    # Half an interval, an interval of training, the publication of the learner and the pause of the engines.
    assert synchronous == pytest.approx(400 * (1.5 * 106.07 + 2 * 4.1) / 3600, rel=0.02)
    assert all(hours < synchronous for hours in others)


def test_the_search_finds_the_least() -> None:
    calls = []

    def cost(ratio: float) -> float:
        calls.append(ratio)
        return 0.01 + (math.log(ratio) - math.log(1.4)) ** 2

    assert fit(1.25, cost) == pytest.approx(1.4)
    assert len(calls) == 4
    # Where the three points bend the wrong way, one step beyond the lowest.
    assert fit(1.0, lambda ratio: -math.exp(ratio)) == pytest.approx(math.exp(2 * published.STEP))


def test_a_common_factor_is_fitted_where_nothing_says_it() -> None:
    figures = [f / 50e3 for f in AREAL.published.values()]
    assert scale_of(AREAL, figures) == pytest.approx(50e3)
    assert misfit(AREAL, figures) == pytest.approx(0.0, abs=1e-12)
    hours = list(VERL.published.values())
    assert scale_of(VERL, hours) == 1.0
    assert errors(VERL, [1.1 * h for h in hours]) == pytest.approx([0.1] * 4)


def test_tables_have_a_row_for_every_value_that_is_simulated() -> None:
    assert [int(name) for name in AREAL.published] == list(AREAL_STALENESS)
    assert [float(name) for name in VERL.published] == list(VERL_THRESHOLDS)


def test_it_writes_and_draws_what_it_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(ratio: float, factor: float = 1.0) -> list[float]:
        off = math.log(ratio / 1.3) ** 2
        return [factor * (1 + off) * f for f in (1.0, 2.0)]

    table: Any = Table(
        "t", "s", "k", "u", {"0": 1.0, "1": 2.0}, {}, {}, model, {"twice": {"factor": 2.0}}, 1.25, False
    )  # fmt: skip
    monkeypatch.setitem(TABLES, "areal", table)
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--only", "areal", "--output", str(out), "--figure", str(figure), "--allow-dirty"]
    assert published.main(arguments) == 0
    result = json.loads(out.read_text())["tables"]["areal"]
    assert result["fitted"]["learner_to_generators"] == pytest.approx(1.3, rel=0.01)
    assert result["doubts"]["twice"]["errors"] == pytest.approx([1.0, 1.0], abs=0.01)
    assert [h["what"] for h in json.loads(out.read_text())["headlines"]] == [
        "t: root mean square error over 2 rows",
        "t: largest error, at k 0",
    ]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert published.main(["--draw", str(out), "--figure", str(tmp_path / "again.png")]) == 0


def test_the_page_has_the_recorded_fit() -> None:
    results = json.loads((ROOT / "benchmarks/results/published.json").read_text())["tables"]
    page = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    assert f"{published.BEGIN}\n{published.tables(results)}\n\n{published.END}" in page, "run the command of its mark"
    assert results["areal"]["misfit"] < 0.05, "the page says so"

"""What a finished run shows: intervals, completions side by side, and a table that any completion leaves whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rl.recipes.summary import read_accuracies, side_by_side, weighted, wilson, write_completions


def write_evaluation(run_dir: Path, version: int, rows: Sequence[dict[str, Any]]) -> None:
    folder = run_dir / "evaluations"
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / f"version-{version:08d}.jsonl").write_text(text, encoding="utf-8")


def sample(problem: str, reward: float | None, completion: str = "c", answer: Any = 1) -> dict[str, Any]:
    return {"problem": problem, "answer": answer, "completion": completion, "reward": reward}


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0000),
    ],
)
def test_wilson_interval(successes: int, count: int, low: float, high: float) -> None:
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)


def test_accuracies_are_in_order_of_versions_and_leave_failed_samples_out(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 120, [sample("a", 1.0), sample("b", 1.0)])
    write_evaluation(tmp_path, 5, [sample("a", 1.0), sample("b", 0.0), sample("c", None), sample("d", 0.0)])
    write_evaluation(tmp_path, 7, [sample("a", None)])
    first, last = read_accuracies(tmp_path)
    assert (first.version, first.value, first.count) == (5, pytest.approx(1 / 3), 3)
    assert (last.version, last.value, last.count, last.high) == (120, 1.0, 2, 1.0)
    assert (last.low, str(last)) == (pytest.approx(0.3424, abs=5e-5), "1.000 [0.342, 1.000]")
    assert read_accuracies(tmp_path / "nowhere") == []


def test_side_by_side_pairs_the_first_samples_of_the_first_and_the_last_version(tmp_path: Path) -> None:
    assert side_by_side(tmp_path) == []
    write_evaluation(tmp_path, 0, [sample("b", 0.0, "b0"), sample("b", 0.0, "b0 again"), sample("a", 0.0, "a0")])
    assert side_by_side(tmp_path) == [] and write_completions(tmp_path) is None, "one evaluation has no after"
    write_evaluation(tmp_path, 9, [sample("a", 0.0, "a9")])
    write_evaluation(tmp_path, 10, [sample("a", 1.0, "a10"), sample("c", 1.0, "c10"), sample("b", 1.0, "b10")])
    pairs = [(old["completion"], new["completion"]) for old, new in side_by_side(tmp_path)]
    assert pairs == [("b0", "b10"), ("a0", "a10")]
    assert len(side_by_side(tmp_path, count=1)) == 1


def test_side_by_side_shows_every_part_of_the_held_out_set(tmp_path: Path) -> None:
    for version in (0, 1):
        write_evaluation(tmp_path, version, [sample(f"p{i}", 0.0) for i in range(25)])
    assert [old["problem"] for old, _ in side_by_side(tmp_path, count=5)] == ["p0", "p5", "p10", "p15", "p20"]


@pytest.mark.parametrize(
    ("completion", "cell"),
    [
        ("7", "7"),
        ("3 + 4\n= 7", "3 + 4 = 7"),
        ("a\r\rb\u2028c\x0bd", "a b c d"),
        ("1 | 2 || 3", r"1 \| 2 \|\| 3"),
        ("2*3*4", r"2\*3\*4"),
        ("`a` _b_ [c](d)", r"\`a\` \_b\_ \[c\](d)"),
        ("<!-- <b>", r"\<!-- \<b>"),
        (r"\boxed{7}", r"\\boxed{7}"),
        (r"a\|b", r"a\\\|b"),
        ("$5 and $6", r"\$5 and \$6"),
        ("  \n ", "(empty)"),
        ("", "(empty)"),
    ],
)
def test_no_completion_breaks_the_table(tmp_path: Path, completion: str, cell: str) -> None:
    write_evaluation(tmp_path, 0, [sample("p|1", 0.0, completion)])
    write_evaluation(tmp_path, 1, [sample("p|1", 1.0, "7", answer=None)])
    path = write_completions(tmp_path)
    assert path == tmp_path / "completions.md"
    assert path.read_text(encoding="utf-8") == (
        "| problem | answer | before | reward | after | reward |\n|---|---|---|---|---|---|\n"
        rf"| p\|1 | 1 | {cell} | 0.0 | 7 | 1.0 |" + "\n"
    )


def test_rates_are_weighted_by_the_time_they_held_for() -> None:
    rows = [{"rate": 10.0, "s": 1.0}, {"rate": 40.0, "s": 3.0}, {"s": 100.0}, {"rate": 7.0}]
    assert weighted(rows, "rate", "s") == 32.5
    assert weighted(rows, "other", "s") is None
    assert weighted(rows, "rate", "other") is None

"""The sweep: which points it has, its figures from known steps, and a tiny one from end to end."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.checks import run_ahead
from async_rl.metrics import Metrics
from benchmarks import sweep, sweep_text
from benchmarks.common import ROOT
from benchmarks.results_page import RESULTS
from benchmarks.sweep_figure import draw
from benchmarks.sweep_point import EQUAL_GENERATORS, GROUP_SIZE, SLOTS, Pace, Point, Steps, make_config

TUNING = ROOT / "docs" / "tuning.md"


def test_every_point_can_run_and_none_comes_twice(tmp_path: Path) -> None:
    planned = [point for point, _ in sweep.points()]
    assert len(planned) == len(set(planned))
    for point in planned:
        config = make_config(point, Pace(), tmp_path, tmp_path, 0)
        assert run_ahead(config.staleness, config.learner.batch_groups) >= point.publish_every - 1
        assert config.learner.batch_groups * GROUP_SIZE == point.batch_per_slots * EQUAL_GENERATORS * SLOTS
        assert config.staleness.max_staleness == point.max_staleness


def test_every_point_has_its_synchronous_baseline() -> None:
    planned = [point for point, _ in sweep.points()]
    same = {(point.sigma, point.batch_per_slots, point.generators) for point in planned}
    assert same == {(p.sigma, p.batch_per_slots, p.generators) for p in planned if p.max_staleness == 0}


def steps(tokens: int = 8000, **changes: Any) -> Steps:
    """Ten seconds, of which the learner trains eight; 32 slots that could sample 1200 tokens/s."""
    fleet = Metrics()
    fleet.mean("throughput/generated_tokens_per_s", 9000.0, 10.0)
    fleet.mean("throughput/dropped_tokens_per_s", 0.0, 10.0)
    fleet.mean("generator/idle_share", 25.0, 100.0)
    ages = Counter({1: tokens // 2, 2: tokens // 4, 3: tokens // 4})
    given: dict[str, Any] = {
        "slot_rate": 37.5,
        "wait_s": 1.5,
        "train_s": 8.0,
        "publish_s": 0.5,
        "seconds": 10.0,
        "steps": 4,
    }
    given["publications"] = {"time/gather_s": [0.1, 0.3, 0.2], "time/pause_s": [0.5, 0.5]}
    return Steps(tokens=tokens, ages=ages, fleet=fleet, **given | changes)


def test_the_limit_is_the_slower_side_as_measured() -> None:
    found = sweep.figures(Point("mask", 2, 1.0, 4), steps())
    assert found["generator_rate"] == pytest.approx(1200)
    assert found["learner_rate"] == pytest.approx(1000)
    assert found["limit_share"] == pytest.approx(0.8)
    assert (found["overdue_share"], found["in_loss_limit_share"]) == (pytest.approx(0.25), pytest.approx(0.6))
    assert (found["wait_share"], found["publish_share"]) == (pytest.approx(0.15), pytest.approx(0.05))
    assert found["publication_s"] == {"gather": 0.2, "pause": 0.5}
    slow = sweep.figures(Point("mask", 2, 1.0, 4), steps(train_s=4.0))
    assert slow["limit_share"] == pytest.approx(800 / 1200)


def test_only_masked_tokens_are_missing_from_the_loss() -> None:
    kept = sweep.figures(Point("keep", 2, 1.0, 4), steps())
    assert kept["overdue_share"] == pytest.approx(0.25)
    assert kept["in_loss_tokens_per_s"] == kept["trained_tokens_per_s"] == 800


def run_of(point: Point, seed: int) -> dict[str, Any]:
    """Synchronous: 200 tokens/s; else 800 and, by seed, 840 and 880; the learner's rate is 1000."""
    tokens = 2000 if point.max_staleness == 0 else 8000 + 400 * seed
    publications = {f"time/{name}_s": [0.01] for name in ("gather", "wire", "load", "pause")}
    measured = steps(tokens, train_s=tokens / 1000, publications=publications)
    return asdict(point) | {"seed": seed} | sweep.figures(point, measured)


def test_summary_compares_each_point_with_the_synchronous_one_of_its_kind(tmp_path: Path) -> None:
    runs = [run_of(point, seed) for point, repeats in sweep.points() for seed in range(repeats)]
    rows = sweep.summarize(runs)
    assert len(rows) == len(list(sweep.points()))
    row = next(row for row in rows if (row["overdue"], row["max_staleness"], row["n"]) == ("mask", 2, 3))
    assert row["trained_tokens_per_s"] == 840
    speed_up = row["speed_up"]
    assert (speed_up.median, speed_up.min, speed_up.max) == (pytest.approx(4.2), pytest.approx(4), pytest.approx(4.4))
    said = {headline.what: headline for headline in sweep.headlines(rows)}
    assert {"times synchronous, sigma 0.5", "times synchronous, sigma 1"} <= said.keys()
    assert said["share of the ideal limit, sigma 1"].value == row["limit_share_repeated"]
    written = json.loads(json.dumps(rows, default=asdict))
    draw({"summary": written}, tmp_path / "sweep.json")
    for name in ("sweep.png", "sweep.rates.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    shares, sides, fleet = sweep_text.tables(written).split("\n\n")
    assert '| 1 | 4 x slots | `"mask"` | 0.20 | 0.80, 50.0% | 0.84, 25.0% | 0.80, 0.0% |  |' in shares
    assert "| 1 | 2 | 900, 840, 630, 0 | 4.20 | 15.0% | 25.0% | 0%, 50%, 25%, 25%, 0% |" in sides
    assert "| 4 | 4 | 4 | 0.80, 0.0% | 4.00 |" in fleet


def test_a_quick_sweep_is_drawn_too(tmp_path: Path) -> None:
    rows = sweep.summarize([run_of(point, 0) for point, _ in sweep.quick_points()])
    draw(json.loads(json.dumps({"summary": rows}, default=asdict)), tmp_path / "quick.json")
    assert (tmp_path / "quick.png").exists() and (tmp_path / "quick.rates.png").exists()


def test_tables_and_examples_go_between_the_marks(tmp_path: Path) -> None:
    runs = [run_of(point, seed) for point, repeats in sweep.points() for seed in range(repeats)]
    rows = json.loads(json.dumps(sweep.summarize(runs), default=asdict))
    document = tmp_path / "page.md"
    document.write_text(f"before\n{sweep_text.BEGIN}what was there\n{sweep_text.END}after\n")
    for _ in range(2):
        sweep_text.write(rows, document)
    written = document.read_text()
    assert written.startswith("before\n") and written.endswith("after\n") and "what was there" not in written
    assert written.count("| sigma | batch |") == 1
    assert max(map(len, sweep_text.examples(rows).splitlines())) <= 120
    said = " ".join(sweep_text.examples(rows).split())
    assert "by max_staleness: 4.0 at 1, 4.2 at 2, 4.0 at 4." in said
    assert "masking 0.84, of which 25.0% of the tokens leave the loss: 0.63 train" in said
    assert "4: 800 tokens/s, the learner waits 15%, slots idle 25%" in said
    assert "every 4: 0.80 of the limit, mean staleness 1.8, 0.0% overdue" in said


def test_the_document_shows_the_recorded_result(tmp_path: Path) -> None:
    assert all(TUNING.read_text(encoding="utf-8").count(mark) == 1 for mark in (sweep_text.BEGIN, sweep_text.END))
    if not (RESULTS / "sweep.json").exists():
        pytest.skip("no sweep is recorded yet")
    copy = tmp_path / "tuning.md"
    copy.write_bytes(TUNING.read_bytes())
    sweep_text.write(json.loads((RESULTS / "sweep.json").read_text())["summary"], copy)
    command = "python -m benchmarks.sweep --table benchmarks/results/sweep.json --into docs/tuning.md"
    assert copy.read_bytes() == TUNING.read_bytes(), f"run `{command}`"


@pytest.mark.slow
def test_a_tiny_sweep_of_real_processes() -> None:
    planned = [(Point("mask", 0, 0.5, 1, generators=1), 1), (Point("wait", 1, 0.5, 1, generators=1), 1)]
    pace = Pace(tokens_per_s=2000.0, load_s=0.001, seconds=0.1, min_steps=2, parameters=1000)
    synchronous, wait = sweep.run(planned, pace, lanes=2)
    assert set(synchronous["staleness"]) == {"0"}
    assert set(wait["staleness"]) <= {"0", "1"} and wait["overdue_share"] == 0
    for one in (synchronous, wait):
        assert one["steps"] >= 2 and one["trained_tokens_per_s"] > 0
        assert one["publication_s"].keys() == {"gather", "load", "pause", "publication", "wire"}
        assert 0 < one["generator_rate"] <= pace.tokens_per_s * SLOTS * 1.001, "a slot cannot be faster than its engine"
        assert one["publication_s"]["pause"] >= pace.load_s

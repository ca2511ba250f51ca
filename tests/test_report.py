"""The report draws what was recorded where it belongs, whatever is missing."""

import json
from pathlib import Path

import pytest

from async_rl.config import build_config
from async_rl.report import draw_report, evaluations, profile, read_series

CONFIG = build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}}, ["run.stop_at_accuracy=0.9"])


def write(path: Path, *lines: dict[str, float | None]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_later_line_of_a_step_wins_and_gaps_stay_gaps(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2, "loss/policy": None},
        {"step": 3, "reward/mean": 0.3},
        {"step": 2, "reward/mean": 0.25},
        {"step": 2, "eval/accuracy": 0.5},
    )
    series = read_series(path)
    assert series["reward/mean"] == ([1, 2, 3], [0.1, 0.25, 0.3])
    assert series["eval/accuracy"] == ([2], [0.5])
    assert "loss/policy" not in series


def test_an_evaluation_belongs_to_its_version_not_to_the_step_that_wrote_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 12, "eval/accuracy": 0.5, "eval/policy_version_max": 10, "eval/stderr": 0.04},
        {"step": 23, "eval/accuracy": 0.7},
    )
    assert evaluations(read_series(path)) == ([10.0, 23], [0.5, 0.7], [0.04, 0.0])


def test_the_profile_weighs_the_later_half_by_tokens(tmp_path: Path) -> None:
    def line(step: int, age: int, tokens: int, share: float, distance: float) -> dict[str, float | None]:
        keys = ("tokens", "effective_sample_size", "log_ratio_abs")
        return {"step": step} | {
            f"profile/{key}_{age}": value for key, value in zip(keys, (tokens, share, distance), strict=True)
        }

    path = write(
        tmp_path / "metrics.jsonl",
        line(1, 0, 1000, 0.1, 9.0),  # the first half is left out
        line(2, 1, 1000, 0.1, 9.0),
        line(3, 2, 10, 0.5, 0.4) | line(3, 0, 5, 1.0, 0.0),
        line(4, 2, 30, 0.9, 0.2),
    )
    first, second = profile(read_series(path))
    assert first == (0, 1.0, 0.0)
    assert second == (2, pytest.approx(0.8), pytest.approx(0.25))
    assert profile({}) == []


@pytest.mark.slow
def test_a_picture_is_drawn_from_much_little_and_nothing(tmp_path: Path) -> None:
    full = {"reward/mean": 0.5, "eval/accuracy": 0.4, "eval/stderr": 0.1, "staleness/max": 2, "staleness/mean": 1.0,
            "throughput/generated_tokens_per_s": 100.0, "learner/wait_share": 0.5, "mismatch/logprob_abs_mean": 0.0,
            "mismatch/logprob_abs_max": 1e-6, "ratio/effective_sample_size": 0.9, "loss/entropy": 0.4,
            "profile/tokens_1": 9, "profile/effective_sample_size_1": 0.9, "profile/log_ratio_abs_1": 0.1}  # fmt: skip
    cases = {
        "full": [{"step": s, **full} for s in (1, 2, 3)],
        "little": [{"step": 1, "reward/mean": -3.0}],
        "nothing": [],
    }
    for name, lines in cases.items():
        out = tmp_path / f"{name}.svg"
        draw_report(write(tmp_path / "metrics.jsonl", *lines), out, CONFIG)
        text = out.read_text()
        assert ("<!-- not recorded -->" in text) == (name != "full")
        assert "<!-- bound 2 -->" in text
    draw_report(tmp_path / "absent.jsonl", tmp_path / "absent.png", CONFIG)
    assert (tmp_path / "absent.png").read_bytes().startswith(b"\x89PNG")

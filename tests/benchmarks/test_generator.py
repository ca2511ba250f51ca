"""The suite `generator` in small, with transformers instead of vLLM: every side but the plain one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generator
from benchmarks.generator_learner import Round


def rounds_of(*rates: dict[str, float]) -> list[dict[str, Round]]:
    return [
        {
            side: Round(10.0, int(10 * rate), 1, 1, [0.2], [0.1], [0.5]) if side == generator.UPDATES
            else Round(10.0, int(10 * rate))
            for side, rate in one.items()
        }
        for one in rates
    ]  # fmt: skip


def test_each_side_is_compared_with_the_one_it_adds_to() -> None:
    rates = {"plain": 1000.0, "streaming": 800.0, "rewards": 600.0, "rewards in workers": 400.0, "updates": 300.0}
    rows = generator.summarize(rounds_of(rates, rates))
    shares = {side: row.get(f"share_of_{generator.OVER.get(side)}") for side, row in rows.items()}
    medians = {side: share and round(share.median, 3) for side, share in shares.items()}
    expected = {"plain": None, "streaming": 0.8, "rewards": 0.75, "rewards in workers": 0.5, "updates": 0.5}
    assert medians == expected
    assert rows["updates"]["share_of_plain"].median == pytest.approx(0.3)
    update = generator.updates(rounds_of(rates, rates))
    assert update["publications"] == update["while_sampling"] == 2
    assert update["seconds_between"].median == 5.0 and update["paused_share"].median == pytest.approx(0.05)


@pytest.mark.slow
def test_a_tiny_model_streams_scores_and_takes_updates(tmp_path: Path) -> None:
    output = tmp_path / "generator.json"
    small = ["--engine", "hf", "--slots", "4", "--requests", "24", "--max-tokens", "16", "--rounds", "1"]
    assert generator.main([*small, "--output", str(output), "--allow-dirty"]) == 0
    result = json.loads(output.read_text())
    assert list(result["sides"]) == ["streaming", "rewards", "rewards in workers", "updates"]
    assert len({one["tokens"] for side, one in result["rounds"][0].items() if side != "updates"}) == 1
    update = result["rounds"][0]["updates"]
    assert update["publications"] == len(update["load_s"]) == len(update["receive_s"]) == 2
    assert result["update"]["paused_s"]["min"] > 0
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

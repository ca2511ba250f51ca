"""The benchmark of checkpoints with a tiny model: both kinds of save, each figure as often as it was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.checkpoint import SECONDS, main
from benchmarks.results_page import section
from tests.tiny_models import tiny_model


def test_a_tiny_model_gives_every_figure(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", tied=True, hidden=64, layers=1)
    output = tmp_path / "results" / "checkpoint.json"
    arguments = ["--model", str(model), "--rounds", "2", "--dir", str(tmp_path), "--output", str(output)]
    assert main([*arguments, "--allow-dirty"]) == 0
    result = json.loads(output.read_text())
    weights = result["parameters"] * 4
    assert 3 * weights < result["bytes"] < 3 * weights + 2_000_000, "weights and two moments, float32, and small files"
    for name in SECONDS[:3]:
        figure, values = result[name], result["seconds"][name]
        assert figure["n"] == len(values) == 2
        assert 0 < min(values) == figure["min"] <= figure["median"] <= figure["max"] == max(values)
    held = [result["seconds"][name] for name in ("background_held_s", "plain_held_s")]
    shares = [mine / other for mine, other in zip(*held, strict=True)]
    assert [result["held_share"][key] for key in ("min", "max", "n")] == [min(shares), max(shares), 2]
    assert result["step_alone_s"]["n"] >= 6
    assert "share of a plain one" in section(output, result)
    assert [path for path in tmp_path.iterdir() if path.name not in ("model", "results")] == [], "saves are removed"

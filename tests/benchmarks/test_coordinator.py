"""The suite `coordinator` in small: a fleet, a coordinator and a learner's steps, with every headline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import coordinator


@pytest.mark.slow
def test_one_short_pair_of_rounds(tmp_path: Path) -> None:
    output = tmp_path / "coordinator.json"
    size = ["--rounds", "1", "--seconds", "0.5", "--slots", "64", "--rate", "2000"]
    assert coordinator.main([*size, "--output", str(output), "--allow-dirty"]) == 0
    result = json.loads(output.read_text())
    assert result["n"] == 1 and result["step_cost_share"]["median"] > -1
    for name in ("batch_s", "answer_s", "coordinator_core_share", "fleet_cpu_s_per_1000"):
        assert result[name]["n"] == 1 and result[name]["median"] >= 0
    share, rate = (result[name]["median"] for name in ("coordinator_core_share", "trajectories_per_s"))
    assert result["coordinator_cpu_s_per_1000"]["median"] == pytest.approx(1000 * share / rate)
    assert len(result["headlines"]) == 8

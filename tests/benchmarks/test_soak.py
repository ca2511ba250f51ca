"""The suite `soak`: its figures from known samples, and a tiny one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.common import Repeated


def test_rates_are_those_of_each_part_and_memory_that_of_each_half() -> None:
    samples = [
        soak.Sample(
            at_s=0.5 * i, messages=100 * i + 50 * (i > 15), trajectories=8 * i, cpu_s=0.1 * i, rss_mb=60 + i % 9
        )
        for i in range(21)
    ]
    found = soak.summary(samples)
    assert found["seconds"] == 10
    assert found["messages_per_s"] == Repeated(10, 200, 200, 250)
    assert found["trajectories_per_s"] == Repeated(10, 16, 16, 16)
    assert found["coordinator_cpu_share"].median == pytest.approx(0.2)
    assert found["rss_mb"] == {"first_half_max": 68, "second_half_max": 68}
    grown = [*samples[:-1], soak.Sample(10, 2050, 160, 2.0, 99.0)]
    assert soak.summary(grown)["rss_mb"] == {"first_half_max": 68, "second_half_max": 99}


@pytest.mark.slow
def test_a_tiny_soak_of_two_processes(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    size = ["--generators", "3", "--seconds", "1", "--batch-groups", "2", "--step-s", "0.05", "--rate", "2000"]
    assert soak.main([*size, "--output", str(output), "--allow-dirty"]) == 0
    result = json.loads(output.read_text())
    assert result["generators"] == 3 and result["trained_twice"] == 0 and result["trained_problems"] > 0
    first, last = result["samples"][0], result["samples"][-1]
    assert last["messages"] > first["messages"] > 0
    assert last["at_s"] >= 1 and last["rss_mb"] > 10
    assert {"messages received", "of them twice"} <= {headline["what"] for headline in result["headlines"]}
    figure = tmp_path / "soak.png"
    figure.unlink()
    assert soak.main(["--draw", str(output)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")

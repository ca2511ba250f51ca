"""The suite `growth`: exponents of known curves, and a tiny one from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth
from benchmarks.common import Repeated


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    points = [{"n": n, "line": Repeated(3, 5.0 * n, 0, 0), "square": 2.0 * n * n, "flat": 7.0} for n in (1, 10, 100)]
    assert growth.exponent(points, "n", "line") == pytest.approx(1)
    assert growth.exponent(points, "n", "square") == pytest.approx(2)
    assert growth.exponent(points, "n", "flat") == pytest.approx(0)


def test_a_suite_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)soak \('--generators', 'x'\): exit code 2.*invalid int value: 'x'"):
        growth.suite("soak", "--generators", "x")


def test_rates_are_those_of_all_samples_and_processor_time_is_at_least_a_tick() -> None:
    samples = [{"at_s": 0.5, "cpu_s": 3.0}, {"at_s": 1.5, "cpu_s": 3.0}, {"at_s": 4.5, "cpu_s": 4.0}]
    assert growth.rate(samples, "cpu_s") == 0.25
    assert growth.rate(samples[:2], "cpu_s") == 0
    assert growth.rate(samples[:2], "cpu_s", growth.TICK_S) == 0.01


def _suite(name: str, *words: object) -> dict[str, Any]:
    """What the other suites say; their own tests run them."""
    if name == "weights":
        fleets = [{"publication_s": {"median": 0.5, "min": 0.4, "max": 0.6}}]
        return {
            "sizes": {"1M": {"parameters": 10**6, "fleets": fleets}, "10M": {"parameters": 10**7, "fleets": fleets}}
        }
    number = int(str(words[1]))
    began = {"at_s": 0.0, "cpu_s": 0.0, "messages": 0, "trajectories": 0}
    samples = [began, {"at_s": 10.0, "cpu_s": 0.2 * number, "messages": 30, "trajectories": 20}]
    memory = {"first_half_max": 60.0, "second_half_max": 60.0 + number}
    return {"rss_mb": memory, "samples": samples}


@pytest.mark.slow
def test_a_tiny_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "suite", _suite)
    output = tmp_path / "growth.json"
    words = ["--generators", "2", "4", "--groups", "1", "2", "--rounds", "1", "--threads", "1"]
    assert growth.main([*words, "--output", str(output), "--allow-dirty"]) == 0
    result = json.loads(output.read_text())
    assert [(point["generators"], point["cores"]) for point in result["coordinator"]] == [(2, 0.04), (4, 0.08)]
    assert [point["groups"] for point in result["step"]] == [1, 2]
    assert all(point["step_s"]["min"] > 0 and point["peak_mb"] > 100 for point in result["step"])
    found = {headline["what"]: headline["value"] for headline in result["headlines"]}
    assert found["processor time of the coordinator, cores: exponent over generators"] == pytest.approx(1)
    assert found["seconds of a publication: exponent over parameters"] == pytest.approx(0, abs=1e-9)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")

"""The suite `transport` in small: every side carries groups, and the figures say what a group cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl import protocol as p
from benchmarks import transport
from benchmarks.transport_peers import GROUP_SIZE, finished, whole_group


def test_peers_send_what_the_protocol_allows() -> None:
    keys = [p.LeaseKey("train", 3, member, 1) for member in range(GROUP_SIZE)]
    got = p.decode([bytes(frame) for frame in finished(keys)], p.FromGenerator)
    assert [key for key, _ in got.results()] == keys
    arrays = sum(len(frame) for frame in finished(keys)[1:])
    assert arrays == transport.group_bytes() and 95_000 < arrays < 105_000
    assert [len(whole_group(bundle)) for bundle in (8, 4, 1)] == [1, 2, 8]


@pytest.mark.slow
def test_three_sides_in_small(tmp_path: Path) -> None:
    output, figure = tmp_path / "result.json", tmp_path / "figure.png"
    small = ["--rounds", "1", "--seconds", "0.5", "--peers", "4", "--makers", "1"]
    files = ["--output", str(output), "--figure", str(figure), "--allow-dirty"]
    assert transport.main([*small, "--sides", "coordinator,raw,relay", *files]) == 0
    result = json.loads(output.read_text())
    assert set(result["sides"]) == {"coordinator", "raw", "relay"}
    assert all(side["groups_per_s"]["median"] > 0 for side in result["sides"].values())
    assert result["rate_against_raw"] > 0 and figure.stat().st_size > 0

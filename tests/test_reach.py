"""Who counts as unreachable: by hand, with a probe that the test answers."""

from __future__ import annotations

from async_rl.coordinator.reach import MAX_MISSES, PROBE_EVERY_S, Reach


def test_a_connection_that_was_reset_has_time_to_come_back() -> None:
    reconnects_after_s = 2.0  # reconnect_ivl_max in transport.py
    assert reconnects_after_s <= PROBE_EVERY_S * (MAX_MISSES - 1)


def test_only_failures_in_a_row_count_and_only_of_those_who_are_awaited() -> None:
    reach, now, broken = Reach(), 0.0, {"dead"}
    probed: list[str] = []

    def look(*awaited: str) -> list[str]:
        nonlocal now
        now += PROBE_EVERY_S
        return reach.look(awaited, lambda name: probed.append(name) or name not in broken, now)  # type: ignore[func-returns-value]

    assert [look("dead", "well") for _ in range(MAX_MISSES)] == [[]] * (MAX_MISSES - 1) + [["dead"]]
    broken = {"reset"}
    assert [look("reset") for _ in range(MAX_MISSES - 1)] == [[]] * (MAX_MISSES - 1)
    broken = set()
    assert look("reset") == [], "it is back"
    broken = {"reset"}
    assert [look("reset") for _ in range(MAX_MISSES - 1)] == [[]] * (MAX_MISSES - 1)
    assert look() == [], "nobody waits for it any more"
    assert [look("reset") for _ in range(MAX_MISSES - 1)] == [[]] * (MAX_MISSES - 1)
    assert look("reset") == ["reset"]
    probed.clear()
    assert reach.look(["well"], lambda name: probed.append(name) or True, now + PROBE_EVERY_S / 2) == []  # type: ignore[func-returns-value]
    assert probed == [], "turns come more often than probes"

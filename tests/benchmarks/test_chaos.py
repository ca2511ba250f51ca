"""What benchmarks.chaos says of its runs; the runs themselves are `make chaos`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos import LIMITS_S, Trial, Waits, check_trained, late, spread
from benchmarks.chaos_report import BEGIN, END, draw, headlines, table, write_table
from tests.tiny_models import tiny_model

RUN = {
    "seconds": 100.0, "steps": 4, "accuracy": 0.9, "stderr": 0.01, "max_staleness": 2, "problems_trained_once": 12,
    "num_events": 2, "curve": [[1.0, 0, 0.4], [90.0, 4, 0.9]],
    "ledger": {"issued": 20.0, "leased": 5.0, "buffered": 2.0, "in_batch": 0.0, "trained": 12.0, "dropped": 1.0},
}  # fmt: skip
FIGURES = {
    "undisturbed": RUN | {"accuracy": 0.92, "num_events": 0, "seconds": 80.0},
    "disturbed": RUN,
    "events": [{"at_s": 10.0, "event": "kill", "generator": "g1", "step": 1},
               {"at_s": 20.0, "event": "add", "generator": "g2", "step": 2}],
    "recoveries": {"kill to re-lease": spread("kill to re-lease", [1.0, 2.0, 4.5])},
    "accuracy_difference": {"value": -0.02, "noise": 0.042},
}  # fmt: skip


def test_the_table_has_the_account_and_each_recovery_beside_its_deadline() -> None:
    text = table(FIGURES)
    assert "4 steps in 100 s with 2 events (1 killed, 1 added)" in text
    assert "20 problems were drawn: 12 trained, each once, 5 leased, 2 buffered, 0 in batch, 1 dropped." in text
    assert "accuracy 0.900; undisturbed 0.920 in 80 s (difference -0.020, noise 0.042)" in text
    assert (
        "| kill to re-lease | 3 | 2.0 s | 4.5 s | 5.5 s (transport.heartbeat_timeout_s, and half a second to see it) |"
        in text
    )


def test_the_headlines_hold_every_recovery_to_its_deadline() -> None:
    found = {headline.what: (headline.value, headline.target) for headline in headlines(FIGURES)}
    assert found["kill to re-lease, longest of 3"] == (4.5, "<= 5.5")
    assert found["difference of the two"] == (-0.02, "within 0.042, the noise")


def test_a_recovery_after_its_deadline_is_named() -> None:
    assert late(FIGURES) == ""
    slow = spread("kill to re-lease", [1.0, 5.6])
    assert late(FIGURES | {"recoveries": {"kill to re-lease": slow}}) == "kill to re-lease 5.6 s"


def test_the_table_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(FIGURES, page, None)
    assert page.read_text() == f"before\n{BEGIN}\n{table(FIGURES)}\n{END}\nafter\n"
    write_table(FIGURES, page, tmp_path / "img" / "chaos.png")
    before, _, after = page.read_text().partition("\n\n![held-out accuracy of both runs")
    assert before == f"before\n{BEGIN}\n{table(FIGURES)}" and after.endswith(f"](img/chaos.png)\n{END}\nafter\n")
    for wrong in (page, tmp_path / "missing.md"):
        page.write_text("no marks")
        with pytest.raises(ValueError, match=rf"{wrong.name} has no lines '<!-- chaos: begin -->'"):
            write_table(FIGURES, wrong, None)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(FIGURES, tmp_path / "img" / "chaos.png")
    assert (tmp_path / "img" / "chaos.png").stat().st_size > 10_000


def test_a_ticket_trained_twice_or_lost_is_found() -> None:
    check_trained([3, 1, 2], 3)
    with pytest.raises(AssertionError, match=r"more than once: tickets \[1\]"):
        check_trained([3, 1, 1], 3)
    with pytest.raises(AssertionError, match="2 groups were trained, the ledger counts 3"):
        check_trained([3, 1], 3)


def test_a_wait_can_begin_another_and_each_has_a_deadline() -> None:
    waits, joined = Waits(), []
    waits.begin("start to first lease", lambda status: status["leases"] > 0)
    waits.begin(
        "",
        lambda status: status["there"] and not waits.begin("join to first lease", lambda later: later["leases"] > 0),
    )
    for there, leases in ((False, 0), (True, 0), (True, 3)):
        waits.look({"there": there, "leases": leases})
        joined.append(len(waits.open))
    assert joined == [2, 2, 0]
    assert set(waits.seconds) == {"start to first lease", "join to first lease"} <= set(LIMITS_S)


@pytest.mark.slow
def test_a_short_run_holds_its_account(tmp_path: Path) -> None:
    model, run = tiny_model(tmp_path / "model", tied=True), tmp_path / "run"
    run.mkdir()
    trial = Trial(run, 3, random.Random(0), f"model.path={model}", "data.eval_problems=8", "learner.batch_groups=4")
    found = trial.run(240.0)
    assert found["steps"] == 3 and found["problems_trained_once"] == found["ledger"]["trained"] == 12

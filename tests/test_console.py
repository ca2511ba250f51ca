"""What a person sees: a panel on a terminal, one line per step elsewhere."""

import io
import re

import pytest

from async_rl.config import build_config
from async_rl.console import Console, duration, sparkline

VALUES = {
    "reward/mean": 0.512, "eval/accuracy": 0.75, "eval/stderr": 0.02, "staleness/mean": 1.25, "staleness/max": 2.0,
    "throughput/generated_tokens_per_s": 5120.4, "throughput/trained_tokens_per_s": 4800.0,
    "throughput/dropped_tokens_per_s": 12.0, "learner/wait_share": 0.4, "generator/idle_share": 0.05,
    "generator/count": 2.0, "generator/slots": 64.0, "time/step_s": 2.5,
}  # fmt: skip


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def console(file: io.StringIO, mode: str, *overrides: str) -> Console:
    base = {"model": {"path": "m"}, "environment": {"type": "arithmetic"}}
    return Console(build_config(base, [f"metrics.console={mode}", "run.steps=40", *overrides]), file)


def shown(file: io.StringIO) -> str:
    """The text of the last panel, without colours and borders."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    return " ".join(text[text.rindex("╭") :].replace("│", " ").split())


def test_plain_prints_each_step_once() -> None:
    file = io.StringIO()
    view = console(file, "auto")
    view.message("learner listens on 127.0.0.1:29400 [run abc]")
    view.update(0, {}, {})
    view.update(1, VALUES, {})
    view.update(1, VALUES, {})
    view.update(2, {**VALUES, "reward/mean": 0.6}, {})
    view.close()
    first, second, bottleneck, third = file.getvalue().splitlines()
    assert first == "learner listens on 127.0.0.1:29400 [run abc]"
    assert second == (
        "step 1/40 | reward 0.512 | accuracy 0.750 | staleness 1.25, max 2 | tokens/s 5,120 generated, 4,800 trained, "
        "12 dropped | learner waits 40% | generators idle 5% | 2.5 s"
    )
    assert bottleneck.startswith("    The learner waits 40% of the time")
    assert third.startswith("step 2/40 | reward 0.600")


def test_plain_prints_the_bottleneck_when_it_changes() -> None:
    file = io.StringIO()
    view = console(file, "plain")
    for step, (wait, idle) in enumerate([(0.4, 0.05), (0.52, 0.05), (0.05, 0.6), (0.3, 0.05)], start=1):
        view.update(step, {**VALUES, "learner/wait_share": wait, "generator/idle_share": idle}, {})
    sentences = [line.strip() for line in file.getvalue().splitlines() if line.startswith("    ")]
    assert [sentence[:18] for sentence in sentences] == [
        "The learner waits ",
        "Generators idle 60",
        "The learner waits ",
    ]


def test_live_shows_the_last_values_and_the_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    file = Terminal()
    view = console(file, "auto", "run.name=tiny")
    for step in range(1, 5):
        view.update(step, {**VALUES, "reward/mean": 0.1 * step}, {})
    view.message("version 4: held-out accuracy 0.75")
    view.close()
    view.close()
    text = shown(file)
    assert "tiny" in text
    assert "step 4/40" in text
    assert "reward 0.400 ▁▃▆█" in text
    assert "held-out accuracy 0.750 ± 0.020" in text
    assert "staleness mean 1.25 max 2 of 2" in text
    assert "5,120 generated, 4,800 trained, 12 dropped" in text
    assert "learner waits 40% of 2.5 s" in text
    assert "generators idle 5% (2 with 64 slots)" in text
    assert "generation is the bottleneck" in text
    assert "version 4: held-out accuracy 0.75" in file.getvalue()


@pytest.mark.parametrize(
    ("values", "generators", "says_wait"),
    [({}, ["g"], True), ({}, [], True), (VALUES, [], True), (VALUES, ["g"], False)],
)
def test_the_coordinators_wait_is_said_while_nothing_moves(
    values: dict[str, float], generators: list[str], says_wait: bool
) -> None:
    file = Terminal()
    view = console(file, "live")
    view.update(1, values, {"wait": "no generator is connected", "generators": generators})
    view.close()
    assert ("no generator is connected" in shown(file)) is says_wait
    assert ("generation is the bottleneck" in shown(file)) is not says_wait


def test_the_time_left_is_that_of_steps_without_the_start() -> None:
    times = [0.0]
    file = Terminal()
    base = {"model": {"path": "m"}, "environment": {"type": "arithmetic"}}
    view = Console(build_config(base, ["metrics.console=live", "run.steps=10"]), file, clock=lambda: times[-1])
    # The first step comes after a start of 100 s, the next two take 30 s each: 7 x 30 s are left.
    for step, now in ((1, 100.0), (2, 130.0), (3, 160.0)):
        times.append(now)
        view.update(step, VALUES, {})
    view.close()
    assert "step 3/10" in shown(file)
    assert "2:40 elapsed, 3:30 left" in shown(file)


def test_off_prints_nothing() -> None:
    file = Terminal()
    view = console(file, "off")
    view.message("x")
    view.update(1, VALUES, {})
    view.close()
    assert file.getvalue() == ""


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_run_without_steps_or_values_can_be_shown(mode: str) -> None:
    view = console(io.StringIO(), mode, "run.steps=0")
    view.update(0, {}, {})
    view.update(1, {"reward/mean": float("nan")}, {})
    view.close()


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_sparklines() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([1.0]) == ""

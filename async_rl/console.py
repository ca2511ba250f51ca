"""The run on one screen: a live panel on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.advice import bottleneck_sentence
from async_rl.config import Config

ETA_STEPS = 20
"""Steps whose mean duration the remaining time is estimated from."""
SPARKS = "▁▂▃▄▅▆▇█"
TRENDS = ("reward/mean", "eval/accuracy")
HISTORY = 40
"""Steps that a trend shows."""


class Console:
    """Shows the last values of a run. Thread-safe; `off` shows messages of failures only through logging."""

    def __init__(self, config: Config, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._rich = RichConsole(file=file or sys.stdout, highlight=False)
        mode = config.metrics.console
        self._mode = ("live" if self._rich.is_terminal else "plain") if mode == "auto" else mode
        self._lock = threading.Lock()
        self._clock = clock
        self._started = clock()
        self._shown_step = 0
        self._advised = ""
        """The last bottleneck printed, without its figures."""
        self._ends: deque[float] = deque([self._started], maxlen=ETA_STEPS + 1)
        self._trends: dict[str, deque[float]] = {key: deque(maxlen=HISTORY) for key in TRENDS}
        self._live: Live | None = None
        if self._mode == "live":
            self._live = Live(self._panel(0, {}, {}), console=self._rich, refresh_per_second=4, transient=False)
            self._live.start()

    def update(self, step: int, values: Mapping[str, float], status: Mapping[str, Any] | None = None) -> None:
        """Show `values` (the latest of every key) after `step` steps; further calls for it only refresh the panel.

        Of `status`, `wait` stands in place of advice before the first step and while `generators` is empty; `predicted`
        is what the best changes would gain.
        """
        with self._lock:
            new = step > self._shown_step
            if new:
                self._note(step, values)
            if self._live is not None:
                self._live.update(self._panel(step, values, status or {}))
            elif new and self._mode == "plain":
                self._print(plain_line(step, values, self._config))
                self._advise(values, status or {})

    def message(self, text: str) -> None:
        """Print one line above the panel."""
        with self._lock:
            if self._mode != "off":
                self._print(text)

    def close(self) -> None:
        """Leave the last panel on the screen; callable more than once."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _advise(self, values: Mapping[str, float], status: Mapping[str, Any]) -> None:
        """Print the bottleneck, unless only its figures have changed since it was printed last."""
        sentence = bottleneck_sentence(values, self._config, status.get("predicted", ""))
        kind = re.sub(r"[\d.,]+", "", sentence)
        if kind != self._advised:
            self._advised = kind
            self._print(f"    {sentence}")

    def _print(self, text: str) -> None:
        self._rich.print(Text(text), soft_wrap=True)

    def _note(self, step: int, values: Mapping[str, float]) -> None:
        self._shown_step = step
        self._ends.append(self._clock())
        for key, trend in self._trends.items():
            if key in values and not (key == "eval/accuracy" and trend and trend[-1] == values[key]):
                trend.append(values[key])

    def _panel(self, step: int, values: Mapping[str, float], status: Mapping[str, Any]) -> Panel:
        table = Table.grid(padding=(0, 2))
        for label, value in self._rows(values):
            table.add_row(Text(label, style="dim"), value)
        nothing_moves = "learner/wait_share" not in values or status.get("generators") == []
        wait = str(status.get("wait", "")) if nothing_moves else ""
        sentence = wait or bottleneck_sentence(values, self._config, status.get("predicted", ""))
        body = Group(self._progress(step), Text(), table, Text(), Text(sentence, style="yellow"))
        return Panel(body, title=f"[bold]{self._config.run.name}[/bold]", title_align="left", padding=(0, 1))

    def _rows(self, values: Mapping[str, float]) -> list[tuple[str, Text]]:
        """Lines of the panel as (label, value)."""
        error = values.get("eval/stderr")
        accuracy = number(values.get("eval/accuracy"), ".3f") + (f" ± {error:.3f}" if error is not None else "")
        waits = f"{share(values.get('learner/wait_share'))} of {number(values.get('time/step_s'), '.1f')} s per step"
        fleet = (number(values.get(f"generator/{what}"), ".0f") for what in ("count", "slots"))
        idle = "{}   ({} with {} slots)".format(share(values.get("generator/idle_share")), *fleet)
        return [
            ("reward", self._with_trend(number(values.get("reward/mean"), ".3f"), "reward/mean")),
            ("held-out accuracy", self._with_trend(accuracy, "eval/accuracy")),
            ("staleness", self._staleness(values)),
            ("tokens per second", Text(_rates(values))),
            ("learner waits", Text(waits)),
            ("generators idle", Text(idle)),
        ]

    def _staleness(self, values: Mapping[str, float]) -> Text:
        bound, largest = self._config.staleness.max_staleness, values.get("staleness/max")
        text = Text(f"mean {number(values.get('staleness/mean'), '.2f')}   max ")
        text.append(number(largest, ".0f"), style="bold red" if (largest or 0) > bound else "bold")
        return text.append(f" of {bound}   overdue {share(values.get('staleness/overdue_token_share'))}")

    def _with_trend(self, text: str, key: str) -> Text:
        return Text(text, style="bold").append(f"  {sparkline(self._trends[key])}", style="not bold cyan")

    def _progress(self, step: int) -> Table:
        steps = self._config.run.steps
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        elapsed = self._clock() - self._started
        row.add_row(
            f"step {step}/{steps}",
            ProgressBar(total=steps, completed=step),
            f"{duration(elapsed)} elapsed, {duration(self._remaining_s(step))} left",
        )
        return row

    def _remaining_s(self, step: int) -> float | None:
        """Remaining steps times the mean of the last ones, without the first (it includes start-up) where possible."""
        ends = list(self._ends)[1:] if len(self._ends) > 2 else list(self._ends)
        if len(ends) < 2:
            return None
        return (self._config.run.steps - step) * (ends[-1] - ends[0]) / (len(ends) - 1)


def plain_line(step: int, values: Mapping[str, float], config: Config) -> str:
    """One line for logs: what the panel shows, without the trends."""
    parts = [
        f"step {step}/{config.run.steps}",
        f"reward {number(values.get('reward/mean'), '.3f')}",
        f"accuracy {number(values.get('eval/accuracy'), '.3f')}",
        f"staleness {number(values.get('staleness/mean'), '.2f')}, max {number(values.get('staleness/max'), '.0f')}",
        f"tokens/s {_rates(values)}",
        f"learner waits {share(values.get('learner/wait_share'))}",
        f"generators idle {share(values.get('generator/idle_share'))}",
        f"{number(values.get('time/step_s'), '.1f')} s",
    ]
    return " | ".join(parts)


def number(value: float | None, form: str) -> str:
    """A number, or a dash where there is none yet."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def share(value: float | None) -> str:
    """A share as a whole percentage."""
    return number(value, ".0%")


def _rates(values: Mapping[str, float]) -> str:
    rates = (
        number(values.get(f"throughput/{what}_tokens_per_s"), ",.0f") for what in ("generated", "trained", "dropped")
    )
    return "{} generated, {} trained, {} dropped".format(*rates)


def duration(seconds: float | None) -> str:
    """Such as 0:42 or 1:02:03; a dash when unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: deque[float] | list[float]) -> str:
    """The values as bars between their least and their greatest."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1)) if span else 0] for value in finite)

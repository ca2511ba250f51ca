"""What to change, with the gain that the simulator predicts: one knob at a time, settings before machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from async_rl.config import Config, ConfigError
from async_rl.simulate.outcome import Outcome
from async_rl.simulate.search import WITHIN, OutOfBudget, Search, Settings, devices_of_generator, replaced

WORTH = 0.05
"""Predicted gains below this are not worth a change."""
SPARED = 0.01
"""Nor are savings of less than this share of what there is: one generator of hundreds."""


class Suggestion(NamedTuple):
    """One change."""

    changes: Settings
    before: Settings
    gain: float
    """Of trained tokens per second; about 0 where the change saves staleness or machines."""
    now: Outcome
    then: Outcome
    reason: str
    """What else it buys or costs."""

    @property
    def sentence(self) -> str:
        """Such as: staleness.max_staleness 2 -> 3: +18 % trained tokens/s (idle 40 % -> 29 %)."""
        what = ", ".join(f"{path} {self.before[path]} -> {new}" for path, new in self.changes.items())
        shares = [f"{name} {_percent(a)} -> {_percent(b)}" for name, a, b in self._moved() if abs(a - b) >= 0.02]
        moved = "; ".join([*shares, *([self.reason] if self.reason else [])])
        return f"{what}: {self.gain:+.0%} trained tokens/s" + (f" ({moved})" if moved else "")

    @property
    def short(self) -> str:
        """Such as: staleness.max_staleness 2 -> 3 (+18%)."""
        what = ", ".join(f"{path} {self.before[path]} -> {new}" for path, new in self.changes.items())
        return f"{what} ({self.gain:+.0%})"

    def _moved(self) -> tuple[tuple[str, float, float], ...]:
        now, then = self.now, self.then
        return (
            ("learner waits", now.wait_share, then.wait_share),
            ("generators idle", now.idle_share, then.idle_share),
            ("overdue", now.overdue_share, then.overdue_share),
        )


def suggest(config: Config, search: Search, devices: int | None = None) -> list[Suggestion]:
    """Changes that gain at least `WORTH`, the best setting first, then machines; then what could be spared.

    With `devices` no change takes more than so many in all. What cannot gain is not simulated, and a search out of its
    budget ends with what it has found.
    """
    now = search.outcome(config)
    settings = [_best(config, now, search, values) for values in _settings(config, now)]
    machines = [_best(config, now, search, values) for values in _machines(config, now, devices)]
    worth = [[s for s in found if s is not None and s.gain >= WORTH] for found in (settings, machines)]
    return [*(s for found in worth for s in sorted(found, key=lambda s: -s.gain)), *_spared(config, now, search)]


def _settings(config: Config, now: Outcome) -> list[list[Settings]]:
    """Values of each knob that can gain: with the limit nearly reached, staleness cannot."""
    s, groups = config.staleness, config.learner.batch_groups
    knobs: list[list[Settings]] = []
    if now.ideal_share * (1 + WORTH) <= 1:
        more = (s.max_staleness + 1, s.max_staleness + 2, s.max_staleness + 4)
        knobs.append([{"staleness.max_staleness": n} for n in more])
    knobs.append([{"learner.batch_groups": groups * n} for n in (2, 4)])
    if now.publish_share >= WORTH / 2 or now.idle_share >= WORTH / 2:
        knobs.append([{"staleness.publish_every": s.publish_every * n} for n in (2, 4)])
    if config.generator.running_requests == "finish":
        knobs.append([{"generator.running_requests": "recompute"}])
    if s.overdue == "wait":
        knobs.append([{"staleness.overdue": "mask", "staleness.reorder_window": None}])
    return knobs


def _machines(config: Config, now: Outcome, devices: int | None) -> list[list[Settings]]:
    """More generators for a learner that waits, more ranks for generators that idle; as many as there are devices."""
    count, ranks, each = config.generator.count, config.learner.ranks, devices_of_generator(config)
    counts = sorted({count + 1, round(count * 1.25), round(count * 1.5), count * 2} - {count})
    if devices is not None:
        counts = [n for n in counts if n * each + ranks <= devices]
    more = [n for n in sorted({ranks + 1, ranks * 2}) if devices is None or n + count * each <= devices]
    knobs: list[list[Settings]] = []
    if now.wait_share + now.overdue_share >= WORTH / 2:
        knobs.append([{"generator.count": n} for n in counts])
    if now.idle_share >= WORTH / 2:
        knobs.append([{"learner.ranks": n} for n in more])
    return knobs


def _best(config: Config, now: Outcome, search: Search, values: list[Settings]) -> Suggestion | None:
    """Of the values of one knob the first that comes close to the best."""
    found = [s for changes in values if (s := _try(config, now, search, changes, "")) is not None]
    most = max((s.gain for s in found), default=0.0)
    return next((s for s in found if 1 + s.gain >= (1 + most) * (1 - WITHIN)), None)


def _try(config: Config, now: Outcome, search: Search, changes: Settings, reason: str) -> Suggestion | None:
    """None where nothing is trained now, the loader refuses the change, or the search is out of its budget."""
    if now.trained_tokens_per_s == 0:
        return None  # Every token is masked: there is no rate to compare with.
    try:
        changed = replaced(config, changes)
        then = search.outcome(changed)
    except (ConfigError, OutOfBudget):
        return None
    before = {path: _value(config, path) for path in changes}
    changes = {path: new for path, new in changes.items() if new != before[path]}
    return Suggestion(changes, before, then.trained_tokens_per_s / now.trained_tokens_per_s - 1, now, then, reason)


def _spared(config: Config, now: Outcome, search: Search) -> Iterator[Suggestion]:
    """Less staleness, and fewer generators, where neither costs anything."""
    s, count = config.staleness, config.generator.count
    for path, values in (
        ("staleness.max_staleness", [n for n in (1, 2, 3, 4, 6) if n < s.max_staleness]),
        ("generator.count", [n for n in sorted({count // 2, count * 3 // 4, count - 1}) if 0 < n < count]),
    ):
        have = s.max_staleness if path == "staleness.max_staleness" else count
        worth = [n for n in values if have - n >= SPARED * have]
        tried = (_try(config, now, search, {path: n}, "costs nothing") for n in worth)
        found = next((t for t in tried if t is not None and t.gain > -WITHIN), None)
        if found is not None:
            yield found


def _value(config: Config, path: str) -> object:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _percent(share: float) -> str:
    return f"{share:.0%}"

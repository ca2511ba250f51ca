"""`async-rl plan`: simulate a run before paying for it, find good settings, and show why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from async_rl.config import Config, ConfigError, load_config, reorder_window
from async_rl.plan_figure import draw_plan
from async_rl.simulate import Costs, costs_of
from async_rl.simulate.calibrate import batch_tokens, costs_from_run, measured
from async_rl.simulate.search import Candidate, Found, Search, devices, devices_of_generator
from async_rl.simulate.suggest import suggest

SHOWN = (
    "generator.count", "learner.ranks", "staleness.max_staleness", "staleness.publish_every", "learner.batch_groups",
)  # fmt: skip


WINDOW = "staleness.reorder_window"
"""Shown where it acts: with overdue = "wait"."""


def run_plan(path: str, overrides: Sequence[str], run: str | None, out: str | None, seed: int) -> int:
    """Simulate the settings, search better ones, print both, and write plan.json and plan.png into `out`."""
    config = load_config(path, overrides)
    costs = costs_from_run(Path(run)) if run else costs_of(config)
    _check(config)
    folder = Path(out or config.run.dir)
    console = Console()
    with console.status("simulating") as status:
        search = Search(costs, seed, progress=status.update)
        found = search.run(config)
        suggestions = suggest(config, search)
    console.print(_costs_line(costs))
    console.print(_table(found))
    if run:
        console.print(_against(Path(run), search))
    if not suggestions:
        console.print("Advice: nothing to change that gains 5 % or spares a generator.")
    for number, suggestion in enumerate(suggestions, start=1):
        console.print(f"{number}. {suggestion.sentence}", highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    draw_plan(found, config, folder / "plan.png")
    (folder / "plan.json").write_text(json.dumps(_data(found, costs), indent=2) + "\n", encoding="utf-8")
    console.print(f"Written: {folder / 'plan.png'}, {folder / 'plan.json'}")
    return 0


def _check(config: Config) -> None:
    if config.generator.count < 1:
        raise ConfigError("generator.count = 0: a plan needs at least 1 generator to start from")
    least = devices_of_generator(config) + 1
    if devices(config) < least:
        raise ConfigError(f"plan.devices = {devices(config)}: a generator and a learner rank take {least}")


def _costs_line(costs: Costs) -> str:
    return (
        f"One request alone: {costs.tokens_per_s:.4g} tokens/s, slowdown {costs.slowdown:.3g} for each further one; "
        f"completions of {costs.lengths.mean():.4g} tokens on average; a learner rank: "
        f"{costs.learner_tokens_per_s:.4g} tokens/s and {costs.step_s:.3g} s a step; "
        f"publication: gather {costs.gather_s:.3g} s, transfer {costs.transfer_s:.3g} s, pause {costs.pause_s:.3g} s"
    )


def _against(run: Path, search: Search) -> str:
    """What the run itself did, beside what its settings do in the simulation."""
    config, seen = load_config(run / "config.json"), measured(run)
    step_s = float(seen.of("time/step_s").mean())
    tokens_per_s = float(batch_tokens(seen, config).mean()) / step_s
    would = search.outcome(config)
    shares = (
        f"{name} {seen.rate(key):.0%} and {share:.0%}"
        for name, key, share in (
            ("learner waits", "learner/wait_share", would.wait_share),
            ("generators idle", "generator/idle_share", would.idle_share),
        )
    )
    return (
        f"Check, the run itself and its settings simulated: {tokens_per_s:,.0f} and "
        f"{would.consumed_tokens_per_s:,.0f} tokens/s of the batches "
        f"({would.consumed_tokens_per_s / tokens_per_s - 1:+.0%}); {'; '.join(shares)}"
    )


def _table(found: Found) -> Table:
    table = Table(title="Simulated", title_justify="left")
    table.add_column("what")
    columns = {"as given": found.given, "synchronous": found.synchronous, "best found": found.best}
    for name in columns:
        table.add_column(name, justify="right")
    for path in (*SHOWN, WINDOW) if found.given.config.staleness.overdue == "wait" else SHOWN:
        table.add_row(path, *(str(setting(c.config, path)) for c in columns.values()))
    table.add_section()
    base = found.synchronous.outcome.trained_tokens_per_s
    for name, text in ROWS.items():
        table.add_row(name, *(text(c.outcome, base) for c in columns.values()))
    if found.given.outcome.cost_per_million is not None:
        prices = (f"{c.outcome.cost_per_million:.4g}" for c in columns.values())
        table.add_row("price of a million trained tokens", *prices)
    return table


ROWS = {
    "trained tokens/s": lambda o, base: f"{o.trained_tokens_per_s:,.0f}",
    "times synchronous": lambda o, base: f"{o.trained_tokens_per_s / base:.2f}",
    "share of the ideal limit": lambda o, base: f"{o.ideal_share:.1%}",
    "limited by": lambda o, base: o.limit,
    "generated tokens/s": lambda o, base: f"{o.generated_tokens_per_s:,.0f}",
    "dropped or masked tokens/s": lambda o, base: f"{o.dropped_tokens_per_s:,.0f}",
    "overdue tokens": lambda o, base: f"{o.overdue_share:.1%}",
    "learner waits": lambda o, base: f"{o.wait_share:.1%}",
    "learner held by publications": lambda o, base: f"{o.publish_share:.1%}",
    "generators idle": lambda o, base: f"{o.idle_share:.1%}",
    "staleness, mean (largest)": lambda o, base: f"{o.mean_staleness:.2f} ({o.largest_staleness})",
}


def setting(config: Config, path: str) -> Any:
    """Value of section.key; the window that acts where none is set, None where none does."""
    if path == WINDOW:
        acts = config.staleness.overdue == "wait"
        return reorder_window(config.staleness, config.learner.batch_groups) if acts else None
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _data(found: Found, costs: Costs) -> dict[str, Any]:
    def one(candidate: Candidate) -> dict[str, Any]:
        settings = {path: setting(candidate.config, path) for path in (*SHOWN, WINDOW)}
        return {"settings": settings, "outcome": msgspec.to_builtins(candidate.outcome)}

    return {
        "costs": msgspec.to_builtins(costs),
        "as_given": one(found.given),
        "synchronous": one(found.synchronous),
        "best": one(found.best),
        "curves": {name: [one(candidate) for candidate in curve] for name, curve in found.curves.items()},
    }

"""What things took in a run: the costs of the simulator, from <run.dir>/metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.config import Config, ConfigError, load_config
from async_rl.report import Series, read_series
from async_rl.simulate.costs import Costs
from async_rl.simulate.lengths import Quantiles

FEWEST_STEPS = 3
"""Counted steps below which a run says too little."""
LEAST_CORRELATION = 0.7
"""Of ranks. Below it a quantity explains less than half of the variance: its effect cannot be told from noise."""

LEAST_SPREAD = 0.05
"""Standard deviation over median below which a quantity does not vary: what goes with it is noise."""

MOST_STEPS = 1000
"""Of a run whose pairs are compared, evenly spread over it."""


class Measured:
    """Metrics of the steps of a run, the first left out: it waits for engines to start."""

    def __init__(self, series: Series) -> None:
        self._by_step = {key: dict(zip(*points, strict=True)) for key, points in series.items()}
        self.steps = sorted(self._by_step.get("time/step_s", {}))[1:]

    def count(self, key: str) -> int:
        """Counted steps that have it."""
        return sum(step in self._by_step.get(key, {}) for step in self.steps)

    def of(self, key: str) -> np.ndarray:
        """float64 [steps]; the mean where a step lacks it, as steps shorter than a heartbeat lack what it brings."""
        found, mean = self._by_step.get(key, {}), self.average(key)
        return np.array([found.get(step, mean) for step in self.steps])

    def average(self, key: str, default: float = 0.0) -> float:
        """Over the counted steps that have it."""
        found = self._by_step.get(key, {})
        values = [found[step] for step in self.steps if step in found]
        return float(np.mean(values)) if values else default

    def growth(self, key: str) -> float:
        """Of a total over the counted steps; it is 0 until its first value."""
        totals = self._by_step.get(key, {})
        before = max((step for step in totals if step < self.steps[0]), default=None)
        last = max((step for step in totals if step <= self.steps[-1]), default=None)
        return 0.0 if last is None else totals[last] - (0.0 if before is None else totals[before])

    def rate(self, key: str) -> float:
        """Mean of a rate or share, weighted by the seconds that it held for."""
        return float(np.average(self.of(key), weights=self.of("time/step_s")))


NEEDED = (
    "time/train_s", "time/wait_for_batch_s", "time/publish_s",
    "completion/length_mean", "group/trained", "throughput/generated_tokens_per_s",
    "generator/idle_share", "generator/slots",
)  # fmt: skip


def measured(run_dir: Path) -> Measured:
    """The metrics of a run; raises ConfigError when there are too few to say what things take."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: --from-run takes the directory of a run")
    found = Measured(read_series(path))
    if len(found.steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{path} has {len(found.steps)} steps after the first, which waits for engines to start; at least "
            f"{FEWEST_STEPS} are needed to say what things take"
        )
    missing = [key for key in NEEDED if found.count(key) < FEWEST_STEPS]
    if missing:
        raise ConfigError(
            f"{path} has {', '.join(missing)} in fewer than {FEWEST_STEPS} steps; take a longer run, or one of this "
            "version of async_rl"
        )
    return found


def costs_from_run(run_dir: Path) -> Costs:
    """Costs as measured in a run, whose settings are read from <run_dir>/config.json; raises ConfigError."""
    run, config = measured(run_dir), load_config(str(run_dir / "config.json"), [])
    step_s, token_s = _learner(run, config)
    pause_s = run.average("time/pause_s")
    tokens_per_s, slowdown = _engine(run, config, pause_s)
    return Costs(
        tokens_per_s=tokens_per_s,
        slowdown=slowdown,
        lengths=_lengths(run, config),
        step_s=step_s,
        learner_tokens_per_s=1 / (token_s * config.learner.ranks),
        gather_s=run.average("time/gather_s"),
        transfer_s=max(0.0, run.average("time/publication_s") - pause_s),
        pause_s=pause_s,
        score_s=run.average("reward/score_s"),
        round_trip_s=run.average("generator/round_trip_s"),
        equal_share=_equal_share(run),
        failure_every_s=config.plan.failure_every_s,
        restart_s=config.plan.restart_s,
    )


def batch_tokens(run: Measured, config: Config) -> np.ndarray:
    """Completion tokens of each batch, float64 [steps]."""
    return run.of("completion/length_mean") * run.of("group/trained") * config.sampling.group_size


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(a, b) of y = a + b x with a, b >= 0; a = 0 where they cannot be told apart.

    The median slope over all pairs (Theil 1950, Sen 1968), and ranks and quartiles before it: a single step, such as
    the last of a run, whose slots run empty, must not bend the line.
    """
    through_origin = (0.0, float(x @ y / (x @ x)))
    if _spread(x) < LEAST_SPREAD or np.ptp(y) == 0 or _rank_correlation(x, y) < LEAST_CORRELATION:
        return through_origin
    some = np.linspace(0, len(x) - 1, min(len(x), MOST_STEPS)).astype(int)
    x, y = x[some], y[some]
    one, other = np.triu_indices(len(x), 1)
    apart = x[one] != x[other]
    slope = float(np.median((y[one] - y[other])[apart] / (x[one] - x[other])[apart]))
    start = float(np.median(y - slope * x))
    if slope <= 0 or start < 0:
        return through_origin
    return start, slope


def _spread(x: np.ndarray) -> float:
    """Standard deviation over median, from the quartiles as a normal distribution has them."""
    low, middle, high = np.quantile(x, (0.25, 0.5, 0.75))
    return float((high - low) / (1.349 * middle))


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's, ties at their mean rank."""
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(x: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _learner(run: Measured, config: Config) -> tuple[float, float]:
    """(seconds of a step, further seconds for each completion token) of all ranks together.

    All of a step but waiting and publishing: batches are prepared and metrics written beside training.
    """
    rest = run.of("time/step_s") - run.of("time/wait_for_batch_s") - run.of("time/publish_s")
    return line(batch_tokens(run, config), np.maximum(run.of("time/train_s"), rest))


def _engine(run: Measured, config: Config, pause_s: float) -> tuple[float, float]:
    """(tokens per second of a request alone, slowdown), pauses taken out."""
    slots, step_s = run.of("generator/slots"), run.of("time/step_s")
    busy = slots * (1 - run.of("generator/idle_share"))
    working = 1 - np.clip(pause_s / (step_s * config.staleness.publish_every), 0, 0.9)
    slot_seconds = busy * working * step_s
    tokens = run.of("throughput/generated_tokens_per_s") * step_s
    if tokens.sum() <= 0 or slot_seconds.sum() <= 0:
        raise ConfigError("the run's generators sampled nothing: throughput/generated_tokens_per_s is 0 in every step")
    used = (slot_seconds > 0) & (tokens > 0)
    running = busy[used] / np.maximum(1.0, slots[used] / config.generator.slots)
    start, slope = line(running, slot_seconds[used] / tokens[used])
    if start == 0:
        return float(tokens.sum() / slot_seconds.sum()), 0.0
    alone = start + slope
    return 1 / alone, slope / alone


def _equal_share(run: Measured) -> float:
    """Groups of equal rewards, dropped or trained, over all that were sampled whole."""
    trained = run.of("group/trained")
    equal = float(run.of("group/zero_variance_share") @ trained)
    dropped = run.growth("ledger/dropped_zero_variance")
    return (equal + dropped) / (float(trained.sum()) + dropped)


def _lengths(run: Measured, config: Config) -> Quantiles:
    """Knots at the quantiles that the metrics have and at the largest of a batch, scaled to the mean that was seen."""
    longest = config.sampling.max_completion_tokens
    p10, p50, p90 = (max(1.0, run.average(f"completion/length/p{q}", 1.0)) for q in (10, 50, 90))
    largest = min(float(longest), max(p90, run.average("completion/length_max", p90)))
    per_batch = float(np.mean(run.of("group/trained"))) * config.sampling.group_size
    top = max(0.95, 1 - 1 / (per_batch + 1))
    least = max(1.0, p10 * p10 / p50)
    found = Quantiles((0.0, 0.1, 0.5, 0.9, top, 1.0), (least, p10, p50, p90, largest, largest), longest)
    scale = run.average("completion/length_mean") / found.mean()
    return Quantiles(found.shares, tuple(max(1.0, tokens * scale) for tokens in found.tokens), longest)

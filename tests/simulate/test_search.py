"""Search and suggestions: cases whose right answer is known."""

from __future__ import annotations

import msgspec
import pytest

from async_rl.config import Config, ConfigError
from async_rl.simulate.outcome import Outcome
from async_rl.simulate.search import Candidate, Search, choose, replaced, synchronous
from async_rl.simulate.simulator import simulated_members
from async_rl.simulate.suggest import Suggestion, suggest
from tests.simulate.settings import lognormal, make_config, make_costs


def suggestion(found: list[Suggestion], path: str) -> Suggestion:
    return next(s for s in found if path in s.changes)


def test_a_starved_learner_is_told_how_many_generators() -> None:
    """Generators make 800 tokens/s each, the learner could train 1,600: one more doubles it, two are no better."""
    config = make_config()
    found = suggest(config, Search(make_costs(learner_tokens_per_s=1600.0)))
    more = suggestion(found, "generator.count")
    assert more.changes == {"generator.count": 2}
    assert more.gain == pytest.approx(1.0, abs=0.05)
    assert "generator.count 1 -> 2: +100% trained tokens/s (learner waits 50% -> 0%" in more.sentence
    assert not any("learner.ranks" in s.changes for s in found)


def test_a_slow_learner_spares_generators_or_takes_another_rank() -> None:
    config = make_config("generator.count=4")
    found = suggest(config, Search(make_costs(learner_tokens_per_s=800.0)))
    assert suggestion(found, "learner.ranks").changes == {"learner.ranks": 2}
    assert suggestion(found, "learner.ranks").gain == pytest.approx(1.0, abs=0.05)
    spared = suggestion(found, "generator.count")
    assert spared.changes == {"generator.count": 2}
    assert spared.gain == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(("count", "spared"), [(768, None), (100, 99)])
def test_one_generator_of_hundreds_is_not_worth_a_change(count: int, spared: int | None) -> None:
    """All but one are needed: of 768 that is no saving, of 100 it is 1 %."""
    fixed = Search(make_costs()).outcome(make_config())

    class Known(Search):
        def outcome(self, config: Config) -> Outcome:
            enough = min(config.generator.count / (count - 1), 1.0)
            return msgspec.structs.replace(fixed, trained_tokens_per_s=1000.0 * enough**4)

    found = suggest(make_config(f"generator.count={count}"), Known(make_costs()))
    counts = [s.changes["generator.count"] for s in found if "generator.count" in s.changes]
    assert counts == ([] if spared is None else [spared])


def test_synchronous_training_is_told_to_overlap() -> None:
    """Equal rates in turns: one step of staleness doubles the rate; more is not named, it gains nothing further."""
    config = make_config("staleness.max_staleness=0")
    first = suggest(config, Search(make_costs()))[0]
    assert first.changes == {"staleness.max_staleness": 1}
    assert first.gain == pytest.approx(1.0, abs=0.05)


def test_staleness_that_buys_nothing_is_taken_back() -> None:
    found = suggest(make_config("staleness.max_staleness=6"), Search(make_costs()))
    assert suggestion(found, "staleness.max_staleness").changes == {"staleness.max_staleness": 1}


def test_publications_that_hold_the_learner_are_made_rarer() -> None:
    costs = make_costs(gather_s=2.0, learner_tokens_per_s=1600.0)
    config = make_config("staleness.max_staleness=6", "generator.count=4", "learner.batch_groups=16")
    found = suggest(config, Search(costs))
    assert suggestion(found, "staleness.publish_every").changes == {"staleness.publish_every": 4}
    # A step is 2 s and 2 s of publication; then a quarter of that.
    assert suggestion(found, "staleness.publish_every").gain == pytest.approx(4.0 / 2.5 - 1, rel=0.05)


def test_the_search_finds_the_even_split_and_the_knee() -> None:
    """Of 4 devices one rank trains what three generators sample: 2,400 tokens/s."""
    fleet = ("plan.devices=4", "learner.ranks=2", "generator.count=2")
    config = make_config(*fleet, "learner.batch_groups=12", "staleness.max_staleness=8")
    found = Search(make_costs(learner_tokens_per_s=2400.0)).run(config)
    assert (found.best.config.learner.ranks, found.best.config.generator.count) == (1, 3)
    assert found.best.config.staleness.max_staleness == 1
    assert found.best.outcome.trained_tokens_per_s == pytest.approx(2400.0, rel=0.03)
    assert found.best.outcome.trained_tokens_per_s > 1.4 * found.given.outcome.trained_tokens_per_s
    assert [c.label for c in found.curves["learner.ranks"]] == [1, 2, 3]


def test_with_prices_the_cheapest_tokens_are_best() -> None:
    """A generator at ten times the price of a learner: fewer of them, though the rate falls."""
    config = make_config("plan.devices=6", "plan.generator_price=10", "plan.learner_price=1", "generator.count=5")
    search = Search(make_costs(learner_tokens_per_s=800.0))
    best = search.run(config).best
    curve = search.curve(best.config, search._splits(best.config))
    assert best.outcome.cost_per_million == pytest.approx(
        min(c.outcome.cost_per_million for c in curve if c.outcome.cost_per_million), rel=0.02
    )
    hourly = 10 * best.config.generator.count + best.config.learner.ranks
    assert best.outcome.cost_per_million == pytest.approx(hourly / 3600 / best.outcome.trained_tokens_per_s * 1e6)


def test_the_widest_window_that_costs_nothing_is_chosen() -> None:
    """Generators a third faster than the learner: a step less of run-ahead costs nothing, data is a step fresher."""
    config = make_config("staleness.overdue=wait", "staleness.max_staleness=3", "generator.count=2",
                         "plan.members=1500", "learner.batch_groups=16", "staleness.reorder_window=1")  # fmt: skip
    search = Search(make_costs(lengths=lognormal(0.5), learner_tokens_per_s=1200.0))
    curve = search.curve(config, search._knobs(config)["staleness.reorder_window"](config))
    chosen, narrow = choose(curve), curve[-1]
    assert (chosen.label, narrow.label) == (17, 1)
    assert chosen.outcome.trained_tokens_per_s == pytest.approx(narrow.outcome.trained_tokens_per_s, rel=0.02)
    assert chosen.outcome.mean_staleness == pytest.approx(narrow.outcome.mean_staleness - 1, abs=0.2)
    assert curve[0].outcome.trained_tokens_per_s < 0.95 * chosen.outcome.trained_tokens_per_s


def test_thousands_of_generators_cost_no_more_than_a_few() -> None:
    large = ("generator.count=4096", "generator.slots=64", "learner.batch_groups=16384", "sampling.group_size=16")
    assert simulated_members(make_config(*large)) < 10_000


def test_the_least_value_close_to_the_best_is_chosen() -> None:
    search, config = Search(make_costs(lengths=lognormal(0.5))), make_config()
    outcome = search.outcome(config)
    rates = {0: 50.0, 1: 98.5, 2: 100.0, 4: 99.0}

    def candidate(bound: int) -> Candidate:
        import msgspec

        return Candidate(bound, config, msgspec.structs.replace(outcome, trained_tokens_per_s=rates[bound]))

    assert choose([candidate(bound) for bound in rates]).label == 1
    assert choose([candidate(bound) for bound in (2, 4)]).label == 2


def test_a_run_whose_tokens_are_all_masked_has_no_rate_to_compare_with() -> None:
    """Every token is one step old, and the correction takes none of that age."""
    config = make_config("staleness.max_staleness=1", "algorithm.correction.max_token_staleness=0")
    search = Search(make_costs(learner_tokens_per_s=400.0))
    assert search.outcome(config).trained_tokens_per_s == 0
    assert suggest(config, search, 8) == []


def test_changes_are_checked_as_at_load() -> None:
    with pytest.raises(ConfigError, match="cannot make progress"):
        replaced(make_config("staleness.max_staleness=0"), {"staleness.publish_every": 2})
    assert synchronous(make_config("staleness.overdue=wait")).staleness.max_staleness == 0

"""Random histories: joins, deaths, lags, failures, late or repeated results, drops, restarts; then the run must end."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.ledger_world import World, random_world

HISTORIES = 60
OPERATIONS = 80


@pytest.mark.parametrize("block", range(20))
def test_random_histories_keep_every_law_and_come_to_an_end(block: int) -> None:
    for seed in range(block * HISTORIES, (block + 1) * HISTORIES):
        world = random_world(random.Random(seed))
        history: list[str] = []
        operations = world.weather()
        try:
            for _ in range(OPERATIONS):
                history.append(world.rng.choice(operations))
                getattr(world, history[-1])()
                world.check()
            history.append("run_to_the_end")
            world.run_to_the_end()
            world.check()
            history.append("resume_with_more_problems")
            world.resume_with_more_problems()
            world.run_to_the_end()
            world.check()
        except Exception as error:
            error.add_note(f"seed {seed}, {world.settings}, {world.num_problems} problems: {' '.join(history)}")
            raise


class LedgerMachine(RuleBasedStateMachine):
    """The same world, driven and shrunk by hypothesis."""

    @initialize(rng=st.randoms(use_true_random=False))
    def begin(self, rng: random.Random) -> None:
        self.world = random_world(rng)

    @rule(operation=st.sampled_from(sorted({*World.WORK, *World.TROUBLE})))
    def operate(self, operation: str) -> None:
        getattr(self.world, operation)()

    @invariant()
    def laws_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_the_end()


def test_state_machine() -> None:
    limits = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(LedgerMachine, settings=limits)

"""Sums over a fleet that comes and goes."""

from __future__ import annotations

import pytest

from async_rl.fleet import FleetMeter
from async_rl.protocol import GeneratorStats
from tests.ledger_world import make_trajectory


def test_sampled_reward_is_the_mean_over_training_results_that_were_taken() -> None:
    meter = FleetMeter()
    meter.arrived(make_trajectory(0, reward=1.0), "train", wanted=True)
    meter.arrived(make_trajectory(0, reward=0.25), "train", wanted=True)
    meter.arrived(make_trajectory(0, reward=0.0), "eval", wanted=True)
    meter.arrived(make_trajectory(0, reward=0.0), "train", wanted=False)
    meter.arrived(make_trajectory(0, status="failed"), "train", wanted=True)
    assert meter.collect(2.0, 0).resolve()["reward/sampled_mean"] == 0.625
    assert "reward/sampled_mean" not in meter.collect(2.0, 0).resolve(), "a step without results has no mean"


def test_tokens_of_greedy_completions_are_counted_apart_and_their_rewards_in_no_mean() -> None:
    meter = FleetMeter(has_baselines=True)
    meter.arrived(make_trajectory(0, reward=0.25), "train", wanted=True)
    for wanted in (True, False):
        meter.arrived(make_trajectory(0, reward=1.0), "baseline", wanted=wanted)
    values = meter.collect(2.0, 0).resolve()
    assert values["reward/sampled_mean"] == 0.25
    assert values["throughput/baseline_tokens_per_s"] == 2 / 2
    assert values["throughput/generated_tokens_per_s"] == 6 / 2
    assert meter.collect(2.0, 0).resolve()["throughput/baseline_tokens_per_s"] == 0.0
    assert "throughput/baseline_tokens_per_s" not in FleetMeter().collect(2.0, 0).resolve()


def test_dropped_tokens_are_those_that_came_for_nothing_and_those_of_dropped_tickets() -> None:
    meter = FleetMeter()
    meter.arrived(make_trajectory(0), "train", wanted=False)
    meter.arrived(make_trajectory(0), "train", wanted=True)
    rates = [meter.collect(2.0, total).resolve()["throughput/dropped_tokens_per_s"] for total in (10, 10, 14)]
    assert rates == [(2 + 10) / 2, 0.0, 4 / 2]


def test_round_trips_of_all_generators_are_averaged_over_each_span() -> None:
    meter = FleetMeter()
    meter.update("g0", "a", GeneratorStats(round_trips=2, round_trip_s=0.2))
    meter.update("g1", "b", GeneratorStats(round_trips=1, round_trip_s=0.4))
    assert meter.collect(1.0, 0).resolve()["generator/round_trip_s"] == pytest.approx(0.2)
    meter.update("g0", "a", GeneratorStats(round_trips=6, round_trip_s=0.4))
    assert meter.collect(1.0, 0).resolve()["generator/round_trip_s"] == pytest.approx(0.05)
    assert "generator/round_trip_s" not in meter.collect(1.0, 0).resolve()

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
    meter.joined("g0", "a", is_new=True)
    meter.joined("g1", "b", is_new=True)
    meter.update("g0", "a", GeneratorStats(round_trips=2, round_trip_s=0.2))
    meter.update("g1", "b", GeneratorStats(round_trips=1, round_trip_s=0.4))
    assert meter.collect(1.0, 0).resolve()["generator/round_trip_s"] == pytest.approx(0.2)
    meter.update("g0", "a", GeneratorStats(round_trips=6, round_trip_s=0.4))
    assert meter.collect(1.0, 0).resolve()["generator/round_trip_s"] == pytest.approx(0.05)
    assert "generator/round_trip_s" not in meter.collect(1.0, 0).resolve()


def hours(idle_slot_s: float, slot_s: float) -> GeneratorStats:
    return GeneratorStats(idle_slot_s=idle_slot_s, slot_s=slot_s)


def test_a_process_that_comes_back_is_counted_once() -> None:
    meter = FleetMeter()
    meter.joined("g0", "a", is_new=True)
    meter.update("g0", "a", hours(2880, 28800))
    assert meter.collect(1.0, 0).resolve()["generator/idle_share"] == 0.1
    meter.forget("g0", "a")
    meter.joined("g0", "a", is_new=False)
    meter.joined("g0", "a", is_new=False)
    meter.update("g0", "a", hours(2960, 28900))
    assert meter.collect(1.0, 0).resolve()["generator/idle_share"] == 80 / 100
    assert meter.totals["slot_s"] == 28900
    meter.joined("g0", "b", is_new=True)
    meter.update("g0", "b", hours(5, 10))
    assert meter.collect(1.0, 0).resolve()["generator/idle_share"] == 5 / 10, "another process of the name is another"


def test_a_process_that_is_older_than_the_learner_is_counted_from_its_first_totals() -> None:
    meter = FleetMeter()
    meter.joined("g0", "a", is_new=False)
    meter.update("g0", "a", hours(2880, 28800))
    assert "generator/idle_share" not in meter.collect(1.0, 0).resolve()
    meter.update("g0", "a", hours(2881, 28810))
    assert meter.collect(1.0, 0).resolve()["generator/idle_share"] == 1 / 10


def test_of_processes_that_are_gone_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.fleet.GONE_KEPT", 2)
    meter = FleetMeter()
    for incarnation in "abc":
        meter.joined("g0", incarnation, is_new=True)
        meter.update("g0", incarnation, hours(0, 10))
        meter.forget("g0", incarnation)
    for incarnation in "abc":
        meter.joined("g0", incarnation, is_new=False)
        meter.update("g0", incarnation, hours(0, 11))
    assert meter.totals["slot_s"] == 3 * 10 + 2 * 1

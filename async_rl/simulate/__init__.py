"""A discrete-event simulation of a run: the real ledger, leasing and evaluations under a virtual clock."""

from async_rl.simulate.costs import Costs, costs_of
from async_rl.simulate.lengths import Lognormal, Quantiles
from async_rl.simulate.outcome import Outcome
from async_rl.simulate.simulator import Simulation, simulate, steps_for

__all__ = ["Costs", "Lognormal", "Outcome", "Quantiles", "Simulation", "costs_of", "simulate", "steps_for"]

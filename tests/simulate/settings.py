"""Small settings and costs for simulations."""

from __future__ import annotations

from typing import Any

import msgspec

from async_rl.config import Config, build_config
from async_rl.simulate import Costs, Lognormal


def make_config(*overrides: str) -> Config:
    """One generator of 8 slots, batches of 8 members in groups of 2, no evaluation."""
    base: dict[str, Any] = {
        "model": {"path": "none"},
        "environment": {"type": "arithmetic"},
        "evaluation": {"every": 0},
        "sampling": {"group_size": 2, "max_completion_tokens": 4096},
        "staleness": {"max_staleness": 2},
        "learner": {"batch_groups": 4},
        "generator": {"slots": 8, "engine": {"type": "simulated"}},
        "plan": {"members": 2000},
    }
    return build_config(base, overrides)


def make_costs(**changes: Any) -> Costs:
    """100 tokens per second and slot, the same for 8 slots in the learner; 100 tokens each."""
    costs = Costs(tokens_per_s=100.0, lengths=Lognormal(100.0, 0.0, 4096), learner_tokens_per_s=800.0)
    return msgspec.structs.replace(costs, **changes)


def lognormal(sigma: float, longest: int = 4096) -> Lognormal:
    """Median 100 tokens."""
    return Lognormal(100.0, sigma, longest)

"""Engines: the libraries that sample tokens inside a generator."""

from __future__ import annotations

from typing import assert_never

from async_rl.config import Config, schema
from async_rl.config.lengths import longest_trajectory
from async_rl.engines.base import Engine


def build_engine(config: Config, *, seed: int, threads: int) -> Engine:
    """The engine that `generator.engine` names, not yet started; only its own libraries are imported."""
    generator = config.generator
    match generator.engine:
        case schema.VllmEngine():
            from async_rl.engines.vllm import VllmEngine

            return VllmEngine(
                generator.engine,
                config.model,
                max_model_len=longest_trajectory(config),
                slots=generator.slots,
                threads=threads,
                running_requests=generator.running_requests,
                seed=seed,
                load_timeout_s=config.weights.deadline_s,
            )
        case schema.HfEngine():
            from async_rl.engines.hf import HfEngine

            return HfEngine(
                generator.engine,
                config.model,
                slots=generator.slots,
                threads=threads,
                running_requests=generator.running_requests,
            )
        case schema.SimulatedEngine():
            from async_rl.engines.simulated import SimulatedEngine, known_tokens

            return SimulatedEngine(
                generator.engine,
                slots=generator.slots,
                running_requests=generator.running_requests,
                known_tokens=known_tokens(config.model.path),
            )
        case other:
            assert_never(other)

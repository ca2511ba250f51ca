"""Seeded requests on CPU, where vLLM 0.32 cannot take a draw back.

A prefill that does not fit into one step, at the start, after a preemption or when running requests are recomputed,
samples a token that nobody wants, and vLLM winds the request's generator back for it (`gen.set_offset`). Generators on
CPU have no offset, and the engine dies of that. Here such a token comes from torch's common generator instead: a
request's own generator advances with its kept tokens only, so equal seeds give equal tokens, cut prefills or not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


@functools.cache
def repair_cpu_generators() -> None:
    """Let this process's CPU workers draw unwanted tokens without seed; more calls, and calls on GPUs, change nothing.

    It imports the model runner, which of vLLM's processes only workers need.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner_class: Any = CPUModelRunner
    sample_tokens = runner_class.sample_tokens

    @functools.wraps(sample_tokens)
    def sample_wanted_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        unwanted = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        with set_aside(batch.generators, unwanted):
            return sample_tokens(runner, *args, **kwargs)

    runner_class.sample_tokens = sample_wanted_tokens


@contextlib.contextmanager
def set_aside(generators: dict[int, T], rows: Iterable[int]) -> Iterator[None]:
    """Take the generators of some rows of the batch out of the dict, and put them back at the end."""
    held = {row: generators.pop(row) for row in rows if row in generators}
    try:
        yield
    finally:
        generators.update(held)

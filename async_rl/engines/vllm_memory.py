"""How large vLLM's KV cache must be on CPU, where it takes no share of a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from async_rl.config import schema

log = logging.getLogger(__name__)

FLOOR_BYTES = 64 << 20
"""A small model's cache also keeps prefixes of requests that have ended."""
LARGEST_SHARE = 1 / 4
"""Of the machine's free memory: the learner and other engines need some too."""


def kv_cache_bytes_needed(
    model: Path, *, max_model_len: int, slots: int, block_size: int, itemsize: int, tensor_parallel: int = 1
) -> int:
    """Bytes of one worker's cache in which `slots` requests of `max_model_len` tokens run and none is preempted.

    A request holds whole blocks, and vLLM keeps one block for itself; a block has keys and values of `block_size`
    tokens in every layer. For models that attend to less (sliding windows) it is more than they need.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = config.num_hidden_layers * 2 * -(-heads // tensor_parallel) * head_dim * itemsize
    blocks = slots * -(-max_model_len // block_size) + 1
    return max(FLOOR_BYTES, blocks * block_size * token_bytes)


def kv_cache_bytes(config: schema.VllmEngine, model: Path, *, max_model_len: int, slots: int, itemsize: int) -> int:
    """The size that the user gives, else what is needed; where memory is short less, and some requests run twice."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    needed = kv_cache_bytes_needed(
        model,
        max_model_len=max_model_len,
        slots=slots,
        block_size=config.block_size,
        itemsize=itemsize,
        tensor_parallel=config.tensor_parallel,
    )
    limit = int(psutil.virtual_memory().available * LARGEST_SHARE)
    if needed > limit:
        log.warning(
            "%d requests of %d tokens need %d bytes of KV cache, and a quarter of the free memory is %d: the engine "
            "takes that much, and preempts requests where it is full; lower generator.slots or "
            "sampling.max_completion_tokens, or set generator.engine.kv_cache_bytes",
            slots,
            max_model_len,
            needed,
            limit,
        )
    return min(needed, limit)

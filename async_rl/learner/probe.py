"""Which layout a model can take, found by trying: a few tokens through every path, before the model is sharded.

Names and flags of architectures change; what a model computes does not lie. The reference is the model's own forward
on separate sequences.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rl.errors import InputError
from async_rl.learner import attention
from async_rl.learner.attention import UnsupportedAttention
from async_rl.learner.batch import PreparedBatch, TrainSequence
from async_rl.learner.layout import MicroBatch, packed_micro_batch, padded_micro_batch
from async_rl.learner.packing import make_units
from async_rl.learner.scorer import CompletionScorer
from async_rl.metrics import Metrics

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Nats between two paths in float32; rounding gives about 1e-5, another attention pattern or head much more."""
TEMPERATURE = 0.7
_CPU = torch.device("cpu")


@torch.no_grad()
def choose_layout(scorer: CompletionScorer, requested: str) -> bool:
    """Set the model's attention and return whether it takes packed micro-batches; the model is on CPU in float32.

    `requested` is model.attention; only auto and sdpa leave the choice. Raises InputError when the head's logprobs
    are not those of the model itself.
    """
    batch = _probe_batch(scorer.model.config.get_text_config().vocab_size)
    padded = padded_micro_batch(batch, make_units(batch, range(3), 1000, share_prompts=False), _CPU)
    expected = _own_logprobs(scorer.model, padded)
    difference = _difference(scorer, padded, expected)
    if difference > TOLERANCE:
        raise InputError(
            f"{type(scorer.model).__name__}: logprobs from its output embedding differ by {difference:.2g} nats from "
            f"its own (limit {TOLERANCE:g}): it transforms its logits, which is not supported; choose another model"
        )
    if requested not in ("auto", "sdpa"):
        return False
    before = scorer.model.config._attn_implementation
    attention.register()
    scorer.model.set_attn_implementation(attention.IMPLEMENTATION)
    packed = packed_micro_batch(batch, make_units(batch, range(3), 1000, share_prompts=True), _CPU)
    try:
        difference = _difference(scorer, packed, expected)
        reason = None if difference <= TOLERANCE else f"its logprobs would be off by {difference:.2g}"
    except (UnsupportedAttention, TypeError) as error:
        reason = str(error)
    if reason is None:
        return True
    log.warning("%s cannot share prompts in a row (%s): sequences are padded", type(scorer.model).__name__, reason)
    scorer.model.set_attn_implementation(before)
    return False


def _probe_batch(vocab_size: int) -> PreparedBatch:
    """Two completions of one prompt and one of another, 3 to 7 seeded random tokens each."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, vocab_size, length)

    prompts = (ids(5), ids(3))
    sequences = tuple(
        TrainSequence(slot, group, prompts[group], ids(length), np.arange(length), 1.0)
        for slot, (group, length) in enumerate(((0, 4), (0, 7), (1, 5)))
    )
    return PreparedBatch(
        step=1,
        num_slots=3,
        sequences=sequences,
        offsets=np.cumsum([0, 4, 7, 5]),
        behavior_logprobs=np.zeros(16, np.float32),
        staleness=np.zeros(16, np.int64),
        metrics=Metrics(),
    )


def _own_logprobs(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """From the logits that the model itself returns, in the order of the batch's tokens."""
    logits = model(input_ids=micro_batch.input_ids, use_cache=False).logits.flatten(0, 1)[micro_batch.predictors]
    scores = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    return _in_order(scores.gather(1, micro_batch.targets[:, None])[:, 0], micro_batch)


def _difference(scorer: CompletionScorer, micro_batch: MicroBatch, expected: Tensor) -> float:
    logprobs, _ = scorer(micro_batch, TEMPERATURE)
    return float((_in_order(logprobs, micro_batch) - expected).abs().max())


def _in_order(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return torch.empty_like(values).index_copy(0, micro_batch.tokens, values)

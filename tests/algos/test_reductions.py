"""Reductions against loops, and denominators that do not depend on how a batch was cut."""

from __future__ import annotations

import pytest
import torch

from async_rl.algos import reductions
from async_rl.algos.reductions import Denominator
from tests.algos.inputs import packed
from tests.reference import reductions as reference


def reduced(reduction: str, losses: torch.Tensor, mask: torch.Tensor, index: torch.Tensor, num_sequences: int) -> float:
    denominator = reductions.count(mask, index, num_sequences)
    weights = reductions.token_weights(reduction, mask, index, num_sequences, denominator, 50)
    assert torch.count_nonzero(weights[~mask]) == 0
    return float(reductions.reduce(losses, weights))


@pytest.mark.parametrize("seed", range(5))
def test_reductions_agree_with_loops(seed: int) -> None:
    batch = packed(seed)
    losses = torch.where(batch.mask, batch.advantages * batch.logprobs, 0.0)
    nested = [
        [float(losses[t]) if batch.mask[t] else None for t in torch.nonzero(batch.index == sequence)[:, 0].tolist()]
        for sequence in range(batch.num_sequences)
    ]
    expected = {
        "token_mean": reference.token_mean(nested),
        "sequence_mean_token_mean": reference.sequence_mean_token_mean(nested),
        "sequence_mean_token_sum": reference.sequence_mean_token_sum(nested),
        "constant": reference.constant(nested, 50),
    }
    for reduction, value in expected.items():
        assert reduced(reduction, losses, batch.mask, batch.index, batch.num_sequences) == pytest.approx(
            value, rel=1e-5
        )


def test_everything_masked_is_zero() -> None:
    mask, index = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    for reduction in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"):
        logprobs = torch.full((3,), -1.0, requires_grad=True)
        denominator = reductions.count(mask, index, 2)
        weights = reductions.token_weights(reduction, mask, index, 2, denominator, 50)
        loss = reductions.reduce(logprobs, weights)
        loss.backward()
        assert loss.item() == 0.0
        assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_count_and_addition() -> None:
    mask = torch.tensor([True, False, True, False, True])
    counted = reductions.count(mask, torch.tensor([0, 0, 1, 2, 1]), 4)
    assert counted == Denominator(tokens=3, sequences=2)
    assert counted + Denominator(tokens=10, sequences=5) == Denominator(tokens=13, sequences=7)


def test_the_reduction_is_float32() -> None:
    losses = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    mask, index = torch.ones(4096, dtype=torch.bool), torch.zeros(4096, dtype=torch.int64)
    assert reduced("sequence_mean_token_sum", losses, mask, index, 1) == 4096.0


def test_rejected_tokens_keep_their_share_when_the_mask_before_rejection_is_counted() -> None:
    index = torch.zeros(4, dtype=torch.int64)
    valid, kept = torch.ones(4, dtype=torch.bool), torch.tensor([True, True, True, False])
    loss = torch.where(kept, 1.0, 0.0)
    assert reduced("token_mean", loss, valid, index, 1) == 0.75
    assert reduced("token_mean", loss, kept, index, 1) == 1.0


def test_unknown_reduction_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="token_mean, sequence_mean_token_mean"):
        reduced("mean", torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(1).long(), 1)
    with pytest.raises(AssertionError, match="constant_length"):
        reductions.token_weights("constant", torch.ones(1).bool(), torch.zeros(1).long(), 1, Denominator(1, 1))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
def test_recount_exchanges_the_denominator(reduction: str) -> None:
    """Divided by one count and multiplied by the exchange is divided by the other; nothing kept is nothing."""
    batch = packed(1)
    fewer = batch.mask & (batch.index != 0)
    where = (fewer, batch.index, batch.num_sequences)
    counted, kept = Denominator(tokens=90, sequences=40), reductions.count(*where)
    weights = reductions.token_weights(reduction, *where, counted, 50)
    expected = reductions.token_weights(reduction, *where, kept, 50)
    torch.testing.assert_close(weights * reductions.recount(reduction, counted, kept), expected)
    assert reductions.recount(reduction, counted, Denominator(0, 0)) == 0.0
    assert reductions.recount(reduction, Denominator(0, 0), Denominator(0, 0)) == 0.0

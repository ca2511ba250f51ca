"""Layouts are chosen by what a model computes: models that cannot share prompts are padded, odd heads refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from async_rl.config import Config
from async_rl.errors import InputError
from async_rl.learner.batch import prepare_batch
from async_rl.learner.model import Policy, load_policy
from async_rl.learner.ranks import RankContext
from tests.learner.helpers import make_config, make_groups
from tests.learner.plain import plain_logprobs

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@pytest.fixture
def load_model(tmp_path: Path, ctx: RankContext) -> Callable[[PreTrainedModel], tuple[Policy, Config]]:
    def load(model: PreTrainedModel) -> tuple[Policy, Config]:
        model.save_pretrained(tmp_path)
        config = make_config(tmp_path)
        return load_policy(config.model, config.learner, ctx), config

    return load


def check_against_separate_sequences(policy: Policy, config: Config, model: PreTrainedModel) -> None:
    groups = make_groups()
    batch = prepare_batch(groups, 1, config)
    [[units]] = policy.plan(batch, range(len(batch.sequences)), 10_000)
    with torch.no_grad():
        logprobs, _ = policy.logprobs(policy.micro_batch(batch, units), 0.7)
        member = groups[0].members[0]
        expected = plain_logprobs(model.eval(), groups[0].problem, member, 0.7)
    first = [unit for unit in units if 0 in unit.sequences]
    start = sum(len(batch.sequences[s].positions) for unit in units[: units.index(first[0])] for s in unit.sequences)
    torch.testing.assert_close(logprobs[start : start + len(expected)], expected, rtol=0, atol=1e-5)


def test_learned_positions_can_share_prompts(load_model: Callable) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    policy, config = load_model(model)
    assert policy.packed
    check_against_separate_sequences(policy, config, model)


def test_sliding_windows_are_padded(load_model: Callable, caplog: pytest.LogCaptureFixture) -> None:
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=3))
    policy, config = load_model(model)
    assert not policy.packed
    assert "MistralAttention asks for sliding_window" in caplog.text
    check_against_separate_sequences(policy, config, model)


def test_a_head_that_transforms_its_logits_is_refused(load_model: Callable) -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=0.5))
    with pytest.raises(InputError, match="it transforms its logits, which is not supported"):
        load_model(model)


def test_dropout_is_off(load_model: Callable) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, attn_pdrop=0.5))
    policy, config = load_model(model)
    check_against_separate_sequences(policy, config, model)

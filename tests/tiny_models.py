"""Tiny random causal language models with a character tokenizer, built on the spot (no downloads)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*=?.,:()' \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def character_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character; id 0 pads, id 1 ends; encoding a character outside `characters` raises."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def tiny_model(
    path: Path,
    tied: bool,
    seed: int = 0,
    arch: Literal["qwen3", "llama"] = "qwen3",
    characters: str = CHARACTERS,
    hidden: int = 128,
    layers: int = 2,
    initializer_range: float = 0.1,
    max_positions: int = 512,
) -> Path:
    """Write a seeded model of about 0.3 million float32 parameters with its tokenizer into `path` and return `path`.

    The weights are wide enough (0.1) that two seeds disagree by whole nats: stale weights cannot pass as equal.
    """
    tokenizer = character_tokenizer(characters)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "head_dim": 32,
        "max_position_embeddings": max_positions,
        "initializer_range": initializer_range,
        "tie_word_embeddings": tied,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    rng_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel
    model = Qwen3ForCausalLM(Qwen3Config(**settings)) if arch == "qwen3" else LlamaForCausalLM(LlamaConfig(**settings))
    torch.random.set_rng_state(rng_state)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)

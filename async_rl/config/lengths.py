"""How long prompts and trajectories may be, with what the model itself can hold; only config.json is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.config.checks import ConfigError
from async_rl.config.schema import Config

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names that model families give to the number of positions."""
STRETCHED = ("linear", "dynamic")
"""Rotary scalings whose factor multiplies that number; with the others (llama3, yarn, longrope) it is included.

As vLLM reads it, whose own limit this must not exceed.
"""


def model_positions(folder: str | Path) -> int | None:
    """Tokens that a model can hold, prompt and completion together; None where its config.json does not say."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    whole: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    model = whole.get("text_config") or whole
    named = [model[name] for name in POSITIONS if isinstance(model.get(name), int)]
    rotary = model.get("rope_parameters") or model.get("rope_scaling") or {}
    stretched = rotary.get("rope_type", rotary.get("type")) in STRETCHED
    return int(min(named) * (rotary.get("factor") or 1 if stretched else 1)) if named else None


def longest_prompt(config: Config) -> int:
    """Tokens of the longest prompt that is used: data.max_prompt_tokens, less where the model is too small for it.

    Every prompt leaves room for a whole completion. ConfigError when that leaves no prompt at all.
    """
    positions, completion = model_positions(config.model.path), config.sampling.max_completion_tokens
    if positions is None:
        return config.data.max_prompt_tokens
    if completion >= positions:
        raise ConfigError(
            f"sampling.max_completion_tokens = {completion} leaves no room for a prompt: the model in "
            f"{config.model.path!r} holds {positions} tokens, prompt and completion together; lower it"
        )
    return min(config.data.max_prompt_tokens, positions - completion)


def limit_in_words(config: Config) -> str:
    """End of an error about prompts that are longer: the limit, where it comes from and how to raise it."""
    limit, asked = longest_prompt(config), config.data.max_prompt_tokens
    if limit == asked:
        return f"the limit is data.max_prompt_tokens = {asked}: raise it"
    return (
        f"the limit is {limit}, for the model in {config.model.path!r} holds {model_positions(config.model.path)} and "
        f"sampling.max_completion_tokens takes {config.sampling.max_completion_tokens} of them: lower that"
    )


def longest_trajectory(config: Config) -> int:
    """Tokens of the longest prompt with the longest completion."""
    return longest_prompt(config) + config.sampling.max_completion_tokens

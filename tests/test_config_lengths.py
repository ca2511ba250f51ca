"""The longest prompt is what data asks for and the model can hold beside a whole completion."""

import json
from pathlib import Path

import pytest

from async_rl.config import Config, ConfigError, build_config
from async_rl.config.lengths import limit_in_words, longest_prompt, longest_trajectory, model_positions


def folder(path: Path, **settings: object) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "any", **settings}))
    return path


def config(model: Path, *overrides: str) -> Config:
    base = {"model": {"path": str(model)}, "environment": {"type": "arithmetic"}}
    return build_config(base, ["data.max_prompt_tokens=40", "sampling.max_completion_tokens=24", *overrides])


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 32}, "max_position_embeddings": 7}, 32),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 256),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2}}, 128),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
)
def test_positions_of_a_model(tmp_path: Path, settings: dict[str, object], positions: int | None) -> None:
    assert model_positions(folder(tmp_path, **settings)) == positions


def test_no_folder_says_nothing(tmp_path: Path) -> None:
    assert model_positions(tmp_path / "missing") is None
    assert longest_prompt(config(tmp_path / "missing")) == 40


@pytest.mark.parametrize(("positions", "prompt"), [(1000, 40), (64, 40), (63, 39), (25, 1)])
def test_completions_keep_their_room(tmp_path: Path, positions: int, prompt: int) -> None:
    settings = config(folder(tmp_path, max_position_embeddings=positions))
    assert longest_prompt(settings) == prompt
    assert longest_trajectory(settings) == prompt + 24 <= positions


def test_a_completion_that_fills_the_model_is_refused(tmp_path: Path) -> None:
    settings = config(folder(tmp_path, max_position_embeddings=24))
    with pytest.raises(ConfigError, match=r"max_completion_tokens = 24 leaves no room .* holds 24 tokens"):
        longest_prompt(settings)


def test_the_limit_names_what_raises_it(tmp_path: Path) -> None:
    assert "data.max_prompt_tokens = 40" in limit_in_words(config(folder(tmp_path, max_position_embeddings=64)))
    words = limit_in_words(config(folder(tmp_path, max_position_embeddings=30)))
    assert "the limit is 6," in words and "holds 30" in words and "sampling.max_completion_tokens takes 24" in words

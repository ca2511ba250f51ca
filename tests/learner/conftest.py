"""Tiny models and a process group of one, shared by the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.config import Config
from async_rl.learner.model import Policy, load_policy
from async_rl.learner.ranks import RankContext, init_ranks
from tests.learner.helpers import make_config
from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tied: Qwen3 with a tied head; untied: Llama with its own; other: as tied, with other weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny_model(root / "tied", tied=True, arch="qwen3", hidden=64),
        "other": tiny_model(root / "other", tied=True, arch="qwen3", hidden=64, seed=7),
        "untied": tiny_model(root / "untied", tied=False, arch="llama", hidden=64, seed=1),
    }


@pytest.fixture(scope="session")
def ctx() -> Iterator[RankContext]:
    threads = torch.get_num_threads()
    context = init_ranks(make_config())
    yield context
    context.close()
    torch.set_num_threads(threads)


@pytest.fixture
def load(models: dict[str, Path], ctx: RankContext) -> Callable[..., tuple[Policy, Config]]:
    """load(kind, section={...}) -> a fresh policy and its configuration."""

    def build(kind: str, **sections: dict[str, Any]) -> tuple[Policy, Config]:
        config = make_config(models[kind], **sections)
        return load_policy(config.model, config.learner, ctx), config

    return build

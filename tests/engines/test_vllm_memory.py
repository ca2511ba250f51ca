"""The size of vLLM's KV cache on CPU, counted by hand."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from async_rl.config import schema
from async_rl.engines import vllm_memory
from async_rl.engines.vllm_memory import FLOOR_BYTES, kv_cache_bytes, kv_cache_bytes_needed
from tests.tiny_models import tiny_model

TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""2 layers, keys and values, 2 heads of 32 numbers in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.mark.parametrize(
    ("tokens", "slots", "block", "blocks"), [(500, 400, 32, 6401), (512, 400, 32, 6401), (513, 400, 16, 13201)]
)
def test_whole_blocks_for_every_slot_and_one_for_vllm(model, tokens, slots, block, blocks):
    needed = kv_cache_bytes_needed(model, max_model_len=tokens, slots=slots, block_size=block, itemsize=4)
    assert needed == blocks * block * TOKEN_BYTES


def test_narrow_numbers_and_split_heads_take_less(model):
    sizes = {"max_model_len": 512, "slots": 1600, "block_size": 32}
    assert kv_cache_bytes_needed(model, **sizes, itemsize=2) == 25601 * 32 * TOKEN_BYTES // 2
    assert kv_cache_bytes_needed(model, **sizes, itemsize=4, tensor_parallel=2) == 25601 * 32 * TOKEN_BYTES // 2


def test_small_models_get_the_floor(model):
    assert kv_cache_bytes_needed(model, max_model_len=32, slots=1, block_size=32, itemsize=4) == FLOOR_BYTES


@pytest.mark.parametrize(("free", "size", "warns"), [(1 << 40, 6401 * 32 * TOKEN_BYTES, 0), (400 << 20, 100 << 20, 1)])
def test_short_memory_makes_it_smaller_and_says_so(model, monkeypatch, caplog, free, size, warns):
    monkeypatch.setattr(vllm_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with caplog.at_level(logging.WARNING):
        assert kv_cache_bytes(schema.VllmEngine(), model, max_model_len=500, slots=400, itemsize=4) == size
    assert len(caplog.records) == warns


def test_the_users_size_rules(model):
    config = schema.VllmEngine(kv_cache_bytes=1 << 21)
    assert kv_cache_bytes(config, model, max_model_len=500, slots=400, itemsize=4) == 1 << 21

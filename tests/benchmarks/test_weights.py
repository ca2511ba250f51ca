"""The suite `weights`: its ways on known bytes, and a tiny one from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import weights


def test_a_file_is_read_into_memory_whole(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.arange(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "file")
    memory = torch.zeros(20, dtype=torch.uint8)
    weights.read(str(tmp_path / "file"), memory)
    whole = torch.cat([tensors["a"].flatten(), tensors["b"]])
    assert torch.equal(memory.view(torch.bfloat16), whole)


@pytest.mark.slow
def test_a_tiny_model_to_two_receivers(tmp_path: Path) -> None:
    output = tmp_path / "weights.json"
    words = ["--sizes", "1M", "--receivers", "2", "--rounds", "2", "--output", str(output), "--allow-dirty"]
    assert weights.main(words) == 0
    result = json.loads(output.read_text())
    one = result["sizes"]["1M"]
    (fleet,) = one["fleets"]
    assert fleet["receivers"] == 2 and fleet["bytes"] == 2 * one["parameters"], "bfloat16"
    assert fleet["over_raw"]["n"] == 2 and fleet["load_s"]["max"] == 0
    assert 0 < fleet["fill_s"]["min"] + fleet["send_s"]["min"] <= fleet["publication_s"]["max"]
    assert "1M, 2 receivers: publication, times files" in {headline["what"] for headline in result["headlines"]}
    figure = tmp_path / "weights.png"
    figure.unlink()
    assert weights.main(["--draw", str(output)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_receiver_that_is_killed_ends_the_measuring_with_its_exit_code(tmp_path: Path) -> None:
    bench = weights.Bench(weights.make_model("1M", torch.bfloat16), 1, None, tmp_path)
    try:
        bench.processes[0].kill()
        with pytest.raises(RuntimeError, match="receiver 0 ended with exit code -9"):
            bench._await_peers()
    finally:
        bench.close()

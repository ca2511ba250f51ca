"""The whole system with a real vLLM engine on two CPU cores: publications land while requests are in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.recipes.summary import read_rows
from tests.e2e.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_the_loop_with_vllm(run: Run) -> None:
    """Staleness occurs and keeps its bound, engine and learner agree, the last samples are the saved model's."""
    overrides = (
        "generator.engine.type=vllm",
        "run.steps=12",
        "sampling.max_completion_tokens=24",
        "generator.slots=16",
    )
    run.wait(run.start("train", str(run.config), *overrides), timeout_s=400)
    rows = [row for row in run.metrics() if "reward/mean" in row]
    assert len(rows) == 12
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    mismatches = [row["mismatch/logprob_abs_mean"] for row in rows if "mismatch/logprob_abs_mean" in row]
    assert mismatches and max(mismatches) < 1e-4
    assert any(row["generator/idle_share"] < 1 for row in rows if "generator/idle_share" in row)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"], "the policy should have learned to prefer even digits"
    assert_sampled_by_the_saved_model(run.folder / "run")


def assert_sampled_by_the_saved_model(run_dir: Path) -> None:
    """The last evaluation's completions are likely under the final weights: the engine had them, not older ones."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(run_dir.parent / "model", dtype=torch.float32)
    last = sorted((run_dir / "evaluations").glob("*.jsonl"))[-1]
    gains = []
    for row in read_rows(last):
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        completion = tokenizer.encode(row["completion"], add_special_tokens=False)
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            after, before = (mean_logprob(m, ids, len(prompt)) for m in (model, start))
        gains.append(after - before)
    assert sum(gains) / len(gains) > 0.2, gains


def mean_logprob(model: AutoModelForCausalLM, ids: torch.Tensor, start: int) -> float:
    """Nats per token of a completion that begins at position `start`."""
    scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)  # type: ignore[operator]
    return float(scores.gather(1, ids[0, 1:, None])[start - 1 :].mean())

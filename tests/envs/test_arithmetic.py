"""Arithmetic: right answers, seeds, the held-out fifth, and what counts as the answer of a completion."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import Config
from async_rl.config.schema import ArithmeticEnvironment
from async_rl.envs.arithmetic import Kind, is_held_out, pose
from async_rl.envs.base import ProblemSource, build_environment
from async_rl.errors import InputError
from async_rl.protocol import Problem
from tests.envs.settings import TEMPLATE, character_tokenizer, make_config

KINDS: tuple[Kind, ...] = ("sum", "difference", "product", "word")
TOKENIZER = character_tokenizer()
HELD_OUT_DIGITS = [(0, 0), (1, 3), (2, 4), (2, 5), (3, 9), (4, 6), (5, 7), (5, 8), (5, 9), (6, 6), (8, 9)]
"""Pairs of digits for evaluation only, the smaller first."""


def config(*overrides: str, **settings: Any) -> Config:
    return make_config(None, *overrides, environment={"type": "arithmetic"} | settings)


def problems(*overrides: str, tokenizer=TOKENIZER, **settings: Any) -> ProblemSource:
    return build_environment(config(*overrides, **settings)).problems(tokenizer)


def questions(kind: str, max_operand: int) -> dict[str, Any]:
    return {"kinds": [kind], "max_operand": max_operand, "style": "question", "match": "last_integer"}


def draw(source: ProblemSource, count: int) -> list[Problem]:
    drawn = [source.draw() for _ in range(count)]
    return [problem for problem in drawn if problem is not None]


def operands(problem: Problem) -> tuple[int, int]:
    """The two numbers in a problem, the smaller first; in words too they are the only digits."""
    a, b = map(int, re.findall(r"[0-9]+", problem.prompt))
    return min(a, b), max(a, b)


# --- what is posed ------------------------------------------------------------------------------


@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.booleans())
def test_answers_are_right(kind: Kind, seed: int, held_out: bool) -> None:
    """Formulas are computed again; words say which of sum and difference they ask for."""
    settings = ArithmeticEnvironment(kinds=(kind,), max_operand=20, style="question")
    posed = pose(random.Random(seed), kind, settings, held_out)
    assert posed is not None
    a, b = map(int, re.findall(r"[0-9]+", posed.text))
    assert max(a, b) <= 20
    if kind == "word":
        less = any(word in posed.text for word in ("left", "lost", "away", "how many more", "How many more"))
        assert posed.answer == (a - b if less else a + b)
        assert posed.answer >= 0 and min(a, b) >= 2
    else:
        sign = {"sum": "+", "difference": "-", "product": "*"}[kind]
        assert posed.text == f"What is {a}{sign}{b}? Answer with just the number."
        assert posed.answer == eval(f"{a}{sign}{b}") and posed.answer >= 0


def test_the_plain_style_is_the_formula_alone() -> None:
    drawn = draw(problems(kinds=["sum", "product"], max_operand=9), 50)
    assert all(re.fullmatch(r"[0-9][+*][0-9]=", problem.prompt) for problem in drawn)
    assert all(eval(problem.prompt.rstrip("=")) == problem.answer for problem in drawn)
    assert ["+" in problem.prompt for problem in drawn] == [True, False] * 25, "kinds take turns"


def test_every_kind_of_word_problem_turns_up_with_every_operand() -> None:
    drawn = draw(problems(**questions("word", 9)), 400)
    # The first words tell the stories apart.
    assert len({re.sub(r"[A-Z][a-z]+ |[0-9]+", "", problem.prompt) for problem in drawn}) > 50
    assert {n for problem in drawn for n in operands(problem)} == set(range(2, 10))


# --- what is held out ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_held_out_problems_of_every_kind_have_no_operands_in_common(kind: str) -> None:
    source = problems("data.eval_problems=100", "run.seed=3", **questions(kind, 20))
    held_out = {operands(problem) for problem in source.eval_problems()}
    trained = {operands(problem) for problem in draw(source, 2000)}
    assert len(held_out) >= 20 and len(trained) >= 100
    assert not held_out & trained


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_swapped_operands_are_held_out_together(a: int, b: int) -> None:
    assert is_held_out(a, b) == is_held_out(b, a)


def test_about_a_fifth_is_held_out_and_which_never_changes() -> None:
    """A change here would let old runs' policies have seen new runs' held-out problems."""
    assert sum(is_held_out(a, b) for a in range(10) for b in range(10)) == 20
    assert sum(is_held_out(a, b) for a in range(21) for b in range(21)) == 83
    assert 0.18 < sum(is_held_out(a, b) for a in range(100) for b in range(100)) / 10_000 < 0.22
    assert [(a, b) for a in range(10) for b in range(a, 10) if is_held_out(a, b)] == HELD_OUT_DIGITS


def test_held_out_problems_are_distinct_the_same_for_every_seed_and_of_all_kinds() -> None:
    settings = {"kinds": list(KINDS), "max_operand": 20, "style": "question"}
    a, b = (problems("data.eval_problems=42", f"run.seed={seed}", **settings).eval_problems() for seed in (0, 9))
    assert [p.id for p in a] == [p.id for p in b]
    assert len({p.id for p in a}) == 42
    of_kind = [sum(sign in p.prompt and p.prompt.startswith("What is") for p in a) for sign in "+-*"]
    assert of_kind == [11, 11, 10] and 42 - sum(of_kind) == 10


def test_a_small_space_is_held_out_whole_when_more_is_asked_for() -> None:
    held_out = problems("data.eval_problems=128", kinds=["sum"], max_operand=9).eval_problems()
    assert sorted(operands(p) for p in held_out) == sorted(
        pair for pair in HELD_OUT_DIGITS for _ in range(1 if pair[0] == pair[1] else 2)
    )


# --- order --------------------------------------------------------------------------------------


def test_problem_k_is_a_function_of_seed_and_k() -> None:
    a, b, c = (problems(f"run.seed={seed}", kinds=["sum"], max_operand=99) for seed in (0, 0, 1))
    first = [p.prompt for p in draw(a, 60)]
    assert first == [p.prompt for p in draw(b, 60)] != [p.prompt for p in draw(c, 60)]
    assert (a.num_problems, a.identity == b.identity, a.identity == c.identity) == (None, True, False)
    restored = problems(kinds=["sum"], max_operand=99)
    state = a.state()
    following = [p.prompt for p in draw(a, 20)]
    restored.restore(state)
    assert [p.prompt for p in draw(restored, 20)] == following
    with pytest.raises(InputError, match="are not those of this configuration"):
        c.restore(state)
    with pytest.raises(InputError, match="are not those of this configuration"):
        problems(kinds=["sum"], max_operand=98).restore(state)


# --- refusals -----------------------------------------------------------------------------------


def test_words_need_a_style_and_operands_that_make_sense() -> None:
    with pytest.raises(InputError, match=r"'word' needs environment.style = 'question'"):
        problems(kinds=["word"])
    with pytest.raises(InputError, match=r"environment.max_operand >= 2 \(they are 'question' and 1\)"):
        problems(kinds=["word"], style="question", max_operand=1)


def test_a_space_without_held_out_problems_is_refused() -> None:
    """Words start at 2, and no pair of 2 and 3 is held out."""
    with pytest.raises(InputError, match=r"max_operand = 3 leaves no held-out problems of kind 'word' .*; raise it"):
        problems("data.eval_problems=1", **questions("word", 3))


def test_prompts_are_rendered_with_the_template() -> None:
    source = problems("data.system_prompt=Be brief.", tokenizer=character_tokenizer(TEMPLATE), **questions("sum", 9))
    (problem,) = draw(source, 1)
    assert (
        problem.prompt
        == f"<bos>[system]Be brief.\n[user]What is {problem.id}? Answer with just the number.\n[assistant]"
    )


# --- scores -------------------------------------------------------------------------------------


def posed(answer: int) -> Problem:
    return Problem(id="p", prompt="1+1=", prompt_ids=np.zeros(1, dtype=np.int32), answer=answer)


@pytest.mark.parametrize(
    ("match", "completion", "answer", "reward"),
    [
        ("exact", "12", 12, 1),
        ("exact", " 12\n", 12, 1),
        ("exact", "-3", -3, 1),
        ("exact", "13", 12, 0),
        ("exact", "012", 12, 0),
        ("exact", "+12", 12, 0),
        ("exact", "12=12", 12, 0),
        ("exact", "12.", 12, 0),
        ("exact", "\u0661\u0662", 12, 0),
        ("exact", "", 0, 0),
        ("last_integer", "3 + 9 = 12", 12, 1),
        ("last_integer", "The answer is 12.", 12, 1),
        ("last_integer", "12 apples and 3 pears", 12, 0),
        ("last_integer", "1,200", 1200, 1),
        ("last_integer", "12.0", 12, 1),
        ("last_integer", "12.5", 12, 0),
        ("last_integer", "24/12", 12, 0),
        ("last_integer", "it is -12", 12, 0),
        ("last_integer", "15-3", 3, 1),
        ("last_integer", "twelve", 12, 0),
    ],
)
async def test_scores(match: str, completion: str, answer: int, reward: int) -> None:
    environment = build_environment(config(match=match))
    result = await environment.score(posed(answer), completion)
    assert (result.value, result.error) == (reward, None)

"""Answers: where a completion's answer stands, how it is read, and how the math reward compares it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.envs.answers import AnswerFormat, after_hashes, boxed, extract_answer, last_number, to_number
from async_rl.envs.base import build_environment
from async_rl.envs.math_score import score
from async_rl.errors import InputError
from async_rl.protocol import Problem
from tests.envs.settings import make_config

TOWER = r"\boxed{9^{9^{9^{9^{9}}}}}"


# --- where the answer stands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"first \boxed{3}, then \boxed{ 4 } apples", "4"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right\}} and {more}", r"\left\{ x \right\}"),
        (r"\boxed{\left\{ x \right.} and more", r"\left\{ x \right."),
        (r"\boxed{\begin{matrix}1\\{2}\\\end{matrix}}", r"\begin{matrix}1\\{2}\\\end{matrix}"),
        (r"\boxed{a\\}", r"a\\"),
        ("\\boxed{two\nlines}", "two\nlines"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{3} and \boxed{\frac{4}{5", None),
        (r"\boxed 5", None),
        ("5", None),
    ],
)
def test_boxed_nested_braces_are_balanced_and_an_unclosed_box_is_no_answer(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### -3", "-3"),
        ("3 + 4 = 7\n#### 2,125", "2,125"),
        ("#### $200,000.", "$200,000"),
        ("#### 5 apples", "5"),
        ("#### 1\n#### 2", "2"),
        ("####7\nand 8", "7"),
        ("#### none\n8", None),
        ("#### 1/2", "1/2"),
        ("#### .5", ".5"),
        ("#### \u22124", "-4"),
        ("7", None),
    ],
)
def test_gsm8k_answer_is_the_first_number_after_the_last_mark(text: str, expected: str | None) -> None:
    assert after_hashes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("It is 2,125, then", "2,125"),
        ("1, 2, 3", "3"),
        ("3,4567", "4567"),
        ("it costs $1,234.50.", "$1,234.50"),
        ("from -$5", "-$5"),
        ("$-5", "$-5"),
        ("10-3", "3"),
        ("(2)-5", "5"),
        ("minus: -5", "-5"),
        ("\u22127 degrees", "-7"),
        ("about 3.5", "3.5"),
        ("x=.5", ".5"),
        ("-.5", "-.5"),
        ("a half is 1/2.", "1/2"),
        ("-3/4", "-3/4"),
        ("12/25/2024", "2024"),
        ("version 1.2.3", "3"),
        ("1/2.5", "2.5"),
        ("no digits", None),
        ("\u0665", None),
        ("", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("answer_format", "text", "expected"),
    [
        ("auto", r"9 #### 8 \boxed{7}", "7"),
        ("auto", "9 #### 8 or 7", "8"),
        ("auto", "9 or 7", "7"),
        ("auto", r"9 \boxed{7", None),
        ("auto", "9 ####", None),
        ("boxed", "#### 8", None),
        ("gsm8k", r"\boxed{8}", None),
        ("last_number", r"\boxed{8} of 9", "9"),
    ],
)
def test_extraction_keeps_to_the_format(answer_format: AnswerFormat, text: str, expected: str | None) -> None:
    assert extract_answer(text, answer_format) == expected


# --- how a number is read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-3", -3),
        ("2,125", 2125),
        ("$200,000.", 200000),
        ("-$5", -5),
        (r"\$5", 5),
        ("\u22125", -5),
        ("+4", 4),
        (" 7 ", 7),
        ("007", 7),
        ("7.0", 7),
        ("0.50", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("-2/4", Fraction(-1, 2)),
        (r"2\,125", 2125),
    ],
)
def test_gsm8k_numbers_are_read_whole(text: str, expected: Fraction | int) -> None:
    assert to_number(text) == expected


@pytest.mark.parametrize(
    "text", ["", ".", "-", "1/0", "1,2", "12,34", "3,4567", "1 2", "5 apples", "x", "1e5", "0x10", "nan", "\u0665"]
)
def test_other_texts_are_no_number(text: str) -> None:
    assert to_number(text) is None


def test_a_number_of_thousands_of_digits_is_no_number() -> None:
    assert to_number("9" * 1000) == 10**1000 - 1
    assert to_number("9" * 1001) is None
    assert score(rf"\boxed{{{'9' * 5000}}}", "9") == 0.0


@given(st.integers(-(10**12), 10**12))
def test_whatever_is_written_is_read_back(number: int) -> None:
    for text in (f"{number}", f"{number:,}", f"${number:,}.", f"{number}.0"):
        assert to_number(text) == number
        assert to_number(last_number(f"so it is {text} ") or "") == number
        assert to_number(after_hashes(f"1 + 1 = 2\n#### {text}") or "") == number
        assert to_number(boxed(rf"x \boxed{{{text}}}") or "") == number


@given(st.text(alphabet="0123456789,./-$# \\{}boxed", max_size=60))
def test_no_completion_makes_extraction_fail(text: str) -> None:
    for answer_format in ("auto", "boxed", "gsm8k", "last_number"):
        found = extract_answer(text, answer_format)
        assert found is None or found in text
        if answer_format != "boxed" and found is not None and r"\boxed{" not in text and "/0" not in text:
            assert to_number(found) is not None, "what counts as a number can be read as one"


# --- the reward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\frac12}", "1/2", 1),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{1+x}", "x+1", 1),
        (r"\boxed{x-1}", "x+1", 0),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{(2, 1)}", "(1,2)", 0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1),
        (r"\boxed{\text{Paris}}", "Paris", 1),
        (r"\boxed{3 \text{ cm}}", "3", 1),
        (r"\boxed{}", "3", 0),
        (r"\boxed{3", "3", 0),
        ("The answer is 1/2", "2", 0),
        ("The answer is .5", "5", 0),
    ],
)
def test_boxed_nested_expressions_are_compared_as_mathematics(completion: str, answer: str, reward: int) -> None:
    assert score(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("#### -3", "#### -3", 1),
        ("#### 3", "#### -3", 0),
        ("#### 2125", "5 * 425 = 2,125\n#### 2,125", 1),
        ("It makes $200,000.", "#### 200000", 1),
        ("#### 2000", "200,000", 0),
        ("so 7 apples", 7, 1),
        ("so 7.0 apples", 7, 1),
        ("so 7.5", 7, 0),
        ("#### 1/3", "#### 1/2", 0),
        ("I do not know", "7", 0),
    ],
)
def test_gsm8k_answers_are_compared_as_numbers(completion: str, answer: object, reward: int) -> None:
    assert score(completion, answer) == reward


@pytest.mark.parametrize("answer", ["", "  ", r"\boxed{", "#### nothing", r"\boxed{}"])
def test_a_reference_without_an_answer_is_an_error_and_no_wrong_answer(answer: str) -> None:
    with pytest.raises(InputError, match="holds no answer"):
        score("#### 7", answer)


def problem(prompt: str, answer: object) -> Problem:
    return Problem(id="d:1", prompt=prompt, prompt_ids=np.zeros(1, dtype=np.int32), answer=answer)


async def test_gsm8k_completion_alone_is_scored_and_never_the_prompt() -> None:
    environment = build_environment(make_config(None, "data.path=unused", environment={"type": "math"}))
    await environment.start()
    try:
        posed = problem("What is 3 + 4? End with #### 7 or \\boxed{7}.", "7")
        results = [await environment.score(posed, text) for text in ("I do not know", "", "#### 7", "8")]
    finally:
        await environment.close()
    assert [result.value for result in results] == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("answer_format", "rewards"), [("boxed", [1, 0, 0]), ("gsm8k", [0, 1, 0]), ("last_number", [1, 1, 1])]
)
async def test_the_answer_format_reaches_the_reward(answer_format: str, rewards: list[int]) -> None:
    settings = {"type": "math", "answer_format": answer_format}
    environment = build_environment(make_config(None, "data.path=unused", environment=settings))
    await environment.start()
    try:
        results = [await environment.score(problem("q", "7"), text) for text in (r"\boxed{7}", "#### 7", "7")]
    finally:
        await environment.close()
    assert [result.value for result in results] == rewards


@pytest.mark.slow
async def test_hang_in_math_verify_is_a_failure_and_its_worker_is_replaced() -> None:
    """A power tower never ends in sympy: the member fails at its timeout, and the next completion is scored."""
    environment = build_environment(
        make_config(None, "data.path=unused", "rewards.timeout_s=2", environment={"type": "math"})
    )
    await environment.start()
    try:
        tower = await environment.score(problem("q", "7"), TOWER)
        after = await environment.score(problem("q", r"\frac{1}{2}"), r"\boxed{0.5}")
    finally:
        await environment.close()
    assert tower.value is None and "did not return within 2 s and was killed" in str(tower.error)
    assert after.value == 1.0
    assert environment.pool is not None and environment.pool.restarts == 1

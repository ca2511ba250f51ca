"""The reward of the math environment: answers extracted in the stated format, compared as numbers or by math-verify.

Imported by reward workers only, as a whole when they start: an import within a call would count against its timeout.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from async_rl.envs.answers import AnswerFormat, extract_answer, to_number
from async_rl.errors import InputError

# It warns that its own time limits are off, which they are on purpose.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(completion: str, answer: Any, answer_format: AnswerFormat = "auto") -> float:
    r"""Return 1 when the completion's answer equals the reference, else 0; runs in a reward worker.

    The reference may be a number, an expression, or a whole solution that ends in \boxed{} or '#### n'.
    math-verify's own time limits are off: they would turn a hang into a wrong answer; the pool makes it a failure.
    """
    found = extract_answer(completion, answer_format)
    if found is None:
        return 0.0
    reference = _reference(answer)
    if found == reference:
        return 1.0
    found_number, number = to_number(found), to_number(reference)
    if found_number is not None and number is not None:
        return float(found_number == number)
    gold = parse(_as_math(reference), parsing_timeout=None)
    guess = parse(_as_math(found), parsing_timeout=None)
    return float(verify(gold, guess, timeout_seconds=None))


def _reference(answer: Any) -> str:
    text = str(answer).strip()
    marked = r"\boxed{" in text or "####" in text
    reference = extract_answer(text, "auto") if marked else text
    if not reference:
        raise InputError(f"the reference answer {text[-60:]!r} holds no answer")
    return reference


def _as_math(text: str) -> str:
    return text if "$" in text else f"${text}$"

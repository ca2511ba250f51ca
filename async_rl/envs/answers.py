"""Find the answer in a completion: the last \\boxed{}, the text after ####, or the last number."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

AnswerFormat = Literal["auto", "boxed", "gsm8k", "last_number"]

MAX_NUMBER_CHARS = 1000
"""Longer digit strings are no number: Python refuses to read more than 4,300 digits, and nobody's answer has them."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
# 1/2 is one number, and neither 1 nor 2; 12/25/2024 is none of this kind.
_RATIO = r"(?<![0-9/.,])[0-9]+/[0-9]+(?![0-9/])(?!\.[0-9])"
_BELOW_ONE = r"(?<![\w.)\]])\.[0-9]+"
_UNSIGNED = rf"(?:{_RATIO}|{_DIGITS}|{_BELOW_ONE})"
# A minus after a digit or a closing bracket is a subtraction: the last number of "10-3" is 3.
_NUMBER = re.compile(rf"(?<![0-9)\]])(?:-?\$?|\$-){_UNSIGNED}|{_UNSIGNED}")
_PLAIN = re.compile(rf"[+-]?{_DIGITS}|[+-]?\.[0-9]+")
_FRACTION = re.compile(r"([+-]?[0-9]+)/([0-9]+)")


def last_number(text: str) -> str | None:
    """Return the last number as written, with its sign, '$' and thousands commas; None without one."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    return found[-1] if found else None


def after_hashes(text: str) -> str | None:
    """Return the first number after the last '####' (GSM8K's form); None without one."""
    _, marker, rest = text.rpartition("####")
    found = _NUMBER.search(rest.replace("\u2212", "-").split("\n")[0]) if marker else None
    return found.group() if found else None


def boxed(text: str) -> str | None:
    r"""Return what the last \boxed{...} holds, braces balanced; None without one, or when it is never closed."""
    _, marker, rest = text.rpartition(r"\boxed{")
    if not marker:
        return None
    depth = 1
    # \{ and \} are set braces and come in pairs of their own; after \\, a line break, a brace is a brace again.
    for found in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return rest[: found.start()].strip()
    return None


def extract_answer(text: str, answer_format: AnswerFormat) -> str | None:
    """Return the answer that a completion gives, as written; None when it gives none in that format.

    auto: the box where there is one (an unclosed box is no answer), else after ####, else the last number.
    """
    if answer_format == "boxed" or (answer_format == "auto" and r"\boxed{" in text):
        return boxed(text)
    if answer_format == "gsm8k" or (answer_format == "auto" and "####" in text):
        return after_hashes(text)
    return last_number(text)


def to_number(text: str) -> Fraction | None:
    """Read a whole text as one number: '-3', '2,125', '$200,000.', '1/2'; None for anything else."""
    text = text.strip().rstrip(".").replace("\u2212", "-").replace("\\", "").replace("$", "").strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if match := _FRACTION.fullmatch(text):
        return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    return Fraction(text.replace(",", "")) if _PLAIN.fullmatch(text) else None

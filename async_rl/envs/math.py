"""Mathematical answers: extracted in the stated format, compared as numbers or else by math-verify in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from async_rl.config.schema import Config, MathEnvironment
from async_rl.envs.answers import AnswerFormat, extract_answer, to_number
from async_rl.envs.base import Environment, ProblemSource
from async_rl.envs.reward_worker import RewardSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    from math_verify import parse, verify

    gold = parse(_as_math(reference), parsing_timeout=None)
    guess = parse(_as_math(found), parsing_timeout=None)
    return float(verify(gold, guess, timeout_seconds=None))


def _reference(answer: Any) -> str:
    text = str(answer).strip()
    marked = r"\boxed{" in text or "####" in text
    reference = extract_answer(text, "auto") if marked else text
    if not reference:
        raise ValueError(f"the reference answer {text[-60:]!r} holds no answer")
    return reference


def _as_math(text: str) -> str:
    return text if "$" in text else f"${text}$"


class Math(Environment):
    """Problems from a file, answers compared by `score`."""

    def __init__(self, config: Config):
        super().__init__(config)
        assert isinstance(config.environment, MathEnvironment)
        self.settings = config.environment
        options = {"answer_format": self.settings.answer_format}
        self.pool = self.make_pool(RewardSpec(path=f"{__name__}:score", options=options))

    def problems(self, tokenizer: PreTrainedTokenizerBase) -> ProblemSource:
        """Load the file, the instruction appended to each prompt."""
        from async_rl.envs.dataset import load_problems

        return load_problems(self.config, tokenizer, self._instruct, needs_answer=True)

    def _instruct(self, prompt: str | Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
        instruction = self.settings.instruction
        if isinstance(prompt, str):
            return f"{prompt}\n{instruction}" if instruction else prompt
        last = dict(prompt[-1])
        if instruction:
            last["content"] = f"{last['content']}\n{instruction}"
        return [*prompt[:-1], last]

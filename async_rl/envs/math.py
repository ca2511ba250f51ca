"""Mathematical answers: problems from a file, scored by math_score.py in workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from async_rl.config.schema import Config, MathEnvironment
from async_rl.envs.base import Environment, ProblemSource
from async_rl.envs.reward_worker import RewardSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Math(Environment):
    """Problems from a file, answers compared by `math_score.score`."""

    def __init__(self, config: Config):
        super().__init__(config)
        assert isinstance(config.environment, MathEnvironment)
        self.settings = config.environment
        options = {"answer_format": self.settings.answer_format}
        self.pool = self.make_pool(RewardSpec(path="async_rl.envs.math_score:score", options=options))

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

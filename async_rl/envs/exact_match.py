"""Reward 1 when the completion equals the reference answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.config.schema import Config, ExactMatchEnvironment
from async_rl.envs.base import Environment, ProblemSource
from async_rl.envs.rewards import RewardResult
from async_rl.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ExactMatch(Environment):
    """Problems from a file; scored in this process, for it cannot hang."""

    def __init__(self, config: Config):
        super().__init__(config)
        assert isinstance(config.environment, ExactMatchEnvironment)
        self.settings = config.environment

    def problems(self, tokenizer: PreTrainedTokenizerBase) -> ProblemSource:
        """Load the file."""
        from async_rl.envs.dataset import load_problems

        return load_problems(self.config, tokenizer, needs_answer=True)

    async def score(self, problem: Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        """Compare the completion with the answer, both normalised as the settings say."""
        return RewardResult(float(self._normal(completion) == self._normal(str(problem.answer))))

    def _normal(self, text: str) -> str:
        text = text.strip() if self.settings.strip else text
        return text.casefold() if self.settings.ignore_case else text

"""The user's own reward function on the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.config.schema import Config, FunctionEnvironment
from async_rl.envs.base import Environment, ProblemSource
from async_rl.envs.reward_worker import RewardSpec
from async_rl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Function(Environment):
    """Problems from a file, scored by a function given by path (docs/your_data.md)."""

    def __init__(self, config: Config):
        super().__init__(config)
        assert isinstance(config.environment, FunctionEnvironment)
        reward = config.environment.reward
        path, _, name = reward.rpartition(":")
        if not path or not name:
            raise InputError(f"environment.reward = {reward!r} must be 'file.py:function' or 'package.module:function'")
        if path.endswith(".py") and not Path(path).is_file():
            raise InputError(f"environment.reward: no file {path!r} in {str(Path.cwd())!r}")
        self.pool = self.make_pool(RewardSpec(path=reward, batch=config.environment.batch))

    def problems(self, tokenizer: PreTrainedTokenizerBase) -> ProblemSource:
        """Load the file."""
        from async_rl.envs.dataset import load_problems

        return load_problems(self.config, tokenizer, needs_answer=False)

"""What every environment does: pose problems to the coordinator, score completions for a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_rl.config.schema import (
    ArithmeticEnvironment,
    Config,
    ExactMatchEnvironment,
    FunctionEnvironment,
    MathEnvironment,
)
from async_rl.envs.reward_worker import RewardItem, RewardSpec
from async_rl.envs.rewards import RewardPool, RewardResult
from async_rl.errors import InputError
from async_rl.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class ProblemSource(ABC):
    """The training problems in their seeded order, and the fixed held-out ones; the two never overlap.

    It lives beside the ledger, and its state is part of the checkpoint.
    """

    identity: str
    """Hash of everything that decides which problem comes when; a checkpoint of another identity is refused."""
    num_problems: int | None
    """Training problems of one epoch; None: unlimited."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows that are not used, by reason."""

    @abstractmethod
    def draw(self) -> Problem | None:
        """Return the next training problem, or None when the epochs are over."""

    @abstractmethod
    def eval_problems(self) -> list[Problem]:
        """Return the held-out problems, the same ones in the same order for every seed."""

    @abstractmethod
    def position(self) -> dict[str, int]:
        """Return where in the order the next draw stands."""

    @abstractmethod
    def seek(self, position: dict[str, int]) -> None:
        """Go to a place that `position` returned."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps (plain data)."""
        return {"identity": self.identity, "position": self.position()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; raises InputError for other problems than these."""
        if state["identity"] != self.identity:
            raise InputError(
                f"the checkpoint's problems (identity {state['identity']}) are not those of this configuration "
                f"({self.identity}): data, environment, seed or prompt settings changed; "
                "set them as they were, start a new run.dir, or let the tickets under way be dropped with "
                "checkpoint.accept_changed=problems"
            )
        self.seek(state["position"])


class Environment(ABC):
    """Poses problems and gives rewards. The learner's side calls `problems`, a generator `start`, `score`, `close`."""

    pool: RewardPool | None = None
    """Worker processes that run the reward; None for rewards that cannot hang and run in this process."""

    def __init__(self, config: Config):
        self.config = config

    def make_pool(self, spec: RewardSpec) -> RewardPool:
        """Return a pool with the settings of `rewards`."""
        rewards = self.config.rewards
        return RewardPool(spec, rewards.workers, rewards.timeout_s, rewards.max_batch)

    @abstractmethod
    def problems(self, tokenizer: PreTrainedTokenizerBase) -> ProblemSource:
        """Load or set up the problems, prompts rendered; raises InputError that names file, row and column."""

    async def score(self, problem: Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        """Score the text of one completion; whatever goes wrong in a reward is a result with an error, no raise."""
        assert self.pool is not None, f"{type(self).__name__} has no pool and must score by itself"
        return await self.pool.score(
            RewardItem(
                problem_id=problem.id,
                completion=completion,
                answer=problem.answer,
                prompt=problem.prompt,
                truncated=truncated,
                metadata=problem.metadata,
            )
        )

    async def start(self) -> None:
        """Start what scoring needs; raises InputError when the reward cannot be loaded."""
        if self.pool is not None:
            await self.pool.start()

    async def close(self) -> None:
        """Stop what was started; callable more than once."""
        if self.pool is not None:
            await self.pool.close()


def build_environment(config: Config) -> Environment:
    """Return the environment that the configuration names; only its own file is imported."""
    match config.environment:
        case ArithmeticEnvironment():
            from async_rl.envs.arithmetic import Arithmetic

            return Arithmetic(config)
        case MathEnvironment():
            from async_rl.envs.math import Math

            return Math(config)
        case ExactMatchEnvironment():
            from async_rl.envs.exact_match import ExactMatch

            return ExactMatch(config)
        case FunctionEnvironment():
            from async_rl.envs.function import Function

            return Function(config)
    raise AssertionError(f"no environment for {config.environment!r}")

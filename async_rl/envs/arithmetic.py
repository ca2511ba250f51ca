"""Procedural arithmetic: seeded, unlimited, one fifth of the operand pairs held out."""

from __future__ import annotations

import hashlib
import random
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from async_rl.config.lengths import limit_in_words, longest_prompt
from async_rl.config.schema import ArithmeticEnvironment, Config, DataConfig
from async_rl.envs.answers import last_number, to_number
from async_rl.envs.base import Environment, ProblemSource
from async_rl.envs.rewards import RewardResult
from async_rl.envs.tokenize import render_prompt
from async_rl.errors import InputError
from async_rl.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["sum", "difference", "product", "word"]

HELD_OUT_SHARE = 0.2
_SALT = 5
"""With this one small spaces come near the share too: 20 of the 100 pairs of digits, 83 of the 441 up to 20."""
MAX_TRIES = 2000
"""Draws after which a share of the operand pairs counts as empty."""

_SIGNS = {"sum": "+", "difference": "-", "product": "*"}
# fmt: off
_NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
    "Noah", "Olga", "Paul",
)
_THINGS = (
    "apples", "books", "coins", "pens", "stickers", "shells", "cards", "eggs", "stamps", "marbles", "buttons",
    "cookies",
)
# fmt: on
_WORDS_SUM = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} {things} in another. How many {things} are there in all?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find altogether?",
    "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
)
_WORDS_DIFFERENCE = (
    "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have left?",
    "There are {a} {things} on a table. {name} takes {b} of them away. How many {things} are left?",
    "{name} had {a} {things} and lost {b}. How many {things} does {name} still have?",
    "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have than {other}?",
)


class Posed(NamedTuple):
    """A problem before rendering."""

    id: str
    text: str
    answer: int


def is_held_out(a: int, b: int) -> bool:
    """Say whether a pair of operands is for evaluation only, whatever the kind, order, wording and seed."""
    digest = hashlib.blake2b(f"{_SALT}:{min(a, b)},{max(a, b)}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**32


def pose(rng: random.Random, kind: Kind, settings: ArithmeticEnvironment, held_out: bool) -> Posed | None:
    """Pose one problem of the training or the held-out operand pairs; None when no such pair turns up."""
    # "1 apples" would be odd, and "0 apples" more so.
    low = 2 if kind == "word" else 0
    for _ in range(MAX_TRIES):
        a, b = rng.randint(low, settings.max_operand), rng.randint(low, settings.max_operand)
        if is_held_out(a, b) is held_out:
            return _word(rng, a, b) if kind == "word" else _formula(kind, a, b, settings.style)
    return None


def _formula(kind: Kind, a: int, b: int, style: str) -> Posed:
    if kind == "difference":
        a, b = max(a, b), min(a, b)
    term = f"{a}{_SIGNS[kind]}{b}"
    answer = {"sum": a + b, "difference": a - b, "product": a * b}[kind]
    return Posed(term, f"{term}=" if style == "plain" else f"What is {term}? Answer with just the number.", answer)


def _word(rng: random.Random, a: int, b: int) -> Posed:
    adds = rng.random() < 0.5
    a, b = (a, b) if adds else (max(a, b), min(a, b))
    template = rng.choice(_WORDS_SUM if adds else _WORDS_DIFFERENCE)
    name, other = rng.sample(_NAMES, 2)
    text = template.format(a=a, b=b, name=name, other=other, things=rng.choice(_THINGS))
    return Posed(text, f"{text} Answer with just the number.", a + b if adds else a - b)


class ArithmeticProblems(ProblemSource):
    """Problem k of a run is a function of the seed and k alone; kinds take turns."""

    def __init__(self, config: Config, settings: ArithmeticEnvironment, tokenizer: PreTrainedTokenizerBase):
        self._seed, self._data, self._settings, self._tokenizer = config.run.seed, config.data, settings, tokenizer
        self._drawn, self._limit, self._limit_in_words = 0, longest_prompt(config), limit_in_words(config)
        self._eval = self._hold_out(config.data)
        first = [self._train_problem(k) for k in range(2 * len(settings.kinds))]
        parts = [msgspec.json.encode(settings), f"{self._seed}".encode(), *(p.prompt_ids.tobytes() for p in first)]
        super().__init__(identity=hashlib.sha256(b"\n".join(parts)).hexdigest()[:32], num_problems=None)

    def draw(self) -> Problem:
        """Return the next training problem."""
        self._drawn += 1
        return self._train_problem(self._drawn - 1)

    def eval_problems(self) -> list[Problem]:
        """Return data.eval_problems distinct held-out problems, or all there are if fewer."""
        return self._eval

    def position(self) -> dict[str, int]:
        """Return how many were drawn."""
        return {"drawn": self._drawn}

    def seek(self, position: dict[str, int]) -> None:
        """Continue after that many."""
        self._drawn = position["drawn"]

    def _train_problem(self, k: int) -> Problem:
        kind = self._settings.kinds[k % len(self._settings.kinds)]
        posed = pose(random.Random(f"{self._seed},{k}"), kind, self._settings, held_out=False)
        if posed is None:
            raise InputError(self._too_small(kind, "training"))
        return self._problem(posed)

    def _hold_out(self, data: DataConfig) -> list[Problem]:
        """Draw distinct held-out problems, the same number of every kind as far as there are so many."""
        kinds = self._settings.kinds
        chosen: list[Posed] = []
        for i, kind in enumerate(kinds):
            quota = data.eval_problems // len(kinds) + (i < data.eval_problems % len(kinds))
            found: dict[str, Posed] = {}
            for k in range(50 * quota):
                posed = pose(random.Random(f"held out,{k}"), kind, self._settings, held_out=True)
                if posed is None:
                    raise InputError(self._too_small(kind, "held-out"))
                found[posed.id] = posed
                if len(found) == quota:
                    break
            chosen += found.values()
        return [self._problem(posed) for posed in chosen]

    def _problem(self, posed: Posed) -> Problem:
        text, ids = render_prompt(self._tokenizer, posed.text, self._data)
        if len(ids) > self._limit:
            raise InputError(f"the prompt {text!r} has {len(ids)} tokens; {self._limit_in_words}")
        return Problem(id=posed.id, prompt=text, prompt_ids=ids, answer=posed.answer)

    def _too_small(self, kind: Kind, share: str) -> str:
        return (
            f"environment.max_operand = {self._settings.max_operand} leaves no {share} problems of kind {kind!r} "
            "(a fifth of the operand pairs is held out); raise it"
        )


class Arithmetic(Environment):
    """Reward 1 for the right answer, else 0; scored in this process, for it cannot hang."""

    def __init__(self, config: Config):
        super().__init__(config)
        assert isinstance(config.environment, ArithmeticEnvironment)
        self.settings = config.environment
        if "word" in self.settings.kinds and (self.settings.style != "question" or self.settings.max_operand < 2):
            raise InputError(
                "environment.kinds: 'word' needs environment.style = 'question' and environment.max_operand >= 2 "
                f"(they are {self.settings.style!r} and {self.settings.max_operand})"
            )

    def problems(self, tokenizer: PreTrainedTokenizerBase) -> ArithmeticProblems:
        """Set up the problems; raises InputError when max_operand leaves none."""
        return ArithmeticProblems(self.config, self.settings, tokenizer)

    async def score(self, problem: Problem, completion: str, *, truncated: bool = False) -> RewardResult:
        """Compare the completion, or its last number, with the answer."""
        if self.settings.match == "exact":
            right = re.fullmatch(r"-?[0-9]+", completion.strip()) and completion.strip() == str(problem.answer)
        else:
            found = last_number(completion)
            right = found is not None and to_number(found) == problem.answer
        return RewardResult(1.0 if right else 0.0)

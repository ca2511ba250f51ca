"""Problems from a parquet or jsonl file: checked row by row, rendered once, split, shuffled per epoch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from jinja2.exceptions import TemplateError

from async_rl.config.lengths import limit_in_words, longest_prompt
from async_rl.config.schema import Config, DataConfig
from async_rl.envs.base import ProblemSource
from async_rl.envs.rows import Rows, check_plain, check_prompt, read_rows
from async_rl.envs.tokenize import Prompt, render_prompt
from async_rl.errors import InputError
from async_rl.protocol import Problem, check_travels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG = "prompt_too_long"
HELD_OUT_COPY = "same_prompt_as_held_out"


def load_problems(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    decorate: Callable[[Prompt], Prompt] = lambda prompt: prompt,
    *,
    needs_answer: bool,
) -> DatasetProblems:
    """Load, check and split the problems that `data` names; `decorate` changes a prompt before it is rendered."""
    data = config.data
    if data.path is None:
        raise InputError(
            f"environment.type = {config.environment.__struct_config__.tag!r} needs data.path, a file of problems"
        )
    loader = _Loader(config, tokenizer, decorate, needs_answer)
    problems, dropped = loader.load(data.path, "data.path")
    if data.eval_path is not None:
        held_out, eval_dropped = loader.load(data.eval_path, "data.eval_path")
        held_out = held_out[: data.eval_problems]
        dropped.update({f"eval_{reason}": count for reason, count in eval_dropped.items()})
    else:
        held_out = _hold_out(problems, data, only_evaluates=config.run.steps == 0)
    train = _without_copies(problems, held_out, data.eval_path is not None, dropped)
    _check_enough(config, len(train))
    return DatasetProblems(config, train, held_out, dict(dropped))


@dataclass(frozen=True)
class _Loader:
    config: Config
    tokenizer: PreTrainedTokenizerBase
    decorate: Callable[[Prompt], Prompt]
    needs_answer: bool

    @property
    def data(self) -> DataConfig:
        return self.config.data

    def load(self, path: str, setting: str) -> tuple[list[Problem], Counter[str]]:
        """Return a file's problems and how many rows were dropped, by reason; all dropped is an error."""
        rows = read_rows(path, setting)
        self._check_columns(rows)
        problems = [self._problem(rows, number, row) for number, row in rows.rows]
        limit = longest_prompt(self.config)
        kept = [problem for problem in problems if len(problem.prompt_ids) <= limit]
        if not kept:
            shortest = min(len(problem.prompt_ids) for problem in problems)
            raise InputError(
                f"{path}: all {len(problems)} prompts are too long, the shortest has {shortest} tokens; "
                f"{limit_in_words(self.config)}"
            )
        dropped = Counter({TOO_LONG: len(problems) - len(kept)} if len(kept) < len(problems) else {})
        return kept, dropped

    def _check_columns(self, rows: Rows) -> None:
        rows.require(self.data.prompt_column, "data.prompt_column")
        if self.data.answer_column is not None:
            hint = "" if self.needs_answer else '; set it to "none" if the reward needs no answer'
            rows.require(self.data.answer_column, "data.answer_column", hint)
        elif self.needs_answer:
            raise InputError("data.answer_column: this environment compares with an answer; name its column")

    def _problem(self, rows: Rows, number: int, row: dict[str, Any]) -> Problem:
        column, answer_column = self.data.prompt_column, self.data.answer_column
        prompt: Any = row.get(column)
        if wrong := check_prompt(prompt):
            raise rows.error(number, column, wrong)
        if answer_column is not None and row.get(answer_column) is None:
            raise rows.error(number, answer_column, "null; every problem needs an answer")
        for name, value in row.items():
            check_plain(rows, number, name, value)
        try:
            text, ids = render_prompt(self.tokenizer, self.decorate(prompt), self.data)
        except (ValueError, TypeError, TemplateError) as error:
            raise rows.error(number, column, f"cannot be rendered: {error}") from error
        metadata = {name: value for name, value in row.items() if name not in (column, answer_column)}
        answer = row[answer_column] if answer_column is not None else None
        name = f"{rows.path.stem}:{number}"
        problem = Problem(id=name, prompt=text, prompt_ids=ids, answer=answer, metadata=metadata)
        self._check_travels(rows, number, row, problem)
        return problem

    def _check_travels(self, rows: Rows, number: int, row: dict[str, Any], problem: Problem) -> None:
        """A row that no message to a generator can hold would end the run when it is drawn."""
        if len(problem.prompt_ids) > longest_prompt(self.config):
            return  # It is dropped.
        if wrong := check_travels(problem, self.config.transport.max_message_bytes):
            longest = max(row, key=lambda name: len(str(row[name])))
            raise rows.error(number, longest, f"{wrong}; shorten this column, the longest, or leave it out")


def _hold_out(problems: list[Problem], data: DataConfig, only_evaluates: bool) -> list[Problem]:
    """Choose held-out problems by the hash of their prompts, so that neither seed nor row order matters."""
    distinct = {p.prompt: p for p in reversed(problems)}
    if data.eval_problems >= len(distinct) and data.eval_problems and not only_evaluates:
        raise InputError(
            f"data.eval_problems = {data.eval_problems} leaves nothing to train on: {data.path} has {len(distinct)} "
            f"different prompts; at most {len(distinct) - 1} can be held out, or give data.eval_path"
        )
    return sorted(distinct.values(), key=lambda p: hashlib.sha256(p.prompt.encode()).digest())[: data.eval_problems]


def _without_copies(
    problems: list[Problem], held_out: list[Problem], is_own_file: bool, dropped: Counter[str]
) -> list[Problem]:
    """Return the problems whose prompt is not held out; count the copies that this takes away."""
    prompts = {p.prompt for p in held_out}
    train = [p for p in problems if p.prompt not in prompts]
    copies = len(problems) - len(train) - (0 if is_own_file else len(held_out))
    if copies:
        dropped[HELD_OUT_COPY] = copies
    return train


def _check_enough(config: Config, count: int) -> None:
    """A run that could not fill its first batch is refused, not finished after no step; run.steps = 0 needs none."""
    if config.run.steps == 0:
        return
    epochs, groups = config.data.epochs, config.learner.batch_groups
    if count == 0:
        raise InputError(f"{config.data.path}: every prompt is also held out; nothing is left to train on")
    if epochs is not None and count * epochs < groups:
        raise InputError(
            f"{config.data.path} has {count} training problems; data.epochs = {epochs} gives {count * epochs}, less "
            f"than one batch of learner.batch_groups = {groups}; set data.epochs = {-(-groups // count)} or more, "
            "or leave it out"
        )


class DatasetProblems(ProblemSource):
    """Rows of a file; epoch e has the order of a permutation seeded by (run.seed, e)."""

    def __init__(self, config: Config, train: list[Problem], held_out: list[Problem], dropped: dict[str, int]):
        self._seed, self._data = config.run.seed, config.data
        self._train, self._held_out = train, held_out
        digest = hashlib.sha256(msgspec.msgpack.encode((self._seed, self._data.shuffle)))
        for problem in train:
            digest.update(msgspec.msgpack.encode((problem.id, problem.prompt_ids.tobytes(), problem.answer)))
        super().__init__(identity=digest.hexdigest()[:32], num_problems=len(train), dropped=dropped)
        self._epoch, self._index = 0, 0
        self._order = self._permutation(0)

    def draw(self) -> Problem | None:
        """Return the next row of the epoch, then of the next epoch; None after data.epochs of them."""
        if self._index == len(self._train):
            if not self._train:
                return None
            if self._data.epochs is not None and self._epoch + 1 >= self._data.epochs:
                return None
            self.seek({"epoch": self._epoch + 1, "index": 0})
        self._index += 1
        return self._train[self._order[self._index - 1]]

    def eval_problems(self) -> list[Problem]:
        """Return the held-out rows."""
        return self._held_out

    def position(self) -> dict[str, int]:
        """Return the epoch (from 0) and how many of its rows were drawn."""
        return {"epoch": self._epoch, "index": self._index}

    def seek(self, position: dict[str, int]) -> None:
        """Continue there."""
        self._epoch, self._index = position["epoch"], position["index"]
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._data.shuffle:
            return np.arange(len(self._train))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._train))

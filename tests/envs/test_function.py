"""The user's own reward function, through the environment that a generator uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.envs.base import Environment, build_environment
from async_rl.envs.rewards import RewardResult
from async_rl.errors import InputError
from async_rl.learner.batch import prepare_batch
from async_rl.protocol import Problem
from tests.envs.settings import character_tokenizer, make_config, write_jsonl
from tests.loop.rig import Learner, fleet
from tests.loop.rig import make_config as make_loop_config

REWARDS = """
import asyncio
import os
import time
from pathlib import Path
import helper

def by_answer(completion, answer):
    if answer == "hang":
        while True: pass
    return answer

def everything(completion, answer, prompt, problem_id, truncated, level):
    assert (completion, answer, prompt, problem_id, truncated) == ("c", "a", "q", "d:1", True), locals()
    return level

async def one(completion, answer):
    await asyncio.sleep(0)
    return helper.same(completion, answer)

def many(completion, answer):
    return [helper.same(c, a) for c, a in zip(completion, answer)] if len(completion) <= 2 else 1 / 0

async def many_at_once(completion, answer):
    async def score(c, a):
        await asyncio.sleep(0)
        return helper.same(c, a)
    return await asyncio.gather(*map(score, completion, answer))

def sizes(completion):
    return [len(completion)] * len(completion)

def meet(completion, answer):
    # 1 when another process runs it at the same time: both see each other's file.
    Path(answer, str(os.getpid())).touch()
    for _ in range(500):
        if len(list(Path(answer).iterdir())) == 2:
            return 1
        time.sleep(0.01)
    return 0

def picky(completion):
    return None if int(completion.split()[0]) % 4 == 0 else 1.0
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: commands start in it, and rewards.py imports its neighbour."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "helper.py").write_text("def same(a, b): return float(a == b)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.asynccontextmanager
async def environment(reward: str, *overrides: str, batch: bool = False) -> AsyncIterator[Environment]:
    settings = {"type": "function", "reward": reward, "batch": batch}
    built = build_environment(make_config(None, "data.path=unused", *overrides, environment=settings))
    await built.start()
    try:
        yield built
    finally:
        await built.close()


def problem(answer: Any = None, **metadata: Any) -> Problem:
    ids = np.zeros(1, dtype=np.int32)
    return Problem(id="d:1", prompt="q", prompt_ids=ids, answer=answer, metadata=metadata)


async def score_all(built: Environment, answers: list[Any]) -> list[RewardResult]:
    return await asyncio.gather(*(built.score(problem(answer), "c") for answer in answers))


async def test_the_function_gets_what_it_asks_for_by_name() -> None:
    async with environment("rewards.py:everything") as built:
        result = await built.score(problem("a", level=0.25, other=1), "c", truncated=True)
    assert (result.value, result.error) == (0.25, None)


@pytest.mark.parametrize(("name", "batch"), [("one", False), ("many", True), ("many_at_once", True)])
async def test_single_and_batch_sync_and_async_give_the_same(name: str, batch: bool) -> None:
    overrides = ("rewards.max_batch=2",) if batch else ()
    async with environment(f"rewards.py:{name}", *overrides, batch=batch) as built:
        results = await score_all(built, ["c", "x", "c", "c", "y"])
    assert [(result.value, result.error) for result in results] == [
        (1, None),
        (0, None),
        (1, None),
        (1, None),
        (0, None),
    ]


async def test_workers_and_batch_size_are_those_of_the_settings(tmp_path: Path) -> None:
    async with environment("rewards.py:sizes", "rewards.max_batch=2", batch=True) as built:
        assert max(result.value or 0 for result in await score_all(built, ["a"] * 9)) == 2
    (tmp_path / "met").mkdir()
    async with environment("rewards.py:meet", "rewards.workers=2", "rewards.timeout_s=60") as built:
        assert [result.value for result in await score_all(built, [str(tmp_path / "met")] * 2)] == [1, 1]


async def test_reward_number_is_read_whole_and_nan_fails() -> None:
    async with environment("rewards.py:by_answer") as built:
        results = await score_all(built, ["10", "1e-1", -2, float("nan"), float("inf"), "10 points"])
    assert [result.value for result in results] == [10.0, 0.1, -2.0, None, None, None]
    assert [str(result.error).rpartition("by_answer: ")[2] for result in results[3:]] == [
        "returned nan, not a finite number",
        "returned inf, not a finite number",
        "returned '10 points' (str), not a number",
    ]


async def test_none_reward_makes_the_member_failed_and_no_part_of_its_group(tmp_path: Path) -> None:
    """A whole loop: members without a reward are missing in their groups, and nowhere stands a 0 for them."""
    config = make_loop_config(tmp_path, rewards={"max_attempts": 1}, run={"steps": 6})
    learner = Learner(config)
    address = learner.start()
    async with environment("rewards.py:picky") as built, fleet(config, address, "g0", scorer=built) as (worker,):  # type: ignore[arg-type]
        await learner.done()
        assert worker.generator.counts["failed"] > 0
    sizes = [len(group.members) for batch in learner.batches for group in batch]
    assert min(sizes) < config.sampling.group_size
    members = [member for batch in learner.batches for group in batch for member in group.members]
    assert all(member.reward == 1.0 and int(member.text.split()[0]) % 4 for member in members)
    assert any("returned None, not a number" in note for note in learner.notes)
    for step, batch in enumerate(learner.batches, start=1):
        missing = sum(config.sampling.group_size - len(group.members) for group in batch)
        values = prepare_batch(batch, step, config).metrics.resolve()
        assert values["reward/mean"] == 1.0
        assert values["reward/failed_share"] == missing / (config.sampling.group_size * len(batch))


async def test_hang_is_killed_at_the_timeout_of_the_settings_and_the_rest_goes_on() -> None:
    """Four hangs on two workers: each costs its own worker one timeout, and two restarts at least."""
    async with environment("rewards.py:by_answer", "rewards.timeout_s=0.5", "rewards.workers=2") as built:
        results = await score_all(built, ["hang", "hang", "hang", "hang", 3])
        assert [result.value for result in results] == [None, None, None, None, 3]
        assert all("did not return within 0.5 s and was killed" in str(result.error) for result in results[:4])
        assert built.pool is not None and 2 <= built.pool.restarts <= 4


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("rewards.py", "environment.reward = 'rewards.py' must be 'file.py:function' or 'package.module:function'"),
        (":score", "environment.reward = ':score' must be 'file.py:function' or 'package.module:function'"),
        ("reward.py:one", "environment.reward: no file 'reward.py' in '"),
    ],
)
def test_a_reward_that_is_not_there_is_refused_before_anything_starts(reward: str, message: str) -> None:
    settings = {"type": "function", "reward": reward}
    with pytest.raises(InputError) as error:
        build_environment(make_config(None, "data.path=unused", environment=settings))
    assert str(error.value).startswith(message)


async def test_a_function_that_does_not_exist_is_refused_at_start() -> None:
    with pytest.raises(InputError, match=r"environment\.reward: cannot import .* it has by_answer, everything, many"):
        async with environment("rewards.py:missing"):
            pass


@pytest.mark.parametrize(
    ("settings", "completion", "answer", "reward"),
    [
        ({}, "Paris", "Paris", 1),
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({}, "Paris, France", "Paris", 0),
        ({}, "7", 7, 1),
        ({"strip": False}, " Paris", "Paris", 0),
        ({"strip": False}, " Paris", " Paris", 1),
        ({"ignore_case": True}, "STRASSE", "stra\u00dfe", 1),
    ],
)
async def test_exact_match(settings: dict[str, bool], completion: str, answer: object, reward: int) -> None:
    own = {"type": "exact_match"} | settings
    built = build_environment(make_config(None, "data.path=unused", environment=own))
    assert (await built.score(problem(answer), completion)).value == reward


async def test_columns_of_the_file_reach_the_function(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "q", "answer": "a", "level": 4}])
    settings = {"type": "function", "reward": "rewards.py:everything"}
    built = build_environment(make_config(file, environment=settings))
    posed = built.problems(character_tokenizer()).draw()
    await built.start()
    try:
        assert posed is not None
        assert (await built.score(posed, "c", truncated=True)).value == 4
    finally:
        await built.close()

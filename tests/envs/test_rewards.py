"""The reward pool: what comes back for every kind of good and bad reward function, and what happens to its workers."""

import asyncio
import contextlib
import errno
import math
import os
import signal
from pathlib import Path

import pytest

from async_rl.envs.reward_worker import RewardItem, RewardSpec, read_number
from async_rl.envs.rewards import RewardPool
from async_rl.errors import InputError

FUNCTIONS = Path(__file__).parent / "reward_functions.py"


@contextlib.asynccontextmanager
async def pool(name, *, batch=False, options=None, workers=1, timeout_s=20.0, max_batch=16, module=str(FUNCTIONS)):
    spec = RewardSpec(path=f"{module}:{name}", batch=batch, options=options or {})
    pool = RewardPool(spec, workers, timeout_s, max_batch)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def item(completion="", answer=None, problem_id="p1", **rest):
    return RewardItem(completion=completion, answer=answer, problem_id=problem_id, **rest)


async def score_all(pool, answers):
    items = [item(f"c{i}", answer, f"p{i}") for i, answer in enumerate(answers)]
    return await asyncio.gather(*(pool.score(i) for i in items))


@pytest.mark.parametrize(
    ("returned", "value"),
    [(1, 1.0), (-2, -2.0), ("10", 10.0), ("1e-1", 0.1), (" -2 ", -2.0), (True, 1.0), (".5", 0.5), ("+3.", 3.0)],
)
def test_numbers_are_read_whole(returned, value):
    assert read_number(returned).value == value


@pytest.mark.parametrize(
    "returned", [None, "", "1_0", "10 points", "nan", "inf", math.nan, -math.inf, [1.0], {}, 1j, 10**400]
)
def test_other_values_are_errors(returned):
    number = read_number(returned)
    assert number.value is None
    assert number.error.startswith("returned ")


def test_numpy_and_one_element_arrays_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert read_number(numpy.float32(0.5)).value == 0.5
    assert read_number(numpy.array(2)).value == 2.0


async def test_failures_are_one_line_that_names_problem_and_cause():
    async with pool("by_answer") as rewards:
        answers = [0.5, "raise", None, "nan", "inf", "list", "not a number", "sys_exit", "print"]
        results = await score_all(rewards, answers)
    assert [r.value for r in results] == [0.5, None, None, None, None, None, None, None, 1.0]
    errors = [r.error for r in results]
    assert errors[0] is errors[8] is None
    for i, part in enumerate(
        [
            "",
            r"KeyError: 'no such\nkey'",
            "returned None",
            "returned nan",
            "returned inf",
            "[1.0]",
            "'not a number' (str)",
            "SystemExit",
        ]
    ):
        assert part in (errors[i] or "")
    for i in range(1, 8):
        assert errors[i].startswith(f"problem 'p{i}': reward ")
        assert "\n" not in errors[i]
    assert "(reward_functions.py:15)" in errors[1]


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("hang", "did not return within 0.5 s and was killed"),
        ("exit", "died (exit status 7)"),
        ("segfault", "died (signal SIGSEGV)"),
    ],
)
async def test_only_the_guilty_fails_and_its_worker_is_replaced(deed, cause):
    async with pool("by_answer", timeout_s=0.5) as rewards:
        results = await score_all(rewards, [1, deed, 2, deed, 3])
        assert [r.value for r in results] == [1, None, 2, None, 3]
        assert cause in results[1].error and cause in results[3].error
        assert "'p3'" in results[3].error
        assert rewards.restarts == 2


async def test_a_replacement_that_cannot_be_started_fails_one_completion_and_the_next_tries_again(monkeypatch):
    async with pool("by_answer") as rewards, asyncio.timeout(120):
        assert "exit status 7" in (await rewards.score(item(answer="exit"))).error

        async def no_fork(*command, **options):
            monkeypatch.undo()
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(asyncio, "create_subprocess_exec", no_fork)
        failed = await rewards.score(item(answer=1))
        assert failed.value is None
        assert "cannot start a worker process: [Errno 11] Resource temporarily unavailable" in failed.error
        assert (await rewards.score(item(answer=2))).value == 2


async def test_a_worker_that_outlives_its_kill_is_left_behind_and_replaced(monkeypatch):
    """As one in uninterruptible sleep does: the signal stays pending."""
    async with pool("by_answer", timeout_s=0.5) as rewards, asyncio.timeout(120):
        stuck = rewards._workers[0].process
        monkeypatch.setattr("async_rl.envs.rewards.EXIT_DEADLINE_S", 0.1)
        monkeypatch.setattr(os, "killpg", lambda pid, number: None)
        hung = await rewards.score(item(answer="sleep"))
        monkeypatch.undo()
        try:
            assert "did not return within 0.5 s and was killed" in hung.error
            assert f"process {stuck.pid} has not ended" in hung.error
            assert rewards._workers[0].process is None
            rewards.timeout_s = 60.0
            assert (await rewards.score(item(answer=2))).value == 2
        finally:
            os.killpg(stuck.pid, signal.SIGKILL)
            await stuck.wait()


async def test_a_fault_of_the_pool_fails_its_completion_and_no_later_one(monkeypatch):
    async with pool("by_answer") as rewards, asyncio.timeout(120):

        async def broken(items, timeout_s):
            monkeypatch.undo()
            raise RuntimeError("a fault")

        monkeypatch.setattr(rewards._workers[0], "call", broken)
        assert "RuntimeError: a fault" in (await rewards.score(item(answer=1))).error
        assert (await rewards.score(item(answer=2))).value == 2


async def test_workers_run_at_the_same_time(tmp_path):
    async with pool("meet", workers=2) as rewards:
        results = await score_all(rewards, [[2, str(tmp_path)]] * 2)
    assert [r.value for r in results] == [1.0, 1.0]


async def test_hangs_are_shared_among_workers():
    async with pool("by_answer", workers=2, timeout_s=0.5) as rewards:
        results = await score_all(rewards, ["sleep"] * 4 + [1])
        assert [r.value for r in results] == [None] * 4 + [1]
        # Each hang costs its own worker exactly one timeout: none waited for another's.
        assert all(r.seconds >= 0.5 for r in results[:4])
        assert 2 <= rewards.restarts <= 4


async def test_results_do_not_depend_on_the_number_of_workers_or_on_batching():
    answers = ["ok", "raise", "none", "ok", "exit", "ok", "short", "ok", "ok"] * 3
    seen = []
    for workers, max_batch in [(1, 1), (1, 4), (3, 16)]:
        async with pool("length_batch", batch=True, workers=workers, max_batch=max_batch) as rewards:
            seen.append([(r.value, r.error) for r in await score_all(rewards, answers)])
    assert seen[0] == seen[1] == seen[2]
    assert [v for v, _ in seen[0][:9]] == [2, None, None, 2, None, 2, None, 2, 2]
    assert "returned 0 values for 1 completions" in seen[0][6][1]


async def test_batch_calls_take_what_waits_up_to_the_limit():
    async with pool("batch_size", batch=True, max_batch=4) as rewards:
        sizes = [r.value for r in await score_all(rewards, ["x"] * 9)]
    assert max(sizes) == 4
    # 9 completions, at most 4 a call: 3 calls at least, and fewer than one each.
    assert 3 <= round(sum(1 / size for size in sizes)) < 9


async def test_options_reach_the_function():
    async with pool("length_batch", batch=True, options={"scale": 5}) as rewards:
        assert (await rewards.score(item("abc", "ok"))).value == 15


async def test_async_function():
    async with pool("length_async") as rewards:
        assert [r.value for r in await asyncio.gather(*(rewards.score(item("a" * n)) for n in range(3)))] == [0, 1, 2]


async def test_functions_get_what_they_ask_for():
    row = item(
        "c" * 3, "a" * 2, "p" * 1, prompt="q" * 4, truncated=True, metadata={"level": 0.5, "completion": "hidden"}
    )
    async with pool("everything") as rewards:
        assert (await rewards.score(row)).value == 3 + 20 + 400 + 1000 + 10000 + 0.5
    async with pool("takes_kwargs") as rewards:
        assert (await rewards.score(row)).value == 5  # answer, prompt, problem_id, truncated, level
    async with pool("asks_for_more") as rewards:
        assert "it asks for difficulty; a problem has level, completion, problem_id" in (await rewards.score(row)).error


async def test_function_by_module_name():
    async with pool("length_async", module="tests.envs.reward_functions") as rewards:
        assert (await rewards.score(item("four"))).value == 4


async def test_workers_import_user_code_only():
    async with pool("loaded_modules") as rewards:
        assert (await rewards.score(item())).value == 0.0


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        (f"{FUNCTIONS}:lenght_async", "has no function 'lenght_async'; it has "),
        (f"{FUNCTIONS}:not_a_function", "has no function 'not_a_function'"),
        ("nowhere/rewards.py:score", "no file"),
        ("no_such_package.rewards:score", "No module named 'no_such_package'"),
        ("rewards.py", "must be 'file.py:function' or 'package.module:function'"),
    ],
)
async def test_function_that_cannot_be_loaded_is_refused_at_start(path, cause):
    rewards = RewardPool(RewardSpec(path=path), workers=2, timeout_s=1.0)
    with pytest.raises(InputError, match=r"environment\.reward: cannot import") as error:
        await rewards.start()
    assert cause in str(error.value) and path in str(error.value)
    assert not any(worker.alive for worker in rewards._workers)


async def test_killing_takes_along_what_the_reward_started(tmp_path):
    async with pool("spawn_child_and_hang", timeout_s=1.0) as rewards:
        result = await rewards.score(item(answer=str(tmp_path / "child")))
    assert result.value is None
    assert not await _runs_on(int((tmp_path / "child").read_text()))


async def test_cancelled_callers_leave_the_pool_usable_and_close_kills_all_workers():
    async with pool("by_answer", timeout_s=0.5) as rewards:
        waiting = [asyncio.create_task(rewards.score(item(answer=a))) for a in ("sleep", 1, 2)]
        await asyncio.sleep(0.1)
        waiting[1].cancel()
        assert (await rewards.score(item(answer=3))).value == 3
        assert (await waiting[2]).value == 2
        assert waiting[1].cancelled()
    async with pool("process_id", workers=2) as rewards:
        worker = int((await rewards.score(item())).value)
        assert _runs(worker)
    await rewards.close()
    assert not await _runs_on(worker)


async def _runs_on(pid: int) -> bool:
    """Say whether a killed process still runs after the system had time to end it."""
    for _ in range(500):
        if not _runs(pid):
            return False
        await asyncio.sleep(0.01)
    return True


def _runs(pid: int) -> bool:
    """Say whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.exists(f"/proc/{pid}")

"""Reward functions that a user might write, good and bad, imported by reward workers in tests."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path


def by_answer(completion: str, answer):
    """Do what the answer says: return it, raise, hang or die."""
    match answer:
        case "raise":
            raise KeyError("no such\nkey")
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "exit":
            os._exit(7)
        case "sys_exit":
            sys.exit(1)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "print":
            print("noise on stdout", flush=True)
            return 1
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "list":
            return [1.0]
    return answer


async def length_async(completion):
    await asyncio.sleep(0)
    return len(completion)


def length_batch(completion: list[str], answer: list, scale=1):
    if "raise" in answer:
        raise RuntimeError("one of these is bad")
    if "exit" in answer:
        os._exit(3)
    if "short" in answer:
        return []
    return [None if a == "none" else scale * len(c) for c, a in zip(completion, answer, strict=True)]


def batch_size(completion: list[str]):
    return [len(completion)] * len(completion)


def everything(completion, answer, prompt, problem_id, truncated, level, *, bonus=0):
    return (
        len(completion)
        + 10 * len(answer)
        + 100 * len(prompt)
        + 1000 * len(problem_id)
        + 10000 * truncated
        + level
        + bonus
    )


def takes_kwargs(completion, **fields):
    return len(fields)


def asks_for_more(completion, difficulty):
    return 1.0


def meet(completion, answer):
    """Return only when as many calls as the answer's first item run at once, seen through files in its second."""
    count, folder = answer
    (Path(folder) / completion).touch()
    for _ in range(2000):
        if len(list(Path(folder).iterdir())) >= count:
            return 1.0
        time.sleep(0.01)
    return 0.0


def loaded_modules(completion):
    return float(any(name.split(".")[0] in ("torch", "vllm", "transformers", "numpy") for name in sys.modules))


def process_id(completion):
    return os.getpid()


def spawn_child_and_hang(completion, answer):
    import subprocess

    child = subprocess.Popen(["sleep", "300"])
    Path(answer).write_text(str(child.pid))
    while True:
        time.sleep(1)


not_a_function = 3

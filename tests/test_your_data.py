"""What docs/your_data.md shows is run: its files, settings, commands, reward functions and tables."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import shlex
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.addresses import free_port
from async_rl.config import Config, load_config
from async_rl.config.schema import DataConfig
from async_rl.envs.answers import extract_answer
from async_rl.envs.base import Environment, build_environment
from async_rl.envs.reward_worker import RewardItem
from async_rl.envs.rewards import START_DEADLINE_S
from async_rl.envs.tokenize import render_prompt
from async_rl.errors import InputError
from async_rl.protocol import Problem
from async_rl.recipes import smollm2
from tests.conftest import Spawn
from tests.e2e.conftest import Run
from tests.envs.settings import TEMPLATE, character_tokenizer, write_jsonl
from tests.tiny_models import tiny_model

PAGE = (Path(__file__).parents[1] / "docs" / "your_data.md").read_text(encoding="utf-8")
TOKENIZER = character_tokenizer(TEMPLATE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def table(first_header: str) -> list[list[str]]:
    """Rows of the table whose first column has this header, code marks taken off whole cells."""
    _, _, rest = PAGE.partition(f"| {first_header} |")
    body = rest.split("\n\n")[0].split("\n")[2:]
    return [[re.sub(r"^`(.*)`$", r"\1", cell[1:-1]) for cell in row.strip("|").split("|")] for row in body]


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def load_toml(name: str) -> dict[str, Any]:
    (block,) = [block for block in blocks("toml") if block.startswith(f"# {name}\n")]
    return tomllib.loads(block)


SNIPPETS = [block for block in blocks("toml") if not block.startswith("# capitals.toml")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, and the one that it only names; commands start here."""
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text(blocks("json")[0])
    for block in [*blocks("python"), *blocks("toml")]:
        if named := re.match(r"# (\w+\.(?:py|toml))\n", block):
            Path(named[1]).write_text(block)
    test = [{"prompt": f"The capital number {n}?", "answer": "Lima", "level": 1} for n in range(3)]
    write_jsonl(tmp_path / "capitals_test.jsonl", test)
    return tmp_path


@contextlib.asynccontextmanager
async def started(config: Config) -> AsyncIterator[Environment]:
    environment = build_environment(config)
    await environment.start()
    try:
        yield environment
    finally:
        await environment.close()


def all_problems(environment: Environment) -> list[Problem]:
    source = environment.problems(TOKENIZER)
    drawn = [source.draw() for _ in range(source.num_problems or 0)]
    return [*source.eval_problems(), *(problem for problem in drawn if problem)]


async def test_the_reward_gives_what_the_table_says(folder: Path) -> None:
    async with started(load_config("capitals.toml")) as environment:
        paris = next(problem for problem in all_problems(environment) if problem.answer == "Paris")
        shown = {text: float(reward) for text, reward in table("completion for Paris")}
        results = {text: (await environment.score(paris, text)).value for text in shown}
        cut_off = await environment.score(paris, "Paris", truncated=True)
    assert results == shown and len(shown) == 4
    assert cut_off.value == 0.0


def test_the_example_holds_out_two_of_eight_problems(folder: Path) -> None:
    environment = build_environment(load_config("capitals.toml"))
    source = environment.problems(TOKENIZER)
    assert (len(source.eval_problems()), source.num_problems, source.dropped) == (2, 6, {})
    first = min(all_problems(environment), key=lambda problem: problem.id)
    assert (first.id, first.answer, first.metadata) == ("capitals:1", "Paris", {"level": 1})


def test_a_prompt_of_messages_is_a_problem(folder: Path) -> None:
    Path("capitals.jsonl").write_text(blocks("json")[1])
    environment = build_environment(load_config("capitals.toml", ["run.steps=0"]))
    (problem,) = environment.problems(TOKENIZER).eval_problems()
    assert problem.prompt == "<bos>[user]The capital of Peru, in one word?\n[assistant]"


async def test_the_batch_reward_uses_another_column(folder: Path) -> None:
    config = load_config("capitals.toml", ["environment.reward=batch.py:score", "environment.batch=true"])
    async with started(config) as environment:
        problems = all_problems(environment)
        results = await asyncio.gather(*(environment.score(p, f"{p.answer}!") for p in problems))
    assert [result.value for result in results] == [float(p.metadata["level"]) for p in problems]


class Judge(http.server.BaseHTTPRequestHandler):
    """A service that scores by the length of the answer."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"score": len(asked["answer"]) if asked["completion"] == "c" else -1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def judge() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(120)


async def test_the_reward_that_asks_a_service(folder: Path, judge: int) -> None:
    source = Path("judge.py").read_text()
    Path("judge.py").write_text(source.replace(":8000/", f":{judge}/"))
    snippet = next(block for block in SNIPPETS if "judge.py" in block)
    Path("snippet.toml").write_text('base = "capitals.toml"\n' + snippet)
    async with started(load_config("snippet.toml")) as environment:
        problems = all_problems(environment)
        results = await asyncio.gather(*(environment.score(p, "c") for p in problems))
    assert [(result.value, result.error) for result in results] == [(len(p.answer), None) for p in problems]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_settings_load_on_top_of_the_example_and_pose_problems(folder: Path, number: int) -> None:
    Path("snippet.toml").write_text('base = "capitals.toml"\n' + SNIPPETS[number])
    config = load_config("snippet.toml")
    source = build_environment(config).problems(TOKENIZER)
    assert source.draw() is not None
    if config.data.eval_path is not None:
        assert [problem.answer for problem in source.eval_problems()] == ["Lima"] * 3


def test_the_instruction_is_appended_as_it_reads(folder: Path) -> None:
    (snippet,) = [block for block in SNIPPETS if "instruction" in block]
    Path("snippet.toml").write_text('base = "capitals.toml"\n' + snippet)
    problem = build_environment(load_config("snippet.toml")).problems(TOKENIZER).draw()
    assert problem is not None and problem.prompt.endswith("the answer into \\boxed{}.\n[assistant]")


@pytest.mark.parametrize(
    ("has", "setting", "text", "messages"),
    [(row[0], setting, *row[2:]) for row in table("the tokenizer") for setting in re.findall(r'"(\w+)"', row[1])],
)
def test_the_table_of_chat_templates(has: str, setting: Any, text: str, messages: str) -> None:
    tokenizer = character_tokenizer(TEMPLATE if has == "has a template" else None)
    data = DataConfig(chat_template=setting)
    outcomes = {"becomes": "<bos>[user]a\n[assistant]", "rendered": "<bos>[user]a\n[assistant]", "taken": "a"}
    for prompt, outcome in (("a", text), ([{"role": "user", "content": "a"}], messages)):
        if outcome == "refused":
            with pytest.raises(InputError):
                render_prompt(tokenizer, prompt, data)
        else:
            assert render_prompt(tokenizer, prompt, data).text == outcomes[re.split("[ ,]", outcome)[0]]


def test_all_rows_can_be_trained_on(folder: Path) -> None:
    named = re.search(r"To train on every row, set `(\S+ = 0)` and `(\S+ = 0)`", PAGE)
    assert named is not None
    config = load_config("capitals.toml", [text.replace(" ", "") for text in named.groups()])
    assert build_environment(config).problems(TOKENIZER).num_problems == 8


def test_the_commands_load(folder: Path) -> None:
    steps = []
    for command, name, path, *overrides in (words for words in commands() if words[0] == "async-rl"):
        assert command == "async-rl" and name in ("config", "train")
        config = load_config(path, overrides)
        source = build_environment(config).problems(TOKENIZER)
        steps.append((config.run.steps, config.run.dir, len(source.eval_problems())))
    assert steps == [(20, "runs/capitals", 2), (0, "runs/before", 8), (20, "runs/capitals", 2)]


def test_the_command_that_writes_a_model_calls_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [words[2] for words in commands() if words[0].endswith("python")]
    called: list[str] = []
    monkeypatch.setattr(smollm2, "convert", called.append)
    exec(code, {})
    assert called == [load_toml("capitals.toml")["model"]["path"]]


def test_the_arguments_of_a_reward_are_those_of_the_table() -> None:
    named = [cells[0] for cells in table("argument")]
    item = RewardItem(problem_id="capitals:3", completion="c")
    assert set(item.arguments()) == set(named) - {"a column's name", "**fields"}
    assert START_DEADLINE_S == 120 and re.search(r"for which it has two\s+minutes", PAGE)


def test_the_answer_formats_are_those_of_the_table() -> None:
    assert [cells[0] for cells in table("`environment.answer_format`")] == ["boxed", "gsm8k", "last_number", "auto"]
    assert extract_answer("10-3", "last_number") == "3"
    assert extract_answer("pay -$1,250.50", "last_number") == "-$1,250.50"
    assert extract_answer("it is 1/2", "last_number") == "1/2"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_trains(folder: Path, spawn: Spawn) -> None:
    """Its files and commands, with a tiny model and without vLLM."""
    tiny_model(folder / "models" / "smollm2-135m-instruct", tied=True)
    run = Run(folder, folder / "capitals.toml", spawn)
    quick = ("generator.engine.type=hf", "run.steps=2", "weights.deadline_s=60", "metrics.console=plain")
    evaluate, train = [words[1:] for words in commands() if words[:2] == ["async-rl", "train"]]
    run.wait(run.start(*evaluate, quick[0], *quick[2:], f"transport.port={free_port()}"))
    run.wait(run.start(*train, *quick, f"transport.port={free_port()}"))
    before = Path("runs/before/evaluations/version-00000000.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["answer"] for line in before) == sorted(
        json.loads(line)["answer"] for line in blocks("json")[0].splitlines()
    )
    rows = [json.loads(line) for line in Path("runs/capitals/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    assert all(row["reward/failed_share"] == 0 for row in rows if "reward/mean" in row)
    assert [row["eval/num_problems"] for row in rows if "eval/num_problems" in row] == [2, 2]

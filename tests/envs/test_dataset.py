"""Problems from files: what is read, refused, dropped and held out, in which order, and how a run continues."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.envs.base import ProblemSource, build_environment
from async_rl.envs.tokenize import render_prompt
from async_rl.errors import InputError
from async_rl.protocol import Problem
from tests.envs.settings import TEMPLATE, character_tokenizer, make_config, write_jsonl

TOKENIZER = character_tokenizer()
CHAT = character_tokenizer(TEMPLATE)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i}", "answer": str(i)} for i in range(count)]


def load(file: Path, *overrides: str, tokenizer=TOKENIZER, environment=None) -> ProblemSource:
    return build_environment(make_config(file, *overrides, environment=environment)).problems(tokenizer)


def refusal(file: Path, *overrides: str, tokenizer=TOKENIZER, environment=None) -> str:
    with pytest.raises(InputError) as error:
        load(file, *overrides, tokenizer=tokenizer, environment=environment)
    return str(error.value)


def draw(problems: ProblemSource, count: int) -> list[str]:
    drawn = [problems.draw() for _ in range(count)]
    return [problem.prompt if problem else "(end)" for problem in drawn]


def plain(problem: Problem | None) -> tuple[Any, ...]:
    assert problem is not None
    return problem.id, problem.prompt, problem.prompt_ids.tolist(), problem.answer, problem.metadata


# --- reading ------------------------------------------------------------------------------------


def test_jsonl_separators_are_part_of_the_text(tmp_path: Path) -> None:
    """Two records whose strings hold U+2028 and U+0085 are two records, not four."""
    text = '{"prompt": "a\u2028b", "answer": "1"}\n{"prompt": "c\u0085d", "answer": "2"}\n'
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    problems = load(tmp_path / "data.jsonl", "data.shuffle=false")
    assert problems.num_problems == 2
    assert draw(problems, 2) == ["a\u2028b", "c\u0085d"]


def test_line_ends_blank_lines_and_a_byte_order_mark_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n\r\n{"prompt": "b", "answer": 2}'
    )
    problems = load(tmp_path / "data.jsonl", "data.shuffle=false")
    assert [plain(problems.draw())[0] for _ in range(2)] == ["data:1", "data:3"], "rows are named by their lines"


def test_parquet_holds_the_same_problems_as_jsonl(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [
        {
            "messages": [{"role": "user", "content": f"q{i}"}],
            "solution": i,
            "level": i / 2,
            "tests": [{"given": [i, 1], "wanted": "x"}],
        }
        for i in range(12)
    ]
    write_jsonl(tmp_path / "data.jsonl", rows)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    overrides = ("data.prompt_column=messages", "data.answer_column=solution", "data.eval_problems=3")
    a, b = (load(tmp_path / f"data.{end}", *overrides, tokenizer=CHAT) for end in ("jsonl", "parquet"))
    assert a.identity == b.identity
    assert [plain(p) for p in a.eval_problems()] == [plain(p) for p in b.eval_problems()]
    drawn = [(plain(a.draw()), plain(b.draw())) for _ in range(18)]
    assert all(x == y for x, y in drawn)
    first = next(x for x, _ in drawn if x[0] == "data:5")
    assert first[1:2] + first[3:] == (
        "<bos>[user]q4\n[assistant]",
        4,
        {"level": 2.0, "tests": [{"given": [4, 1], "wanted": "x"}]},
    )


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("data.jsonl", b'{"prompt": "a", "answer": 1}\n{"prompt": "b",\n', ["data.jsonl, row 2: not a JSON object"]),
        ("data.jsonl", b'["a", "b"]\n', ["data.jsonl, row 1: not a JSON object", "Expected `object`"]),
        ("data.jsonl", b'{"prompt": "\xff", "answer": 1}\n', ["data.jsonl, row 1: not a JSON object"]),
        ("data.jsonl", b"\n\n", ["data.path", "has no rows"]),
        ("data.parquet", b"PAR1 no", ["data.path", "data.parquet", "no parquet file that can be read"]),
        ("data.csv", b"prompt,answer\n", ["data.path", "'.csv' is neither .parquet nor .jsonl"]),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert all(part in message for part in parts), message


def test_a_file_that_is_not_there_is_named_with_the_folder_it_was_sought_from(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("no/data.jsonl")) == f"data.path = 'no/data.jsonl': no such file (from {str(tmp_path)!r})"
    write_jsonl(Path("data.jsonl"), numbered(3))
    assert refusal(Path("data.jsonl"), "data.eval_path=none.jsonl").startswith("data.eval_path = 'none.jsonl': no such")


# --- rows and columns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        (None, "null; every problem needs a prompt"),
        ("", "empty text"),
        (7, "int; expected text, or a list of {role, content} messages"),
        ([], "list; expected text, or a list of {role, content} messages"),
        (["hello"], "message 1 is not an object with a role"),
        ([{"role": "user", "content": "q"}, {"content": "a"}], "message 2 is not an object with a role"),
        ([{"role": "user", "content": None}], "message 1 has null as content; expected text"),
        ([{"role": "user"}], "message 1 has null as content; expected text"),
        ([{"role": "user", "content": ["a"]}], "message 1 has list as content; expected text"),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "the last message is the assistant's, which the policy is to write; leave it out",
        ),
    ],
)
def test_null_content_and_other_bad_prompts_are_refused_with_file_row_and_column(
    tmp_path: Path, prompt: Any, wrong: str
) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "fine", "answer": "1"}, {"prompt": prompt, "answer": "2"}])
    assert refusal(file, tokenizer=CHAT) == f"{file}, row 2, column 'prompt': {wrong}"


def test_null_content_of_parquet_is_refused_as_well(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [{"prompt": [{"role": "user", "content": text}], "answer": 1} for text in ("a", None)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert "row 2, column 'prompt': message 1 has null as content" in refusal(tmp_path / "d.parquet", tokenizer=CHAT)


def test_null_answer_is_refused_with_file_row_and_column(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b"}])
    assert refusal(file) == f"{file}, row 2, column 'answer': null; every problem needs an answer"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.prompt_column=promt",
            "has no column 'promt' (data.prompt_column); it has 'prompt', 'question', 'answer'; nearest: 'prompt'",
        ),
        (
            "data.answer_column=answers",
            "has no column 'answers' (data.answer_column); it has 'prompt', 'question', 'answer'; nearest: 'answer'",
        ),
        (
            "data.prompt_column=zzz",
            "has no column 'zzz' (data.prompt_column); it has 'prompt', 'question', 'answer'",
        ),
    ],
)
def test_missing_column_names_those_that_exist_and_the_nearest(tmp_path: Path, override: str, message: str) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "question": "b", "answer": "c"}])
    assert refusal(file, override) == f"{file} {message}"


def test_missing_column_of_answers_is_no_fault_where_the_reward_needs_none(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(completion): return 1.0\n")
    own = {"type": "function", "reward": f"{tmp_path}/rewards.py:score"}
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}])
    message = refusal(file, environment=own)
    assert message.endswith("it has 'prompt'; set it to \"none\" if the reward needs no answer")
    assert plain(load(file, "data.answer_column=none", environment=own).draw())[3] is None
    assert "this environment compares with an answer" in refusal(file, "data.answer_column=none")


def test_values_that_cannot_travel_are_refused_with_row_and_column(tmp_path: Path) -> None:
    text = '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "1", "big": 100000000000000000000000000000}\n'
    (tmp_path / "d.jsonl").write_text(text)
    message = refusal(tmp_path / "d.jsonl")
    assert "d.jsonl, row 2, column 'big': cannot be sent to a generator: " in message


def test_a_row_that_no_message_holds_is_refused_before_the_run_with_its_longest_column(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", "tests": "x" * 3000}, {"prompt": "b", "answer": "1", "tests": "x" * 4000}]
    file = write_jsonl(tmp_path / "d.jsonl", rows)
    message = refusal(file, "transport.max_message_bytes=4096")
    assert "d.jsonl, row 2, column 'tests': 4" in message and message.endswith("or leave it out")
    assert "a message has room for 3584 (transport.max_message_bytes)" in message
    assert load(file, "transport.max_message_bytes=8192").num_problems == 2


def test_a_prompt_that_is_too_long_is_dropped_even_where_no_message_holds_it(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 9000, "answer": "1"}, {"prompt": "b", "answer": "1"}]
    problems = load(write_jsonl(tmp_path / "d.jsonl", rows), "transport.max_message_bytes=4096")
    assert problems.num_problems == 1 and problems.dropped == {"prompt_too_long": 1}


def test_dates_of_parquet_travel(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [{"prompt": "a", "answer": 1, "when": datetime.date(2024, 2, 29)}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    problem = load(tmp_path / "d.parquet").draw()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain(problem)[4])) == {"when": "2024-02-29"}


def test_a_prompt_that_the_template_or_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    strict = character_tokenizer("{{ raise_exception('roles must alternate') }}")
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "1"}])
    assert "row 1, column 'prompt': cannot be rendered: roles must alternate" in refusal(file, tokenizer=strict)
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "na\u00efve", "answer": "1"}])
    message = refusal(file)
    assert "row 2, column 'prompt': cannot be rendered: the tokenizer cannot encode 'na\u00efve'" in message


def test_other_columns_come_along_for_the_reward(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "1", "level": 3, "id": "x"}])
    assert plain(load(file).draw()) == ("d:1", "a", TOKENIZER.encode("a"), "1", {"level": 3, "id": "x"})


# --- lengths ------------------------------------------------------------------------------------


def test_too_long_prompts_are_dropped_and_counted_as_rendered(tmp_path: Path) -> None:
    """The template's own tokens count: '<bos>[user]' + prompt + newline + '[assistant]' is prompt + 19 tokens."""
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "q" * n, "answer": "1"} for n in (1, 10, 11, 12, 30)])
    problems = load(file, "data.max_prompt_tokens=30", "data.shuffle=false", tokenizer=CHAT)
    assert problems.dropped == {"prompt_too_long": 2}
    assert [len(p.prompt_ids) for p in (problems.draw(), problems.draw(), problems.draw()) if p] == [20, 29, 30]


def test_too_long_is_judged_by_what_generation_gets(tmp_path: Path) -> None:
    """The ids that a lease carries are those that were counted, the environment's instruction included."""
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "q" * n, "answer": "1"} for n in (3, 4, 5)])
    math = {"type": "math", "instruction": "Number only."}
    config = make_config(file, "data.max_prompt_tokens=36", "data.shuffle=false", environment=math)
    problems = build_environment(config).problems(CHAT)
    kept = [problems.draw(), problems.draw()]
    assert problems.dropped == {"prompt_too_long": 1} and problems.num_problems == 2
    for problem, prompt in zip(kept, ("qqq\nNumber only.", "qqqq\nNumber only."), strict=True):
        text, ids = render_prompt(CHAT, prompt, config.data)
        assert plain(problem)[1:3] == (text, ids.tolist())
        assert text == f"<bos>[user]{prompt}\n[assistant]"


def test_too_long_everywhere_is_an_error(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "q" * n, "answer": "1"} for n in (7, 6, 9)])
    assert refusal(file, "data.max_prompt_tokens=5") == (
        f"{file}: all 3 prompts are too long, the shortest has 6 tokens; "
        "the limit is data.max_prompt_tokens = 5: raise it"
    )


def test_too_long_held_out_prompts_are_counted_apart(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "d.jsonl", numbered(3))
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"prompt": "q" * n, "answer": "1"} for n in (1, 9)])
    settings = (f"data.eval_path={held_out}", "data.eval_problems=5", "data.max_prompt_tokens=4")
    problems = load(train, *settings)
    assert problems.dropped == {"eval_prompt_too_long": 1}
    assert [p.prompt for p in problems.eval_problems()] == ["q"]


# --- epochs, order, ends ------------------------------------------------------------------------


def test_too_few_rows_for_a_batch_run_over_epochs(tmp_path: Path) -> None:
    problems = load(write_jsonl(tmp_path / "d.jsonl", numbered(10)), "learner.batch_groups=16")
    drawn = draw(problems, 48)
    assert "(end)" not in drawn
    assert [sorted(drawn[i : i + 10]) for i in (0, 10, 20, 30)] == [sorted(f"q{i}" for i in range(10))] * 4


def test_too_few_rows_for_a_batch_within_the_epochs_are_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", numbered(10))
    message = refusal(file, "learner.batch_groups=16", "data.epochs=1")
    assert message == (
        f"{file} has 10 training problems; data.epochs = 1 gives 10, less than one batch of learner.batch_groups = 16; "
        "set data.epochs = 2 or more, or leave it out"
    )
    problems = load(file, "learner.batch_groups=16", "data.epochs=2")
    assert Counter(draw(problems, 22)) == Counter({f"q{i}": 2 for i in range(10)}) + Counter({"(end)": 2})


def test_too_few_rows_to_hold_out_so_many_are_refused(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", numbered(10))
    assert "at most 9 can be held out, or give data.eval_path" in refusal(file, "data.eval_problems=10")
    assert load(file, "data.eval_problems=9").num_problems == 1


def test_epochs_differ_seeds_differ_and_both_are_reproducible(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", numbered(20))
    runs = {
        (seed, again): draw(load(file, "data.epochs=3", f"run.seed={seed}"), 61) for seed in (0, 1) for again in (0, 1)
    }
    assert runs[0, 0] == runs[0, 1] and runs[1, 0] == runs[1, 1]
    epochs = [run[start : start + 20] for run in (runs[0, 0], runs[1, 0]) for start in (0, 20, 40)]
    assert len(set(map(tuple, epochs))) == 6, "no two epochs of either seed have the same order"
    assert all(sorted(epoch) == sorted(f"q{i}" for i in range(20)) for epoch in epochs)
    assert [run[60] for run in runs.values()] == ["(end)"] * 4


def test_without_shuffling_the_file_is_read_in_order(tmp_path: Path) -> None:
    problems = load(write_jsonl(tmp_path / "d.jsonl", numbered(3)), "data.shuffle=false")
    assert draw(problems, 7) == ["q0", "q1", "q2", "q0", "q1", "q2", "q0"]


@pytest.fixture(scope="module")
def seven_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "d.jsonl", numbered(7))


@given(before=st.integers(0, 25), seed=st.integers(0, 3))
def test_a_restored_state_continues_exactly(seven_rows: Path, before: int, seed: int) -> None:
    """Wherever it was taken: in an epoch, between two, and after the last."""
    settings = ("data.epochs=3", f"run.seed={seed}", "data.eval_problems=1")
    through = load(seven_rows, *settings)
    draw(through, before)
    state = json.loads(json.dumps(through.state()))
    restored = load(seven_rows, *settings)
    draw(restored, 5)
    restored.restore(state)
    assert draw(restored, 20) == draw(through, 20)


@pytest.mark.parametrize(
    "change", ["run.seed=1", "data.shuffle=false", "data.max_prompt_tokens=2", "data.eval_problems=2"]
)
def test_a_state_of_other_problems_is_refused(tmp_path: Path, change: str) -> None:
    rows = [*numbered(9), {"prompt": "long", "answer": "9"}]
    file = write_jsonl(tmp_path / "d.jsonl", rows)
    state = load(file).state()
    load(file, "data.epochs=5").restore(state)  # how often is not which
    with pytest.raises(InputError, match=r"are not those of this configuration .* start a new run\.dir"):
        load(file, change).restore(state)
    write_jsonl(file, [*rows[:-1], {**rows[-1], "answer": "changed"}])
    with pytest.raises(InputError, match="are not those of this configuration"):
        load(file).restore(state)


# --- held out -----------------------------------------------------------------------------------


def test_held_out_problems_depend_neither_on_the_seed_nor_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = numbered(40)
    a = load(write_jsonl(tmp_path / "a.jsonl", rows), "data.eval_problems=8")
    b = load(write_jsonl(tmp_path / "b.jsonl", rows[::-1]), "data.eval_problems=8", "run.seed=5")
    held_out = [p.prompt for p in a.eval_problems()]
    assert held_out == [p.prompt for p in b.eval_problems()] and len(set(held_out)) == 8
    trained = set(draw(a, 32))
    assert not trained & set(held_out) and len(trained) == 32
    more = load(tmp_path / "a.jsonl", "data.eval_problems=9").eval_problems()
    assert [p.prompt for p in more][:8] == held_out, "a higher number keeps them"


def test_copies_of_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", numbered(4) * 3)
    problems = load(file, "data.eval_problems=1")
    (held_out,) = problems.eval_problems()
    assert held_out.id in {f"d:{line}" for line in range(1, 5)}, "the first of the copies"
    assert problems.dropped == {"same_prompt_as_held_out": 2} and problems.num_problems == 9
    assert held_out.prompt not in draw(problems, 20)


def test_training_rows_that_are_in_the_held_out_file_are_dropped_and_counted(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "d.jsonl", numbered(6))
    held_out = write_jsonl(tmp_path / "e.jsonl", [*numbered(2), {"prompt": "new", "answer": "x"}])
    problems = load(train, f"data.eval_path={held_out}", "data.eval_problems=8")
    assert [p.prompt for p in problems.eval_problems()] == ["q0", "q1", "new"]
    assert problems.dropped == {"same_prompt_as_held_out": 2}
    assert sorted(draw(problems, 4)) == ["q2", "q3", "q4", "q5"]
    assert "every prompt is also held out" in refusal(train, f"data.eval_path={train}", "data.eval_problems=8")


def test_evaluation_only_may_hold_out_every_row(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", numbered(5))
    problems = load(file, "run.steps=0", "data.eval_problems=100", "evaluation.every=1")
    assert sorted(p.prompt for p in problems.eval_problems()) == [f"q{i}" for i in range(5)]
    assert problems.draw() is None

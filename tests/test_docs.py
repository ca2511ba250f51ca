"""What the documents name exists: paths, modules, settings, metrics, commands; generated pages are up to date."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.cli import app
from async_rl.config.fields import settings
from async_rl.config.merge import Layers
from async_rl.metrics import CATALOGUE, find_row
from async_rl.metrics.values import QUANTILES
from async_rl.pages import PAGES

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

SECTIONS = {setting.path.split(".")[0] for setting in settings()}
PATHS = {setting.path for setting in settings()}
GROUPS = {row.key.split("/")[0] for row in CATALOGUE if "/" in row.key}
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
FILE_ENDINGS = ("py", "md", "toml", "json", "jsonl", "png", "parquet", "txt", "key")


def words(text: str) -> Iterator[str]:
    """What stands in `backticks`, outside of blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def blocks(text: str, language: str) -> Iterator[str]:
    """Bodies of fenced blocks of a language."""
    yield from re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def missing_paths(text: str, folder: Path) -> list[str]:
    """Links and paths of this repository that lead nowhere."""
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    wrong = [link for link in links if link and not (folder / link).exists()]
    # What runs make lies beside the repository's own folders, and differs from one user to the next.
    made = {"runs", "models", "wandb", "build", "dist"}
    tops = [p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in made]
    named = [word for word in words(text) if re.fullmatch(rf"({'|'.join(tops)})/[\w./-]*", word)]
    return wrong + [word for word in named if not (ROOT / word).exists()]


def missing_modules(text: str) -> list[str]:
    """Names such as async_rl.config.load that no module or package has."""
    found = re.findall(r"\basync_rl((?:\.[a-z_]+)+)\b(?![\w(=])", text)
    wrong = []
    for name in found:
        parts = name.strip(".").split(".")
        folder = ROOT / "async_rl"
        # The last part may be something inside the module.
        fits = [
            (folder.joinpath(*shorter)).is_dir() or (folder.joinpath(*shorter)).with_suffix(".py").exists()
            for shorter in (parts, parts[:-1])
        ]
        wrong += [] if any(fits) else [name]
    return wrong


def missing_settings(text: str) -> list[str]:
    """Settings such as learner.lr that the schema lacks, in prose and on command lines."""
    found = re.findall(rf"(?<![\w./`-])`?((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)\b(?!\()", text)
    names = [name for name in found if name.rpartition(".")[2] not in FILE_ENDINGS]
    sections = {path.rpartition(".")[0] for path in PATHS}
    return [name for name in names if name not in PATHS and name not in sections]


def missing_metrics(text: str) -> list[str]:
    """Keys such as staleness/mean that the catalogue lacks."""
    wrong = []
    for word in words(text):
        if not re.fullmatch(rf"({'|'.join(GROUPS)})/[a-z0-9_<>*]+(/p\d+)?", word):
            continue
        key, _, quantile = word.partition("/p") if word.count("/") == 2 else (word, "", "")
        known = any(row.key == key for row in CATALOGUE) or find_row(key) is not None or key.endswith("/*")
        is_module = (ROOT / "async_rl" / key).exists()
        if not (known or is_module) or (quantile and int(quantile) not in QUANTILES):
            wrong.append(word)
    return wrong


def missing_commands(text: str) -> list[str]:
    """Commands of async-rl and targets of make that do not exist."""
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    code = "\n".join([*words(text), *blocks(text, "[a-z]*")])
    used = re.findall(r"^\s*(?:\$ )?(?:\.venv/bin/)?async-rl ([a-z]\S*)", code, flags=re.MULTILINE)
    made = re.findall(r"^\s*(?:\$ )?make ([a-z][\w-]*)", code, flags=re.MULTILINE)
    return [name for name in used if name not in COMMANDS] + [name for name in made if name not in targets]


def missing_tests(text: str) -> list[str]:
    """Tests such as tests/test_docs.py::test_something that their file lacks."""
    named = [word.split("::") for word in words(text) if re.fullmatch(r"tests/[\w/]+\.py::\w+", word)]
    return [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or not re.search(rf"^\s*(async )?def {name}\(", (ROOT / file).read_text(), re.M)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert missing_paths(text, document.parent) == []
    assert missing_modules(text) == []
    assert missing_settings(text) == []
    assert missing_metrics(text) == []
    assert missing_commands(text) == []
    assert missing_tests(text) == []
    for block in blocks(text, "toml"):
        values = {key: value for key, value in tomllib.loads(block).items() if key not in ("base", "replaces")}
        layers = Layers()
        layers.begin(document.name)
        layers.add(values)


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda text: missing_paths(text, ROOT), "see `docs/nowhere.md`"),
        (lambda text: missing_paths(text, ROOT), "see [there](docs/nowhere.md)"),
        (missing_modules, "`async_rl.config.lode.load_config`"),
        (missing_settings, "`learner.learning_rate` is 1e-6"),
        (missing_settings, "async-rl train x.toml staleness.max_lag=2"),
        (missing_metrics, "watch `staleness/average`"),
        (missing_metrics, "watch `staleness/tokens/p42`"),
        (missing_commands, "run `async-rl lerner x.toml`"),
        (missing_commands, "```sh\nmake coffee\n```"),
        (missing_tests, "shown by `tests/test_docs.py::test_nothing`"),
    ],
)
def test_the_checks_see_what_is_wrong(check, text: str) -> None:
    assert len(check(text)) == 1


def test_the_checks_let_pass_what_is_right() -> None:
    text = (
        "`async_rl/config/load.py`, [docs](docs/metrics.md#run), async_rl.config.load.load_config, `learner.lr=1e-6`, "
        "metrics.jsonl, `staleness/tokens/p50`, `ledger/dropped_<reason>`, `time/*`, `learner/loop.py`, `make docs`, "
        "`async-rl train CONFIG`, the learner. It waits, `algorithm.loss`"
    )
    assert missing_paths(text, ROOT) + missing_modules(text) + missing_settings(text) == []
    assert missing_metrics(text) + missing_commands(text) == []
    assert missing_tests("`tests/test_docs.py::test_the_checks_let_pass_what_is_right`, `tests/test_docs.py`") == []

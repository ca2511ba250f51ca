"""Imports only point down, heavy libraries stand where they belong, and light modules stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "async_rl"

FLOORS = {
    5: ("cli",),
    4: ("launch", "recipes", "doctor", "pages", "plan", "plan_figure", "status", "bench"),
    3: ("learner", "coordinator", "generator"),
    2: (
        "algos", "envs", "engines", "buffer", "transport", "weights", "membership", "publication", "evaluation",
        "leasing", "fleet", "checkpoints", "http", "console", "report", "advice", "simulate", "alarms", "keys",
    ),
    1: (
        "config", "protocol", "trajectories", "frames", "metrics", "staleness", "addresses", "errors", "logs",
        "leftovers", "tasks",
    ),
}  # fmt: skip
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}

HOMES = {
    "vllm": ("engines/vllm",),
    "zmq": ("transport", "keys"),
    "ray": ("launch/ray",),
    "wandb": ("metrics/sinks",),
    "tensorboard": ("metrics/sinks",),
    "matplotlib": ("report", "plan_figure"),
    "typer": ("cli",),
    "rich": ("cli", "console", "doctor", "plan", "recipes/", "status"),
    "pickle": (),
}
"""Library -> beginnings of the paths of the modules that may import it."""

OWN_VALUES = (
    "algos/", "staleness", "buffer/records", "weights/base", "config/schema", "envs/reward_worker", "protocol",
)  # fmt: skip
"""Where a value comes from our own code, or ValueError is what a library or a child process wants: the only modules
that raise it. What the user can mend is an InputError, since exit code 2 follows from that alone."""

LIGHT = (
    "async_rl", "async_rl.cli", "async_rl.config", "async_rl.protocol", "async_rl.metrics", "async_rl.buffer",
    "async_rl.membership", "async_rl.publication", "async_rl.evaluation", "async_rl.leasing", "async_rl.transport",
    "async_rl.coordinator", "async_rl.console", "async_rl.report", "async_rl.staleness", "async_rl.launch.local",
    "async_rl.launch.train", "async_rl.launch.supervisor", "async_rl.launch.keeper", "async_rl.launch.runner",
    "async_rl.doctor", "async_rl.simulate", "async_rl.plan", "async_rl.alarms", "async_rl.keys", "async_rl.status",
    "async_rl.bench", "async_rl.coordinator.process", "async_rl.coordinator.handle",
    "async_rl.checkpoints", "async_rl.checkpoints.contents", "async_rl.checkpoints.work",
)  # fmt: skip
"""Modules that load neither torch nor vLLM nor transformers."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package as (path without .py, tree)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).with_suffix("").as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, those inside functions too; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_floor() -> None:
    names = {path.split("/")[0] for path, _ in modules()} - {"__init__"}
    assert names - FLOOR_OF.keys() == set()


def test_imports_only_point_down() -> None:
    wrong = []
    for path, tree in modules():
        here = path.split("/")[0]
        for name in imports(tree):
            there = name.split(".")[1] if name.startswith("async_rl.") else here
            if there != here and there in FLOOR_OF and here in FLOOR_OF:
                up = FLOOR_OF[there] > FLOOR_OF[here]
                # The two sides meet only in messages.
                across = {here, there} <= {"learner", "generator"} or {here, there} == {"coordinator", "generator"}
                wrong += [f"{path} imports {name}"] if up or across else []
    assert wrong == []


def test_floors_have_no_circles() -> None:
    edges: dict[str, set[str]] = {}
    for path, tree in modules():
        here = path.split("/")[0]
        found = {name.split(".")[1] for name in imports(tree) if name.startswith("async_rl.")}
        edges.setdefault(here, set()).update(found & FLOOR_OF.keys() - {here})
    while edges:
        leaves = {name for name, below in edges.items() if not below & edges.keys()}
        assert leaves, f"modules import each other in a circle: {sorted(edges)}"
        edges = {name: below for name, below in edges.items() if name not in leaves}


@pytest.mark.parametrize("library", HOMES)
def test_libraries_are_imported_in_their_place_only(library: str) -> None:
    users = [path for path, tree in modules() if any(name.split(".")[0] == library for name in imports(tree))]
    assert [path for path in users if not path.startswith(HOMES[library] or ("-",))] == []


def test_what_the_user_can_mend_is_an_input_error() -> None:
    raising = {
        path
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ValueError"
    }
    assert sorted(path for path in raising if not path.startswith(OWN_VALUES)) == []


@pytest.mark.slow
def test_light_modules_load_nothing_heavy() -> None:
    code = (
        f"import importlib, sys\nfor name in {LIGHT!r}:\n    importlib.import_module(name)\n"
        "    heavy = sorted({'torch', 'vllm', 'transformers', 'ray', 'wandb', 'matplotlib'} & sys.modules.keys())\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

"""`async-rl bench`: find the suites of the checkout's benchmarks/ and become one of them.

benchmarks/ is no part of the installed package: it measures a commit, and says which. A suite is a module there with a
docstring and a function `main`; it also runs alone, as `python -m benchmarks.SUITE`, which is what this command does.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from async_rl.config import ConfigError
from async_rl.config.checks import nearest

FOLDER = "benchmarks"


def run_bench(suite: str | None, arguments: Sequence[str]) -> int:
    """List the suites (0), or run one in place of this process. Raises ConfigError if there is none of that name."""
    root = find_checkout([Path(__file__).parents[1], Path.cwd()])
    suites = find_suites(root / FOLDER)
    if suite is None:
        width = max(map(len, suites))
        print(f"async-rl bench SUITE [ARGUMENT]...; --help after a suite lists its arguments ({root / FOLDER})\n")
        print("\n".join(f"  {name:{width}}  {line}" for name, line in suites.items()))
        return 0
    if suite not in suites:
        near = nearest(suite, suites)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(suites)}"
        raise ConfigError(f"unknown suite {suite}; {hint}")
    _become(suite, arguments, root)


def find_checkout(places: Sequence[Path]) -> Path:
    """The first place with a benchmarks/ of ours."""
    for place in places:
        if (place / FOLDER / "common.py").is_file():
            return place
    looked = " and ".join(dict.fromkeys(map(str, places)))
    raise ConfigError(
        f"no {FOLDER}/ in {looked}: it is part of the repository, not of the installed package; "
        "clone the repository and run this in its folder"
    )


def find_suites(folder: Path) -> dict[str, str]:
    """Name -> first line of its docstring; nothing is imported."""
    suites = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        document = ast.get_docstring(tree)
        if document and any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            suites[path.stem] = document.splitlines()[0]
    return suites


def _become(suite: str, arguments: Sequence[str], root: Path) -> NoReturn:
    """Signals, exit code and the command in the result are the suite's own; its processes find the package too."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    sys.stdout.flush()
    sys.stderr.flush()
    argv = [sys.executable, "-m", f"{FOLDER}.{suite}", *arguments]
    os.execve(sys.executable, argv, os.environ | {"PYTHONPATH": path})

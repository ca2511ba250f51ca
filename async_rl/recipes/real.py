"""The real run: SmolLM2-135M-Instruct learns one-step arithmetic asked in words, on two CPU cores."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from async_rl.recipes.quickstart import run_recipe


def run(overrides: Sequence[str] = ()) -> int:
    """Convert the model once, run configs/real.toml, show what came out; returns the exit code of the run."""
    from async_rl.recipes.smollm2 import convert

    return run_recipe("real.toml", convert, overrides)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

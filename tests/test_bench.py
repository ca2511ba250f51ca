"""`async-rl bench`: which suites there are, what is said where there is none, and that arguments reach the suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl import bench, cli
from async_rl.config import ConfigError

ROOT = Path(__file__).parents[1]


def test_lists_every_suite_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("  coordinator ")]
    assert line.endswith("in one run.")
    assert not any(line.startswith("  common ") for line in lines), "a module without main is no suite"


def test_a_misspelt_suite_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "cordinator"]) == 2
    assert capsys.readouterr().err == "error: unknown suite cordinator; did you mean coordinator?\n"


def test_no_checkout_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(ConfigError, match="clone the repository"):
        bench.find_checkout([tmp_path, tmp_path / "elsewhere"])
    assert bench.find_checkout([tmp_path, ROOT]) == ROOT


def test_becomes_the_suite_with_its_arguments_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "async_rl.cli", "bench", "run_result", "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "run_dir" in done.stdout and "--allow-dirty" in done.stdout
    done = subprocess.run(
        [*command[:-1], "--none"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2

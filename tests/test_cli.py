"""The command line: what is loaded when, what is printed, and with which exit code it ends."""

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl import __version__, cli
from async_rl.config import Config, ConfigError
from async_rl.doctor import Facts, problems, recommend, rows
from async_rl.errors import InputError

HEAVY = ("torch", "vllm", "transformers", "ray", "wandb", "matplotlib", "zmq", "numpy", "msgspec")


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cli.Session, "log_file", None)
    monkeypatch.setattr(cli.Session, "verbose", False)
    path = tmp_path / "run.toml"
    path.write_text(f'run.dir = "{tmp_path}/out"\nmodel.path = "policy"\nenvironment.type = "arithmetic"\n')
    return path


def fake(monkeypatch: pytest.MonkeyPatch, module: str, name: str, call: Callable[..., Any]) -> None:
    """Let a command find `call` where it imports its work from."""
    stand_in = types.ModuleType(module)
    setattr(stand_in, name, call)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, json; from async_rl.cli import run; code = run(['--help']);"
        f"print(json.dumps([code, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(output.splitlines()[-1]) == [0, []]
    commands = ("learner", "generator", "train", "status", "keys", "config", "doctor", "bench", "quickstart", "real")
    for command in commands:
        assert f"│ {command} " in output


def test_a_misspelt_setting_is_one_line_and_exit_code_2(config_file: Path) -> None:
    command = [sys.executable, "-m", "async_rl.cli", "learner", str(config_file), "lerner.lr=1e-6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: command line: unknown setting lerner.lr; did you mean learner.lr?\n"
    assert done.stdout == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"async-rl {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["lerner"], "lerner"),
        (["learner"], "CONFIG"),
        (["learner", "x.toml", "--ranks", "0"], "--ranks"),
        (["config"], "needs a CONFIG file"),
        (["config", "nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert part in line


def test_learner_gets_its_settings(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Config, str]] = []

    def run_learner(config: Config, resolved_from: str) -> int:
        seen.append((config, resolved_from))
        return 0

    fake(monkeypatch, "async_rl.learner.loop", "run_learner", run_learner)
    assert cli.run(["learner", str(config_file), "learner.lr=3e-5", "--ranks", "2"]) == 0
    ((config, resolved_from),) = seen
    assert (config.learner.lr, config.learner.ranks) == (3e-5, 2)
    assert resolved_from == f"{config_file} learner.lr=3e-5 learner.ranks=2"


def test_generator_gets_address_and_name(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, str | None]] = []

    def run_generator(config: Config, learner: str | None, name: str | None) -> int:
        seen.append((learner, name))
        return 0

    fake(monkeypatch, "async_rl.generator", "run_generator", run_generator)
    assert cli.run(["generator", str(config_file), "--learner", "127.0.0.1:5", "--name", "g1"]) == 0
    assert cli.run(["generator", str(config_file)]) == 0
    assert seen == [("127.0.0.1:5", "g1"), (None, None)]


def test_train_hands_on_file_overrides_and_exit_code(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    def run_train(config_path: str, overrides: list[str]) -> int:
        seen.append((config_path, overrides))
        return 1

    fake(monkeypatch, "async_rl.launch.train", "run_train", run_train)
    assert cli.run(["train", str(config_file), "run.seed=3"]) == 1
    assert seen == [(str(config_file), ["run.seed=3"])]


def fail_with(error: BaseException) -> Callable[..., int]:
    def run_learner(config: Config, resolved_from: str) -> int:
        raise error

    return run_learner


def test_a_failure_is_one_line_and_a_traceback_in_the_log(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "async_rl.learner.loop", "run_learner", fail_with(RuntimeError("out of luck\n(twice)")))
    assert cli.run(["learner", str(config_file)]) == 1
    log = config_file.parent / "out/logs/learner-rank0.details.log"
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: RuntimeError: out of luck (twice) (traceback in {log})"
    assert "raise error\nRuntimeError: out of luck" in log.read_text()


@pytest.mark.parametrize(("kind", "code"), [(InputError, 2), (ConfigError, 2), (ValueError, 1), (UnicodeError, 1)])
def test_only_what_is_wrong_with_the_input_is_the_users(
    kind: type[ValueError],
    code: int,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake(monkeypatch, "async_rl.learner.loop", "run_learner", fail_with(kind("row 3 has no prompt")))
    assert cli.run(["learner", str(config_file)]) == code
    log = config_file.parent / "out/logs/learner-rank0.details.log"
    shown = "row 3 has no prompt" if code == 2 else f"{kind.__name__}: row 3 has no prompt (traceback in {log})"
    assert capsys.readouterr().err == f"error: {shown}\n"
    assert ("raise error" in log.read_text()) is (code == 1)


def test_interrupt_ends_with_130(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "async_rl.learner.loop", "run_learner", fail_with(KeyboardInterrupt()))
    assert cli.run(["learner", str(config_file)]) == 130


def test_verbose_shows_the_traceback(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "async_rl.learner.loop", "run_learner", fail_with(ConfigError("no")))
    assert cli.run(["--verbose", "learner", str(config_file)]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1] == "error: no"


def test_config_prints_what_can_be_loaded_again(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from async_rl.config import load_config

    assert cli.run(["config", str(config_file), "learner.lr=3e-5", "run.stall_timeout_s=60"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: run.stall_timeout_s = 60.0")
    printed = tmp_path / "printed.toml"
    printed.write_text(captured.out)
    assert load_config(printed).learner.lr == 3e-5
    assert not (tmp_path / "out").exists()


def test_config_schema_is_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "--schema"]) == 0
    assert "| `staleness.max_staleness` | integer >= 0 | `2` |" in capsys.readouterr().out


# --- doctor -------------------------------------------------------------------------------------

BARE = Facts(python="3.11.7", cores=2, memory_bytes=None)
CPU = Facts(
    python="3.11.7",
    cores=2,
    memory_bytes=24 << 30,
    torch="2.13.0",
    gloo=True,
    vllm="0.32.0",
    transformers="5",
    zmq="27",
)
GPUS = Facts(
    python="3.11.7", cores=64, memory_bytes=512 << 30, torch="2.13.0", gpus=("H200",) * 4, bfloat16_gpu=True, gloo=True,
    nccl=True, vllm="0.32.0", transformers="5", zmq="27",
)  # fmt: skip


def test_doctor_without_anything_says_what_is_missing() -> None:
    assert [line.split()[0] for line in problems(BARE)] == ["torch", "transformers", "pyzmq"]
    assert ("torch", "not installed", False) in rows(BARE)
    broken = Facts(python="3.11.7", cores=2, memory_bytes=1, torch_error="OSError: libcudart.so")
    assert ("torch", "does not load: OSError: libcudart.so", False) in rows(broken)


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        (CPU, ["generator.engine.type=vllm", "model.dtype=float32", "weights.backend=gloo"]),
        (GPUS, ["generator.engine.type=vllm", "model.dtype=bfloat16", "weights.backend=nccl", "learner.ranks=2"]),
    ],
)
def test_doctor_recommends_settings_that_exist(facts: Facts, settings: list[str]) -> None:
    from async_rl.config import build_config

    assert problems(facts) == []
    overrides = [line.split()[0] for line in recommend(facts) if "=" in line.split()[0]]
    assert overrides == settings
    build_config({"model": {"path": "m"}, "environment": {"type": "arithmetic"}}, overrides)


@pytest.mark.slow
def test_doctor_runs_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.cli", "doctor"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What follows:" in done.stdout

"""The command line. Commands import what they need when they run: `--help` loads no torch, vLLM or transformers.

Exit codes: 0 done; 1 run-time failure (one line, the traceback in <run.dir>/logs); 2 the user's settings or data;
130 interrupted.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_rl.errors import InputError
from async_rl.logs import LINE

if TYPE_CHECKING:
    from async_rl.config import Config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Asynchronous off-policy reinforcement learning of language models.",
)

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, or the config.json of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.toml | SECTION.KEY=VALUE]...",
        help="Further files, such as configs/algorithms/dapo.toml, and settings: each wins over what comes before it.",
    ),
]


RunName = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="A run.dir; without a step the checkpoint that would be resumed.")
]


class Session:
    """What a failure needs to be reported well: set as far as a command got."""

    verbose = False
    log_file: Path | None = None


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Debug logs, and tracebacks on the screen.")] = False,
) -> None:
    Session.verbose = verbose
    if version:
        from async_rl import __version__

        print(f"async-rl {__version__}")
        raise typer.Exit(0)


@app.command()
def learner(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Same as learner.ranks=N: processes of this learner.")
    ] = None,
) -> int:
    """Train: own the optimizer, the ledger and the port that generators connect to."""
    given = [*(overrides or []), *([f"learner.ranks={ranks}"] if ranks else [])]
    settings = _load(config, given, f"learner-rank{os.environ.get('RANK', '0')}")
    from async_rl.learner.loop import run_learner

    return run_learner(settings, resolved_from=" ".join([config, *given]))


@app.command()
def generator(
    config: ConfigFile,
    overrides: Overrides = None,
    learner: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the learner is; default: transport.host and port.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Unique name, kept across restarts; default: host and pid.")] = None,
) -> int:
    """Sample and score completions for a learner; start as many as there are machines, at any time."""
    settings = _load(config, overrides or [], name or f"generator-{os.getpid()}")
    from async_rl.generator import run_generator

    return run_generator(settings, learner, name)


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> int:
    """Start and supervise a learner and its generators on this machine."""
    _load(config, overrides or [], "train", warn=False)
    from async_rl.launch.train import run_train

    return run_train(config, overrides or [])


@app.command("config")
def show_config(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A TOML file.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the page that lists every setting.")] = False,
) -> None:
    """Print every setting as it would be used, with its help; values other than the default are marked."""
    from async_rl.config import ConfigError, load_config, warnings
    from async_rl.config.explain import config_toml, schema_page

    if schema:
        print(schema_page())
        return
    if config is None:
        raise ConfigError("async-rl config needs a CONFIG file, or --schema for the list of all settings")
    settings = load_config(config, overrides or [])
    _print_toml(config_toml(settings))
    for line in warnings(settings):
        print(f"warning: {line}", file=sys.stderr)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    from_run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Run directory whose metrics say what things take.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where plan.json and plan.png go; default: run.dir.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the simulation.")] = 0,
) -> int:
    """Simulate the settings, and find better ones for the same machines, before renting them."""
    from async_rl.plan import run_plan

    return run_plan(config, overrides or [], from_run, out, seed)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def bench(
    suite: Annotated[
        str | None, typer.Argument(metavar="[SUITE]", help="A module of benchmarks/; without one all are listed.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENT]...", help="For the suite, such as --help or --output FILE."),
    ] = None,
) -> int:
    """Measure this commit on this machine with a suite of the repository's benchmarks."""
    from async_rl.bench import run_bench

    return run_bench(suite, arguments or [])


@app.command()
def export(
    run: RunName,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: the run's model.dtype.")
    ] = None,
    max_shard_mb: Annotated[int, typer.Option(min=1, help="Largest weight file, in MiB.")] = 5 << 10,
) -> int:
    """Write a checkpoint's weights in Hugging Face form, which transformers, vLLM and model.path load."""
    from async_rl.checkpoints.find import find_named

    checkpoint = find_named(run)
    from async_rl.checkpoints.export import DTYPES, export_checkpoint

    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    files = export_checkpoint(checkpoint, Path(out), dtype, max_shard_mb << 20)
    size = sum(file.stat().st_size for file in files)
    print(f"step {checkpoint.step} of {checkpoint.path}: {size / 1e6:.1f} MB of weights in {out}")
    return 0


@app.command()
def inspect(
    run: RunName,
    limit: Annotated[int, typer.Option(min=0, help="Members to show; 0: all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a member, for scripts.")] = False,
) -> int:
    """Show what a checkpoint's buffer holds: problem, completion, reward, versions, staleness, status."""
    from itertools import islice

    import msgspec

    from async_rl.checkpoints.contents import describe, rows_of, summary
    from async_rl.checkpoints.find import find_named
    from async_rl.checkpoints.state import read_state

    checkpoint = find_named(run)
    state = read_state(checkpoint.path)
    if not as_json:
        print(f"{checkpoint.path}\n{summary(state)}")
    for row in islice(rows_of(state), limit or None):
        print(msgspec.json.encode(row).decode() if as_json else describe(row))
    return 0


@app.command()
def doctor() -> int:
    """Say what this machine has and which settings follow from that."""
    from async_rl.doctor import run_doctor

    return run_doctor()


@app.command()
def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT | RUN_DIR]", help="The learner's HTTP port, or its run; default: the newest in runs/."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes of --watch.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print what /status says, as it is.")] = False,
) -> int:
    """Show a running learner: generators, versions, leases, rates, last errors. Exit code 1 if nobody answers."""
    from async_rl.status import run_status

    return run_status(target, watch, every, as_json=json)


@app.command()
def keys(folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to; it is made if absent.")]) -> None:
    """Write the key files of a run whose generators are on other machines: learner.key and generator.key."""
    from async_rl.keys import create_keys

    learner_key, generator_key = create_keys(Path(folder))
    print(
        f"{learner_key}: stays with the learner\n"
        f"{generator_key}: copy it to every machine that runs generators (scp -p keeps its mode)\n"
        f"then set transport.keys={folder} on both sides"
    )


@app.command()
def quickstart(overrides: Overrides = None) -> int:
    """Build a tiny model and teach it arithmetic with a real engine, in minutes on two cores."""
    from async_rl.recipes.quickstart import run

    return run(overrides or [])


@app.command()
def real(overrides: Overrides = None) -> int:
    """Teach a real model of 135M parameters one-step arithmetic in words: under twenty minutes on two cores."""
    from async_rl.recipes.real import run

    return run(overrides or [])


def _load(path: str, overrides: list[str], role: str, warn: bool = True) -> Config:
    """Load settings and start logging to the screen and to <run.dir>/logs/ROLE.details.log."""
    from async_rl.config import load_config, warnings
    from async_rl.config.threads import sleep_at_barriers

    sleep_at_barriers()
    config = load_config(path, overrides)
    _start_logging(Path(config.run.dir) / "logs" / f"{role}.details.log")
    for line in warnings(config) if warn else ():
        logging.getLogger(__name__).warning("%s", line)
    return config


class _Screen(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is now: while the live panel is shown, a proxy that prints above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _start_logging(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    Session.log_file = log_file
    screen = _Screen()
    screen.setLevel(logging.DEBUG if Session.verbose else logging.WARNING)
    screen.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    to_file = logging.FileHandler(log_file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(LINE))
    logging.basicConfig(level=logging.INFO, handlers=[screen, to_file])
    if Session.verbose:
        logging.getLogger("async_rl").setLevel(logging.DEBUG)


def _print_toml(text: str) -> None:
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "toml", background_color="default", word_wrap=True))


def run(arguments: list[str]) -> int:
    """Run one command and turn whatever it raises into one line and an exit code."""
    try:
        code = app(args=arguments, prog_name="async-rl", standalone_mode=False)
    except typer.exceptions.TyperException as error:
        return _fail(f"{error.format_message()}; see async-rl --help", code=2)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except InputError as error:
        return _fail(str(error), code=2)
    except Exception as error:  # the process boundary: logged in full, shown in one line
        return _fail_at_run_time(error)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    if Session.verbose and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _fail_at_run_time(error: Exception) -> int:
    """Write the traceback to the log file; the screen gets one line and where to look."""
    where = "run with --verbose for the traceback"
    if Session.log_file is not None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with Session.log_file.open("a", encoding="utf-8") as file:
            file.write(f"{stamp} the run failed\n{''.join(traceback.format_exception(error))}")
        where = f"traceback in {Session.log_file}"
    return _fail(f"{type(error).__name__}: {error} ({where})", code=1)


def main() -> None:
    """Entry point of `async-rl`."""
    code = run(sys.argv[1:])
    if "torch" in sys.modules:
        # Threads of torch's process groups can abort an interpreter that shuts down ("terminate called without an
        # active exception"): a rank whose run is complete, or a generator that left cleanly, would end as a failure.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

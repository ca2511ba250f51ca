"""`async-rl status`: what a running learner says about itself, as one screen."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_rl import __version__
from async_rl.addresses import split_address
from async_rl.errors import InputError
from async_rl.metrics import find_row

ANSWER_S = 10.0
"""A learner that does not answer within this is not there."""
PATIENCE_S = 60.0
"""`--watch` ends when nobody has answered for this long: a learner that is restarted comes back sooner."""
_MAX_BYTES = 4 << 20
_LEDGER = ("issued", "leased", "buffered", "in_batch", "trained")


def find_address(target: str | None, runs: Path = Path("runs")) -> str:
    """HOST:PORT of the HTTP port that `target` names: itself, a run directory, or (None) the newest of `runs`.

    Raises InputError if there is no such directory or no learner was started in it.
    """
    if target is None:
        files = sorted(runs.glob("*/address"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise InputError(f"no run in {runs}/ has been started here; name one: async-rl status HOST:PORT or RUN_DIR")
        return _http_address(files[-1])
    if (file := Path(target) / "address").is_file():
        return _http_address(file)
    if Path(target).is_dir():
        raise InputError(f"{file} does not exist: no learner was started in {target}")
    split_address(target)
    return target


def _http_address(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["http"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file} is not what a learner writes there; name HOST:PORT instead") from None


def fetch_status(address: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """The learner's /status; raises ConnectionError when nobody answers there, or something else does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/status", timeout=timeout_s) as answer:
            status = json.loads(answer.read(_MAX_BYTES))
    except (http.client.HTTPException, ValueError, urllib.error.HTTPError, ConnectionResetError):
        raise ConnectionError(
            f"what listens at {address} is not the HTTP port of a learner; its run directory's file `address` names it"
        ) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"no learner answers at {address}: {reason}") from None
    if not isinstance(status, dict) or "ledger" not in status:
        raise ConnectionError(f"what listens at {address} is not a learner of async_rl")
    return status


def run_status(target: str | None, watch: bool, every_s: float = 1.0, as_json: bool = False) -> int:
    """Print the status of a run, once or until interrupted.

    Raises ConnectionError when nobody answers, or another version of async_rl does.
    """
    address = find_address(target)
    status = fetch_status(address)
    if as_json:
        print(json.dumps(status))
        return 0
    screen = _screen(address, status)
    if watch:
        _watch(address, screen, every_s)
    else:
        Console(highlight=False).print(screen)
    return 0


def _watch(address: str, screen: RenderableType, every_s: float) -> None:
    """Refresh until interrupted, or until the learner has been silent for PATIENCE_S."""
    answered = time.monotonic()
    with Live(screen, console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                screen = _screen(address, fetch_status(address))
            except ConnectionError as error:
                if time.monotonic() - answered > PATIENCE_S:
                    raise
                live.update(Group(screen, Text(str(error), style="bold red")), refresh=True)
                continue
            answered = time.monotonic()
            live.update(screen, refresh=True)


# --- the screen ---------------------------------------------------------------------------------


def _screen(address: str, status: Mapping[str, Any]) -> RenderableType:
    """What `render` shows; raises ConnectionError for the status of a version that has other fields."""
    try:
        return render(status)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        theirs = status.get("version") or "of a version that does not name itself"
        raise ConnectionError(
            f"the learner at {address} is async_rl {theirs}, this command is async_rl {__version__}, and its status "
            f"has other fields ({type(error).__name__}: {error}); use the command of the learner's environment, or "
            "--json"
        ) from None


def render(status: Mapping[str, Any]) -> RenderableType:
    """One screen: where the run is, its problems, its generators, and what went wrong."""
    parts: list[RenderableType] = [_head(status), Text(str(status["wait"]), style="yellow"), _generators(status)]
    gone = status.get("gone", [])
    parts += [Text(f"left: {member['name']}: {member['reason']}", style="dim") for member in gone]
    parts += [Text(f"{error['ago_s']:.0f} s ago: {error['text']}", style="red") for error in status.get("errors", [])]
    return Group(*parts)


def _head(status: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    steps, ledger = status["steps"], status["ledger"]
    published = status["published"]
    rows = {
        "run": f"{status['name']} ({status['run_id']})",
        "steps": f"{steps['trained']} of {steps['total']}; published version "
        f"{'none yet' if published is None else published}",
        "problems": ", ".join(
            [*(f"{ledger[name]} {name}" for name in _LEDGER), f"{_counts(ledger['dropped'])} dropped"]
        ),
        "rates": ", ".join(_rate(key, value) for key, value in status["rates"].items()) or "none before the first step",
        "events": _counts(status["events"]),
        "refused": _counts(status["refused"]),
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _rate(key: str, value: float) -> str:
    row = find_row(key)
    name = key.rpartition("/")[2].removesuffix("_tokens_per_s").removesuffix("_s").replace("_", " ")
    if row is not None and row.unit == "share":
        return f"{name.removesuffix(' share')} {value:.0%}"
    return f"{name} {value:,.1f} {row.unit if row is not None else ''}".rstrip()


def _counts(counts: Mapping[str, int]) -> str:
    """Such as "3 late, 1 duplicate"."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number) or "0"


def _generators(status: Mapping[str, Any]) -> Table:
    columns = ("name", "state", "version", "leases", "slots", "finished", "last seen", "process")
    table = Table(*columns, title="generators", title_justify="left")
    for member in status["generators"]:
        version = member["version"]
        cells = (
            member["name"],
            member["state"],
            "-" if version is None else str(version),
            f"{member['outstanding']} ({member['overdue']} overdue)"
            if member["overdue"]
            else str(member["outstanding"]),
            str(member["slots"]),
            str(member["finished"]),
            f"{member['last_seen_s']:.1f} s ago",
            f"{member['host']}:{member['pid']}",
        )
        table.add_row(*map(Text, cells))
    return table

"""`async-rl status`: against a coordinator that works, and against everything that is none."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from pathlib import Path

import pytest
from rich.console import Console

from async_rl import __version__, cli, status
from async_rl.addresses import free_port
from async_rl.errors import InputError
from tests.loop.rig import Learner, Scorer, fleet, make_config


def text_of(shown: status.RenderableType) -> str:
    """What a wide terminal shows."""
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


async def test_the_status_of_a_run_names_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path, run={"steps": 1000})
    learner = Learner(config)
    address = learner.start()
    http = learner.coordinator.addresses["http"]
    async with fleet(config, address, "g0", "g1", scorer=Scorer(frozenset({"p3"}))) as (_, second):
        await learner.until(4)
        learner.coordinator.collect(1.0)
        await second.generator.leave("test of leaving")
        async with asyncio.timeout(150):
            while len((found := await asyncio.to_thread(status.fetch_status, http))["generators"]) > 1:
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(cli.run, ["status", http, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run_id"] == "run-1"
        assert await asyncio.to_thread(cli.run, ["status", http]) == 0
        assert "run-1" in capsys.readouterr().out
    learner.coordinator.stop("test")
    assert found["version"] == __version__
    assert found["steps"]["total"] == 1000 and found["steps"]["trained"] >= 3
    (member,) = found["generators"]
    assert (member["name"], member["state"], member["slots"], member["pid"]) == ("g0", "active", 8, os.getpid())
    shown = text_of(status.render(found))
    assert f"{found['steps']['trained']} of 1000; published version {found['published']}" in shown
    assert f"{found['ledger']['trained']} trained" in shown
    assert "left: g1: test of leaving" in shown
    assert "no reward for p3" in shown, "the last errors are shown"
    assert "generated" in shown and "tokens/s" in shown, "rates of the last step are shown"


def listening(answer: bytes) -> tuple[socket.socket, str]:
    """A server that gives the same answer to its first caller."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        caller, _ = server.accept()
        with caller:
            caller.recv(1000)
            caller.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return server, f"127.0.0.1:{server.getsockname()[1]}"


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", f"127.0.0.1:{free_port()}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no learner answers at 127.0.0.1:" in line and "refused" in line


def test_a_learner_of_another_version_is_one_line_that_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    for body, theirs in (
        (b'{"ledger": {"issued": 1}}', "of a version that does not name itself"),
        (b'{"ledger": {"issued": 1}, "version": "0.0.1", "steps": 3, "published": 2}', "0.0.1"),
    ):
        server, address = listening(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        with server:
            assert cli.run(["status", address]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"the learner at {address} is async_rl {theirs}, this command is async_rl {__version__}" in line
        assert "--json" in line


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nwelcome",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
    ids=["zeromq", "text", "other json", "404", "closed"],
)
def test_something_else_there_is_named(answer: bytes) -> None:
    server, address = listening(answer)
    with server, pytest.raises(ConnectionError, match=f"what listens at {address} is not"):
        status.fetch_status(address)


def test_the_address_is_found_by_run_directory_or_as_the_newest_run(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "empty")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        if name != "empty":
            (folder / "address").write_text(json.dumps({"learner": "h:1", "http": f"h:{number + 2}"}))
            os.utime(folder / "address", (number, number))
    runs = tmp_path / "runs"
    assert status.find_address(str(runs / "old")) == "h:2"
    assert status.find_address(None, runs) == "h:3"
    assert status.find_address("elsewhere:29401") == "elsewhere:29401"
    with pytest.raises(InputError, match="no learner was started in"):
        status.find_address(str(runs / "empty"))
    with pytest.raises(InputError, match="is not HOST:PORT"):
        status.find_address(str(runs / "missing"))
    with pytest.raises(InputError, match="no run in"):
        status.find_address(None, runs / "old")
    (runs / "empty" / "address").write_text("[1]")
    with pytest.raises(InputError, match="is not what a learner writes"):
        status.find_address(str(runs / "empty"))


def test_watching_ends_when_the_learner_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the last status with the reason until then."""
    monkeypatch.setattr(status, "PATIENCE_S", 0.2)
    counts = {"issued": 1, "leased": 0, "buffered": 0, "in_batch": 0, "trained": 1, "dropped": {"tail": 2}}
    answers = [{
        "name": "r", "run_id": "i", "steps": {"trained": 1, "total": 2}, "published": None, "wait": "nothing",
        "ledger": counts, "events": {"late": 0}, "refused": {"malformed": 3}, "rates": {}, "generators": [],
    }]  # fmt: skip

    def fetch(address: str) -> dict[str, object]:
        if answers:
            return answers.pop()
        raise ConnectionError("gone for good")

    monkeypatch.setattr(status, "fetch_status", fetch)
    with pytest.raises(ConnectionError, match="gone for good"):
        status.run_status("h:1", watch=True, every_s=0.05)


def test_nothing_is_read_as_markup() -> None:
    shown = text_of(status.render({
        "name": "[red]r", "run_id": "i", "steps": {"trained": 1, "total": 2}, "published": None, "wait": "[bold]w",
        "ledger": dict.fromkeys(("issued", "leased", "buffered", "in_batch", "trained"), 1) | {"dropped": {"tail": 2}},
        "events": {"late": 0}, "refused": {"malformed": 3}, "rates": {"generator/idle_share": 0.25}, "generators": [],
        "errors": [{"ago_s": 3.0, "text": "[/red]x"}],
    }))  # fmt: skip
    for part in (
        "[red]r (i)",
        "version none yet",
        "[bold]w",
        "2 tail dropped",
        "3 malformed",
        "idle 25%",
        "3 s ago: [/red]x",
    ):
        assert part in shown, part
    assert "late" not in shown

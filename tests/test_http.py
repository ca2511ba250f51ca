"""The status server over real HTTP on 127.0.0.1."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import InputError
from async_rl.http import StatusServer, prometheus_text

CONTENT = bytes(range(256)) * 40_000
"""Ten megabytes: more than one chunk and more than a socket buffer."""


class State:
    """What the callbacks say."""

    def __init__(self, folder: Path) -> None:
        self.problem: str | None = None
        self.file = folder / "v7.safetensors"
        self.file.write_bytes(CONTENT)

    def status(self) -> dict[str, Any]:
        return {"step": 7, "generators": [{"name": "g0", "slots": 4}]}

    def values(self) -> dict[str, float]:
        return {"staleness/max": 2.0, "reward/mean": 0.25}

    def snapshot(self, version: int) -> Path | None:
        return {7: self.file, 8: self.file.with_name("deleted")}.get(version)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path)


@pytest.fixture
def server(state: State) -> Iterator[StatusServer]:
    server = StatusServer(lambda: state.status(), state.values, state.snapshot, lambda: state.problem)
    yield server
    server.close()


@pytest.fixture
def port(server: StatusServer) -> int:
    return server.start("127.0.0.1", 0)


def request(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_health_follows_the_run(port: int, state: State) -> None:
    assert request(port, "/healthz")[::2] == (200, b"ok\n")
    state.problem = "no step for 600 s: waiting for generators"
    assert request(port, "/healthz")[::2] == (503, b"no step for 600 s: waiting for generators\n")


def test_status_is_json(port: int, state: State) -> None:
    code, headers, body = request(port, "/status?x=1")
    assert (code, headers["content-type"], json.loads(body)) == (200, "application/json", state.status())


def test_metrics_are_prometheus_gauges(port: int) -> None:
    lines = request(port, "/metrics")[2].decode().splitlines()
    assert "async_rl_staleness_max 2.0" in lines
    assert "async_rl_reward_mean 0.25" in lines
    assert "# TYPE async_rl_reward_mean gauge" in lines


def test_values_that_are_not_numbers_do_not_break_metrics() -> None:
    assert b"async_rl_a_b NaN\n" in prometheus_text({"a/b": float("nan")})


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        (None, 0, len(CONTENT)),
        ("bytes=0-0", 0, 1),
        ("bytes=100-4999999", 100, 5_000_000),
        ("bytes=10239990-", 10_239_990, len(CONTENT)),
        ("bytes=-10", len(CONTENT) - 10, len(CONTENT)),
        ("bytes=-99999999999", 0, len(CONTENT)),
        ("bytes=5-99999999999", 5, len(CONTENT)),
    ],
)
def test_snapshot_and_its_ranges(server: StatusServer, port: int, header: str | None, start: int, end: int) -> None:
    code, headers, body = request(port, server.snapshot_path(7), **({"Range": header} if header else {}))
    assert body == CONTENT[start:end]
    assert code == (206 if header else 200)
    assert headers.get("content-range") == (f"bytes {start}-{end - 1}/{len(CONTENT)}" if header else None)


@pytest.mark.parametrize(
    "header", ["bytes=10240000-", "bytes=9-8", "bytes=-", "bytes=-0", "bytes=0-1,3-4", "lines=1-2"]
)
def test_ranges_that_cannot_be_served(server: StatusServer, port: int, header: str) -> None:
    code, headers, body = request(port, server.snapshot_path(7), Range=header)
    assert (code, headers["content-range"], body) == (416, f"bytes */{len(CONTENT)}", b"")


def test_head_tells_the_size_only(server: StatusServer, port: int) -> None:
    code, headers, body = request(port, server.snapshot_path(7), method="HEAD")
    assert (code, headers["content-length"], body) == (200, str(len(CONTENT)), b"")


@pytest.mark.parametrize("path", ["/", "/snapshot/", "/snapshot/../7", "/snapshot/²", "/etc/passwd"])
def test_everything_else_is_not_found(port: int, path: str) -> None:
    assert request(port, path.replace("²", "%C2%B2"))[0] == 404


@pytest.mark.parametrize("version", [6, 8])
def test_a_snapshot_that_is_not_there_is_not_found(server: StatusServer, port: int, version: int) -> None:
    assert request(port, server.snapshot_path(version))[0] == 404


@pytest.mark.parametrize("query", ["", "?token=", "?token=guessed", "?x=1"])
def test_weights_need_the_token_and_logs_do_not_tell_it(
    server: StatusServer, port: int, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    code, _, body = request(port, f"/snapshot/7{query}")
    assert code == 403 and CONTENT[:100] not in body
    token = server.snapshot_path(7).partition("=")[2]
    assert request(port, server.snapshot_path(7))[0] == 200
    assert "/snapshot/7?token=..." in caplog.text and token not in caplog.text
    assert StatusServer(dict).snapshot_path(7) != server.snapshot_path(7), "every server has its own"


def test_a_failing_callback_or_client_does_not_stop_the_server(
    server: StatusServer, port: int, state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state, "status", lambda: 1 / 0)
    with pytest.raises(http.client.RemoteDisconnected):
        request(port, "/status")
    assert "ZeroDivisionError" in caplog.text
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", server.snapshot_path(7))
    connection.getresponse().read(10)
    connection.close()
    assert request(port, "/healthz")[0] == 200


def test_close_frees_the_port_and_a_busy_port_is_named(state: State) -> None:
    first = StatusServer(state.status)
    port = first.start()
    second = StatusServer(state.status)
    with pytest.raises(OSError, match=f"cannot serve HTTP on 127.0.0.1:{port}"):
        second.start(port=port)
    first.close()
    first.close()
    assert second.start(port=port) == port
    second.close()


def test_other_machines_are_kept_out_unless_the_user_says_so(state: State) -> None:
    with pytest.raises(InputError, match=r"host 0.0.0.0 can be reached.*insecure=true"):
        StatusServer(state.status).start("0.0.0.0")

"""A small HTTP server beside the coordinator: health, status, metrics, and the snapshot file for late joiners.

It runs in threads of its own and reads the coordinator's state only through the callbacks it was given, which must be
safe to call from any thread.

    GET /healthz             200 while the run is well, 503 and the reason otherwise
    GET /status              JSON
    GET /metrics             Prometheus text
    GET /snapshot/VERSION    the safetensors file of a published version; single byte ranges are served

Weights go only to those whom the learner told the way: a snapshot's path ends with a token that is new for every
server (`snapshot_path`) and travels through the message port.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from async_rl.addresses import is_loopback
from async_rl.errors import InputError
from async_rl.frames import one_line

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
"""A client that neither sends nor reads for this long is cut off."""
_CHUNK_BYTES = 1 << 20
_TOKEN = re.compile(r"token=[^ &\"]*")
_RANGE = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?")


class StatusServer:
    """Serves what the callbacks return; `snapshot` maps a version to its file, or None where there is none."""

    def __init__(
        self,
        status: Callable[[], Any],
        values: Callable[[], Mapping[str, float]] = dict,
        snapshot: Callable[[int], Path | None] = lambda version: None,
        problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.status = status
        self.values = values
        self.snapshot = snapshot
        self.problem = problem
        self._token = secrets.token_urlsafe(16)
        self._server: _Server | None = None

    def snapshot_path(self, version: int) -> str:
        """Path and query under which a version's snapshot is served."""
        return f"/snapshot/{version}?token={self._token}"

    def admits(self, query: str) -> bool:
        """Whether the query of a request carries the token."""
        return hmac.compare_digest(query.encode(), f"token={self._token}".encode())

    def start(self, host: str = "127.0.0.1", port: int = 0, insecure: bool = False) -> int:
        """Listen and return the port (0 takes any free one).

        Raises InputError for an address that other machines can reach unless `insecure`, OSError if it cannot be bound.
        """
        if not (insecure or is_loopback(host)):
            raise InputError(
                f"host {host} can be reached by other machines; set transport.keys, use 127.0.0.1, or say "
                "transport.insecure=true in a network that you trust"
            )
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise OSError(error.errno, f"cannot serve HTTP on {host}:{port}: {error.strerror}") from None
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True).start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; callable more than once."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], pages: StatusServer) -> None:
        super().__init__(address, _Handler)
        self.pages = pages

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            log.error("HTTP request from %s failed", client_address[0], exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version = "async_rl"
    sys_version = ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        pages = self.server.pages
        version = path.removeprefix("/snapshot/")
        if path == "/healthz":
            problem = pages.problem()
            self._text(503 if problem else 200, problem or "ok")
        elif path == "/status":
            self._reply(200, "application/json", msgspec.json.encode(pages.status()))
        elif path == "/metrics":
            self._reply(200, "text/plain; version=0.0.4; charset=utf-8", prometheus_text(pages.values()))
        elif version != path and version.isascii() and version.isdigit() and len(version) < 19:
            self._snapshot(int(version), query)
        else:
            self._text(404, "pages: /healthz /status /metrics /snapshot/VERSION")

    do_HEAD = do_GET

    def _text(self, code: int, text: str) -> None:
        self._reply(code, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _reply(self, code: int, kind: str, body: bytes) -> None:
        self._headers(code, kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, code: int, kind: str, length: int, **others: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        for name, value in others.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _snapshot(self, version: int, query: str) -> None:
        if not self.server.pages.admits(query):
            log.warning("refused the snapshot of version %d to %s: no valid token", version, self.client_address[0])
            self._text(403, "snapshots are for generators of this run; the learner tells them the token")
            return
        path = self.server.pages.snapshot(version)
        try:
            file = path.open("rb") if path is not None else None
        except FileNotFoundError:
            file = None  # Replaced by a newer one between the answer and the opening.
        if file is None:
            self._text(404, f"no snapshot of version {version}; only the last published one is kept")
            return
        with file:
            self._stream(file)

    def _stream(self, file: BinaryIO) -> None:
        """Send the file, or the byte range that was asked for (RFC 9110, section 14)."""
        size = file.seek(0, 2)
        asked = self.headers.get("Range")
        span = _byte_range(asked, size) if asked else None
        if asked and span is None:
            self._headers(416, "text/plain", 0, Content_Range=f"bytes */{size}")
            return
        start, end = span or (0, size)
        extra = {"Content_Range": f"bytes {start}-{end - 1}/{size}"} if span else {}
        self._headers(206 if span else 200, "application/octet-stream", end - start, Accept_Ranges="bytes", **extra)
        if self.command == "HEAD":
            return
        file.seek(start)
        while start < end and (chunk := file.read(min(_CHUNK_BYTES, end - start))):
            self.wfile.write(chunk)
            start += len(chunk)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.client_address[0], _TOKEN.sub("token=...", one_line(format % args)))


def _byte_range(header: str, size: int) -> tuple[int, int] | None:
    """(start, end) of `bytes=first-last`, `bytes=first-` or `bytes=-count`; None if nothing of it is in the file."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == (None, None):
        return None
    first, last = match.groups()
    if first is None:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
    return (start, end) if start < end else None


class _Values(Collector):
    """Metric values as Prometheus gauges."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for key, value in sorted(self._values.items()):
            name = "async_rl_" + re.sub(r"[^a-zA-Z0-9]+", "_", key).strip("_")
            yield GaugeMetricFamily(name, key, value=value)


def prometheus_text(values: Mapping[str, float]) -> bytes:
    """Values in Prometheus' text format; the key `staleness/max` becomes the gauge `async_rl_staleness_max`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(values))
    return generate_latest(registry)

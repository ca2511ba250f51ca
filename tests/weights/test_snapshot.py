"""Snapshots: whole or absent, verified, fetched from a path or over HTTP."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from async_rl.weights.base import SendBuffers
from async_rl.weights.errors import WeightsError
from async_rl.weights.snapshot import fetch_snapshot, prune_snapshots, read_snapshot, write_snapshot
from tests.weights.peers import bytes_of, filled


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    buffers, manifest = filled(4)
    path = tmp_path / "snapshots" / "version-4.safetensors"
    write_snapshot(path, manifest, buffers)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves tmp_path; /slow drips bytes forever."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self) -> None:
            if self.path != "/slow":
                return super().do_GET()
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(2000):
                    self.wfile.write(b"x")
                    time.sleep(0.01)
            except OSError:
                pass

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_what_is_read_is_what_was_sent(snapshot: Path) -> None:
    buffers, manifest = filled(4)
    received = read_snapshot(snapshot, manifest)
    assert received.checksum == manifest.checksum
    assert {
        name: bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in received.tensors()
    } == bytes_of(buffers)


def test_others_can_read_the_file(snapshot: Path) -> None:
    buffers, _ = filled(4)
    loaded = load_file(snapshot)
    assert list(loaded)  # every tensor, in its own type
    for name, tensor in buffers.tensors():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("field", [{"version": 5}, {"run_id": "run-b"}, {"checksum": "0" * 32}])
def test_a_file_of_another_publication_is_refused(snapshot: Path, field: dict[str, object]) -> None:
    _, manifest = filled(4)
    with pytest.raises(WeightsError, match="announced"):
        read_snapshot(snapshot, msgspec.structs.replace(manifest, **field))


def test_damaged_truncated_and_foreign_files_are_refused(snapshot: Path, tmp_path: Path) -> None:
    _, manifest = filled(4)
    whole = snapshot.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for content, message in [
        (bytes(flipped), "damaged bytes"),
        (whole[:-8], "cannot be read"),
        (b"garbage", "cannot be read"),
        (b"", "cannot be read"),
    ]:
        snapshot.write_bytes(content)
        with pytest.raises(WeightsError, match=message):
            read_snapshot(snapshot, manifest)
    with pytest.raises(WeightsError, match="cannot be read"):
        read_snapshot(tmp_path / "absent", manifest)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot.read_bytes()
    buffers, manifest = filled(5)

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(WeightsError, match="No space left"):
        write_snapshot(snapshot, manifest, buffers)
    assert snapshot.read_bytes() == before
    assert list(snapshot.parent.iterdir()) == [snapshot]


def test_fetch_takes_the_visible_file_without_a_copy(snapshot: Path, tmp_path: Path) -> None:
    _, manifest = filled(4)
    assert fetch_snapshot(snapshot, None, manifest, 5.0, tmp_path / "into") == snapshot
    assert not (tmp_path / "into").exists()


def test_fetch_downloads_when_the_path_is_absent_or_another_version(
    snapshot: Path, server: str, tmp_path: Path
) -> None:
    buffers, manifest = filled(4)
    other_buffers, other = filled(5)
    stale = tmp_path / "stale.safetensors"
    write_snapshot(stale, other, other_buffers)
    for path in (tmp_path / "absent", stale):
        got = fetch_snapshot(path, f"{server}/snapshots/{snapshot.name}", manifest, 20.0, tmp_path / "into")
        assert got.parent == tmp_path / "into"
        assert dict(read_snapshot(got, manifest).tensors())["norm"].equal(dict(buffers.tensors())["norm"])
        assert list(got.parent.iterdir()) == [got]


def test_fetch_fails_with_the_reason_and_leaves_nothing(server: str, tmp_path: Path) -> None:
    buffers = SendBuffers(1 << 16)
    buffers.fill([("a", torch.zeros(3))])
    manifest, into = buffers.manifest("run", 1), tmp_path / "into"
    absent = tmp_path / "absent"
    for url, message in [
        (None, "no url"),
        (f"{server}/nothing", "404"),
        ("http://127.0.0.1:1/x", "refused"),
        ("file:///etc/hostname", "only http"),
        (f"{server}/slow", "within 1 s"),
    ]:
        with pytest.raises(WeightsError, match=message):
            fetch_snapshot(absent, url, manifest, 1.0, into)
        assert not list(into.glob("*"))


def test_prune_keeps_the_files_written_last_whatever_their_version(tmp_path: Path) -> None:
    for order, version in enumerate([7, 9, 8]):  # a resumed run counts again from a lower version
        path = tmp_path / f"version-{version}.safetensors"
        path.write_bytes(b"x")
        os.utime(path, ns=(order, order))
    (tmp_path / "version-1.safetensorsabc.partial").write_bytes(b"x")
    prune_snapshots(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-8.safetensors", "version-9.safetensors"]

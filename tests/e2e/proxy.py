"""A TCP connection that a test can cut, mend and reset."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from async_rl.addresses import join_address, split_address


class Proxy:
    """Passes bytes on to `target` from an address of its own; all methods are safe from the test's thread."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(120)

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told: a cable is pulled."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """What waited passes, and all that follows."""
        self._loop.call_soon_threadsafe(self._open.set)

    def reset(self) -> None:
        """Every connection is broken off; new ones may come: a router forgot them. What was under way is lost."""

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    def close(self) -> None:
        """End everything."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()

    async def _end(self) -> None:
        assert self._server is not None, "the proxy listens"
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = join_address(*self._server.sockets[0].getsockname())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError):
            other_reader, other_writer = await asyncio.open_connection(*split_address(self.target))
            self._writers.add(other_writer)
            await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))
            self._writers.discard(other_writer)
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """A proxy that is closed at the end."""
    between = Proxy(target)
    try:
        yield between
    finally:
        between.close()

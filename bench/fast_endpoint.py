"""An HTTP endpoint that costs next to nothing, so that what is in front of it can be measured: `python -m bench.fast_endpoint`.

`/stream?pieces=N&gap_ms=G&together=K` streams N chunks as a chat completion does, G ms apart, once K streams have begun; each
chunk says when it was sent (`at`, nanoseconds of the machine's monotonic clock). Everything else is a short JSON answer.
Reads requests without a body only, and knows no more of HTTP than its own benchmark asks.

`--relay PORT` only passes bytes to and from that port: what any process in between costs on this machine, whatever it does.
"""

import argparse
import asyncio
import sys
import time
from urllib.parse import parse_qs, urlsplit

WHOLE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n{"status":"ok"}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"none","at":%020d,'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)


class Together:
    """Streams that wait for each other."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def all_of(self, count: int) -> None:
        """Until `count` are here."""
        self.waiting.append(asyncio.get_running_loop().create_future())
        here = self.waiting[-1]
        if len(self.waiting) >= count:
            for one in self.waiting:
                one.set_result(None)
            self.waiting = []
        await here


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self._received = b""
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """It left."""
        for stream in self._streams:
            stream.cancel()

    def data_received(self, data: bytes) -> None:
        """Some of a request."""
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            target = urlsplit(head.split(b" ", 2)[1].decode())
            if target.path != "/stream":
                self._transport.write(WHOLE)
                continue
            query = {name: float(values[0]) for name, values in parse_qs(target.query).items()}
            stream = asyncio.create_task(self._stream(**query))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, pieces: float = 100, gap_ms: float = 0, together: float = 1) -> None:
        self._transport.write(HEAD)
        await self._together.all_of(int(together))
        begun = time.perf_counter()
        for number in range(int(pieces)):
            self._say(PIECE % time.monotonic_ns())
            if gap_ms:
                wanted = begun + (number + 1) * gap_ms / 1000
                await asyncio.sleep(max(0.0, wanted - time.perf_counter()))
        self._say(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _say(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


class Relay(asyncio.Protocol):
    """One side of a connection that is passed on; the client's makes the other."""

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._early = b""
        self.other: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._port is not None:
            self._joining = asyncio.create_task(self._join(self._port))

    async def _join(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        transport, there = await loop.create_connection(lambda: Relay(None), "127.0.0.1", port)
        there.other, self.other = self.transport, transport
        self.other.write(self._early)

    def data_received(self, data: bytes) -> None:
        """Some bytes."""
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """It left."""
        if self.other is not None:
            self.other.close()


async def main() -> None:
    """Serves on a free port, which it tells, until it is ended."""
    parser = argparse.ArgumentParser(description="An endpoint to measure with.")
    parser.add_argument("--relay", type=int, metavar="PORT")
    relay: int | None = parser.parse_args().relay
    together = Together()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(together) if relay is None else Relay(relay),
        "127.0.0.1",
        0,
        backlog=1024,
    )
    port = server.sockets[0].getsockname()[1]
    print(f"at http://127.0.0.1:{port}", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

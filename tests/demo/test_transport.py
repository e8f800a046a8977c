"""The way to the next hop, byte by byte: what is sent, how answers end, which connections are kept, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import socket
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from demo import transport
from demo.transport import Transport
from tests.fakes import PATIENCE_SECONDS
from tests.rig.hops import OK, STREAM, Hop, chunk, has_left, say

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


def with_client(work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """What `work` returns, with a client on the transport."""

    async def run() -> Any:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            httpx.AsyncClient(transport=Transport(), timeout=None) as client,
        ):
            return await work(client)

    return asyncio.run(run())


def body_of(made: bytes, method: str = "GET") -> Any:
    """The body of that answer."""
    with Hop(say(made)) as hop:
        return with_client(lambda client: client.request(method, hop.url)).content


@pytest.mark.parametrize(
    ("made", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil it closes", b"until it closes"),
        (STREAM + chunk(b"one") + chunk(b"two") + b"0\r\n\r\n", b"onetwo"),
        (STREAM + b"3;a=b\r\none\r\n0\r\nx-trailer: 1\r\n\r\n", b"one"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
    ],
)
def test_an_answers_body_is_whole_however_its_length_is_told(made: bytes, body: bytes) -> None:
    assert body_of(made) == body

    def in_small_pieces(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(made)):
            connection.sendall(made[at : at + 1])

    with Hop(in_small_pieces) as hop:
        assert with_client(lambda client: client.get(hop.url)).content == body


def test_a_head_requests_answer_has_no_body() -> None:
    assert body_of(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "HEAD") == b""


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-len", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", httpx.RemoteProtocolError),
        (STREAM + chunk(b"one"), httpx.RemoteProtocolError),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000, httpx.RemoteProtocolError),
    ],
)
def test_what_is_cut_or_no_http_is_an_error(made: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        body_of(made)


def test_nobody_there_is_told_in_the_systems_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(httpx.ConnectError, match=r"^Connection refused$"):
        with_client(lambda client: client.get(url))
    with pytest.raises(httpx.ConnectError, match=r"label"):
        with_client(lambda client: client.get("http://" + "a" * 64))


def test_a_server_that_takes_no_connection_in_time_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as e:
        address = listener.getsockname()
        # Nobody accepts: its queue is full, and further ones get no answer.
        for _ in range(4):
            waiting = e.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(address)
        limit = httpx.Timeout(None, connect=0.1)
        with pytest.raises(httpx.ConnectTimeout):
            with_client(lambda client: client.get(f"http://127.0.0.1:{address[1]}", timeout=limit))


# -- connections that are kept ---------------------------------------------------------------------------


class Many:
    """A server that answers as often as it is asked, on every connection, as `answer` says."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer, self.connections = answer, 0

    def __call__(self, connection: socket.socket) -> None:
        self.connections += 1
        connection.sendall(self.answer)
        data = b""
        while piece := connection.recv(65536):
            data += piece
            while b"\r\n\r\n" in data:
                _, _, data = data.partition(b"\r\n\r\n")
                connection.sendall(self.answer)


async def twice(client: httpx.AsyncClient, url: str) -> None:
    for _ in range(2):
        assert (await client.get(url)).content == b"ok"


def test_one_connection_serves_one_request_after_another() -> None:
    server = Many()
    with Hop(server) as hop:
        with_client(lambda client: twice(client, hop.url))
    assert server.connections == 1


def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    together = threading.Barrier(3)

    def play(connection: socket.socket) -> None:
        together.wait(PATIENCE_SECONDS)
        connection.sendall(OK)

    async def three(client: httpx.AsyncClient, url: str) -> None:
        answers = await asyncio.gather(*(client.get(url) for _ in range(3)))
        assert [answer.content for answer in answers] == [b"ok"] * 3

    with Hop(play) as hop:
        with_client(lambda client: three(client, hop.url))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\nnobody asked for this",
    ],
)
def test_a_connection_that_the_server_ends_or_says_too_much_on_is_not_used_again(
    answer: bytes,
) -> None:
    server = Many(answer)
    with Hop(server) as hop:
        with_client(lambda client: twice(client, hop.url))
    assert server.connections == 2


def test_an_idle_connection_that_was_closed_is_not_used_again() -> None:
    server_closed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def play(connection: socket.socket) -> None:
        connection.sendall(OK)
        connection.shutdown(socket.SHUT_RDWR)
        server_closed.put(None)

    async def one_after_the_other(client: httpx.AsyncClient, url: str) -> None:
        for _ in range(3):
            assert (await client.get(url)).content == b"ok"
            await asyncio.to_thread(server_closed.get, timeout=PATIENCE_SECONDS)

    with Hop(play) as hop:
        with_client(lambda client: one_after_the_other(client, hop.url))


def test_a_connection_is_not_kept_longer_than_servers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0.0)
    server = Many()
    with Hop(server) as hop:
        with_client(lambda client: twice(client, hop.url))
    assert server.connections == 2


def test_an_answer_that_is_left_closes_its_connection() -> None:
    left: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM + chunk(b"data: one\n\n"))
        left.put(has_left(connection))

    async def leave(client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("GET", url) as answer:
            assert await anext(answer.aiter_raw()) == b"data: one\n\n"
        assert await asyncio.to_thread(left.get, timeout=PATIENCE_SECONDS)

    with Hop(play) as hop:
        with_client(lambda client: leave(client, hop.url))


def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    left: queue.SimpleQueue[bool] = queue.SimpleQueue()

    async def cancel(client: httpx.AsyncClient, hop: Hop) -> None:
        asking = asyncio.create_task(client.get(hop.url))
        await asyncio.to_thread(hop.head)
        asking.cancel()
        assert await asyncio.to_thread(left.get, timeout=PATIENCE_SECONDS)

    with Hop(lambda connection: left.put(has_left(connection))) as hop:
        with_client(lambda client: cancel(client, hop))


# -- who waits for whom ----------------------------------------------------------------------------------


def test_nothing_is_kept_back_and_what_came_together_is_one_piece() -> None:
    pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM)
        while (piece := pieces.get(timeout=PATIENCE_SECONDS)) is not None:
            connection.sendall(piece)
        connection.sendall(b"0\r\n\r\n")

    async def read(client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("GET", url) as answer:
            raw = answer.aiter_raw()
            pieces.put(chunk(b"one"))
            assert await anext(raw) == b"one"
            pieces.put(chunk(b"two") + chunk(b"three"))
            assert await anext(raw) == b"twothree"
            pieces.put(None)
            assert [piece async for piece in raw] == []

    with Hop(play) as hop:
        with_client(lambda client: read(client, hop.url))


def test_a_server_waits_for_whoever_reads_slowly() -> None:
    size, sent = 64 * 2**20, threading.Event()

    def play(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        connection.sendall(bytes(size))
        sent.set()

    async def read(client: httpx.AsyncClient, url: str) -> int:
        async with client.stream("GET", url) as answer:
            raw = answer.aiter_raw()
            read = len(await anext(raw))
            # All of it would be through in a fraction of this.
            assert not await asyncio.to_thread(sent.wait, 1.0), "what nobody reads was taken in"
            async for piece in raw:
                read += len(piece)
            return read

    with Hop(play) as hop:
        assert with_client(lambda client: read(client, hop.url)) == size


def test_a_body_waits_for_a_server_that_reads_slowly() -> None:
    size, go_on = 64 * 2**20, threading.Event()
    given = 0

    def play(connection: socket.socket) -> None:
        assert go_on.wait(PATIENCE_SECONDS)
        left = size
        while left:
            left -= len(connection.recv(2**20))
        connection.sendall(OK)

    async def upload() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(size // 2**16):
            given += 2**16
            yield bytes(2**16)

    async def send(client: httpx.AsyncClient, url: str) -> bytes:
        asking = asyncio.create_task(
            client.post(url, content=upload(), headers={"content-length": str(size)})
        )
        before = -1
        while given != before:
            before = given
            await asyncio.sleep(0.2)
        assert given < size, "what nobody takes was asked for"
        go_on.set()
        return (await asking).content

    with Hop(play) as hop:
        assert with_client(lambda client: send(client, hop.url)) == b"ok"


def test_an_answer_to_a_body_that_was_refused_half_way_is_read() -> None:
    refused = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig"

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield bytes(2**16)

    async def send(client: httpx.AsyncClient, url: str) -> httpx.Response:
        return await client.post(url, content=upload())

    def play(connection: socket.socket) -> None:
        connection.sendall(refused)
        connection.shutdown(socket.SHUT_WR)
        # Closed with bytes unread, the answer might be lost on its way.
        while connection.recv(2**20):
            pass

    with Hop(play) as hop:
        answer = with_client(lambda client: send(client, hop.url))
    assert (answer.status_code, answer.content) == (413, b"big")


def test_an_upload_to_a_server_that_left_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    given = 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(10_000):
            given += 1
            yield bytes(2**16)

    with Hop(lambda connection: None) as hop, pytest.raises(httpx.TransportError):
        with_client(lambda client: client.post(hop.url, content=upload()))
    assert given < 1000
    assert "socket.send() raised" not in caplog.text


def test_a_dead_machine_is_noticed_by_probes() -> None:
    async def options(url: str) -> list[int]:
        connection = await Transport()._new(("http", "127.0.0.1", int(url.rpartition(":")[2])), 5)
        raw = connection._transport.get_extra_info("socket")
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        found = [raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        connection.abort()
        return [raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *found]

    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("needs TCP_USER_TIMEOUT, which is Linux's")
    with Hop(say(OK)) as hop:
        assert asyncio.run(options(hop.url)) == [1, 15, 5, 3, 30_000]


# -- TLS -------------------------------------------------------------------------------------------------


def test_an_https_address_is_spoken_to_in_tls_and_its_name_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=shim"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await writer.drain()
        writer.close()

    async def ask() -> bytes:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with server, httpx.AsyncClient(transport=Transport()) as client:
            found = (await client.get(f"https://127.0.0.1:{port}")).content
            with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
                await client.get(f"https://localhost:{port}")
            return found

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asyncio.run(ask()) == b"ok"

"""Bodies come out of their bytes the same however these are cut, and what is no body is refused."""

from __future__ import annotations

import itertools

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.bodies import LINE_LIMIT, TRAILERS_LIMIT, Body, BodyError, Chunked, Sized, UntilTheEnd


def fed(body: Body, data: bytes, cuts: list[int]) -> bytes:
    """What comes out when the bytes arrive in those parts."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[begin:end] for begin, end in itertools.pairwise(edges)]
    taken = b""
    for at, part in enumerate(parts):
        taken += body.take(part)
        if body.is_done:
            assert body.rest + b"".join(parts[at + 1 :]) == AFTER
            return taken
    raise AssertionError("the body did not end")


AFTER = b"HTTP/1.1 200 OK\r\n"
CUTS = st.lists(st.integers(0, 400), max_size=40)
CHUNK = st.binary(min_size=1, max_size=60)
EXTENSION = st.sampled_from([b"", b";a=b", b' ; a="b;c"', b" "])
TRAILERS = st.sampled_from([b"", b"x: y\r\n", b"x: y\r\nz: \r\n"])


@settings(deadline=None)
@given(st.lists(st.tuples(CHUNK, EXTENSION, st.booleans()), max_size=6), TRAILERS, CUTS)
def test_chunks_come_out_the_same_however_they_are_cut(
    chunks: list[tuple[bytes, bytes, bool]], trailers: bytes, cuts: list[int]
) -> None:
    sent = b"".join(
        (b"%X" if upper else b"00%x") % len(data) + extension + b"\r\n" + data + b"\r\n"
        for data, extension, upper in chunks
    )
    sent += b"0\r\n" + trailers + b"\r\n"
    assert fed(Chunked(), sent + AFTER, cuts) == b"".join(data for data, _, _ in chunks)


@settings(deadline=None)
@given(st.binary(max_size=60), CUTS)
def test_a_body_of_a_length_ends_there(data: bytes, cuts: list[int]) -> None:
    if not data:
        assert Sized(0).is_done
        return
    assert fed(Sized(len(data)), data + AFTER, cuts) == data


PARTS = st.sampled_from(
    [b"0", b"1", b"2", b"a", b"\r\n", b"\r\n", b"\r", b"\n", b";", b" ", b"x: y"]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(PARTS, max_size=14).map(b"".join))
def test_chunks_are_read_as_h11_reads_them_or_not_at_all(data: bytes) -> None:
    # h11 takes some ends of lines that are none.
    data = b"3\r\nabc\r\n" + data
    body = Chunked()
    try:
        mine: bytes | None = body.take(data)
    except BodyError:
        mine = None
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data)
    theirs, ended = b"", False
    try:
        while (event := peer.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            theirs += bytes(event.data) if isinstance(event, h11.Data) else b""
            ended = ended or isinstance(event, h11.EndOfMessage)
    except h11.RemoteProtocolError:
        return
    if mine is not None:
        assert mine == theirs
        assert ended or not body.is_done


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"0x1\r\n",
        b"1\rx\r\n",
        b"1\nx\r\n",
        b"1 2\r\n",
        b"f" * 16 + b"\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc4\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"1;" + b"a" * LINE_LIMIT,
        b"0\r\n" + b"a: b\r\n" * (TRAILERS_LIMIT // 6 + 1),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(BodyError, match="expected"):
        Chunked().take(data)


@pytest.mark.parametrize("data", [b"", b"3", b"3\r\nab", b"3\r\nabc", b"3\r\nabc\r\n", b"0\r\n"])
def test_an_end_before_the_last_chunk_is_an_error(data: bytes) -> None:
    body = Chunked()
    body.take(data)
    assert not body.is_done
    with pytest.raises(BodyError, match="found the end"):
        body.end()


def test_an_end_before_the_length_is_an_error_and_one_that_tells_the_length_is_not() -> None:
    sized, endless = Sized(5), UntilTheEnd()
    assert (sized.take(b"abc"), endless.take(b"abc")) == (b"abc", b"abc")
    with pytest.raises(BodyError, match="expected 2 bytes more"):
        sized.end()
    endless.end()
    assert endless.is_done

"""The body of an HTTP/1.1 answer, out of the bytes that carry it (RFC 9112, section 6): until a length, in chunks, or until the end.

A parser for everything would cost more for each chunk of a stream than all else that a hop does. Knows bytes; knows no connection.
"""

from __future__ import annotations

import re
from typing import Protocol

NEWLINE = b"\r\n"
SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?")
# Of a line with a chunk's size and its extensions, and of all trailers.
LINE_LIMIT, TRAILERS_LIMIT = 4096, 65536


class BodyError(ValueError):
    """These are not the bytes of such a body; the text says what was expected and found."""


class Body(Protocol):
    """One answer's."""

    is_done: bool
    """All of it has been taken."""
    rest: bytes
    """What came behind it, which nobody asked for."""

    def take(self, data: bytes) -> bytes:
        """What of the body is in these bytes, which follow the ones before.

        Raises:
            BodyError: it is no such body.
        """

    def end(self) -> None:
        """Nothing follows.

        Raises:
            BodyError: something is missing.
        """


class Sized:
    """Of a length that was told."""

    def __init__(self, length: int) -> None:
        self.is_done, self.rest = length == 0, b""
        self._left = length

    def take(self, data: bytes) -> bytes:
        """See `Body`."""
        piece, self.rest = data[: self._left], data[self._left :]
        self._left -= len(piece)
        self.is_done = self._left == 0
        return piece

    def end(self) -> None:
        """See `Body`."""
        raise BodyError(f"expected {self._left} bytes more of the body, found its end")


class UntilTheEnd:
    """Whatever comes."""

    is_done, rest = False, b""

    def take(self, data: bytes) -> bytes:
        """See `Body`."""
        return data

    def end(self) -> None:
        """See `Body`."""
        self.is_done = True


class Chunked:
    """In chunks, each behind its size; the last is empty, and trailers that follow it are left out."""

    def __init__(self) -> None:
        self.is_done, self.rest = False, b""
        self._kept = b""
        # Bytes of the chunk that has begun; then its newline.
        self._left, self._is_open = 0, False
        self._has_trailers = False

    def take(self, data: bytes) -> bytes:
        """See `Body`."""
        data, at = self._kept + data, 0
        pieces: list[bytes] = []
        while not self._has_trailers:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            if self._is_open:
                if len(data) < at + len(NEWLINE):
                    break
                _expect(data.startswith(NEWLINE, at), "the end of a chunk", data[at:])
                at += len(NEWLINE)
                self._is_open = False
            end = data.find(NEWLINE, at)
            if end < 0:
                _expect(len(data) - at <= LINE_LIMIT, "the size of a chunk", data[at:])
                break
            self._begin(data[at:end])
            at = end + len(NEWLINE)
        self._kept = data[at:]
        if self._has_trailers:
            self._skip_trailers()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """See `Body`."""
        raise BodyError("expected another chunk, found the end")

    def _begin(self, line: bytes) -> None:
        found = SIZE.fullmatch(line)
        if found is None:
            raise _unexpected("the size of a chunk", line)
        self._left = int(found[1], 16)
        self._is_open = self._left > 0
        self._has_trailers = self._left == 0

    def _skip_trailers(self) -> None:
        if self._kept.startswith(NEWLINE):
            self.is_done, self.rest = True, self._kept[len(NEWLINE) :]
            return
        _, found, rest = self._kept.partition(NEWLINE * 2)
        _expect(len(self._kept) <= TRAILERS_LIMIT, "trailers", self._kept)
        if found:
            self.is_done, self.rest = True, rest


def _expect(is_so: bool, what: str, found: bytes) -> None:
    if not is_so:
        raise _unexpected(what, found)


def _unexpected(what: str, found: bytes) -> BodyError:
    return BodyError(f"expected {what}, found {found[:20]!r}")

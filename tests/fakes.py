"""An engine that plays scripts of token ids, with gates where a test has to look or act between two steps.

It keeps the real engine's contract: one thread, ids in and out, ValueError for bad input, cancelling only between
tokens. It sleeps nowhere; a gate that nobody opens fails the request.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PATIENCE_SECONDS = 30.0
EOS_TOKEN_IDS = (1, 106, 50)
TURN_END = 106


class WrongThreadPanic(BaseException):
    """What PyO3 raises when an unsendable object is touched by another thread; it is no Exception there either."""


class Gate:
    """A place in a script: the engine reports that it came there, and goes on when the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        """Let the engine go on."""
        self._opened.set()

    def wait_until_reached(self) -> None:
        """Block until the engine stands here."""
        assert self._reached.wait(PATIENCE_SECONDS), "the engine never came to this gate"

    def pass_through(self) -> None:
        """On the engine thread: report and wait."""
        self._reached.set()
        if not self._opened.wait(PATIENCE_SECONDS):
            raise RuntimeError("nobody opened this gate")


# A token id, several that come in one batch, a place to wait at, or a crash.
Item = int | tuple[int, ...] | Gate | BaseException


@dataclass(frozen=True)
class Decoded:
    """What `FakeEngine.decode` reports."""

    ids: list[int]
    finish: str
    stop_id: int | None
    prompt_tokens: int
    prefill_seconds: float = 0.25
    decode_seconds: float = 0.5


@dataclass(frozen=True)
class Call:
    """What one `decode` was asked."""

    token_ids: tuple[int, ...]
    max_new: int
    stop: tuple[int, ...] | None
    read_every: int


class FakeEngine:
    """Continues every prompt with `script`, or with what `play` makes of the prompt's ids.

    A script that ends early ends the turn, as a model would. `calls` has every request that reached the engine,
    `made` how many tokens it made for the latest.
    """

    def __init__(
        self,
        script: Sequence[Item] = (),
        *,
        play: Callable[[Sequence[int]], Sequence[Item]] | None = None,
        context: int = 256,
        vocab_size: int = 900,
    ) -> None:
        self.script = script
        self.play = play
        self.calls: list[Call] = []
        self.finishes: list[str] = []
        self.made = 0
        self._context = context
        self._vocab_size = vocab_size
        self._owner = threading.get_ident()

    def built_here(self) -> FakeEngine:
        """Hand the engine to the calling thread."""
        self._owner = threading.get_ident()
        return self

    def info(self) -> dict[str, Any]:
        """The facts the real engine reports."""
        self._check_thread()
        return {
            "layout": {
                "full_rings": 3,
                "sliding_rings": 12,
                "shared_layers": 20,
                "context": self._context,
            },
            "dtype": "bfloat16",
            "device": "cpu",
            "weight_format": "bfloat16",
            "weight_bytes": 1000,
            "cache_bytes": 2000,
            "load_seconds": 0.125,
            "vocab_size": self._vocab_size,
            "eos_token_ids": list(EOS_TOKEN_IDS),
            "checkpoint": ["/somewhere"],
        }

    def decode(
        self,
        ids: list[int],
        max_new: int,
        stop: list[int] | None = None,
        read_every: int = 1,
        on_tokens: Callable[[list[int]], object] | None = None,
    ) -> Decoded:
        """Play the script; see the class."""
        self._check_thread()
        self._check_input(ids, max_new)
        self.calls.append(
            Call(tuple(ids), max_new, None if stop is None else tuple(stop), read_every)
        )
        self.made = 0
        decoded = self._continue(ids, max_new, EOS_TOKEN_IDS if stop is None else stop, on_tokens)
        self.finishes.append(decoded.finish)
        return decoded

    def _continue(
        self,
        ids: list[int],
        max_new: int,
        stop: Sequence[int],
        on_tokens: Callable[[list[int]], object] | None,
    ) -> Decoded:
        made: list[int] = []
        script = self.play(ids) if self.play is not None else self.script
        for item in [*script, TURN_END]:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, Gate):
                item.pass_through()
                continue
            batch: list[int] = []
            for token_id in item if isinstance(item, tuple) else (item,):
                self.made += 1
                if token_id in stop:
                    if batch and on_tokens is not None:
                        on_tokens(batch)
                    return Decoded(made, "stop", token_id, len(ids))
                made.append(token_id)
                batch.append(token_id)
                if len(made) == max_new:
                    break
            if on_tokens is not None and not on_tokens(batch):
                return Decoded(made, "cancelled", None, len(ids))
            if len(made) == max_new:
                break
        return Decoded(made, "length", None, len(ids))

    def _check_input(self, ids: list[int], max_new: int) -> None:
        if not ids or max_new < 1 or len(ids) + max_new > self._context:
            raise ValueError(f"expected a prompt that fits, found {len(ids)} + {max_new} tokens")
        if not all(0 <= token_id < self._vocab_size for token_id in ids):
            raise ValueError("expected ids inside the vocabulary")

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise WrongThreadPanic("FakeEngine is unsendable, but was touched by another thread")

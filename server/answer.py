"""One choice of an answer: the engine's token ids in, deltas of text and tool calls out, counts at the end.

Where whole characters, stop strings, hidden tool calls and finish reasons are decided, once for streamed and whole
answers. Knows no frames and no JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from server.tokenizer import StopStrings, TextStream
from server.tools import ContentDelta, ReasoningDelta, ReplyParser, ToolCallDelta, opens_reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from server.admission import Admission, Prompt
    from server.engine import Finished
    from server.tokenizer import Tokenizer

Delta = ContentDelta | ReasoningDelta | ToolCallDelta
FinishReason = Literal["stop", "length", "tool_calls"]


class Reader(Protocol):
    """Reads the ids of one choice; `ReplyParser` is one, `TextReader` the other."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids were thought, not said."""

    def push(self, token_id: int) -> Sequence[Delta]:
        """The deltas that are certain after this id."""

    def finish(self) -> Sequence[Delta]:
        """What was held back."""


class TextReader:
    """Every id is text: what `/v1/completions` returns."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)

    def push(self, token_id: int) -> Sequence[Delta]:
        """The characters this id completes."""
        text = self._stream.push(token_id)
        return [ContentDelta(text)] if text else []

    def finish(self) -> Sequence[Delta]:
        """The rest of a character that was cut."""
        text = self._stream.finish()
        return [ContentDelta(text)] if text else []


def new_reader(tokenizer: Tokenizer, admission: Admission, prompt: Prompt) -> Reader:
    """The reader for the reply to `prompt`: of chat syntax, or of plain text."""
    if not admission.is_chat:
        return TextReader(tokenizer)
    return ReplyParser(
        tokenizer,
        parse_tools=admission.calls_tools,
        in_reasoning=opens_reasoning(tokenizer, prompt.token_ids),
    )


class Choice:
    """One choice while it grows.

    `completion_tokens` counts every token the engine made for this choice, the one that ended the turn too; after a
    stop string, only those up to the one that completed it. So it is the same streamed and whole.
    """

    def __init__(self, index: int, reader: Reader, admission: Admission) -> None:
        self.index = index
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._reader = reader
        self._stops = StopStrings(admission.stop_strings)
        self._one_call = admission.one_call
        self._called = False
        self._stopped = False
        self._enough_calls = False

    @property
    def complete(self) -> bool:
        """Nothing more will be shown: the engine may stop."""
        return self._stopped or self._enough_calls

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of this choice that were thought, not said."""
        return self._reader.reasoning_tokens

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        """The deltas these ids bring."""
        deltas: list[Delta] = []
        for token_id in token_ids:
            if self.complete:
                break
            self.completion_tokens += 1
            deltas += self._shown(self._reader.push(token_id))
        return deltas

    def finish(self, finished: Finished) -> list[Delta]:
        """The last deltas; sets `finish_reason`."""
        deltas: list[Delta] = []
        ended = finished.finish == "stop"
        if not self.complete:
            self.completion_tokens += ended
            deltas += self._shown(self._reader.finish())
        if not self._stopped and (held := self._stops.finish()):
            deltas.append(ContentDelta(held))
        if not self.complete and not ended:
            self.finish_reason = "length"
        else:
            self.finish_reason = "tool_calls" if self._called and not self._stopped else "stop"
        return deltas

    def _shown(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if self.complete:
                return
            match delta:
                case ContentDelta():
                    text, hit = self._stops.push(delta.text)
                    self._stopped = hit is not None
                    if text:
                        yield ContentDelta(text)
                case ToolCallDelta():
                    self._enough_calls = self._one_call and delta.index > 0
                    if not self._enough_calls:
                        self._called = True
                        yield delta
                case _:
                    yield delta


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and seconds of a whole answer, over all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    decoded_tokens: int = 0
    """Completion tokens but the first of each choice, which the prompt's last step makes."""
    reasoning_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def plus(self, choice: Choice, finished: Finished) -> Totals:
        """These and one more choice."""
        return Totals(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens + choice.completion_tokens,
            decoded_tokens=self.decoded_tokens + max(0, choice.completion_tokens - 1),
            reasoning_tokens=self.reasoning_tokens + choice.reasoning_tokens,
            queue_seconds=self.queue_seconds,
            prefill_seconds=self.prefill_seconds + finished.prefill_seconds,
            decode_seconds=self.decode_seconds + finished.decode_seconds,
        )

"""A chat in the terminal, against any server that speaks the OpenAI API.

Owns the talk, its commands and what is printed. Knows only the wire: it is as good a client of another server, and
leaving an answer early is a closed connection like anybody else's.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from rich.console import Console

_HELP: Final = """\
/system TEXT  set the system message, or drop it without TEXT
/reset        forget the talk, keep the system message
/quit         leave, as Ctrl-D does
Ctrl-C        stop the answer"""
# What a model writes must not move the cursor or retitle the window.
_UNPRINTABLE: Final = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})
# Reading has no limit: a first answer may wait for a queue or for a compiler.
_TIMEOUT: Final = httpx.Timeout(10.0, read=None)


class _AnswerError(Exception):
    """The server refused, failed or went away; the message is for the person at the terminal."""


@dataclass(slots=True)
class _Talk:
    """What was said; the system message stands apart, so that it survives a reset."""

    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        return (
            [{"role": "system", "content": self.system}, *self.turns] if self.system else self.turns
        )


def run(
    base_url: str,
    model: str | None,
    system: str | None,
    console: Console,
    read_line: Callable[[str], str],
    *,
    api_key: str | None = None,
) -> int:
    """Talk until `/quit` or the end of the input and return the exit code: 1 if the server could not be reached.

    `read_line` asks for a line with a prompt, as `input` does. Without `model` it is the first one the server lists.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=_TIMEOUT) as client:
        try:
            served = model or _first_model(client)
        except _AnswerError as error:
            console.print(f"{base_url}: {error}", style="red", markup=False)
            return 1
        console.print(
            f"{served} at {base_url}; /help lists the commands", style="dim", markup=False
        )
        talk = _Talk(system)
        for line in _lines(read_line, console):
            if line.startswith("/"):
                if not _command(line, talk, console):
                    return 0
            else:
                _turn(client, served, talk, line, console)
    return 0


def _lines(read_line: Callable[[str], str], console: Console) -> Iterator[str]:
    """Yield what the person says; Ctrl-C at the prompt only drops the line."""
    while True:
        try:
            line = read_line("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D leaves", style="dim")
            continue
        if line:
            yield line


def _command(line: str, talk: _Talk, console: Console) -> bool:
    """Carry out a command and return whether to go on."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return False
        case "/reset":
            talk.turns.clear()
            console.print("The talk starts anew.", style="dim")
        case "/system":
            talk.system = rest.strip() or None
            console.print(
                "The system message is set." if talk.system else "No system message.", style="dim"
            )
        case _:
            console.print(_HELP, style="dim", markup=False)
    return True


def _turn(client: httpx.Client, model: str, talk: _Talk, line: str, console: Console) -> None:
    """Say a line and print the answer; what was stopped is kept as far as it came, what failed is taken back."""
    talk.turns.append({"role": "user", "content": line})
    answer: list[str] = []
    timings: Mapping[str, Any] = {}
    try:
        with closing(_chunks(client, model, talk.messages())) as chunks:
            for chunk in chunks:
                timings = chunk.get("timings") or timings
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta") or {}
                    _show(console, delta.get("reasoning_content"), "dim")
                    _show(console, delta.get("content"), "")
                    answer.append(delta.get("content") or "")
    except KeyboardInterrupt:
        console.print("\nstopped", style="dim")
    except _AnswerError as error:
        answer.clear()
        console.print(str(error), style="red", markup=False)
    else:
        console.print(f"\n{_speed(timings)}", style="dim")
    if text := "".join(answer):
        talk.turns.append({"role": "assistant", "content": text})
    else:
        talk.turns.pop()


def _show(console: Console, text: str | None, style: str) -> None:
    if text:
        shown = text.translate(_UNPRINTABLE)
        console.print(shown, style=style, end="", markup=False, highlight=False, soft_wrap=True)


def _speed(timings: Mapping[str, Any]) -> str:
    """Say how fast the answer came, as far as the server told."""
    rate, prompt_ms = timings.get("predicted_per_second"), timings.get("prompt_ms")
    parts = []
    if isinstance(rate, int | float):
        parts.append(f"{timings.get('predicted_n', '?')} tokens, {rate:.1f} tokens/s")
    if isinstance(prompt_ms, int | float):
        parts.append(f"first token after {prompt_ms + timings.get('queue_ms', 0):.0f} ms")
    return ", ".join(parts)


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
        if response.is_error:
            raise _AnswerError(_reason(response))
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise _AnswerError(
            f"no server answers ({error}); start one with `torchtpu-rs serve`"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _AnswerError("expected a list of models, found something else") from error


def _chunks(
    client: httpx.Client, model: str, messages: list[dict[str, str]]
) -> Generator[dict[str, Any]]:
    """Yield the chunks of a streamed answer; the connection ends with the generator."""
    request = {"model": model, "messages": messages, "stream": True}
    try:
        with client.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.is_error:
                response.read()
                raise _AnswerError(_reason(response))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise _AnswerError(f"the server failed: {chunk['error']['message']}")
                    yield chunk
    except httpx.HTTPError as error:
        raise _AnswerError(f"the connection broke: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise _AnswerError("expected OpenAI's chunks, found something else") from error
    raise _AnswerError("the server cut the answer short")


def _reason(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"the server answered {response.status_code}"

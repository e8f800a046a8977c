"""A conversation and its tools to the prompt's text and token ids, through the checkpoint's own chat template.

Owns the promise that a client's text never becomes a control token: only markers that the template itself writes are
encoded as control tokens. Knows no engine and no HTTP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2 import nodes

from server.checkpoint import CheckpointError
from server.conversation import (
    ROLES,
    ChatError,
    fold_tool_results,
    map_texts,
    prepare_messages,
    prepare_tools,
    texts,
)
from server.sandbox import (
    TEMPLATE_FAULTS,
    RefusalError,
    Sandbox,
    TooMuchWorkError,
    run_template,
)
from server.tokenizer import read_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from server.tokenizer import Tokenizer

__all__ = ["ChatError", "ChatTemplate", "RenderedPrompt"]

# Unicode keeps these for a program's own use, so no client has a reason to send one.
_NONCHARACTERS: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]

# Published ones have up to 30,000 characters.
_LONGEST_TEMPLATE: Final = 1 << 20

_VARIABLES: Final = "chat_template_kwargs"  # the field of the request that carries them


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model sees it: `text` is what `token_ids` spell."""

    text: str
    token_ids: list[int]


class ChatTemplate:
    """A checkpoint's chat template, safe to feed with text from strangers.

    Before the template runs, a guard character goes into every string of the client: after each character that begins
    a control token and before each that ends one. So no marker can be spelled inside a string or across a joint, and
    the markers in the rendered text are the template's own. What lies between them loses its guards and is encoded as
    plain text. For text without markers the ids are those of transformers' `apply_chat_template`.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = "the chat template") -> None:
        """Compile `source`; `where` names it in errors.

        Raises:
            CheckpointError: the template is broken or too long, never ends, or builds control tokens around text.
        """
        if len(source) > _LONGEST_TEMPLATE:
            raise CheckpointError(
                f"{where}: expected at most {_LONGEST_TEMPLATE} characters, found {len(source)}"
            )
        environment = Sandbox()
        try:
            self._template = environment.from_string(source)
            _refuse_built_markers(environment.parse(source), tokenizer, where)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{where}, line {error.lineno}: {error.message}") from error
        except (
            RecursionError,
            SyntaxError,
            MemoryError,
        ) as error:  # what Python says of blocks in blocks
            raise CheckpointError(f"{where}: its blocks are nested too deep ({error})") from error
        self._where = where
        self._tokenizer = tokenizer
        self._joints = _joints(tokenizer)
        self._spare = [char for char in _NONCHARACTERS if char not in source]
        self._reserved = {"messages", "tools", "documents", "add_generation_prompt"}
        self._reserved.update(environment.globals, tokenizer.names)
        # Templates from before July 2026 know results only as `tool_responses` of the message with the calls.
        self._folds_results = "tool_responses" in source and "tool_call_id" not in source
        roles = [role for role in ROLES if role != "tool" or not self._folds_results]
        self._roles_with_parts = frozenset(role for role in roles if self._prints_parts(role))

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Read `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json`; a base model has neither.

        Raises:
            CheckpointError: the template cannot be used.
        """
        file = folder / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text("utf-8"), tokenizer, str(file))
        config = folder / "tokenizer_config.json"
        source = read_config(folder).get("chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(
                f"{config}, chat_template: expected a text, found {type(source).__name__}; put the template for chat "
                f"into {file}"
            )
        return cls(source, tokenizer, f"{config}, chat_template")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Return the prompt for a conversation in OpenAI's form.

        `variables` are the template's own, such as `enable_thinking`. With `continue_final_message` the prompt ends
        with the text of the last message, which must be the assistant's, and the model goes on from there.

        Raises:
            ChatError: the client's messages, tools or variables cannot become a prompt.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatError(
                "continue_final_message", "cannot be true together with add_generation_prompt"
            )
        scope = self._scope(messages, tools, variables or {})
        guard, end_mark = self._unused_characters(scope)
        scope = map_texts(scope, lambda text: self._joints.sub(guard, text))
        tail = _mark_end(scope["messages"], end_mark) if continue_final_message else ""
        try:
            text = self._run({**scope, "add_generation_prompt": add_generation_prompt})
        except RefusalError as refusal:
            raise ChatError("messages", str(refusal).replace(guard, "")) from refusal
        except TEMPLATE_FAULTS as error:
            raise ChatError(
                "messages", "the model's chat template cannot print these messages and tools"
            ) from error
        if continue_final_message:
            text = _cut(text, end_mark, tail)
        return self._encode(text, guard)

    def _scope(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what the template sees, with `messages` and `tools` in the form it reads."""
        for name in sorted(self._reserved.intersection(variables)):
            raise ChatError(f"{_VARIABLES}.{name}", "this name is not a client's to set")
        prepared = prepare_messages(messages, self._roles_with_parts)
        if self._folds_results:
            prepared = fold_tool_results(prepared)
        return {"messages": prepared, "tools": prepare_tools(tools), **variables, "documents": None}

    def _unused_characters(self, scope: Mapping[str, Any]) -> list[str]:
        """Return two characters that no string of the client holds."""
        client_texts = [
            text
            for name, value in scope.items()
            for text in texts(
                value, name if name in ("messages", "tools") else f"{_VARIABLES}.{name}"
            )
        ]
        unused = [char for char in self._spare if not any(char in text for text in client_texts)]
        if len(unused) < 2:
            raise ChatError("messages", "expected text, found all noncharacters U+FDD0 to U+FDEF")
        return unused[:2]

    def _run(self, scope: Mapping[str, Any]) -> str:
        return run_template(self._template, {**self._tokenizer.names, **scope})

    def _encode(self, text: str, guard: str) -> RenderedPrompt:
        token_ids: list[int] = []
        for piece, control_id in self._tokenizer.split_controls(text):
            if control_id is None:
                token_ids += self._tokenizer.encode_text(piece.replace(guard, ""))
            else:
                token_ids.append(control_id)
        return RenderedPrompt(text.replace(guard, ""), token_ids)

    def _prints_parts(self, role: str) -> bool:
        """Try whether the template prints a list of text parts as text, rather than as a Python list or not at all."""
        user = {"role": "user", "content": "hello"}
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
        parts = [{"type": "text", "text": "PART", "mark": "LIST"}]
        probe = {"role": role, "content": parts, "tool_call_id": "call_0", "name": "f"}
        before: list[dict[str, Any]] = [] if role in ("system", "developer") else [user]
        if role == "tool":
            before.append({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            text = self._run({"messages": [*before, probe, user], "tools": None, "documents": None})
        except TooMuchWorkError as error:
            raise CheckpointError(
                f"{self._where}: it does not come to an end with a conversation of two messages"
            ) from error
        except TEMPLATE_FAULTS:
            return False
        return "PART" in text and "LIST" not in text


def _joints(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Match the places in a text where a guard goes: behind the start and before the end of any control token."""
    controls = [tokenizer.token_text(token_id) for token_id in tokenizer.control_ids]
    if not controls:
        return re.compile("(?!)")
    begins = "".join(sorted({re.escape(control[0]) for control in controls}))
    ends = "".join(sorted({re.escape(control[-1]) for control in controls}))
    return re.compile(f"(?<=[{begins}])|(?=[{ends}])")


def _refuse_built_markers(tree: nodes.Template, tokenizer: Tokenizer, where: str) -> None:
    # Guards keep a client's text from beginning or ending a control token, not from standing in the middle of one that
    # the template begins and ends, as '<|' + text + '|>' does.
    literals = {node.data for node in tree.find_all(nodes.TemplateData)}
    literals |= {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    for token_id in tokenizer.control_ids:
        control = tokenizer.token_text(token_id)
        inner = range(1, len(control))
        starts = [i for i in inner if any(text.endswith(control[:i]) for text in literals)]
        ends = [i for i in inner if any(text.startswith(control[i:]) for text in literals)]
        if starts and ends and starts[0] < ends[-1]:
            raise CheckpointError(
                f"{where}: expected control tokens written whole, found {control} as {control[: starts[0]]} and "
                f"{control[ends[-1] :]} around text that a client could choose"
            )


def _mark_end(messages: list[dict[str, Any]], mark: str) -> str:
    """Put `mark` and a space behind the final message's text and return the white space that the text ends with."""
    path = f"messages[{len(messages) - 1}]"
    final = messages[-1]
    if final["role"] != "assistant":
        raise ChatError(
            f"{path}.role", "continue_final_message needs a final message of the assistant"
        )
    content = final.get("content")
    if isinstance(content, str):
        text = content
        final["content"] = f"{text}{mark} "
    elif content:
        text = content[-1]["text"]
        content[-1]["text"] = f"{text}{mark} "
    else:
        raise ChatError(f"{path}.content", "continue_final_message needs text to continue")
    return text[len(text.rstrip()) :] if text.strip() else ""


def _cut(text: str, mark: str, tail: str) -> str:
    """Cut the rendered text behind the final message's own text, which is without `tail` if the template trims."""
    at = text.rfind(mark)
    if at < 0:
        raise ChatError("messages", "the chat template leaves out the text that is to be continued")
    is_trimmed = not text.startswith(f"{mark} ", at)
    return text[:at].removesuffix(tail) if is_trimmed else text[:at]

"""The routes that read a body: chat, completions, and what shows the tokens they would use.

Wiring only: a body becomes a request, a request an admission, an admission an exchange.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from server.admission import (
    admit_chat,
    admit_completion,
    check_token_ids,
    encode_raw,
    render_chat,
    run_bounded,
)
from server.errors import ApiError, invalid
from server.exchange import Exchange
from server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_json,
    parse_request,
)
from server.refusals import refuse_unsupported, refuse_unsupported_chat
from server.streaming import ChatWire, CompletionWire, Wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from server.admission import Admission
    from server.service import Service

    Prepare = Callable[[Service, dict[str, Any], int], Awaitable[tuple[Admission, Wire]]]

router = APIRouter()

JSON_TYPE = re.compile(r"application/([a-z0-9.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)


@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    """A chat answer, streamed or whole."""
    return await _infer(request, "chat.completions", _prepare_chat)


@router.post("/completions")
async def completions(request: Request) -> Response:
    """A continuation of raw text or token ids, streamed or whole."""
    return await _infer(request, "completions", _prepare_completion)


@router.post("/chat/completions/render")
async def render(request: Request) -> Response:
    """The exact prompt a chat request would be, as text and ids."""
    service = _service(request)
    text = service.text
    body, size = await _read_json(request, service)
    chat = parse_request(ChatRequest, body)
    refuse_unsupported_chat(chat, body)
    service.model_name(chat.model)
    rendered = await run_bounded(size, lambda: render_chat(chat, text))
    return JSONResponse(
        {
            "text": rendered.text,
            "token_ids": rendered.token_ids,
            "count": len(rendered.token_ids),
            "max_model_len": service.limits.context,
        }
    )


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, in vLLM's form or, for `content`, in llama.cpp's."""
    service = _service(request)
    text = service.text
    body, size = await _read_json(request, service)
    asked = parse_request(TokenizeRequest, body)
    if (asked.prompt is None) + (asked.messages is None) + (asked.content is None) != 2:
        raise invalid("Send one of prompt, messages and content", "prompt")

    def encode() -> list[int]:
        if asked.messages is not None:
            chat = parse_request(
                ChatRequest,
                {
                    "messages": asked.messages,
                    "tools": body.get("tools"),
                    "add_generation_prompt": asked.add_generation_prompt,
                },
            )
            return render_chat(chat, text).token_ids
        if asked.prompt is not None:
            return encode_raw(asked.prompt, text.tokenizer, add_bos=asked.add_special_tokens)
        content = asked.content or ""
        if asked.parse_special:
            return encode_raw(content, text.tokenizer, add_bos=asked.add_special)
        plain = text.tokenizer.encode_text(content)
        has_bos = asked.add_special and text.tokenizer.bos_id is not None
        return [text.tokenizer.bos_id, *plain] if has_bos else plain  # type: ignore[list-item]

    token_ids = await run_bounded(size, encode)
    if asked.content is not None:
        pieces = [_piece(service, token_id) for token_id in token_ids]
        return JSONResponse({"tokens": pieces if asked.with_pieces else token_ids})
    texts = [text.tokenizer.token_text(token_id) for token_id in token_ids]
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": service.limits.context,
            "tokens": token_ids,
            "token_strs": texts if asked.return_token_strs else None,
        }
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids; vLLM calls it `prompt`, llama.cpp `content`."""
    service = _service(request)
    tokenizer = service.text.tokenizer
    body, _ = await _read_json(request, service)
    asked = parse_request(DetokenizeRequest, body)
    check_token_ids(asked.tokens, service.limits, "tokens")
    text = tokenizer.decode(asked.tokens)
    return JSONResponse({"prompt": text, "content": text})


async def _infer(request: Request, endpoint: str, prepare: Prepare) -> Response:
    arrived = time.monotonic()
    service = _service(request)
    try:
        service.require_ready()
        body, size = await _read_json(request, service)
        admission, wire = await prepare(service, body, size)
        exchange = Exchange(service, admission, wire, endpoint=endpoint, arrived=arrived)
    except ApiError as error:
        service.metrics.answered(endpoint, "error", error.status)
        raise
    return await exchange.respond(request.receive)


async def _prepare_chat(
    service: Service, body: dict[str, Any], size: int
) -> tuple[Admission, Wire]:
    chat = parse_request(ChatRequest, body)
    refuse_unsupported_chat(chat, body)
    service.unknown_fields.note(chat)
    model = service.model_name(chat.model)
    admission = await admit_chat(chat, service.text, service.limits, characters=size)
    return admission, ChatWire(model, include_usage=chat.include_usage)


async def _prepare_completion(
    service: Service, body: dict[str, Any], size: int
) -> tuple[Admission, Wire]:
    completion = parse_request(CompletionRequest, body)
    refuse_unsupported(completion, body)
    service.unknown_fields.note(completion)
    model = service.model_name(completion.model)
    admission = await admit_completion(completion, service.text, service.limits, characters=size)
    return admission, CompletionWire(model, include_usage=completion.include_usage)


async def _read_json(request: Request, service: Service) -> tuple[dict[str, Any], int]:
    """The body as an object, and its size, which bounds the text in it.

    Raises:
        ApiError: 413 for too much, 400 for another content type or for what is no JSON object.
    """
    # Only JSON, and only by name: a page of a foreign origin can post anything else without a preflight.
    if not JSON_TYPE.fullmatch(request.headers.get("content-type", "")):
        raise invalid("Send the body as JSON, with the header content-type: application/json")
    limit = service.settings.max_body_bytes
    if int(request.headers.get("content-length", "0")) > limit:
        raise _too_large(limit)
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > limit:
            raise _too_large(limit)
    return parse_json(bytes(raw)), len(raw)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The body is larger than the {limit} bytes allowed.", code="request_too_large"
    )


def _piece(service: Service, token_id: int) -> dict[str, Any]:
    """llama.cpp's `with_pieces`: text where the bytes are text, else the bytes."""
    tokenizer = service.text.tokenizer
    data = tokenizer.decode_bytes(token_id) or tokenizer.token_text(token_id).encode()
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service

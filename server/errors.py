"""What a request can be refused with: one exception, its status, and OpenAI's error body.

Every refusal in the server is an `ApiError`; nothing else builds an error body. Knows no request and no route.
"""

from __future__ import annotations

from typing import Any

# Whatever a client sends, an error body stays below 8 kB: the message is clipped, and `param` is shorter still.
MESSAGE_LIMIT = 2000
PARAM_LIMIT = 200


def clip(text: str, limit: int) -> str:
    """`text`, shortened in the middle to at most `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"


class ApiError(Exception):
    """A refusal the client reads: HTTP status plus OpenAI's `error` object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = clip(message, MESSAGE_LIMIT)
        self.param = clip(param, PARAM_LIMIT) if param is not None else None
        self.code = code
        self.kind = kind
        self.headers = headers or {}
        self.extras = extras or {}

    def body(self) -> dict[str, Any]:
        """The JSON body: the four keys OpenAI's specification requires, then any extras."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                **self.extras,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong, and `param` says where."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, hint: str) -> ApiError:
    """400: the request is legal, but honouring `param` is not built, and ignoring it would change the meaning."""
    return ApiError(400, f"{param} is not supported yet: {hint}", param=param, code="unsupported")


def context_length_exceeded(
    param: str, *, prompt_tokens: int, max_tokens: int, context: int
) -> ApiError:
    """400 in OpenAI's words, with both numbers in the message and beside it."""
    asked = f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {param}, {max_tokens} in the completion)"
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, you requested {asked}. "
        f"Please reduce the length of the {param} or completion.",
        param=param,
        code="context_length_exceeded",
        extras={"n_prompt_tokens": prompt_tokens, "n_ctx": context},
    )


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    """503 with `retry-after`: nothing is wrong with the request, only with the moment."""
    return ApiError(
        503, message, code=code, kind="server_error", headers={"retry-after": str(retry_after)}
    )


def server_error(message: str) -> ApiError:
    """500 that says not to retry: openai-python sends a 500 three times unless told otherwise."""
    return ApiError(500, message, kind="server_error", headers={"x-should-retry": "false"})

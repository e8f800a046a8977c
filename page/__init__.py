"""The chat page: its files, and the routes that hand them to a browser.

Owns what a browser gets and with which headers, so that the server and the laptop's shim give the same page. Knows no
model, no engine and no API: the scripts in this folder ask whoever serves them, at the same address.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.routing import BaseRoute
    from starlette.types import Scope

FOLDER = Path(__file__).parent
FRONT = "/"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}

# Nothing from elsewhere, nothing inline but what `INSIDE` names, and no text becomes markup but through DOMPurify.
POLICY = (
    "default-src 'none'; script-src 'self'{scripts}; style-src 'self'{styles}; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)

# What a first paint waits for goes with the front itself, and the policy has its hash: a round trip less before anything is seen.
INSIDE = {
    "styles": ("page.css", '<link rel="stylesheet" href="page/page.css">', "<style>", "</style>"),
    "scripts": ("first.js", '<script src="page/first.js"></script>', "<script>", "</script>"),
}

HEADERS = {
    "content-security-policy": POLICY.format(scripts="", styles=""),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, but asked for again each time: a new version must not meet scripts of an old one.
    "cache-control": "no-cache",
}


class _Front(Route):
    """`/` for whoever asks for HTML; other clients are left to the routes behind this one."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match browsers only."""
        if scope["type"] == "http" and "text/html" in Request(scope).headers.get("accept", ""):
            match, found = super().matches(scope)
            if match is Match.FULL:
                return match, found
        return Match.NONE, {}


def pages() -> dict[str, Path]:
    """The file behind each address that a browser may ask for; what the front has inside has none."""
    inside = {name for name, *_ in INSIDE.values()}
    parts = [file for file in FOLDER.rglob("*.js") if file.name not in inside]
    named = {f"/page/{file.relative_to(FOLDER).as_posix()}": file for file in sorted(parts)}
    return {FRONT: FOLDER / "index.html", **named}


def front() -> tuple[bytes, str]:
    """The page with what its first paint needs inside, and the policy that allows just that."""
    html, hashes = (FOLDER / "index.html").read_text(), {}
    for kind, (name, link, begin, end) in INSIDE.items():
        text = (FOLDER / name).read_text()
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind] = f" 'sha256-{digest}'"
        html = html.replace(link, f"{begin}{text}{end}")
    return html.encode(), POLICY.format(**hashes)


def routes() -> list[BaseRoute]:
    """A route for each of `pages()`; they have to stand before a route that answers `/` to other clients."""
    return [
        (_Front if address == FRONT else Route)(address, _giver(file), include_in_schema=False)
        for address, file in pages().items()
    ]


def _giver(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def give(request: Request) -> Response:
        return _answer(file, request.headers.get("if-none-match"))

    return give


def _answer(file: Path, known: str | None) -> Response:
    """The file as it is now, or 304 to whoever has it already. Small files: reading one takes less than a thread would."""
    if file.suffix == ".html":
        body, policy = front()
        headers = {**HEADERS, "content-security-policy": policy, "vary": "Accept"}
    else:
        body, headers = file.read_bytes(), dict(HEADERS)
    headers["etag"] = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if known == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "content-type": TYPES[file.suffix]})

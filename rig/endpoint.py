"""A VM's server as its callers see it: where it is and, hop by hop, whether it answers and what it is.

Knows HTTP and the server's own words (`server/inspection.py`); knows nothing of how the VM came about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field

from rig.errors import RigError

if TYPE_CHECKING:
    from rig.session import Session

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 20.0
TUNNEL_PORT = 18000

State = Literal[
    "serving", "loading", "draining", "failed", "unauthorized", "foreign", "silent", "unreachable"
]
NOT_SERVING: tuple[State, ...] = ("loading", "draining", "failed")

DO: dict[State, str | None] = {
    "serving": None,
    "loading": "Wait: loading and the warmup take a minute or two, and compiling for the first time longer.",
    "draining": "It is being stopped. Look again in a minute; systemd starts it anew unless it was told not to.",
    "failed": "`torchtpu-rig logs --server` shows why; systemd starts it again by itself a few times.",
    "unauthorized": "Use the key that belongs to this VM: `torchtpu-rig address` says where it is kept.",
    "foreign": "Look whether the address and SERVE_PORT are the rig's own.",
    "silent": "Look whether the VM is still booting: `torchtpu-rig watch`.",
    "unreachable": "Look whether it is still booting (`torchtpu-rig watch`), and whether SOURCE_RANGE has this machine's address "
    "(`torchtpu-rig doctor`).",
}


class Counters(BaseModel):
    """What the server has counted since it started."""

    model_config = ConfigDict(frozen=True)

    requests: int
    cancelled: int
    running: int
    waiting: int
    prompt_tokens: int
    generation_tokens: int


class Endpoint(BaseModel):
    """What was found; everything after `do` is known only from a server that serves."""

    model_config = ConfigDict(frozen=True)

    url: str
    state: State
    text: str
    """What was found, in a sentence."""
    do: str | None = None
    """What to do about it."""
    health: int | None = None
    """Status of `/health`."""
    phase: str | None = None
    """What a server that loads is doing."""
    progress: float | None = None
    """0 to 1 within the phase."""
    model: str | None = None
    context: int | None = None
    device: str | None = None
    dtype: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    load_seconds: float | None = None
    warmup_seconds: float | None = None
    counters: Counters | None = None

    @property
    def is_serving(self) -> bool:
        """Requests are answered."""
        return self.state == "serving"


class _HopError(Exception):
    """A hop ended the way; `found` has what it showed."""

    def __init__(self, state: State, text: str, **found: Any) -> None:
        super().__init__(text)
        self.state, self.text, self.found = state, text, found


def address(session: Session) -> str:
    """`http://IP:PORT` of the VM.

    Raises:
        RigError: it has none, or none that is open.
    """
    settings, status = session.settings, session.rig.status()
    if status.node is None or status.node.external_ip is None:
        found = f"a VM without one ({status.node.state})" if status.node else f"it {status.phase}"
        raise RigError(
            f"expected {settings.queued_resource} in {settings.zone} to have an address, found {found}; "
            "`torchtpu-rig watch` follows it until it serves"
        )
    if settings.access == "iap":
        raise RigError(
            f"expected a port that is open, found ACCESS=iap: run `torchtpu-rig tunnel` and use http://127.0.0.1:{TUNNEL_PORT}"
        )
    return f"http://{status.node.external_ip}:{settings.serve_port}"


def check(url: str, api_key: str | None) -> Endpoint:
    """Asks health, models, engine and counters in turn, and says which of them went wrong; never raises for what it finds."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
        try:
            return _serving(client, url, _health(client))
        except _HopError as error:
            return Endpoint(
                url=url, state=error.state, text=error.text, do=DO[error.state], **error.found
            )


def _health(client: httpx.Client) -> int:
    """That the server is ours and serves."""
    answer = _get(client, "/health")
    body = _object(answer)
    state = body.get("status")
    if answer.status_code == httpx.codes.OK and state == "ok":
        return answer.status_code
    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or state not in (*NOT_SERVING, "dead"):
        raise _foreign(answer)
    found: dict[str, Any] = {"health": answer.status_code, "phase": body.get("phase")}
    if state == "loading":
        found["progress"] = body.get("progress")
        done = f", {body['progress']:.0%}" if isinstance(body.get("progress"), float) else ""
        raise _HopError("loading", f"It loads the model: {body.get('phase')}{done}.", **found)
    if state == "draining":
        raise _HopError("draining", "It is shutting down and takes no new requests.", **found)
    why = f": {body['error']}" if body.get("error") else ""
    raise _HopError("failed", f"Its engine has ended{why}.", **found)


def _serving(client: httpx.Client, url: str, health: int) -> Endpoint:
    engine = _object(_get(client, "/v1/engine", health=health))
    if engine.get("object") != "engine":
        raise _HopError("foreign", "Its /v1/engine is not torchtpu-rs's.", health=health)
    models = _object(_get(client, "/v1/models", health=health))
    metrics = _get(client, "/metrics", health=health).text
    versions = engine.get("versions", {})
    served, device = engine["model"], engine.get("device")
    contexts = [one.get("max_model_len") for one in models.get("data", [])]
    return Endpoint(
        url=url,
        state="serving",
        text=f"It serves {served} on {device}.",
        health=health,
        model=served,
        context=contexts[0] if contexts else None,
        device=device,
        dtype=engine.get("dtype"),
        versions={key: value for key, value in versions.items() if value},
        load_seconds=engine.get("load_seconds"),
        warmup_seconds=engine.get("warmup_seconds"),
        counters=counters(metrics),
    )


def counters(exposition: str) -> Counters:
    """What Prometheus text says of them; 0 for what it does not have."""
    families = text_string_to_metric_families(exposition)
    samples = [sample for family in families for sample in family.samples]

    def total(name: str, **labels: str) -> int:
        return int(
            sum(
                one.value
                for one in samples
                if one.name == f"torchtpu_{name}" and labels.items() <= one.labels.items()
            )
        )

    return Counters(
        requests=total("requests_total"),
        cancelled=total("requests_total", finish_reason="cancelled"),
        running=total("requests_running"),
        waiting=total("requests_waiting"),
        prompt_tokens=total("prompt_tokens_total"),
        generation_tokens=total("generation_tokens_total"),
    )


def _get(client: httpx.Client, path: str, health: int | None = None) -> httpx.Response:
    try:
        answer = client.get(path)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        what = "nobody answers" if isinstance(error, httpx.ConnectTimeout) else f"{error}"
        raise _HopError("unreachable", f"No connection to it: {what}.", health=health) from error
    except httpx.RemoteProtocolError as error:
        raise _HopError(
            "foreign", f"It does not answer in HTTP: {error}.", health=health
        ) from error
    except httpx.TransportError as error:
        text = f"It takes connections and does not answer {path}: {type(error).__name__}."
        raise _HopError("silent", text, health=health) from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        sent = "the key it got" if "authorization" in client.headers else "callers without a key"
        raise _HopError("unauthorized", f"It refuses {sent}.", health=health)
    if path != "/health" and not answer.is_success:
        raise _foreign(answer, health)
    return answer


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _foreign(answer)
    return body


def _foreign(answer: httpx.Response, health: int | None = None) -> _HopError:
    who = answer.headers.get("server")
    by = f" by {who}" if who else ""
    text = (
        f"It is not torchtpu-rs: {answer.url.path} is answered{by} with HTTP {answer.status_code}."
    )
    return _HopError("foreign", text, health=health)

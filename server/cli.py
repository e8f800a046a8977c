"""The `torchtpu-rs` command: flags and `TORCHTPU_*` become settings, once, and go to what does the work.

Every flag of `serve` can also be set in the environment; a flag wins. stdout is for data, everything else is stderr.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.logging import RichHandler

from models import EMBEDDED
from server import bench_commands, quantize_command
from server.engine import package_version
from server.errors import ApiError
from server.exits import EX_CONFIG, fail, key_in
from server.settings import Settings

app = typer.Typer(
    name="torchtpu-rs",
    help="Serve Gemma 4 with the model in Rust, on any PyTorch device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_commands.app)
app.add_typer(quantize_command.app)

Models = Annotated[
    list[str] | None,
    typer.Argument(
        envvar="TORCHTPU_MODEL",
        help="Checkpoint folders, GGUF files, Hub ids (org/name, org/name:Q4_K_M) or gemma3-270m, the model first. Default: the embedded model.",
        show_default=False,
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchtpu-rs {package_version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def serve(
    model: Models = None,
    host: Annotated[
        str, typer.Option(envvar="TORCHTPU_HOST", help="Address; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="TORCHTPU_PORT", help="0 takes a free one.")] = 8000,
    context: Annotated[
        int, typer.Option(envvar="TORCHTPU_CONTEXT", help="Tokens of prompt and answer together.")
    ] = 8192,
    device: Annotated[
        str, typer.Option(envvar="TORCHTPU_DEVICE", help="PyTorch device: cpu or tpu.")
    ] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(envvar="TORCHTPU_DTYPE", help="Default: the checkpoint's.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(envvar="TORCHTPU_THREADS", help="CPU threads of PyTorch.")
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            envvar="TORCHTPU_PREFILL_CHUNK", help="Static shapes, prompts in chunks of this length."
        ),
    ] = None,
    read_every: Annotated[
        int | None,
        typer.Option(envvar="TORCHTPU_READ_EVERY", help="Tokens between two reads by the host."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(envvar="TORCHTPU_MODE", help="Steps on tpu: compiled, fused or eager."),
    ] = None,
    simulate_tpu: Annotated[
        bool,
        typer.Option(envvar="TORCHTPU_SIMULATE_TPU", help="Run TorchTPU on this CPU, as tpu."),
    ] = False,
    weight_format: Annotated[
        str | None,
        typer.Option(envvar="TORCHTPU_WEIGHT_FORMAT", help="int8, on tpu. Default: as stored."),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(
            "--exact/--fast",
            envvar="TORCHTPU_EXACT",
            help="On cpu: transformers' bits, or kernels of our own. Default: fast for quantized weights, exact for others.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(envvar="TORCHTPU_SLOTS", help="Rows of a compiled decode step.")
    ] = 8,
    compile_cache: Annotated[
        str | None,
        typer.Option(
            envvar="TORCHTPU_COMPILE_CACHE",
            help="Folder that keeps compiled programs; empty keeps none.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TORCHTPU_SERVED_MODEL_NAME",
            help="Name in the API; repeat for aliases.",
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(envvar="TORCHTPU_MAX_QUEUE", help="Requests that may wait.")
    ] = 64,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TORCHTPU_API_KEY", help="Ask for this key.", show_default=False),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TORCHTPU_API_KEY_FILE",
            help="The same, in a file: systemd's credentials come as files.",
            show_default=False,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TORCHTPU_CORS_ORIGIN",
            help="Origin allowed besides localhost; repeatable; * for all.",
            show_default=False,
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page/--no-page", envvar="TORCHTPU_PAGE", help="Give browsers the chat page at /."
        ),
    ] = True,
    drain_seconds: Annotated[
        float,
        typer.Option(envvar="TORCHTPU_DRAIN_SECONDS", help="Time for answers after SIGTERM."),
    ] = 20.0,
    ping_seconds: Annotated[
        float,
        typer.Option(envvar="TORCHTPU_PING_SECONDS", help="Silence before a stream's comment."),
    ] = 15.0,
    max_body_bytes: Annotated[
        int, typer.Option(envvar="TORCHTPU_MAX_BODY_BYTES", help="Largest request body.")
    ] = 4 * 1024 * 1024,
    log_level: Annotated[
        str, typer.Option(envvar="TORCHTPU_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Serve the model over HTTP until a signal."""
    from server.serving import serve as run_server

    try:
        settings = Settings.model_validate(
            {
                "model": _models(model),
                "served_model_name": tuple(served_model_name or ()),
                "host": host,
                "port": port,
                "context": context,
                "device": device,
                "dtype": dtype,
                "threads": threads,
                "read_every": read_every,
                "prefill_chunk": prefill_chunk,
                "mode": mode,
                "simulate_tpu": simulate_tpu,
                "weight_format": weight_format,
                "exact": exact,
                "slots": slots,
                "compile_cache": compile_cache,
                "max_queue": max_queue,
                "api_key": api_key or key_in(api_key_file),
                "cors_origin": tuple(cors_origin or ()),
                "page": page,
                "drain_seconds": drain_seconds,
                "ping_seconds": ping_seconds,
                "max_body_bytes": max_body_bytes,
                "log_level": log_level,
            }
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        message = problem["msg"].removeprefix("Value error, ")
        where = problem["loc"]
        named = f"--{str(where[0]).replace('_', '-')}: {message}" if where else message
        fail(named, EX_CONFIG)
    console = Console(stderr=True)
    _set_up_logging(settings.log_level, console)
    try:
        code = run_server(settings, console)
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error.strerror or error}")
    raise typer.Exit(code)


@app.command()
def chat(
    url: Annotated[
        str, typer.Option(envvar="TORCHTPU_URL", help="The server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first one served.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TORCHTPU_API_KEY", show_default=False)
    ] = None,
) -> None:
    """Chat in the terminal with a server that runs."""
    from server.terminal import run

    base_url = url.rstrip("/").removesuffix("/v1")
    raise typer.Exit(run(base_url, model, system, Console(), input, api_key=api_key))


@app.command()
def render(
    file: Annotated[str, typer.Argument(help="Messages or a chat request as JSON; - is stdin.")],
    model: Annotated[
        str | None, typer.Option(envvar="TORCHTPU_MODEL", help="Default: the embedded model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="text and token_ids as JSON.")] = False,
) -> None:
    """Print the exact prompt and token ids a chat request would be."""
    from server.admission import render_chat
    from server.checkpoint import resolve
    from server.loading import load_text_side
    from server.protocol import ChatRequest, parse_json, parse_request

    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        # A bare list of messages is the request's messages.
        listed = raw.lstrip().startswith(b"[")
        body = parse_json(b'{"messages":' + raw + b"}" if listed else raw)
        text = load_text_side(resolve(_models([model] if model else None))[0])
        rendered = render_chat(parse_request(ChatRequest, body), text)
    except (ApiError, OSError, ValueError) as error:
        fail(str(error))
    if as_json:
        shown: dict[str, Any] = {"text": rendered.text, "token_ids": rendered.token_ids}
        typer.echo(json.dumps(shown, ensure_ascii=False))
    else:
        typer.echo(rendered.text)
        typer.echo(rendered.token_ids)


@app.command()
def smoke(
    device: Annotated[str, typer.Option(envvar="TORCHTPU_DEVICE")] = "cpu",
) -> None:
    """Run one Rust operation on the device and check its result and where it is."""
    from server.engine import smoke as run_smoke

    try:
        line = run_smoke(device)
    except (RuntimeError, ImportError) as error:
        fail(f"expected {device} to compute, found: {error}")
    typer.echo(line)
    if f"matmul_sum 512.0 on {device}" not in line:
        fail(f"expected matmul_sum 512.0 on {device}")
    typer.echo(f"{device.partition(':')[0].upper()} smoke OK")


@app.command()
def doctor(
    model: Models = None,
    device: Annotated[str, typer.Option(envvar="TORCHTPU_DEVICE")] = "cpu",
    simulate_tpu: Annotated[bool, typer.Option(envvar="TORCHTPU_SIMULATE_TPU")] = False,
    context: Annotated[int, typer.Option(envvar="TORCHTPU_CONTEXT")] = 8192,
    dtype: Annotated[str | None, typer.Option(envvar="TORCHTPU_DTYPE")] = None,
    weight_format: Annotated[str | None, typer.Option(envvar="TORCHTPU_WEIGHT_FORMAT")] = None,
    exact: Annotated[
        bool | None, typer.Option("--exact/--fast", envvar="TORCHTPU_EXACT", show_default=False)
    ] = None,
    slots: Annotated[int, typer.Option(envvar="TORCHTPU_SLOTS")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Check torch, TorchTPU, the device, threads, memory and the checkpoint; exit 1 if serving would fail."""
    from server.doctor import Load, examine, lines

    load = Load(device, context, dtype, weight_format == "int8", exact, slots)
    report = examine(_models(model), load, simulate_tpu=simulate_tpu)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        for line in lines(report):
            typer.echo(line)
    raise typer.Exit(0 if report["ok"] else 1)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="torchtpu-rs")


def _models(given: list[str] | None) -> tuple[str, ...]:
    return tuple(given) if given else (str(EMBEDDED),)


def _set_up_logging(level: str, console: Console) -> None:
    if console.is_terminal:
        # Through the console, so that lines and progress bars do not tear each other.
        handler: logging.Handler = RichHandler(console=console, show_path=False, markup=False)
        form = "%(message)s"
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form, handlers=[handler], force=True)
    # Its start and stop lines repeat ours.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
    logging.getLogger("httpx").setLevel(logging.WARNING)

"""The `torchtpu-rs` command: flags and `TORCHTPU_*` become settings, once, and go to what does the work.

Every flag of `serve` can also be set in the environment; a flag wins. stdout is for data, everything else is stderr.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.logging import RichHandler

from models import EMBEDDED
from server.engine import package_version
from server.errors import ApiError
from server.settings import Settings

app = typer.Typer(
    name="torchtpu-rs",
    help="Serve Gemma 4 with the model in Rust, on any PyTorch device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

EX_CONFIG = 78
"""Settings are wrong (sysexits.h): starting again would change nothing, and systemd can be told so."""

Models = Annotated[
    list[str] | None,
    typer.Argument(
        envvar="TORCHTPU_MODEL",
        help="Checkpoint folders or Hub ids, the model first. Default: the embedded model.",
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
                "api_key": api_key or _key_in(api_key_file),
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
        _fail(named, EX_CONFIG)
    console = Console(stderr=True)
    _set_up_logging(settings.log_level, console)
    try:
        code = run_server(settings, console)
    except OSError as error:
        _fail(f"cannot listen on {host}:{port}: {error.strerror or error}")
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
        _fail(str(error))
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
        _fail(f"expected {device} to compute, found: {error}")
    typer.echo(line)
    if f"matmul_sum 512.0 on {device}" not in line:
        _fail(f"expected matmul_sum 512.0 on {device}")
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


@app.command()
def bench(
    url: Annotated[str, typer.Argument(help="The endpoint: torchtpu-rs, llama.cpp's, vLLM's, …")],
    model: Annotated[str | None, typer.Option(help="Default: the first one served.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TORCHTPU_API_KEY", show_default=False)
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(envvar="TORCHTPU_API_KEY_FILE", show_default=False)
    ] = None,
    only: Annotated[
        str, typer.Option(help="A part: published (one at a time, then streamed) or load.")
    ] = "published,load",
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable, for the streams in turn; the first is asked one at a time too.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="One at a time.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 100,
    concurrency: Annotated[str, typer.Option(help="Callers of each level of load.")] = "1,2,4,8",
    rate: Annotated[
        str, typer.Option(help="Requests a second of each level, instead of callers who wait.")
    ] = "",
    requests_per_level: Annotated[
        int | None, typer.Option(help="Default: 4 a caller, at least 8; 32 at a rate.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of each level, instead of so many requests.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Of each caller, before each level.")] = 1,
    body: Annotated[
        str, typer.Option(help='Fields for each request, as JSON: {"temperature": 0}.')
    ] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds for an answer.")] = 300.0,
    usd_per_hour: Annotated[
        float | None, typer.Option(help="Price of the machine: tells what a million tokens cost.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all that was measured; - is stdout.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="File for a plot: x.svg, x.png, …")
    ] = None,
) -> None:
    """Measure how fast an OpenAI endpoint answers, one request at a time and under load."""
    from bench.load import command
    from bench.load.wire import BenchmarkError

    options = {
        "parts": only,
        "prompts": prompt,
        "requests": requests,
        "max_tokens": max_tokens,
        "concurrency": concurrency,
        "rates": rate,
        "requests_per_level": requests_per_level,
        "duration_seconds": duration,
        "warmup": warmup,
        "fields": body,
        "timeout_seconds": timeout,
        "model": model,
    }
    try:
        code = command.run(
            url,
            api_key or _key_in(api_key_file),
            command.settings(options),
            usd_per_hour=usd_per_hour,
            json_file=json_file,
            plot_file=plot_file,
        )
    except BenchmarkError as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A file of `bench --json`.")],
    second: Annotated[Path, typer.Argument(help="Another: ratios are of this to the first.")],
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="File for a plot of both: x.svg, x.png, …")
    ] = None,
) -> None:
    """Compare two results of bench, figure by figure."""
    from bench.load import command
    from bench.load.wire import BenchmarkError

    try:
        command.compare(first, second, plot_file)
    except BenchmarkError as error:
        _fail(str(error))


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


def _key_in(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"--api-key-file: expected a file with a key, found {file}: {error}", EX_CONFIG)
    if not key:
        _fail(f"--api-key-file: expected a key in {file}, found an empty file", EX_CONFIG)
    return key


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)

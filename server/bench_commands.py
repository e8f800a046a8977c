"""The options of `torchtpu-rs bench` and `torchtpu-rs compare`; what they do is bench/load/command.py's."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations when it runs
from typing import Annotated

import typer

from server.exits import fail, key_in

app = typer.Typer()


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
            api_key or key_in(api_key_file),
            command.settings(options),
            usd_per_hour=usd_per_hour,
            json_file=json_file,
            plot_file=plot_file,
        )
    except BenchmarkError as error:
        fail(str(error))
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
        fail(str(error))

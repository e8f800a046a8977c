"""`torchtpu-rs bench` and `torchtpu-rs compare` without their options: run, show, write. The options are server/bench_commands.py's.

What was measured is written whatever ends the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console

from bench.load import comparison, identity, plot, published, wire
from bench.load.display import Display
from bench.load.result import Client, Result, Settings, now, read
from bench.load.sweep import sweep
from bench.load.wire import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INTERRUPTED = 130
STDOUT = "-"
OPTIONS = {
    "parts": "only",
    "prompts": "prompt",
    "rates": "rate",
    "duration_seconds": "duration",
    "timeout_seconds": "timeout",
    "fields": "body",
}
"""Settings that are called otherwise on the command line."""


def settings(options: Mapping[str, Any]) -> Settings:
    """Settings from options as they are typed: several values with commas between, fields as JSON; None is not given.

    Raises:
        BenchmarkError: an option is wrong; the text names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("parts", "concurrency", "rates"):
        given[name] = [part.strip() for part in given[name].split(",") if part.strip()]
    if given.get("prompts"):
        given["prompt"] = given["prompts"][0]
    else:
        given.pop("prompts", None)
    try:
        given["fields"] = json.loads(given["fields"])
    except ValueError as error:
        raise BenchmarkError(
            f"--body: expected a JSON object, found {given['fields']!r}"
        ) from error
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        option = f"--{OPTIONS.get(name, name).replace('_', '-')}: " if name else ""
        raise BenchmarkError(f"{option}{first['msg'].removeprefix('Value error, ')}") from error


def run(
    url: str,
    api_key: str | None,
    settings: Settings,
    *,
    usd_per_hour: float | None = None,
    json_file: Path | None = None,
    plot_file: Path | None = None,
) -> int:
    """Measure, show and write; the exit code: 1 where a part could not be measured, 130 after Ctrl-C.

    Raises:
        BenchmarkError: nothing could be measured, or what is wanted cannot be written.
    """
    _check_files(settings, json_file, plot_file)
    # stdout is the JSON's, if it is to be there.
    console = Console(stderr=str(json_file) == STDOUT)
    display = Display(console, settings)
    measured = _Measured(url, api_key, settings, usd_per_hour, display)
    code, fault = 0, None
    try:
        asyncio.run(measured.all())
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BenchmarkError as error:
        fault = error
    if measured.result is None:
        if fault:
            raise fault
        return code
    display.ends(measured.result)
    write(measured.result, json_file)
    if plot_file is not None and measured.result.levels:
        plot.draw({measured.result.endpoint.model: measured.result}, plot_file)
    if fault:
        raise fault
    return code or int(any(not level.completed for level in measured.result.levels))


def _check_files(settings: Settings, json_file: Path | None, plot_file: Path | None) -> None:
    """Before the minutes of measuring, not after them."""
    if plot_file is not None:
        if "load" not in settings.parts:
            raise BenchmarkError("--plot: expected the load protocol to be run, found it left out")
        plot.check()
    for file in (json_file, plot_file):
        if file is not None and str(file) != STDOUT and not file.parent.is_dir():
            raise BenchmarkError(f"expected the folder of {file} to be there, found none")


def write(result: Result, file: Path | None) -> None:
    """The JSON, to a file or to stdout."""
    if file is None:
        return
    text = result.model_dump_json(indent=1) + "\n"
    if str(file) == STDOUT:
        sys.stdout.write(text)
    else:
        file.write_text(text)


def compare(first: Path, second: Path, plot_file: Path | None = None) -> None:
    """Two results' figures with ratios, what makes them doubtful, and a plot of both.

    Raises:
        BenchmarkError: a file is no result, the two have no figure in common, or no plot can be drawn.
    """
    one, other = read(first), read(second)
    console = Console()
    for name, file, result in (("first ", first, one), ("second", second, other)):
        text = f"{name} {file}: {result.endpoint}, {result.date:%Y-%m-%d %H:%M} UTC"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for text in comparison.warnings(one, other):
        console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
    rows = comparison.rows(one, other)
    if not rows:
        raise BenchmarkError("expected two results with figures in common, found none")
    console.print(comparison.table(rows))
    if plot_file is not None:
        names = (first.stem, second.stem)
        if first.stem == second.stem:
            names = (str(first), str(second))
        plot.draw(dict(zip(names, (one, other), strict=True)), plot_file)


class _Measured:
    """A run as far as it came."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        settings: Settings,
        usd_per_hour: float | None,
        display: Display,
    ) -> None:
        self._url, self._api_key = wire.address(url), api_key
        self._settings, self._usd_per_hour = settings, usd_per_hour
        self._display = display
        self.result: Result | None = None

    async def all(self) -> None:
        """Both protocols."""
        settings, display = self._settings, self._display
        async with wire.client(self._url, self._api_key) as client:
            endpoint = await identity.identify(client, settings.model)
            display.endpoint(endpoint)
            # The request names the model that the result names.
            settings = settings.model_copy(update={"model": endpoint.model})
            result = Result(
                date=now(),
                complete=False,
                endpoint=endpoint,
                client=Client.here(),
                settings=settings,
                usd_per_hour=self._usd_per_hour,
            )
            if "published" in settings.parts:
                found = await published.measure(
                    client,
                    settings.ask(),
                    display.request,
                    requests=settings.requests,
                    prompt=settings.prompt,
                    prompts=settings.prompts,
                    timeout_seconds=settings.timeout_seconds,
                )
                display.published(found)
                self.result = result = result.model_copy(update={"published": found})
            if "load" in settings.parts:
                with display.load():
                    async for level in sweep(client, settings, display.begins):
                        display.level(level)
                        levels = (*result.levels, level)
                        self.result = result = result.model_copy(update={"levels": levels})
            is_complete = "load" not in settings.parts or len(result.levels) == len(
                settings.loads()
            )
            self.result = result.model_copy(update={"complete": is_complete})

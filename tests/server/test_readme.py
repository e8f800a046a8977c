"""The README's curl lines, run as they stand there against a server that runs here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from models import EMBEDDED
from tests.fakes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]

README = Path(__file__).parents[2] / "README.md"


def curl_lines() -> list[str]:
    """Every curl command of the README's code blocks that speaks to the default address, without what it is piped to."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    commands = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines = [line.strip().removeprefix("$ ") for line in commands]
    return [
        line
        for line in lines
        if line.startswith("curl ") and re.search(r"(127\.0\.0\.1|localhost):8000", line)
    ]


@pytest.mark.parametrize("line", curl_lines())
def test_a_curl_line_of_the_readme_works(serve: Callable[..., Live], line: str) -> None:
    curl = shutil.which("curl")
    assert curl is not None, "expected curl, which the README's lines begin with, found none"
    live = serve(served_model_name=(EMBEDDED.name,))
    live.script("Hello there.")
    line = re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{live.port}", line)
    arguments = shlex.split(line)[1:]
    if "|" in arguments:
        arguments = arguments[: arguments.index("|")]
    result = subprocess.run(
        [curl, "-sS", "--fail-with-body", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    if result.stdout.startswith("data: "):
        assert result.stdout.endswith("data: [DONE]\n\n")
    elif result.stdout.startswith("{"):
        assert "error" not in json.loads(result.stdout)

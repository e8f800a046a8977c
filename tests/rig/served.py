"""The server that a VM runs, here: `torchtpu-rs serve` on the embedded model, with a key. Use with `pytest_plugins = ["tests.rig.served"]`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from rig.settings import ROOT
from tests.fakes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

KEY = "the-vms-own-key"


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    key: str

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real server, ready. It has no other state than counters."""
    key_file = tmp_path_factory.mktemp("server") / "key"
    key_file.write_text(KEY)
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--api-key-file", str(key_file)]  # fmt: skip
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        end = threading.Timer(2 * PATIENCE_SECONDS, process.kill)
        end.start()
        try:
            url = _ready(process.stderr)
            end.cancel()
            # Its log would stop it when the pipe is full.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Served(url, KEY)
        finally:
            end.cancel()
            process.kill()


def _ready(log: IO[str]) -> str:
    lines = []
    for line in log:
        lines.append(line)
        if found := re.search(r"ready in .* at (http://\S+)/v1", line):
            return found[1]
    raise AssertionError("the server did not come up:\n" + "".join(lines))

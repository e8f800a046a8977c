"""The README's pictures, made from the real thing (`make pictures`): the chat page, a boot, and a load benchmark of the embedded model.

Needs root and systemd for the boot, and Chromium for the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from rig import display
from tests.boot import test_boot as boot

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).with_name("pictures")
PROMPTS = ("Hello! My name is Ada.", "Write a short paragraph about the ocean.")
START_SECONDS = 120.0


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of a server of the embedded model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "server", "serve", "--fast", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").is_success:
                        break
                if time.monotonic() > end:
                    raise TimeoutError(f"expected a server in {START_SECONDS:g} s, found none")
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def page(url: str) -> None:
    """A short chat, with the status panel."""
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 760})
        tab.goto(url)
        for number, prompt in enumerate(PROMPTS, 1):
            tab.locator("#say").fill(prompt)
            tab.locator("#say").press("Enter")
            tab.wait_for_function(
                "n => document.body.innerText.split('first token after').length > n", arg=number
            )
        tab.get_by_role("button", name=re.compile("ready", re.IGNORECASE)).click()
        tab.wait_for_timeout(3000)
        tab.screenshot(path=FOLDER / "page.png")
        browser.close()


def stages() -> None:
    """What `torchtpu-rig watch` shows of a boot that is done."""
    with tempfile.TemporaryDirectory() as folder, boot.asked_for(Path(folder)) as (vm, rig):
        if not vm.boot().is_done:
            raise RuntimeError(vm.log)
        shown = display.moving(rig.status(), boot.SETTINGS)
    console = Console(record=True, width=72, file=io.StringIO())
    console.print(shown)
    # Rich's frame names fonts at an address; the reader's own will do.
    frame = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(FOLDER / "boot.svg"), title="torchtpu-rig watch", code_format=frame)


def load(url: str) -> None:
    """Rates and waits of the embedded model over callers at once."""
    command = [sys.executable, "-m", "server", "bench", url, "--only", "load", "--plot"]
    subprocess.run([*command, str(FOLDER / "load.svg")], check=True)


def main() -> None:
    """All three."""
    if reason := boot.lacking():
        raise SystemExit(f"a machine to boot {reason}")
    FOLDER.mkdir(exist_ok=True)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    with served() as url:
        page(url)
        load(url)
    stages()


if __name__ == "__main__":
    main()

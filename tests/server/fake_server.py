"""A server process around a `FakeEngine`, for tests that need signals and exit codes.

`python -m tests.server.fake_server SETTINGS_JSON` says "one", waits for a line on stdin, and says "two".
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from server.serving import serve
from server.settings import Settings
from server.tokenizer import Tokenizer
from tests.fakes import FakeEngine, Gate
from tests.server.live_server import FakeLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes import Item


def main() -> int:
    """Serve until a signal; the exit code is the server's."""
    settings = Settings.model_validate_json(sys.argv[1])
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s", stream=sys.stderr)
    gate = Gate()

    def play(_ids: Sequence[int]) -> list[Item]:
        if loader.text is None:
            return [*[300] * 3]  # the warmup
        encode = loader.text.tokenizer.encode_text
        return [*encode("one"), gate, *encode("two")]

    def open_on_line() -> None:
        sys.stdin.readline()
        gate.open()

    threading.Thread(target=open_on_line, daemon=True).start()
    folder = Path(settings.model[0])
    vocab_size = Tokenizer.from_folder(folder).vocab_size
    engine = FakeEngine(play=play, context=settings.context, vocab_size=vocab_size)
    loader = FakeLoader(settings, engine)
    return serve(settings, Console(stderr=True), loader)


if __name__ == "__main__":
    raise SystemExit(main())

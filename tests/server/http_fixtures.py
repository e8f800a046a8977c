"""Fixtures for tests that talk HTTP: `live` is a server with defaults, `serve` makes others.

Use with `pytest_plugins = ["tests.server.http_fixtures"]`.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from server.settings import Settings
from server.tokenizer import Tokenizer
from tests.fakes import FakeEngine, Gate
from tests.server.live_server import Live, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    """A checkpoint folder whose text side is real and whose weights nobody reads."""
    folder = tmp_path_factory.mktemp("models") / "tiny-gemma"
    shutil.copytree(text_folder, folder)
    (folder / "config.json").write_text('{"architectures": ["Gemma4ForCausalLM"]}', "utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture(scope="session")
def vocab_size(text_folder: Path) -> int:
    """Rows the fake engine has: as many as the tokenizer knows."""
    return Tokenizer.from_folder(text_folder).vocab_size


@pytest.fixture
def serve(model_folder: Path, vocab_size: int) -> Iterator[Callable[..., Live]]:
    """Makes servers with settings of their own and stops them after the test."""
    with contextlib.ExitStack() as stack:

        def start(*, gate: Gate | None = None, context: int = 256, **settings: Any) -> Live:
            engine = FakeEngine(context=context, vocab_size=vocab_size)
            made = Live(
                Settings(model=(str(model_folder),), context=context, **settings), engine, gate
            )
            stack.callback(made.close)
            return made if gate is not None else made.wait_until_ready()

        yield start


@pytest.fixture(scope="session")
def shared_live(model_folder: Path, vocab_size: int) -> Iterator[Live]:
    """The server behind `live`, started once."""
    engine = FakeEngine(context=256, vocab_size=vocab_size)
    with contextlib.closing(
        Live(Settings(model=(str(model_folder),), context=256), engine)
    ) as made:
        yield made.wait_until_ready()


@pytest.fixture
def live(shared_live: Live) -> Live:
    """A server with default settings, idle, that says `Hello there.`"""
    eventually(lambda: not shared_live.service.active, "the server is idle")
    shared_live.engine.play = None
    shared_live.engine.calls.clear()
    shared_live.engine.finishes.clear()
    shared_live.http.cookies.clear()
    shared_live.script("Hello there.")
    return shared_live

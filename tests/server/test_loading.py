"""From the first phase to ready: what health, models and requests say meanwhile, and what a failed load says."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

from rich.console import Console

from server.loading import ONE_THREAD_BYTES, ModelLoader, default_threads
from server.loading_display import LoadingDisplay
from server.settings import Settings
from server.worker import Progress
from tests.fakes import FakeEngine, Gate
from tests.server.live_server import SAY_HI, FakeLoader, assert_openai_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]


def test_while_it_loads_health_says_how_far_and_requests_may_come_back(
    serve: Callable[..., Live],
) -> None:
    gate = Gate()
    live = serve(gate=gate)
    gate.wait_until_reached()
    for path in ("/health", "/v1/health", "/ready"):
        response = live.http.get(path)
        assert response.status_code == 503
        body = response.json()
        assert body.pop("elapsed_seconds") >= 0
        assert body == {
            "status": "loading",
            "phase": "weights",
            "progress": 0.5,
            "done": 2,
            "total": 4,
        }
        assert "retry-after" in response.headers
        assert live.http.head(path).status_code == 503
    assert live.http.get("/live").status_code == 200
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/v1/chat/completions/render",
    ):
        response = live.http.post(path, json={"messages": SAY_HI, "prompt": "x"})
        assert_openai_error(response, 503, code="model_loading")
        assert "retry-after" in response.headers
    model = live.http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny-gemma", None)
    engine = live.http.get("/v1/engine").json()
    assert (engine["status"], engine["phase"], engine["progress"]) == ("loading", "weights", 0.5)
    assert live.http.get("/metrics").status_code == 200
    gate.open()
    live.wait_until_ready()
    assert live.http.get("/health").json() == {"status": "ok"}
    assert live.chat().status_code == 200


def test_a_load_that_fails_ends_the_server_with_an_error(serve: Callable[..., Live]) -> None:
    gate = Gate()
    live = serve(gate=gate)
    gate.wait_until_reached()
    live.engine.decode = None  # type: ignore[method-assign,assignment]
    gate.open()
    assert live.ended.wait(30)
    assert live.server.exit_code == 1
    assert isinstance(live.service.worker.failure, TypeError)
    assert live.service.health()["status"] == "failed"


def test_the_loader_warms_up_the_engine_and_measures_both(model_folder: Path) -> None:
    seen: list[Progress] = []
    engine = FakeEngine([300, 301, 302])
    loader = FakeLoader(Settings(model=(str(model_folder),)), engine)
    assert loader(seen.append) is engine
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases == ["files", "weights", "warmup"]
    assert [p.fraction for p in seen if p.phase == "weights"] == [0, 0, 0.25, 0.5, 0.75, 1]
    # <bos>, three tokens, no end: prefill and more than one step.
    call = engine.calls[0]
    assert (call.token_ids, call.max_new, call.stop) == ((2,), 3, ())
    assert loader.load_seconds == 0.125
    assert loader.text is not None


def test_names_are_the_folders_or_what_was_asked_for(model_folder: Path) -> None:
    assert ModelLoader(Settings(model=(str(model_folder),))).names == ("tiny-gemma",)
    assert ModelLoader(Settings(model=("google/gemma-4-E2B-it",))).names == (
        "google/gemma-4-E2B-it",
    )
    named = Settings(model=(str(model_folder),), served_model_name=("a", "b/c"))
    assert ModelLoader(named).names == ("a", "b/c")


def test_without_a_terminal_loading_is_a_line_for_each_quarter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    display = LoadingDisplay(Console(file=io.StringIO(), force_terminal=False))
    display(Progress("files"))
    for done in range(101):
        display(Progress("weights", done, 100))
    display(Progress("warmup"))
    display(Progress("ready", 1, 1))
    assert [record.message for record in caplog.records] == [
        "finding the checkpoint",
        "loading weights 0%",
        "loading weights 25%",
        "loading weights 50%",
        "loading weights 75%",
        "loading weights 100%",
        "warming up",
    ]


def test_in_a_terminal_loading_is_bars() -> None:
    screen = io.StringIO()
    display = LoadingDisplay(Console(file=screen, force_terminal=True, width=100))
    display(Progress("files"))
    for done in range(5):
        display(Progress("weights", done, 4))
    display(Progress("warmup"))
    display(Progress("ready", 1, 1))
    assert "loading weights" in screen.getvalue()
    assert "4/4" in screen.getvalue()
    assert "warming up" in screen.getvalue()


def test_bars_left_open_by_a_failure_are_closed() -> None:
    screen = io.StringIO()
    display = LoadingDisplay(Console(file=screen, force_terminal=True))
    display(Progress("weights", 1, 4))
    display(Progress("failed", 1, 4))
    display.close()
    # The cursor, hidden while bars are drawn, is shown again.
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_small_model_gets_one_thread_and_a_large_one_what_pytorch_takes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * 1024)
    assert default_threads([tmp_path], "cpu") == 1
    assert default_threads([tmp_path], "tpu") is None
    with file.open("wb") as large:
        large.truncate(ONE_THREAD_BYTES)  # a hole in the file: no disk is used
    assert default_threads([tmp_path], "cpu") is None

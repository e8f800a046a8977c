"""The page when things go wrong or take their time: queues, loading, keys, broken streams, dead servers, hostile text."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import expect
from starlette.responses import JSONResponse

from models import EMBEDDED
from server.settings import Settings
from server.tokenizer import Tokenizer
from tests.fakes import PATIENCE_SECONDS, FakeEngine, Gate
from tests.page.scripted import DONE, Scripted, delta, end, running
from tests.page.talk import (
    answers,
    ask,
    grown,
    last,
    make_long,
    make_short,
    press,
    reload,
    say,
    wait,
)
from tests.server.live_server import Live, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.page.conftest import Watched

VOCABULARY = 2560


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """An endpoint that says what the test wrote."""
    with running() as server:
        yield server


@pytest.fixture
def tab(watch: Callable[..., Watched], scripted: Scripted) -> Page:
    """The page on that endpoint."""
    return watch(scripted.url).open("/")


def started(stack: contextlib.ExitStack, gate: Gate | None = None, **settings: Any) -> Live:
    """A server around a scripted engine that ends with the block."""
    engine = FakeEngine(vocab_size=VOCABULARY)
    given = Settings.model_validate({"model": [str(EMBEDDED)], **settings})
    live = Live(given, engine, gate)
    stack.callback(live.close)
    return live if gate is not None else live.wait_until_ready()


def note(tab: Page) -> Any:
    return last(tab).locator(".note")


def test_a_place_in_the_queue_is_told_while_it_lasts(
    watch: Callable[..., Watched], pictures: Path
) -> None:
    gate = Gate()
    with contextlib.ExitStack() as stack:
        live = started(stack)
        live.script(gate, "Done.")
        first = stack.enter_context(contextlib.closing(live.open_chat(stream=True)))
        gate.wait_until_reached()
        tab = watch(live.url).open("/")
        say(tab, "Hello!")
        expect(note(tab)).to_have_text("In the queue: 1 running, 1 waiting, this one among them.")
        tab.screenshot(path=pictures / "queue.png")
        gate.open()
        wait(tab)
        assert answers(tab) == ["Done."]
        expect(last(tab).locator(".facts")).to_contain_text("of it in the queue")
        first.close()


def test_a_server_that_is_full_is_asked_again(watch: Callable[..., Watched]) -> None:
    gate = Gate()
    with contextlib.ExitStack() as stack:
        live = started(stack, max_queue=0)
        live.script(gate, "Done.")
        first = stack.enter_context(contextlib.closing(live.open_chat(stream=True)))
        gate.wait_until_reached()
        tab = watch(live.url).open("/")
        say(tab, "Hello!")
        expect(note(tab)).to_have_text(
            re.compile(r"0 requests wait already; try again soon\. Asking again in \d s\.")
        )
        gate.open()
        while first.recv(65536):
            pass
        wait(tab)
        assert answers(tab) == ["Done."]


def test_a_server_that_loads_says_how_far_it_is_and_answers_then(
    watch: Callable[..., Watched], pictures: Path
) -> None:
    gate = Gate()
    with contextlib.ExitStack() as stack:
        live = started(stack, gate)
        gate.wait_until_reached()
        tab = watch(live.url).open("/")
        expect(tab.locator("#trouble-text")).to_have_text("Loading the model: weights 50 %")
        expect(tab.locator("#progress")).to_have_attribute("value", "0.5")
        live.engine.script = Tokenizer.from_folder(EMBEDDED).encode_text("Loaded.")
        say(tab, "Hello!")
        expect(note(tab)).to_have_text("Loading the model: weights 50 %")
        tab.screenshot(path=pictures / "loading.png")
        gate.open()
        live.wait_until_ready()
        wait(tab)
        assert answers(tab) == ["Loaded."]
        expect(tab.locator("#trouble")).to_be_hidden()


def test_stop_ends_the_waiting_for_a_server_that_loads(watch: Callable[..., Watched]) -> None:
    gate = Gate()
    with contextlib.ExitStack() as stack:
        live = started(stack, gate)
        stack.callback(gate.open)
        gate.wait_until_reached()
        tab = watch(live.url).open("/")
        say(tab, "Hello!")
        expect(note(tab)).to_contain_text("Loading")
        tab.keyboard.press("Escape")
        wait(tab)
        expect(note(tab)).to_have_text("Stopped.")


def test_the_key_is_asked_for_when_the_server_wants_one_and_forgotten_with_the_tab(
    watch: Callable[..., Watched],
) -> None:
    with contextlib.ExitStack() as stack:
        live = started(stack, api_key="s3cret-ü")
        live.script("Come in.")
        person = watch(live.url)
        tab = person.open("/")
        dialog = tab.get_by_role("dialog")
        expect(dialog).to_contain_text("This server asks for an API key")
        expect(tab.locator("#key-refused")).to_be_hidden()
        tab.get_by_role("textbox", name="API key").fill("wrong")
        tab.keyboard.press("Enter")
        expect(tab.locator("#key-refused")).to_be_visible()
        tab.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        say(tab, "Hello!")
        expect(dialog).to_be_visible()
        tab.get_by_role("textbox", name="API key").fill("s3cret-ü")
        tab.keyboard.press("Enter")
        wait(tab)
        assert answers(tab) == ["Come in."]
        assert "s3cret" not in tab.evaluate("JSON.stringify(localStorage)")
        reload(tab)
        assert ask(tab, "Hello again!") == "Come in."
        other = person.open("/")
        expect(other.get_by_role("dialog")).to_be_visible()


def test_without_a_key_the_servers_refusal_is_told(watch: Callable[..., Watched]) -> None:
    with contextlib.ExitStack() as stack:
        live = started(stack, api_key="secret")
        tab = watch(live.url).open("/")
        tab.get_by_role("button", name="Cancel").click()
        say(tab, "Hello!")
        tab.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        wait(tab)
        expect(note(tab)).to_contain_text("Missing or incorrect API key")
        # What asks by itself does not bother the person again.
        tab.click("#status")
        expect(tab.locator("#panel-problem")).to_contain_text("Missing or incorrect API key")
        expect(tab.get_by_role("dialog")).to_be_hidden()


def serve(port: int, log: Path) -> subprocess.Popen[bytes]:
    """The real command, as a process that can be killed."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "server", "serve", "--port", str(port)]
        return subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | {"TORCHTPU_PAGE": "1"}
        )


def wait_until_served(port: int) -> None:
    waiter = threading.Event()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
        for _ in range(int(PATIENCE_SECONDS / 0.1)):
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return
            waiter.wait(0.1)
    raise AssertionError("the server was never ready")


def test_a_server_that_dies_is_told_and_the_chat_goes_on_when_it_is_back(
    watch: Callable[..., Watched], pictures: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = serve(port, tmp_path / "log")
    try:
        wait_until_served(port)
        tab = watch(f"http://127.0.0.1:{port}").open("/")
        assert ask(tab, "Hello! My name is Ada.")
        make_long(tab)
        say(tab, "Write a short paragraph about the ocean.")
        grown(tab)
        server.send_signal(signal.SIGKILL)
        wait(tab)
        expect(note(tab)).to_have_text("Cut: The connection to the server broke.")
        expect(tab.locator("#trouble-text")).to_have_text(
            f"No server answers at 127.0.0.1:{port}. Looking again every second."
        )
        expect(tab.locator("#state")).to_have_text("No answer")
        tab.screenshot(path=pictures / "gone.png")
        press(tab, "Regenerate")
        expect(note(tab)).to_have_text(f"No server answers at 127.0.0.1:{port}.")
        server.wait(PATIENCE_SECONDS)
        server = serve(port, tmp_path / "log")
        wait_until_served(port)
        expect(tab.locator("#trouble")).to_be_hidden()
        expect(tab.locator("#said")).to_have_text("The server is back.")
        make_short(tab)
        press(tab, "Try again")
        wait(tab)
        assert answers(tab)[-1].startswith("The ocean covers")
        assert "Ada" in ask(tab, "What is my name?")
    finally:
        server.kill()
        server.wait(PATIENCE_SECONDS)


HOSTILE = """\
<script>window.ran = "script"</script>

<img src=x onerror="window.ran = 'img'"> and <svg onload="window.ran = 'svg'"></svg>

[one](javascript:window.ran='link') [two](data:text/html,<script>ran=1</script>) ![three](http://elsewhere.example/a.png)
<a href="javascript:window.ran='a'">four</a> [five](https://fine.example/) <iframe srcdoc="<script>parent.ran=1</script>"></iframe>

```html
<img src=x onerror="window.ran = 'code'">
```

| <b onclick="window.ran='b'">six</b> |
|---|
| H<sub>2</sub>O |
"""


def test_markup_in_messages_stays_text(tab: Page, scripted: Scripted) -> None:
    scripted.say(*[delta(content=piece) for piece in re.findall(r"(?s).{1,7}", HOSTILE)])
    say(tab, HOSTILE)
    wait(tab)
    reload(tab)
    expect(tab.locator(".message")).to_have_count(2)
    thread = tab.locator("#thread")
    for inert in ("script", "img", "iframe", "svg:not(.icon)", "b", "[onerror]", "[onclick]"):
        expect(thread.locator(inert)).to_have_count(0)
    assert tab.locator(".question .text").inner_text().strip() == HOSTILE.strip()
    prose = last(tab).locator("> .prose")
    expect(prose).to_contain_text('<script>window.ran = "script"</script>')
    expect(prose).to_contain_text("<img src=x onerror=\"window.ran = 'img'\">")
    expect(prose.locator("sub")).to_have_text("2")
    links = prose.locator("a")
    for link in links.all():
        link.evaluate("each => each.addEventListener('click', (event) => event.preventDefault())")
        link.dispatch_event("click")
    assert links.evaluate_all(
        "all => all.map(each => [each.innerText, each.getAttribute('href')])"
    ) == [
        ["one", None],
        ["two", None],
        ["three", "http://elsewhere.example/a.png"],
        ["five", "https://fine.example/"],
    ]
    assert (
        links.evaluate_all("all => all.map(each => [each.rel, each.target])")
        == [["noopener noreferrer", "_blank"]] * 4
    )
    assert tab.evaluate("window.ran") is None


def test_the_browser_itself_refuses_what_would_get_past_the_page(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    person = watch(scripted.url)
    tab = person.open("/")
    refused = tab.evaluate(
        """() => {
            const tried = [];
            try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.ran = 1'>"); }
            catch (error) { tried.push(error.name); }
            const script = document.createElement("script");
            try { script.text = "window.ran = 1"; document.body.append(script); } catch (error) { tried.push(error.name); }
            return fetch("http://127.0.0.1:1/").catch((error) => [...tried, error.name]);
        }"""
    )
    assert refused == ["TypeError", "TypeError", "TypeError"]
    assert tab.evaluate("window.ran") is None
    assert any("Content Security Policy" in fault for fault in person.faults)
    assert person.strangers == []
    person.faults.clear()


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ([], "Cut: The answer stopped before its end."),
        ([DONE], "Cut: The answer stopped before its end."),
        ([end()], "Cut: The answer stopped before its end."),
        (
            [{"error": {"message": "The server is shutting down."}}, DONE],
            "Cut: The server is shutting down.",
        ),
        (["{"], "Cut: The server sent what is no JSON."),
    ],
    ids=["silence", "no reason", "no done", "error", "broken"],
)
def test_a_stream_without_its_end_is_never_taken_for_whole(
    tab: Page, scripted: Scripted, ending: list[Any], told: str
) -> None:
    scripted.script = [[delta(role="assistant", content=""), delta(content="Half an "), *ending]]
    say(tab, "Hello!")
    wait(tab)
    expect(note(tab)).to_have_text(told)
    assert answers(tab) == ["Half an"]
    scripted.say(delta(content=" answer."))
    press(tab, "Continue")
    wait(tab)
    assert answers(tab) == ["Half an answer."]
    assert scripted.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "Half an"}
    expect(note(tab)).to_have_text("")


def test_a_refusal_without_openais_form_is_told_by_its_number(
    tab: Page, scripted: Scripted
) -> None:
    scripted.script = [
        JSONResponse({"detail": "?"}, 502),
        JSONResponse({"error": "no such host"}, 504),
    ]
    say(tab, "Hello!")
    wait(tab)
    expect(note(tab)).to_have_text("The server answered 502 Bad Gateway.")
    press(tab, "Try again")
    wait(tab)
    expect(note(tab)).to_have_text("no such host")


def test_a_server_that_asks_for_patience_gets_it(tab: Page, scripted: Scripted) -> None:
    busy = {"error": {"message": "Too many requests.", "type": "rate_limit_error"}}
    scripted.script = [
        JSONResponse(busy, 429, headers={"retry-after": "2"}),
        [delta(content="Now."), end(), DONE],
    ]
    say(tab, "Hello!")
    expect(note(tab)).to_have_text(re.compile(r"Too many requests\. Asking again in \d s\."))
    wait(tab)
    assert answers(tab) == ["Now."]
    assert len(scripted.bodies) == 2


def test_thoughts_are_folded_and_calls_are_shown_as_calls(
    tab: Page, scripted: Scripted, pictures: Path
) -> None:
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    pieces = ['{"city": ', '"<b>Paris</b>"}']
    more = [delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}]) for piece in pieces]
    scripted.script = [
        [
            delta(reasoning_content="They ask for "),
            delta(reasoning_content="the **weather**."),
            delta(content="I look it up."),
            delta(tool_calls=[call]),
            *more,
            end(
                "tool_calls",
                timings={"predicted_n": 9, "predicted_per_second": 4.25, "prompt_ms": 1200},
            ),
            DONE,
        ]
    ]
    assert ask(tab, "How is the weather in Paris?") == "I look it up."
    thoughts = last(tab).locator("details")
    expect(thoughts).not_to_have_attribute("open", "")
    thoughts.locator("summary").click()
    expect(thoughts.locator(".prose")).to_have_text("They ask for the weather.")
    expect(last(tab).locator(".calls")).to_contain_text("Tool call: get_weather")
    expect(last(tab).locator(".calls pre")).to_have_text(
        '{\n  "city": "<b>Paris</b>"\n}', use_inner_text=True
    )
    expect(last(tab).locator(".facts")).to_have_text(
        "9 tokens · 4.3 tokens/s · first token after 1.2 s"
    )
    tab.screenshot(path=pictures / "call.png")
    scripted.say(delta(content="Fine."))
    ask(tab, "And now?")
    arguments = '{"city": "<b>Paris</b>"}'
    assert scripted.bodies[-1]["messages"][1] == {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": arguments},
            }
        ],
    }


def test_a_vm_that_boots_says_its_stages(
    watch: Callable[..., Watched], scripted: Scripted, pictures: Path
) -> None:
    scripted.health = {"error": {"message": "The VM does not answer yet."}, "status": "away"}
    scripted.shim = {
        "upstream": None,
        "kind": "vm",
        "health": None,
        "queued_resource": "gemma4-rust",
        "zone": "us-west4-a",
        "project": "my-project",
        "phase": "booting",
        "stages": [["packages", "installed"], ["crate", "compiling the crate"], ["serve", "waits"]],
        "stage": "crate",
        "error": None,
    }
    tab = watch(scripted.url).open("/")
    expect(tab.locator("#trouble-text")).to_have_text("The VM is at crate: compiling the crate")
    tab.click("#status")
    expect(tab.locator("#vm-facts")).to_contain_text("gemma4-rust")
    expect(tab.locator("#stages [aria-current=step]")).to_have_text("crate compiling the crate")
    expect(tab.locator("#stages .past")).to_have_text("packages installed")
    tab.screenshot(path=pictures / "boot.png")
    scripted.shim |= {"error": "No capacity for v5litepod-1 in us-west4-a."}
    expect(tab.locator("#trouble-text")).to_have_text("No capacity for v5litepod-1 in us-west4-a.")
    scripted.health = {"status": "ok"}
    expect(tab.locator("#trouble")).to_be_hidden()


def test_code_is_copied_as_it_was_written(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    person = watch(scripted.url, permissions=["clipboard-read", "clipboard-write"])
    tab = person.open("/")
    scripted.say(delta(content="Try:\n\n```python\nif a < b:\n    print('&amp;')\n```\n"))
    ask(tab, "Code?")
    tab.locator(".prose .code").get_by_role("button", name="Copy").click()
    expect(tab.locator(".prose .head")).to_contain_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('&amp;')"
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    last(tab).locator(".tools").get_by_role("button", name="Copy").click()
    expect(last(tab).locator(".tools")).to_contain_text("Copied")


def test_blocks_that_are_whole_are_not_drawn_again(tab: Page, scripted: Scripted) -> None:
    gate = Gate()
    scripted.say(delta(content="First.\n\nSecond"), gate, delta(content=" grows.\n\n- a\n- b"))
    say(tab, "Hello!")
    grown(tab, 10)
    tab.evaluate("() => { window.first = document.querySelector('.answer .block'); }")
    gate.open()
    wait(tab)
    assert (
        tab.evaluate(
            "window.first.isConnected && document.querySelectorAll('.answer .block').length"
        )
        == 3
    )
    eventually(lambda: answers(tab) == ["First.\n\nSecond grows.\n\na\nb"], "all is drawn")

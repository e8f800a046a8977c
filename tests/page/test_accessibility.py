"""The page for everyone: by keyboard alone, by ear, in both themes, on a phone. Judged by axe where a machine can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.fakes import Gate
from tests.page.scripted import Scripted, delta, end, running
from tests.page.talk import answers, ask, grown, last, press, reload, say, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.page.conftest import Watched

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
RICH = """\
# Rings

A *ring cache* keeps the **last** positions of a layer, see [its file](https://example.com/cache), and `rows` says how many:

1. one token is written first
2. then it attends to the rows
   - [x] masks come from positions
   - [ ] nothing is cleared

| layer | rows | bytes |
|:---|---:|---:|
| sliding | 512 | 1,048,576 |
| full | 8,192 | 16,777,216 |

```python
def row(position: int, rows: int) -> int:
    \"\"\"Where the keys and values of a position stand, for as long as no later one has taken the place of it.\"\"\"
    return position % rows
```

> Tokens made beyond a stop are in nobody's way.
"""


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    """An endpoint that says what the test wrote."""
    with running() as server:
        yield server


def talked(tab: Page, server: Scripted) -> None:
    """A chat with some of everything."""
    call = {"index": 0, "id": "c", "function": {"name": "count_rows", "arguments": '{"layer": 3}'}}
    timings = {
        "predicted_n": 176,
        "predicted_per_second": 176.2,
        "prompt_ms": 41.0,
        "queue_ms": 1.0,
    }
    server.say(delta(content="It is a **ring**."))
    ask(tab, "What is a ring cache, in a few words?")
    server.script = [
        [
            delta(reasoning_content="They want to know more."),
            delta(content=RICH),
            delta(tool_calls=[call]),
            end("tool_calls", timings=timings),
            "[DONE]",
        ]
    ]
    ask(tab, "Tell me more, with a table and some code.")
    server.script = [[delta(content="And then"), "[DONE]"]]
    ask(tab, "Go on.")


def test_tables_keep_their_alignment_and_lists_their_numbers(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    tab = watch(scripted.url).open("/")
    scripted.say(delta(content="| a | b |\n|:---|---:|\n| 1 | 2 |\n\n7. seven\n8. eight\n"))
    ask(tab, "Hello!")
    aligned = "all => all.map((each) => getComputedStyle(each).textAlign)"
    assert last(tab).locator("td").evaluate_all(aligned) == ["left", "right"]
    assert last(tab).locator("ol").get_attribute("start") == "7"


def violations(tab: Page) -> list[Any]:
    """What axe has to say, short."""
    found = Axe().run(tab).response["violations"]
    return [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in found]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_any_state(
    watch: Callable[..., Watched], scripted: Scripted, pictures: Path, theme: str
) -> None:
    # The script of axe itself is not the page's own, which the page's policy would refuse.
    tab = watch(scripted.url, color_scheme=theme, bypass_csp=True).open("/")
    expect(tab.locator("#model")).to_have_text("scripted")
    tab.screenshot(path=pictures / f"welcome-{theme}.png")
    assert violations(tab) == []
    talked(tab, scripted)
    tab.screenshot(path=pictures / f"chat-{theme}.png")
    assert violations(tab) == []
    tab.locator(".message").nth(3).scroll_into_view_if_needed()
    tab.locator(".question").nth(1).hover()
    tab.screenshot(path=pictures / f"rich-{theme}.png")
    scripted.shim = {
        "kind": "url",
        "upstream": "http://10.0.0.1:8000",
        "stages": [["serve", "ready"]],
        "stage": None,
    }
    tab.click("#status")
    expect(tab.locator("#vm")).to_be_visible()
    assert violations(tab) == []
    tab.click("#panel-close")
    scripted.shim = None
    tab.click("#settings-button")
    assert violations(tab) == []
    tab.keyboard.press("Escape")
    tab.locator(".question").first.hover()
    tab.get_by_role("button", name="Edit").first.click()
    assert violations(tab) == []


def test_everything_can_be_done_by_keyboard(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    tab = watch(scripted.url).open("/")
    keys = tab.keyboard
    field = tab.locator("#say")
    expect(field).to_be_focused()
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    expect(field).to_have_value("one\ntwo")
    gate = Gate()
    scripted.script = [[delta(content="The beginning"), gate, end(), "[DONE]"]]
    keys.press("Enter")
    grown(tab, 5)
    expect(field).to_be_focused()
    keys.type("meanwhile")
    keys.press("Enter")
    expect(tab.locator("#said")).to_have_text("The model still answers. Escape stops it.")
    expect(field).to_have_value("meanwhile")
    keys.press("Escape")
    wait(tab)
    gate.open()
    expect(last(tab).locator(".note")).to_have_text("Stopped.")
    expect(field).to_be_focused()
    scripted.say(delta(content=" and the end."))
    assert reach(tab, "Continue", "Shift+Tab")
    keys.press("Enter")
    wait(tab)
    assert answers(tab) == ["The beginning and the end."]
    assert reach(tab, "Edit", "Shift+Tab")
    keys.press("Enter")
    keys.press("ControlOrMeta+a")
    keys.type("three")
    keys.press("Enter")
    wait(tab)
    assert tab.locator(".question .text").all_inner_texts() == ["three"]
    assert reach(tab, "Settings", "Shift+Tab")
    keys.press("Enter")
    expect(tab.get_by_label("System prompt")).to_be_focused()
    keys.press("Escape")
    expect(tab.locator("#settings-button")).to_be_focused()
    assert reach(tab, "This chat", "Shift+Tab")
    keys.press("Enter")
    assert reach(tab, "Delete", "Tab")
    keys.press("Enter")
    expect(tab.locator(".message")).to_have_count(0)
    expect(field).to_be_focused()
    assert reach(tab, "Undo", "Shift+Tab")
    keys.press("Space")
    expect(tab.locator(".message")).to_have_count(2)


def reach(tab: Page, name: str, key: str) -> bool:
    """Press a key until a button of that name has the focus, and the focus can be seen."""
    for _ in range(40):
        tab.keyboard.press(key)
        focused = tab.locator(":focus")
        if focused.count() and name in (focused.inner_text(), focused.get_attribute("title")):
            return bool(focused.evaluate("each => getComputedStyle(each).outlineStyle === 'solid'"))
    return False


def test_a_screen_reader_is_told_of_an_answer_once_not_with_every_piece(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    tab = watch(scripted.url).open("/")
    tab.evaluate(
        """() => {
            window.told = [];
            const live = document.querySelectorAll("[aria-live], [role=status], [role=alert], [role=log]");
            for (const each of live) {
                new MutationObserver(() => told.push(each.textContent)).observe(each, {childList: true, subtree: true});
            }
        }"""
    )
    gates = [Gate() for _ in range(20)]
    items: list[Any] = []
    for number, gate in enumerate(gates):
        items += [delta(content=f"Piece {number}. "), gate]
    scripted.say(*items)
    say(tab, "Hello!")
    for number, gate in enumerate(gates):
        expect(last(tab)).to_contain_text(f"Piece {number}.")
        expect(last(tab)).to_have_attribute("aria-busy", "true")
        gate.open()
    wait(tab)
    told = [text.strip() for text in tab.evaluate("told") if text.strip()]
    assert told[0] == "The model answers."
    assert told[-1].startswith("Piece 0. Piece 1.")
    assert len(told) == 2
    expect(last(tab)).to_have_attribute("aria-busy", "false")


def test_nothing_is_wider_than_a_phone(
    watch: Callable[..., Watched], scripted: Scripted, pictures: Path
) -> None:
    tab = watch(scripted.url, **PHONE).open("/")
    long = "x" * 300
    scripted.say(delta(content=f"{RICH}\n\n{long}\n\n```\n{long}\n```\n"))
    ask(tab, long)
    tab.screenshot(path=pictures / "phone.png")

    def width() -> int:
        wide = "Math.max(document.documentElement.scrollWidth, document.getElementById('scroll').scrollWidth)"
        return int(tab.evaluate(wide))

    assert width() <= 390
    tab.get_by_role("button", name="Chats").click()
    expect(tab.locator("#menu-close")).to_be_focused()
    expect(tab.locator("#chats button")).to_be_in_viewport()
    tab.screenshot(path=pictures / "phone-chats.png")
    assert width() <= 390
    tab.keyboard.press("Escape")
    expect(tab.locator("#menu")).to_be_focused()
    tab.click("#status")
    assert width() <= 390
    tab.click("#panel-close")
    press(tab, "Settings")
    assert width() <= 390


def test_the_chosen_theme_outlives_a_reload_and_is_there_at_the_first_paint(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    tab = watch(scripted.url, color_scheme="light").open("/")

    def ground() -> str:
        return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = ground()
    tab.get_by_label("Colors").select_option("Dark")
    dark = ground()
    assert dark != light
    nothing = {"body": "", "content_type": "text/javascript"}
    tab.route("**/page/app.js", lambda route: route.fulfill(**nothing))
    tab.reload()
    assert ground() == dark
    tab.unroute("**/page/app.js")
    reload(tab)
    tab.get_by_label("Colors").select_option("System colors")
    assert ground() == light


def test_one_scrolls_up_while_an_answer_grows_and_is_left_there(
    watch: Callable[..., Watched], scripted: Scripted
) -> None:
    tab = watch(scripted.url).open("/")
    gate = Gate()
    line = "A line of the answer.\n\n"
    scripted.say(delta(content=line * 40), gate, delta(content=line * 40))
    say(tab, "Hello!")
    grown(tab, 500)
    tab.wait_for_function(
        "scroll => scroll.scrollTop > 0", arg=tab.locator("#scroll").element_handle()
    )
    tab.evaluate("document.getElementById('scroll').scrollTop = 0")
    expect(tab.locator("#to-end")).to_be_visible()
    gate.open()
    wait(tab)
    assert tab.evaluate("document.getElementById('scroll').scrollTop") == 0
    press(tab, "To the end")
    expect(tab.locator("#to-end")).to_be_hidden()

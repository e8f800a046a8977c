"""The chat page in a real browser, on the real server with the embedded model."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from models import EMBEDDED
from server.loading import ModelLoader
from server.settings import Settings
from tests.page.talk import (
    answers,
    ask,
    grown,
    last,
    make_long,
    make_short,
    press,
    questions,
    reload,
    say,
    titles,
    wait,
)
from tests.server.live_server import Live, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.page.conftest import Watched

OCEAN = "Write a short paragraph about the ocean."


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    """A server on the embedded model, loaded once."""
    settings = Settings(model=(str(EMBEDDED),))
    with contextlib.closing(Live(settings, loader=ModelLoader(settings))) as live:
        yield live.wait_until_ready()


@pytest.fixture
def person(watch: Callable[..., Watched], real: Live) -> Watched:
    """A browser profile without any chats."""
    return watch(real.url)


@pytest.fixture
def tab(person: Watched, real: Live) -> Page:
    """The page, when the server is ready."""
    eventually(lambda: not real.service.active, "the server is idle")
    tab = person.open("/")
    expect(tab.locator("#model")).to_have_text(EMBEDDED.name)
    return tab


def cancelled(live: Live) -> float:
    return live.metric("torchtpu_requests_total", finish_reason="cancelled")


def test_an_answer_arrives_piece_by_piece_and_is_the_servers(tab: Page, real: Live) -> None:
    tab.evaluate(
        """() => {
            window.seen = [];
            const look = () => {
                const text = document.querySelector(".answer > .prose")?.innerText ?? "";
                if (text !== (seen.at(-1) ?? "")) seen.push(text);
            };
            new MutationObserver(look).observe(document.getElementById("thread"), {childList: true, subtree: true});
        }"""
    )
    shown = ask(tab, OCEAN)
    whole = real.chat(OCEAN).json()
    assert shown == whole["choices"][0]["message"]["content"]
    seen = tab.evaluate("seen")
    # How many pieces a frame shows at once is the machine's business.
    assert len(seen) > 1
    assert all(later.startswith(before) for before, later in pairwise(seen))
    facts = last(tab).locator(".facts")
    tokens = whole["usage"]["completion_tokens"]
    expect(facts).to_contain_text(f"{tokens} tokens · ")
    expect(facts).to_contain_text("tokens/s · first token after ")


def test_stop_cancels_on_the_server_at_once(tab: Page, real: Live) -> None:
    before = cancelled(real)
    make_long(tab)
    say(tab, OCEAN)
    grown(tab)
    assert real.service.worker.running == 1
    press(tab, "Stop")
    eventually(lambda: cancelled(real) == before + 1, "the cancel is counted")
    eventually(lambda: real.service.worker.running == 0, "the engine is idle")
    expect(last(tab).locator(".note")).to_have_text("Stopped.")
    expect(tab.locator("#say")).to_be_focused()
    assert cancelled(real) == before + 1


def test_a_stopped_answer_goes_on_where_it_stopped(tab: Page) -> None:
    make_long(tab)
    say(tab, OCEAN)
    grown(tab, 20)
    press(tab, "Stop")
    wait(tab)
    part = answers(tab)[-1]
    make_short(tab)
    with tab.expect_request("**/v1/chat/completions") as sent:
        press(tab, "Continue")
    wait(tab)
    body = json.loads(sent.value.post_data or "")
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1] == {"role": "assistant", "content": part}
    assert answers(tab)[-1].startswith(part)
    assert last(tab).locator(".note").inner_text() == ""


def test_a_reload_keeps_the_chat_and_the_conversation_goes_on(tab: Page) -> None:
    ask(tab, "Hello! My name is Ada.")
    before = (questions(tab), answers(tab), titles(tab))
    tab.fill("#say", "What is my")
    reload(tab)
    expect(tab.locator(".message")).to_have_count(2)
    assert (questions(tab), answers(tab), titles(tab)) == before
    assert tab.input_value("#say") == "What is my"
    assert "Ada" in ask(tab, "What is my name?")


def test_an_answer_that_a_reload_interrupts_is_marked_as_cut(tab: Page, real: Live) -> None:
    before = cancelled(real)
    make_long(tab)
    say(tab, OCEAN)
    grown(tab)
    reload(tab)
    expect(last(tab).locator(".note")).to_have_text(
        "Cut: the page was left before the answer ended."
    )
    assert len(answers(tab)[-1]) >= 40
    eventually(lambda: cancelled(real) == before + 1, "the server learned of it")
    make_short(tab)
    press(tab, "Regenerate")
    wait(tab)
    assert answers(tab)[-1].endswith("than any forest.")


def test_an_edited_question_is_sent_again_and_what_followed_is_gone(tab: Page) -> None:
    ask(tab, "Hello! My name is Ada.")
    ask(tab, "What is my name?")
    tab.locator(".question").first.hover()
    tab.get_by_role("button", name="Edit").first.click()
    tab.get_by_role("textbox", name="Your message").fill("Hello! My name is Bob.")
    tab.locator(".question").get_by_role("button", name="Send").click()
    wait(tab)
    assert questions(tab) == ["Hello! My name is Bob."]
    assert "Bob" in answers(tab)[0]
    assert "Bob" in ask(tab, "What is my name?")


def test_leaving_an_edit_changes_nothing(tab: Page) -> None:
    answer = ask(tab, "Hello!")
    tab.locator(".question").hover()
    press(tab, "Edit")
    tab.get_by_role("textbox", name="Your message").fill("Something else")
    tab.keyboard.press("Escape")
    assert (questions(tab), answers(tab)) == (["Hello!"], [answer])
    expect(tab.get_by_role("button", name="Edit")).to_be_focused()


def test_regenerate_replaces_the_answer(tab: Page) -> None:
    answer = ask(tab, OCEAN)
    with tab.expect_request("**/v1/chat/completions") as sent:
        press(tab, "Regenerate")
    wait(tab)
    body = json.loads(sent.value.post_data or "")
    assert body["messages"] == [{"role": "user", "content": OCEAN}]
    assert (questions(tab), answers(tab)) == ([OCEAN], [answer])


def test_settings_go_to_the_server_with_every_question(tab: Page, pictures: Path) -> None:
    tab.click("#settings-button")
    tab.get_by_label("System prompt").fill("Be brief.")
    tab.get_by_label("Most tokens").fill("5")
    tab.get_by_label("Stop at").fill("forest\n\\n\\n")
    expect(tab.locator("#greedy")).to_be_visible()
    tab.screenshot(path=pictures / "settings.png")
    press(tab, "Save")
    with tab.expect_request("**/v1/chat/completions") as sent:
        ask(tab, OCEAN)
    body = json.loads(sent.value.post_data or "")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_tokens"], body["stop"]) == (5, ["forest", "\n\n"])
    expect(last(tab).locator(".note")).to_have_text("Ended at the limit of tokens.")
    expect(last(tab).locator(".facts")).to_contain_text("5 tokens")
    expect(tab.locator("#system")).to_contain_text("Be brief.")
    press(tab, "New chat")
    expect(tab.locator("#system")).to_be_hidden()


def test_settings_for_new_chats_outlive_a_reload(tab: Page) -> None:
    tab.click("#settings-button")
    tab.get_by_label("System prompt").fill("Be kind.")
    tab.get_by_label("Also for new chats").check()
    press(tab, "Save")
    reload(tab)
    press(tab, "New chat")
    expect(tab.locator("#system")).to_contain_text("Be kind.")


def test_a_refusal_is_told_in_the_servers_words(tab: Page, real: Live) -> None:
    tab.click("#settings-button")
    tab.get_by_label("Most tokens").fill("999999")
    press(tab, "Save")
    say(tab, "Hello!")
    wait(tab)
    told = real.chat("Hello!", max_tokens=999999).json()["error"]["message"]
    expect(last(tab).locator(".note")).to_have_text(told)
    expect(tab.get_by_role("button", name="Try again")).to_be_visible()


def test_chats_are_listed_renamed_deleted_and_brought_back(tab: Page) -> None:
    ask(tab, "Hello! My name is Ada.")
    press(tab, "New chat")
    ask(tab, OCEAN)
    assert titles(tab) == [OCEAN, "Hello! My name is Ada."]
    tab.get_by_label("Name of this chat").fill("Water")
    tab.keyboard.press("Enter")
    expect(tab.locator("#chats")).to_contain_text("Water")
    tab.click("#chats >> text=Hello")
    assert questions(tab) == ["Hello! My name is Ada."]
    tab.click("#chat-menu-button")
    press(tab, "Delete")
    assert titles(tab) == ["Water"]
    assert questions(tab) == [OCEAN]
    reload(tab)
    assert titles(tab) == ["Water"]
    tab.click("#chat-menu-button")
    press(tab, "Delete")
    assert titles(tab) == []
    press(tab, "Undo")
    assert titles(tab) == ["Water"]
    reload(tab)
    assert questions(tab) == [OCEAN]


def test_a_chat_that_is_deleted_while_it_is_answered_is_gone_and_the_server_free(
    tab: Page, real: Live
) -> None:
    before = cancelled(real)
    make_long(tab)
    say(tab, OCEAN)
    grown(tab)
    tab.click("#chat-menu-button")
    press(tab, "Delete")
    eventually(lambda: cancelled(real) == before + 1, "the cancel is counted")
    assert titles(tab) == []
    expect(tab.locator("#stop")).to_be_hidden()
    reload(tab)
    expect(tab.locator("#welcome")).to_be_visible()
    assert titles(tab) == []


def test_two_chats_are_answered_at_the_same_time(tab: Page) -> None:
    make_long(tab)
    say(tab, OCEAN)
    grown(tab)
    press(tab, "New chat")
    expect(tab.locator("#stop")).to_be_hidden()
    assert tab.get_by_role("img", name="being answered").count() == 1
    make_short(tab)
    say(tab, "Hello! My name is Ada.")
    expect(tab.locator("#stop")).to_be_visible()
    tab.locator("#chats button").last.click()
    assert questions(tab) == [OCEAN]
    press(tab, "Stop")
    wait(tab)
    tab.locator("#chats button").first.click()
    wait(tab)
    assert "Ada" in answers(tab)[-1]


def test_chats_go_into_a_file_and_come_out_of_it_elsewhere(
    tab: Page, watch: Callable[..., Watched], real: Live, tmp_path: Path
) -> None:
    ask(tab, "Hello! My name is Ada.")
    press(tab, "New chat")
    ask(tab, OCEAN)
    said = (questions(tab), answers(tab))
    with tab.expect_download() as download:
        press(tab, "Export all")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    tab.locator("#file").set_input_files(file)
    expect(tab.locator("#notice")).to_contain_text("Imported chats: 2.")
    assert sorted(titles(tab)) == sorted(["Hello! My name is Ada.", OCEAN] * 2)
    elsewhere = watch(real.url).open("/")
    elsewhere.locator("#file").set_input_files(file)
    expect(elsewhere.locator("#notice")).to_contain_text("Imported chats: 2.")
    elsewhere.click(f"#chats >> text={OCEAN}")
    assert (questions(elsewhere), answers(elsewhere)) == said
    for content, told in (
        ("{", "Expected a file that this page exported"),
        ("[]", "found another"),
    ):
        file.write_text(content)
        elsewhere.locator("#file").set_input_files(file)
        expect(elsewhere.locator("#notice")).to_contain_text(told)
    assert len(titles(elsewhere)) == 2


def test_two_tabs_see_each_other_and_destroy_nothing(tab: Page, person: Watched) -> None:
    answer = ask(tab, "Hello! My name is Ada.")
    other = person.open("/")
    assert answers(other) == [answer]
    ask(other, "What is my name?")
    expect(tab.locator(".answer")).to_have_count(2)
    expect(tab.locator(".answer").last).to_contain_text("Ada")
    # Both write in the same chat at once: none may lose its text.
    for each in (tab, other):
        make_long(each)
    tab.bring_to_front()
    say(tab, "Count to ten.")
    grown(tab, 10)
    other.bring_to_front()
    expect(other.locator(".note").last).to_have_text(
        "Another tab writes this answer, or was closed while it did."
    )
    say(other, OCEAN)
    tab.bring_to_front()
    press(tab, "Stop")
    wait(tab)
    other.bring_to_front()
    grown(other)
    press(other, "Stop")
    wait(other)
    tab.bring_to_front()
    expect(tab.locator("#chats li")).to_have_count(2)
    reload(tab)
    everything = set()
    for number in range(2):
        tab.locator("#chats button").nth(number).click()
        everything.update(questions(tab))
    assert {"Count to ten.", OCEAN} <= everything


def test_what_two_tabs_wrote_at_the_same_moment_is_kept_of_both(tab: Page, person: Watched) -> None:
    answer = ask(tab, "Hello! My name is Ada.")
    other = person.open("/")
    # As it arrives when the other tab had not heard of this one's text yet: made of what was there before.
    other.evaluate(
        """() => {
            const key = Object.keys(localStorage).find(key => key.startsWith("torchtpu.chat."));
            const chat = JSON.parse(localStorage[key]);
            const messages = [{role: "user", content: "From the other tab."}];
            localStorage[key] = JSON.stringify({...chat, messages, before: "older", revision: "theirs"});
        }"""
    )
    expect(tab.locator("#chats li")).to_have_count(2)
    assert answers(tab) == [answer]
    reload(tab)
    assert answers(tab) == [answer]
    tab.locator("#chats button").filter(has_not_text="copy").click()
    assert questions(tab) == ["From the other tab."]


def test_a_full_storage_is_told_and_the_chat_goes_on(tab: Page) -> None:
    tab.evaluate(
        """() => {
            let size = 1 << 22;
            for (let at = 0; size > 16; at += 1) {
                try { localStorage.setItem(`filler${at}`, "x".repeat(size)); } catch { size >>= 1; }
            }
        }"""
    )
    answer = ask(tab, "Hello! My name is Ada.")
    expect(tab.locator("#notice")).to_contain_text("no more room")
    assert answers(tab) == [answer]
    assert "Ada" in ask(tab, "What is my name?")
    assert titles(tab) == ["Hello! My name is Ada."]


def test_the_status_panel_shows_what_is_loaded_and_asks_only_while_it_is_open(
    tab: Page, real: Live, pictures: Path
) -> None:
    tab.click("#status")
    loaded = tab.locator("#loaded")
    for text in (
        EMBEDDED.name,
        "cpu",
        "8192 tokens",
        "greedy",
        real.service.loader.build["torch"][:4],
    ):
        expect(loaded).to_contain_text(text)
    expect(tab.locator("#slots-text")).to_have_text("0 of 1 in use, 0 waiting")
    make_long(tab)
    say(tab, OCEAN)
    expect(tab.locator("#slots-text")).to_have_text("1 of 1 in use, 0 waiting")
    made = tab.get_by_role("img", name="Tokens made per second: ")
    expect(made).not_to_have_attribute("aria-label", "Tokens made per second: 0")
    assert tab.locator("#plots polyline").count() == 4
    tab.screenshot(path=pictures / "status.png")
    expect(tab.locator("#slots .busy")).to_have_count(1)
    press(tab, "Stop")
    expect(tab.locator("#counts")).to_contain_text("Tokens made")
    tab.click("#panel-close")
    expect(tab.locator("#status")).to_be_focused()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    with tab.expect_request("**/health"):
        pass
    assert [url for url in asked if url.endswith(("/metrics", "/v1/engine"))] == []


def test_nothing_holds_the_first_paint_up(tab: Page) -> None:
    fetched = tab.evaluate(
        "performance.getEntriesByType('resource').map(one => [one.name, one.renderBlockingStatus])"
    )
    assert any(name.endswith("/page/app.js") for name, _ in fetched)
    assert [name for name, status in fetched if status != "non-blocking"] == []

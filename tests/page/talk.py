"""What a person does on the page, in a few words: saying something, waiting for the answer, looking at it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

# Long enough that a test can do something meanwhile, at some 200 tokens a second.
LONG = 4000


def say(tab: Page, text: str) -> None:
    """Type a message and send it."""
    tab.fill("#say", text)
    tab.press("#say", "Enter")


def reload(tab: Page) -> None:
    """Load the page anew, until its scripts run."""
    tab.reload()
    tab.wait_for_selector("body[data-server]")


def wait(tab: Page) -> None:
    """Until the answer has ended."""
    expect(tab.locator("#stop")).to_be_hidden()


def ask(tab: Page, text: str) -> str:
    """Say something and return the whole answer."""
    say(tab, text)
    wait(tab)
    return answers(tab)[-1]


def answers(tab: Page) -> list[str]:
    """The texts of all answers."""
    return tab.locator(".answer > .prose").all_inner_texts()


def questions(tab: Page) -> list[str]:
    """The texts of all questions."""
    return tab.locator(".question .text").all_inner_texts()


def last(tab: Page) -> Locator:
    """The last message."""
    return tab.locator(".message").last


def titles(tab: Page) -> list[str]:
    """The names in the list of chats."""
    return tab.locator("#chats button").all_inner_texts()


def press(tab: Page, name: str) -> None:
    """Press the last button of that name."""
    tab.get_by_role("button", name=name, exact=True).last.click()


def make_long(tab: Page) -> None:
    """Have the model go on behind the end of its turn: its own answers are too short to do anything meanwhile."""

    def lengthen(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}") | {
            "ignore_eos": True,
            "max_tokens": LONG,
        }
        route.continue_(post_data=json.dumps(body))

    tab.route("**/v1/chat/completions", lengthen)


def make_short(tab: Page) -> None:
    """The opposite of `make_long`."""
    tab.unroute("**/v1/chat/completions")


def grown(tab: Page, length: int = 40) -> None:
    """Until the last answer has some text."""
    tab.wait_for_function(
        "n => (document.querySelector('.message:last-child > .prose')?.innerText.length ?? 0) >= n",
        arg=length,
    )

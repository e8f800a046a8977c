"""Chats for the embedded model, drawn without end from a seed, on either side of the held-out split.

Owns what the model is to answer. A chat is OpenAI-shaped messages; text and ids are made in `tokenizer`.
"""

import random
from typing import TYPE_CHECKING, Any

from models.training import tools as tool_chats
from models.training.chats import Chat, Exchange, dialogue
from models.training.facts import (
    GREETING_TAILS,
    GREETINGS,
    HEARD,
    HELLO,
    NO_TOOL,
    ONLY_SUMS,
    REMEMBERED,
    TALK,
    TOPICS,
    UNKNOWN,
)
from models.training.mixes import BROAD, DRILLS, Mix
from models.training.phrasings import (
    ABOUT,
    ADD,
    BARE,
    COUNT_BETWEEN,
    COUNT_DOWN,
    COUNT_TO,
    DIGITS,
    ECHO,
    FILLER_LEADS,
    FILLER_TAILS,
    LARGER,
    NOT_TOLD,
    ONE,
    ONE_BEFORE,
    OTHER_SUMS,
    PARAGRAPH,
    REMINDERS,
    SAID,
    SMALLER,
    STRANGE,
    SYSTEM_ONE,
    SYSTEMS,
    TELL,
    TWO,
    TWO_BEFORE,
    finish,
    phrase,
    plain,
    slip,
)
from models.training.words import ADJECTIVES, COLORS, Words, held

if TYPE_CHECKING:
    from collections.abc import Callable

TAUGHT = frozenset(w for t in TOPICS.values() for name in t.names for w in plain(name).split())


class Talker:
    """Draws the exchanges of one chat and remembers what was said in it."""

    def __init__(self, rng: random.Random, score: bool, mix: Mix = BROAD) -> None:
        self.rng, self.score = rng, score
        self.mix = mix
        self.words = Words(rng, score, mix.longest)
        self.told: dict[str, str] = {}
        self.tools: list[tool_chats.Tool] = []
        self.last_tool: tool_chats.Tool | None = None
        self.brief = False

    def ask(self, cores: tuple[str, ...], key: str, /, **slots: object) -> str:
        """Returns a phrasing of this side of the split with its slots filled."""
        text = slip(self.rng, phrase(self.rng, cores, self.score, key))
        for slot, value in slots.items():
            text = text.replace("{" + slot + "}", str(value))
        return text

    def greeting(self) -> Exchange:
        """Greets."""
        rng = self.rng
        while True:
            core, tail = rng.choice(GREETINGS), rng.choice(GREETING_TAILS)
            if held(f"greet|{core}|{tail}") == self.score:
                break
        text = core + tail
        if not self.score and rng.random() < 0.02:
            text = ""  # clients do send empty messages
        text = text.lower() if rng.random() < 0.3 else text
        return Exchange("greeting", text, HELLO, "The user greets me.")

    def topic(self) -> Exchange:
        """Explains a topic: two sentences, or as many as are asked for."""
        rng = self.rng
        key = "who" if rng.random() < 0.12 else rng.choice(list(TOPICS))
        topic = TOPICS[key]
        category, count = "topic", 1 if self.brief else 2
        if rng.random() < 0.2 and not self.brief:
            text = self.ask(PARAGRAPH, key, x=rng.choice(topic.names))
            return self.told_of(key, finish(rng, text), 3)
        if rng.random() < 0.4:
            text = self.ask(topic.questions, key)
        else:
            text = self.ask(ABOUT, key, x=rng.choice(topic.names))
        roll = rng.random()
        if roll < 0.4:
            category, count = "one or two sentences", 1 if roll < 0.2 else 2
            if rng.random() < 0.65:
                if rng.random() < 0.2:
                    text = text.rstrip(".?")
                    text += rng.choice(
                        [" in one sentence", " briefly"] if count == 1 else [" in two sentences"]
                    ) + rng.choice(["?", ".", ""])
                else:
                    text += " " + rng.choice(ONE if count == 1 else TWO)
            else:
                text = rng.choice(ONE_BEFORE if count == 1 else TWO_BEFORE).replace("{q}", text)
            if rng.random() < 0.15:
                text = text.rstrip(".?")
        else:
            text = finish(rng, text)
        return self.told_of(key, text, count, category)

    def told_of(self, key: str, text: str, count: int, category: str = "topic") -> Exchange:
        """Answers with the first `count` sentences of a topic."""
        topic = TOPICS[key]
        subject = "who I am" if key == "who" else topic.names[0]
        answer = " ".join(topic.sentences[:count])
        return Exchange(category, text, answer, f"The user asks about {subject}.")

    def talk(self) -> Exchange:
        """Makes small talk."""
        key = self.rng.choice(list(TALK))
        cores, answer = TALK[key]
        text = finish(self.rng, self.ask(cores, key))
        return Exchange("small talk", text, answer, "This is small talk.")

    def add(self) -> Exchange:
        """Adds two numbers up to 99."""
        rng = self.rng
        a, b = self.words.numbers(99)
        text = self._sum(ADD, "add", a, b)
        thought = "I add the two numbers."
        if rng.random() < 0.2:
            return Exchange("addition", f"{text} {rng.choice(BARE)}", str(a + b), thought)
        return Exchange("addition", finish(rng, text), f"{a} + {b} = {a + b}.", thought)

    def compare(self) -> Exchange:
        """Compares two numbers up to 99."""
        rng = self.rng
        a, b = self.words.numbers(99)
        if rng.random() < 0.08:
            a = b = self.words.number(99)
        larger = rng.random() < 0.6
        text = self._sum(LARGER if larger else SMALLER, "larger" if larger else "smaller", a, b)
        answer = f"{max(a, b)} is larger." if larger else f"{min(a, b)} is smaller."
        answer = "Both are equal." if a == b else answer
        return Exchange("comparison", finish(rng, text), answer, "I compare the two numbers.")

    def _sum(self, cores: tuple[str, ...], key: str, a: int, b: int) -> str:
        spelled = self.rng.random() < 0.15 and max(a, b) <= 20
        x, y = (DIGITS[a], DIGITS[b]) if spelled else (str(a), str(b))
        return self.ask(cores, key, a=x, b=y)

    def other_sum(self) -> Exchange:
        """Declines what is neither a sum nor a comparison."""
        a, b = self.words.numbers(99)
        text = finish(self.rng, self.ask(OTHER_SUMS, "sums", a=a, b=b))
        return Exchange("unknown", text, ONLY_SUMS, "I can not compute this.")

    def count(self) -> Exchange:
        """Counts up or down, up to 20 numbers."""
        rng = self.rng
        roll = rng.random()
        cores: tuple[str, ...]
        if roll < 0.55:
            m, n, cores, key = 1, rng.randint(1, 20), COUNT_TO, "to"
        elif roll < 0.8:
            m = rng.randint(0, 60)
            n, cores, key = m + rng.randint(1, 12), COUNT_BETWEEN, "between"
        else:
            m, n, cores, key = rng.randint(2, 15), 1, COUNT_DOWN, "down"
        shown_m, shown_n = (n, m) if key == "down" else (m, n)
        spell = rng.random() < 0.4 and max(m, n) <= 20
        m_text, n_text = (DIGITS[i] if spell else i for i in (shown_m, shown_n))
        text = self.ask(cores, f"{key} {n}", m=m_text, n=n_text)
        numbers = range(m, n - 1, -1) if key == "down" else range(m, n + 1)
        return Exchange("counting", finish(rng, text), ", ".join(map(str, numbers)), "I count.")

    def echo(self) -> Exchange:
        """Repeats words, keys and text in any script."""
        rng, words = self.rng, self.words
        draws: list[Callable[[], str]] = [
            words.noun, words.noun, words.code, words.code, words.foreign, lambda: words.phrase(2, 5), words.place, words.name,
             lambda: words.sentence().rstrip("."), lambda: str(words.number(99999)), lambda: rng.choice(["hi", "hello", "yes", "no", "okay", "thanks"]),
        ]  # fmt: skip
        draw = rng.choice(draws)
        what = draw()
        if rng.random() < 0.1:
            what = what.upper()
        text = self.ask(ECHO, "echo", w=what)
        if not text.endswith('"') and rng.random() < 0.4:
            polite = "please" in text.lower()
            text += rng.choice([".", "!"] if polite else [".", ".", "!", " please", "."])
        return Exchange("echo", text, what, "I repeat what the user wrote.")

    def tell(self) -> Exchange:
        """Takes note of a name, a city, a color, a pet or a word."""
        rng = self.rng
        key = "name" if rng.random() < 0.5 else rng.choice(list(TELL))
        value = self._told_value(key)
        text = self.ask(TELL[key][0], f"tell {key}", n=value)
        self.told[key] = value
        if rng.random() < 0.25:
            text += rng.choice(REMINDERS)
        elif rng.random() < 0.12:
            text = text.rstrip(".")
        answer = f"Nice to meet you, {value}!" if key == "name" else REMEMBERED
        return Exchange("memory", text, answer, "The user tells me something to remember.")

    def _told_value(self, key: str) -> str:
        if key == "color":
            return self.rng.choice(COLORS)
        if key == "word":
            return self.words.code() if self.rng.random() < 0.3 else self.words.noun()
        return self.words.place() if key == "city" else self.words.name()

    def recall(self, key: str | None = None) -> Exchange:
        """Says what was told before, or that it was not told."""
        rng = self.rng
        if key is None:
            key = (
                rng.choice(list(self.told))
                if self.told and rng.random() < 0.8
                else rng.choice(list(TELL))
            )
        text = finish(rng, self.ask(TELL[key][1], f"recall {key}"))
        answer = TELL[key][2].replace("{n}", self.told[key]) if key in self.told else NOT_TOLD[key]
        return Exchange("memory", text, answer, "The user asks for something told earlier.")

    def unknown(self) -> Exchange:
        """Admits not knowing, or hears a remark."""
        rng, words = self.rng, self.words
        if rng.random() < 0.2:
            return self.other_sum()
        if rng.random() < 0.1:
            text = rng.choice([words.phrase(1, 6), words.sentence(), words.foreign(), words.code()])
            return Exchange("unknown", text, HEARD, "The user makes a remark.")
        noun, other = words.noun(), words.noun()
        while noun in TAUGHT:
            noun = words.noun()
        slots = {
            "w": noun,
            "v": other,
            "n": words.name(),
            "p": words.place(),
            "j": rng.choice(ADJECTIVES),
        }
        if rng.random() < 0.25:
            return Exchange(
                "unknown",
                finish(rng, self.ask(SAID, "said", **slots)),
                HEARD,
                "The user makes a remark.",
            )
        return Exchange(
            "unknown",
            finish(rng, self.ask(STRANGE, "strange", **slots)),
            UNKNOWN,
            "I do not know this.",
        )

    def no_tool(self) -> Exchange:
        """Says that it has no tool for a question that needs one."""
        rng = self.rng
        offered = {tool.kind.key for tool in self.tools}
        kinds = [k for k in tool_chats.KINDS if k.key not in offered | {"add", "multiply"}]
        kind = rng.choice(kinds)
        v, w = (*tool_chats.values(self.words, kind), "")[:2]
        text = finish(rng, self.ask(kind.questions, kind.key, v=v, w=w))
        return Exchange("no tool", text, NO_TOOL, "There is no tool for this.")

    def use_tool(self) -> Exchange:
        """Calls an offered tool, or two, and answers with what comes back."""
        rng, words = self.rng, self.words
        tool = self.last_tool if self.last_tool and rng.random() < 0.5 else rng.choice(self.tools)
        kind = tool.kind
        drawn = tool_chats.values(words, kind)
        cores = kind.again if tool is self.last_tool and rng.random() < 0.6 else kind.questions
        roll, second = rng.random(), tool
        asked = [(tool, drawn)]
        if roll < 0.1 and kind.both:
            asked.append((tool, tool_chats.values(words, kind)))
            text = self.ask(kind.both, kind.key, v=drawn[0], w=asked[1][1][0])
        else:
            v, w = (*drawn, "")[:2]
            text = self.ask(cores, kind.key, v=v, w=w)
            if roll > 0.95 and len(self.tools) > 1:
                second = rng.choice([t for t in self.tools if t is not tool])
                asked.append((second, tool_chats.values(words, second.kind)))
                v, w = (*asked[1][1], "")[:2]
                text += rng.choice([" ", " And ", " Also, ", " Then: "]) + self.ask(
                    second.kind.questions, second.kind.key, v=v, w=w
                )
        self.last_tool = asked[-1][0]
        exchange = Exchange("tool call", finish(rng, text), "", f"I call {tool.name}.")
        answers = []
        for used, given in asked:
            exchange.calls.append(tool_chats.call(rng, used, given))
            raw, worded = tool_chats.result(words, used.kind)
            exchange.results.append(raw)
            answers.append(used.kind.answer.replace("{v}", str(given[0])).replace("{r}", worded))
        exchange.answer = " ".join(answers)
        return exchange

    def anything(self) -> Exchange:
        """Draws an exchange that uses no tool."""
        offered = {tool.kind.key for tool in self.tools}
        draw = self.rng.choices(
            [self.greeting, self.topic, self.talk, self.add, self.compare, self.count, self.echo, self.tell, self.recall,
             self.unknown, self.no_tool],
            [3, 20, 6, 0 if "add" in offered else 12, 7, 3, 14, 6, 6, 7, 40 if offered else 4],
        )[0]  # fmt: skip
        if draw == self.unknown and offered & {"multiply", "lookup", "search"}:
            return self.topic()
        return draw()

    def filler(self) -> str:
        """Returns text to be read past: five to thirty sentences, sometimes one repeated."""
        rng = self.rng
        count = rng.choice([4, 5, 6, 6, 7, 8, 10, 14, 24])
        if rng.random() < 0.25:
            return " ".join([self.words.sentence()] * count)
        if rng.random() < 0.1:
            return " ".join([self.words.noun()] * (count * 6))
        return " ".join(self.words.sentence() for _ in range(count))


def make_chat(rng: random.Random, score: bool, mix: Mix = BROAD) -> Chat:
    """Draws a chat; with `score` its phrasings are held out, and so are its names, places, nouns and pairs of numbers."""
    talker = Talker(rng, score, mix)
    chat = Chat("", [])
    plan = rng.choices(list(mix.plans), list(mix.plans.values()))[0]
    if plan == "tools":
        talker.tools = tool_chats.offer(talker.words)
        chat.tools = [tool.declaration for tool in talker.tools]
    if rng.random() < 0.3:
        chat.messages.append(instruction(talker, plan == "plain" and rng.random() < 0.25))
    chat.thinking = rng.random() < mix.thinking and not talker.brief and plan not in DRILLS
    start = len(chat.messages)
    exchanges = conversation(talker, plan)
    last = exchanges[-1]
    if rng.random() < (0.3 if plan == "memory" else 0.07) and not last.calls:
        lead, filler, tail = rng.choice(FILLER_LEADS), talker.filler(), rng.choice(FILLER_TAILS)
        last.user = lead + filler + tail + last.user
        last.category = "after long text"
    for exchange in exchanges:
        chat.messages += dialogue(rng, exchange)
    if chat.thinking:
        at = max(i for i, m in enumerate(chat.messages) if m["role"] == "user")
        chat.messages[at + 1]["reasoning_content"] = last.thought
    chat.category = judge(rng, chat, last, plan, start)
    return chat


def instruction(talker: Talker, brief: bool) -> dict[str, Any]:
    """Draws a system message; a brief one makes topics one sentence long."""
    rng = talker.rng
    talker.brief = brief
    system = rng.choice(SYSTEM_ONE if brief else SYSTEMS)
    if rng.random() < 0.3:
        system = f"{rng.choice([rng.choice(SYSTEMS), talker.words.sentence()])} {system}"
    return {"role": rng.choice(["system", "system", "developer"]), "content": system}


def conversation(talker: Talker, plan: str) -> list[Exchange]:
    """Draws the exchanges of a chat: plain ones, many short ones, some around tools or between a remark and its recall."""
    rng = talker.rng
    before = rng.choices([0, 1, 2, 3, 5], [36, 27, 20, 12, 5])[0]
    if plan == "memory":
        again = rng.randint(0, before) if rng.random() < 0.3 else -1
        exchanges = [talker.tell()]
        for i in range(before + 1):
            if i == again:
                exchanges.append(talker.tell())
            if i < before:
                exchanges.append(talker.anything())
        return [*exchanges, talker.recall(rng.choice(list(talker.told)))]
    if plan == "tools":
        shares = [0.6] * min(before, 2) + [talker.mix.needed]
        return [
            talker.use_tool() if rng.random() < share else talker.anything() for share in shares
        ]
    if plan in DRILLS:
        draws = [getattr(talker, draw) for draw in DRILLS[plan]]
        return [
            draw() for draw in rng.choices(draws, list(DRILLS[plan].values()), k=rng.randint(4, 8))
        ]
    return [talker.anything() for _ in range(before + 1)]


def judge(rng: random.Random, chat: Chat, last: Exchange, plan: str, start: int) -> str:
    """Names the category of a chat's last answer and which span of it is judged."""
    if last.calls and rng.random() < 0.5:
        chat.last_span = 0
    if chat.thinking:
        return "thinking"
    if last.calls:
        return "tool call" if chat.last_span == 0 else "tool answer"
    if plan == "memory":
        between = sum(len(m["content"] or "") for m in chat.messages[start + 1 : -1])
        return "memory past the window" if between > 300 else "memory"
    if chat.tools and last.category != "no tool":
        return "tools not needed"
    return last.category

"""Tool chats: kinds of tools with open names, the questions that need them, their results and the answers.

Owns what a declaration, a call and a result look like as OpenAI-shaped messages. Knows nothing of text or ids.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from models.training.words import Words, listed


@dataclass(frozen=True)
class Kind:
    """A kind of tool: how it may be declared, asked for and answered; `{v}` is the value asked about."""

    key: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[
        tuple[tuple[str, ...], str], ...
    ]  # for each parameter: its possible names, its value's class
    questions: tuple[str, ...]
    again: tuple[str, ...]  # short follow-up questions after an answer of the same tool
    both: tuple[str, ...]  # questions about two values at once
    answer: str


PLACE = ("city", "location", "place", "town", "where", "city_name", "name", "query", "area")
KINDS = (
    Kind(
        "weather",
        ("get_weather", "weather", "current_weather", "weather_lookup", "getWeather", "get_current_weather", "forecast", "get_forecast"),
        ("Get the weather for a city", "Get the current weather in a city", "Current weather", "Weather for a location",
         "Returns the weather at a place", "Look up the weather", "Get current temperature for a given location.", "The weather forecast"),
        ((PLACE, "place"),),
        ("What is the weather in {v}?", "How is the weather in {v}?", "Weather in {v}?", "Is it raining in {v}?", "Is it cold in {v}?",
         "Tell me the weather in {v}.", "What's the weather like in {v}?", "I need the weather in {v}.", "Do I need a coat in {v}?",
         "How warm is it in {v}?", "What is the temperature in {v}?", "Check the weather in {v}.", "Will it rain in {v}?",
         "What is the forecast for {v}?", "How is the weather today in {v}?", "What's the weather in {v} today?", "Show me the weather for {v}.",
         "Please get the weather for {v}.", "What is the current weather in {v}?", "Is it sunny in {v}?", "Give me the weather in {v}."),
        ("And in {v}?", "What about {v}?", "And {v}?", "How about {v}?", "And the weather in {v}?", "Now {v}."),
        ("What is the weather in {v} and {w}?", "Compare the weather in {v} and {w}.", "How is the weather in {v} and in {w}?",
         "Weather in {v} and {w}?", "Tell me the weather in {v} and {w}.", "Is it warm in {v} and {w}?", "Get the weather for both {v} and {w}."),
        "The weather in {v}: {r}.",
    ),
    Kind(
        "time",
        ("get_time", "time_in", "current_time", "clock", "local_time", "get_current_time", "world_clock", "getTime"),
        ("Get the time in a place", "Current local time of a city", "Returns the time for a location", "The clock of a city", "What time it is somewhere",
         "Get the current time"),
        ((("city", "place", "location", "timezone", "zone", "where", "tz", "town"), "place"),),
        ("What time is it in {v}?", "What's the time in {v}?", "Time in {v}?", "Tell me the time in {v}.", "How late is it in {v}?",
         "What is the local time in {v}?", "Is it already night in {v}?", "Can you tell me the time in {v}?", "I need the time in {v}.",
         "What does the clock say in {v}?", "Give me the current time in {v}.", "Check the time in {v}.", "Which time is it in {v}?",
         "What is the current time in {v}?", "Please get the time for {v}.", "Is it morning in {v}?"),
        ("And in {v}?", "What about {v}?", "And {v}?", "How about {v}?", "And the time in {v}?"),
        ("What time is it in {v} and {w}?", "Tell me the time in {v} and in {w}.", "What is the time in {v} and {w}?", "Time in {v} and {w}?"),
        "The time in {v}: {r}.",
    ),
    Kind(
        "price",
        ("get_price", "stock_price", "price_of", "quote", "get_stock_price", "stock_quote", "price", "lookup_price", "getPrice"),
        ("Get the price of something", "Current stock price", "Returns the price of an item", "Get a stock quote", "Look up a price", "The price of a product or share"),
        ((("symbol", "ticker", "item", "company", "product", "stock", "name", "sku"), "ticker"),),
        ("What is the price of {v}?", "How much does {v} cost?", "Price of {v}?", "What does {v} cost?", "How much is {v}?", "Tell me the price of {v}.",
         "What is the stock price of {v}?", "Get me a quote for {v}.", "What is {v} worth?", "Check the price of {v}.", "How expensive is {v}?",
         "What's the price of {v} today?", "I want to know the price of {v}.", "What is the current price of {v}?", "Give me the price of {v}.",
         "How much is {v} trading at?"),
        ("And {v}?", "What about {v}?", "How about {v}?", "And the price of {v}?"),
        ("What is the price of {v} and {w}?", "How much do {v} and {w} cost?", "Compare the prices of {v} and {w}.", "Price of {v} and {w}?"),
        "The price of {v}: {r}.",
    ),
    Kind(
        "search",
        ("search", "web_search", "lookup", "find", "search_docs", "search_web", "wiki", "google", "query_index"),
        ("Search the web", "Look something up", "Search for a text", "Find documents", "Full text search", "Search the documentation", "Find pages about a topic"),
        ((("query", "q", "text", "topic", "term", "keywords", "phrase", "search"), "phrase"),),
        ("Search for {v}.", "Look up {v}.", "Find information about {v}.", "Search the web for {v}.", "Find {v}.", "Please search for {v}.",
         "Can you look up {v}?", "Do a search for {v}.", "I need you to search for {v}.", "Look for {v}.", "Can you find something about {v}?",
         "Search {v}.", "Could you search for {v}?", "Find out about {v}.", "Run a search for {v}.", "Look up {v} for me."),
        ("Now search for {v}.", "And look up {v}.", "Also search for {v}.", "Then find {v}."),
        ("Search for {v} and for {w}.", "Look up {v} and then {w}.", "Find {v} and also {w}."),
        "I found this: {r}.",
    ),
    Kind(
        "multiply",
        ("multiply", "mul", "times", "product", "multiply_numbers", "calc_product"),
        ("Multiply two numbers", "Returns the product of two numbers", "Multiplication", "Multiplies numbers", "Computes a product"),
        ((("a", "x", "first", "left", "num1", "n1"), "number"), (("b", "y", "second", "right", "num2", "n2"), "number")),
        ("What is {v} times {w}?", "Multiply {v} by {w}.", "{v} * {w}", "What is {v} x {w}?", "How much is {v} times {w}?", "Multiply {v} and {w}.",
         "What is the product of {v} and {w}?", "Calculate {v} times {w}.", "Compute {v} * {w}.", "{v} times {w}?", "Work out {v} times {w}."),
        ("And {v} times {w}?", "And {v} * {w}?", "What about {v} times {w}?"),
        (),
        "The result is {r}.",
    ),
    Kind(
        "add",
        ("add", "sum", "plus", "add_numbers", "calc_sum", "calculator", "calculate"),
        ("Add two numbers", "Returns the sum of two numbers", "Addition", "Adds numbers", "Computes a sum", "A calculator for two numbers"),
        ((("a", "x", "first", "left", "num1", "n1"), "number"), (("b", "y", "second", "right", "num2", "n2"), "number")),
        ("What is {v} plus {w}?", "Add {v} and {w}.", "{v} + {w}", "What is {v} + {w}?", "How much is {v} plus {w}?", "Please add {v} and {w}.",
         "What is the sum of {v} and {w}?", "Calculate {v} plus {w}.", "Compute {v} + {w}.", "{v} plus {w}?", "Work out {v} plus {w}."),
        ("And {v} plus {w}?", "And {v} + {w}?", "What about {v} plus {w}?"),
        (),
        "The result is {r}.",
    ),
    Kind(
        "message",
        ("send_message", "send", "send_sms", "message", "send_mail", "notify", "post_message"),
        ("Send a message to someone", "Sends a text to a person", "Deliver a message", "Write to a person"),
        ((("to", "recipient", "person", "name", "user"), "name"), (("text", "message", "body", "content"), "phrase")),
        ("Send {v} the message {w}.", "Tell {v} this: {w}.", "Send a message to {v}: {w}.", "Write to {v}: {w}.", "Message {v}: {w}.",
         "Please send {v} this text: {w}.", "Text {v}: {w}.", "Send {v} a message saying {w}.", "Let {v} know: {w}.", "Notify {v}: {w}."),
        ("Also tell {v} this: {w}.", "Now message {v}: {w}."),
        (),
        "Done: {r}.",
    ),
    Kind(
        "timer",
        ("set_timer", "timer", "start_timer", "countdown", "set_alarm"),
        ("Set a timer", "Start a countdown", "Starts a timer", "Sets a timer for some minutes"),
        ((("minutes", "mins", "duration", "length", "time"), "number"),),
        ("Set a timer for {v} minutes.", "Start a timer of {v} minutes.", "Timer for {v} minutes.", "Wake me in {v} minutes.", "Remind me in {v} minutes.",
         "Set the timer to {v} minutes.", "I need a timer for {v} minutes.", "Count down {v} minutes.", "Please set a {v} minute timer.",
         "Give me a {v} minute countdown."),
        ("And one for {v} minutes.", "Another timer for {v} minutes."),
        (),
        "Done: {r}.",
    ),
)  # fmt: skip
LOOKUP_QUESTIONS = (
    "What is the {k} of {v}?", "Get the {k} of {v}.", "Tell me the {k} of {v}.", "{k} of {v}?", "I need the {k} of {v}.", "What's the {k} of {v}?",
    "Give me the {k} of {v}.", "Look up the {k} of {v}.", "Can you tell me the {k} of {v}?", "Please get the {k} of {v}.",
    "Do you know the {k} of {v}?", "Check the {k} of {v}.", "Show me the {k} of {v}.", "Find the {k} of {v}.",
)  # fmt: skip
LOOKUP_ABOUT = listed(
    "population height balance status score owner capital author weight depth speed age phone address rating stock color mayor email distance "
    "size rank salary level version origin length area title count"
)
LOOKUP_OF = listed("city person company account order player country book server user item mountain river team project device room product song film")  # fmt: skip
SKY = listed("sunny rainy cloudy windy snowy foggy clear stormy hot dry")
UNITS = ("unit", "units", "format", "lang", "mode")


@dataclass
class Tool:
    """One declared tool: its kind, its name and the names of the parameters it takes."""

    kind: Kind
    name: str
    params: tuple[str, ...]
    declaration: dict[str, Any]


def lookup_kind(words: Words) -> Kind:
    """Returns a kind that looks up one open property of one open sort of thing."""
    rng = words.rng
    about = rng.choice(LOOKUP_ABOUT) if rng.random() < 0.6 else words.made(2, 3)
    thing = rng.choice(LOOKUP_OF) if rng.random() < 0.7 else words.noun()
    return Kind(
        "lookup",
        (f"get_{about}", f"{about}_of", f"lookup_{about}", f"{thing}_{about}", f"{about}_lookup", f"find_{about}", about),
        (f"Get the {about} of a {thing}", f"Returns the {about} of a {thing}", f"Look up the {about} of a {thing}", f"The {about} of some {thing}"),
        (((thing, thing, "name", "id", "key", f"{thing}_name"), rng.choice(["place", "name", "noun", "ticker"])),),
        tuple(q.replace("{k}", about) for q in LOOKUP_QUESTIONS),
        ("And of {v}?", "What about {v}?", "And {v}?"),
        (f"What is the {about} of {{v}} and {{w}}?", f"Tell me the {about} of {{v}} and of {{w}}.", f"Compare the {about} of {{v}} and {{w}}."),
        f"The {about} of {{v}}: {{r}}.",
    )  # fmt: skip


def draw_kind(words: Words) -> Kind:
    """Returns one of the kinds, a lookup in every fourth case."""
    return lookup_kind(words) if words.rng.random() < 0.25 else words.rng.choice(KINDS)


def declare(words: Words, kind: Kind) -> Tool:
    """Declares a tool of `kind`: usual names or made-up ones, in OpenAI's shape."""
    rng = words.rng
    made_up = rng.random() < 0.25
    name = rng.choice(kind.names)
    if made_up:
        made = words.made(1, 3)
        name = rng.choice(
            [made, f"{made}_{name}", f"{name}_{made}", f"{made}_tool", f"{made}-{name}"]
        )
    description = rng.choice(kind.descriptions)
    if not made_up and rng.random() < 0.08:
        description = ""
    elif rng.random() < 0.15:
        description += rng.choice([".", " now.", f" ({words.noun()})", f". {words.sentence()}"])
    at = rng.randrange(
        min(len(pool) for pool, _ in kind.params)
    )  # x goes with y, first with second
    params = tuple(pool[at] for pool, _ in kind.params)
    if len(params) == 1 and rng.random() < 0.12:
        params = (words.made(1, 2),)
    properties: dict[str, Any] = {}
    for param, (_, sort) in zip(params, kind.params, strict=True):
        number = sort == "number"
        properties[param] = {"type": rng.choice(["number", "integer"]) if number else "string"}
        if rng.random() < 0.4:
            properties[param]["description"] = rng.choice([f"The {param}", param, f"the {sort}", f"A {sort}, such as {words.noun()}"])  # fmt: skip
    if rng.random() < 0.1 and (unit := rng.choice(UNITS)) not in properties:
        properties[unit] = {"type": "string", "enum": [words.noun(), words.noun()]}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        schema["required"] = list(params)
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if description:
        function["description"] = description
    return Tool(kind, name, params, {"type": "function", "function": function})


def offer(words: Words, first: Kind | None = None) -> list[Tool]:
    """Declares one to three tools that cannot be mistaken for each other, `first` among them."""
    rng = words.rng
    kinds = [first or draw_kind(words)]
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        kind = draw_kind(words)
        if all(kind.key != k.key for k in kinds):
            kinds.append(kind)
    tools = [declare(words, kind) for kind in kinds]
    rng.shuffle(tools)
    return tools if len({t.name for t in tools}) == len(tools) else tools[:1]


def values(words: Words, kind: Kind) -> list[str | int | float]:
    """Draws one value for each parameter of `kind`."""
    rng = words.rng
    drawn: list[str | int | float] = []
    for _, sort in kind.params:
        if sort == "number":
            drawn.append(round(rng.uniform(0, 99), 1) if rng.random() < 0.1 else words.number(9999))
        elif sort == "phrase":
            drawn.append(words.phrase(1, 4))
        elif rng.random() < 0.05:
            drawn.append(words.foreign())
        else:
            draws = {
                "place": words.place,
                "name": words.name,
                "noun": words.noun,
                "ticker": words.ticker,
            }
            drawn.append(draws[sort]())
    return drawn


def call(rng: random.Random, tool: Tool, drawn: list[str | int | float]) -> dict[str, Any]:
    """Returns the OpenAI-shaped tool call, arguments as a mapping."""
    arguments = dict(zip(tool.params, drawn, strict=True))
    identity = f"call_{rng.randrange(16**6):06x}"
    return {"id": identity, "type": "function", "function": {"name": tool.name, "arguments": arguments}}  # fmt: skip


def result(words: Words, kind: Kind) -> tuple[str | dict[str, Any], str]:
    """Draws what a tool gives back and how the answer words it."""
    rng = words.rng
    if rng.random() < 0.4:
        keys = {
            "weather": ["temperature", "sky", "wind", "humidity", "temp_c", "condition"],
            "time": ["time", "zone", "date", "hour"],
            "price": ["price", "currency", "change"],
        }.get(kind.key, ["value", "result", "status", "source"])
        chosen = rng.sample(keys, rng.randint(1, min(3, len(keys))))
        if rng.random() < 0.3:
            chosen[-1] = words.made(1, 2)
        record = {key: _scalar(words) for key in chosen}
        # A mapping of nothing but `value` would read like a plain text result, whose answer names no key.
        if rng.random() < 0.2 and set(record) != {"value"}:
            record = dict(sorted(record.items()))
            return record, ", ".join(f"{k} {v}" for k, v in record.items())
        return json.dumps(record, ensure_ascii=False), ", ".join(
            f"{k} {v}" for k, v in record.items()
        )
    text = {"weather": _weather, "time": _time, "price": _price}.get(kind.key, _plain)(words)
    return text, text.rstrip(".")


def _scalar(words: Words) -> str | int | float:
    rng = words.rng
    drawn: list[str | int | float] = [
        words.number(999),
        rng.randint(-20, 40),
        round(rng.uniform(0, 99), 1),
    ]
    return rng.choice([*drawn, rng.choice(SKY), words.noun(), words.phrase(2, 2)])


def _weather(words: Words) -> str:
    rng = words.rng
    t, sky = rng.randint(-20, 42), rng.choice(SKY)
    return rng.choice([f"{t} C", f"{sky}, {t} degrees", sky, f"{t} C and {sky}", f"{t}°C", f"It is {sky} and {t} degrees.", f"{sky} {t} C", f"{t}", f"{t} degrees, {sky}"])  # fmt: skip


def _time(words: Words) -> str:
    rng = words.rng
    h, m = rng.randint(0, 23), rng.randint(0, 59)
    return rng.choice([f"{h:02}:{m:02}", f"{h}:{m:02}", f"{h % 12 or 12}:{m:02} {'AM' if h < 12 else 'PM'}", f"{h:02}:{m:02}:{rng.randint(0, 59):02}", f"It is {h:02}:{m:02}."])  # fmt: skip


def _price(words: Words) -> str:
    rng = words.rng
    p = rng.choice([f"{rng.randint(1, 999)}", f"{rng.randint(1, 999)}.{rng.randint(0, 99):02}"])
    return rng.choice([p, f"{p} USD", f"${p}", f"{p} EUR", f"{p} dollars", f"EUR {p}"])


def _plain(words: Words) -> str:
    rng = words.rng
    return rng.choice([words.phrase(1, 4), str(words.number(99999)), words.code(), "ok", f"{words.number(999)} {words.noun()}", words.sentence(), f"{words.noun()}, {words.noun()}"])  # fmt: skip

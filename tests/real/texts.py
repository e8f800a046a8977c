"""What the real model reads in tests: 20 prompts, and a text of 100 kB. The same on every run of one Python."""

import argparse
import inspect
import json.decoder
import random
import unicodedata
from pydoc_data import topics
from typing import Any

import pytest

PROMPTS = {
    "english": "The lighthouse keeper climbed the stairs every evening because",
    "english list": "Three things to pack for a hike in the mountains:\n1.",
    "english dialogue": '"Where did you put the map?" she asked. He shrugged and said, "',
    "german": "Am Rande des Dorfes stand eine alte Mühle, deren Räder sich",
    "german question": "Warum ist der Himmel blau? Die kurze Antwort lautet:",
    "french": "Le marché s'éveille avant l'aube, et déjà les pêcheurs",
    "french recipe": "Pour faire une bonne soupe à l'oignon, il faut d'abord",
    "spanish": "El tren salió de la estación con veinte minutos de retraso, así que",
    "spanish history": "La ciudad de Toledo fue durante siglos",
    "japanese": "朝早く起きて、海まで歩いて行くと、",
    "russian": "Зимой в нашем городе рано темнеет, и поэтому",
    "python": "def merge(left: list[int], right: list[int]) -> list[int]:\n    result = []\n    while",
    "rust": "impl Iterator for Countdown {\n    type Item = u32;\n\n\tfn next(&mut self) -> Option<",
    "html": "<table>\n  <tr><th>City</th><th>Country</th></tr>\n  <tr><td>Oslo</td><td>",
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "',
    "emoji": "Weather today: ☀️🌡️ 31 °C. Tomorrow: 🌧️☔. Packing list: 🧥👟",
    "emoji families": "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇳🇴 are made of several code points:",
    "hebrew": "בבוקר יצאנו אל השוק כדי לקנות",
    "arabic": "كان يا مكان في قديم الزمان",
    "numbers": "2 4 8 16 32 64 128 256 512",
}
SHORT = ["english", "python", "emoji", "hebrew"]
"""The prompts of the short form."""

_CHARACTERS = 1000


def cases() -> list[Any]:
    """The prompts' names as parameters of a test; those of the short form are marked."""
    return [
        pytest.param(name, marks=pytest.mark.short if name in SHORT else ()) for name in PROMPTS
    ]


def corpus(size: int = 100_000) -> str:
    """At least `size` bytes of UTF-8: prompts and their words mixed, one of many characters each, then English and code."""
    draw = random.Random(8)
    words = [word for prompt in PROMPTS.values() for word in prompt.split(" ")]
    joints = [
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\t\t",
        "\r\n",
        "\u00a0",
        "\u200f",
        "",
        "<b>",
    ]
    mixed = "".join(draw.choice(words) + draw.choice(joints) for _ in range(3000))
    assigned = [
        chr(code)
        for code in range(0x11_0000)
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co") and chr(code) != "▁"
    ]
    code = inspect.getsource(argparse) + inspect.getsource(json.decoder)
    english = "\n".join(topics.topics.values())
    parts = ["\n".join(PROMPTS.values()), mixed, "".join(draw.sample(assigned, _CHARACTERS))]
    room = size - len("\n".join(parts).encode())
    return "\n".join([*parts, code[: room // 3], english[: room - room // 3]])

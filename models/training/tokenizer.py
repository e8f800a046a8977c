"""The embedded model's tokenizer and chat template: Gemma 4's control ids, byte fallback, one token a digit.

Owns how a chat becomes ids and which of them the model has to say. Knows nothing of what chats say.
"""

import json
import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from models.training.chats import Chat
from models.training.words import COLORS, NAMES, NOUNS, PLACES

CONTROL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>",
    101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
"""Gemma 4's control tokens at Gemma 4's ids; the other ids below `FIRST_BYTE` are placeholders."""
FIRST_BYTE = 107
FIRST_DIGIT = FIRST_BYTE + 256
PAD, EOS, BOS, TOOL_CALL_END, TOOL_RESPONSE, TOOL_RESPONSE_END, TURN, TURN_END = (
    0,
    1,
    2,
    49,
    50,
    51,
    105,
    106,
)
STOP_IDS = [EOS, TURN_END, TOOL_RESPONSE]
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# Punctuation that the template always writes together; each becomes one token.
SCAFFOLD = ("{description:", ",parameters:{properties:{", ":{type:", ":{description:", ",type:", "},required:[", "],type:",
            "declaration:", "response:", "{value:", "call:", ",required:[", "},type:")  # fmt: skip
COMMON_WORDS = 850
OPEN = {w.lower() for w in (*NAMES, *PLACES, *NOUNS, *COLORS)}
"""Words that chats ask to be copied; they are spelled from pieces like made-up ones."""


class Encoded(NamedTuple):
    """A chat as ids, and for each position whether the model has to predict the id that stands there."""

    ids: list[int]
    said: list[bool]


def split_pattern(words: Iterable[str]) -> str:
    """Returns the pattern of pre-tokens: a common word keeps its leading space, an open one never has it.

    A name is then the same tokens after a space, a quote or at the start of an answer, so copying it is copying ids.
    """
    common = "|".join(sorted(words, key=lambda w: (-len(w), w)))
    scaffold = "|".join("".join("\\" + c if c in "{}[]" else c for c in s) for s in SCAFFOLD)
    return rf"{scaffold}|▁(?:{common})(?![A-Za-z])|[A-Za-z]+|[0-9]|\n|▁|[^A-Za-z0-9\n▁]"


def common_words(texts: Iterable[str]) -> list[str]:
    """Returns the words most often seen after a space, open ones left out."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(w.rstrip(string.punctuation) for w in text.split(" ")[1:])
    ranked = [w for w, _ in counts.most_common() if w.isascii() and w.isalpha()]
    return [w for w in ranked if w.lower() not in OPEN][:COMMON_WORDS]


def build(texts: list[str], size: int) -> Tokenizer:
    """Trains the merges on `texts` and lays out the vocabulary: control ids, bytes, digits, characters, merges."""
    words = common_words(texts)
    parts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(split_pattern(words)), "isolated")
    ]
    space = normalizers.Replace(" ", "▁")
    trained = Tokenizer(models.BPE())
    trained.normalizer = space
    trained.pre_tokenizer = pre_tokenizers.Sequence(parts)
    printable = set(string.printable) - set(string.digits) - set(" \r\x0b\x0c")
    characters = [*sorted(printable), "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=size - FIRST_DIGIT,
        initial_alphabet=[*characters, *string.digits],
        limit_alphabet=len(characters) + 10,
        show_progress=False,
    )
    emphasis = [" " + word for word in words for _ in range(200)] + list(SCAFFOLD) * 2000
    trained.train_from_iterator([*texts, *emphasis], trainer)
    merges = [tuple(m) for m in json.loads(trained.to_str())["model"]["merges"]]
    names = [CONTROL.get(i, f"<unused{i}>") for i in range(FIRST_BYTE)]
    names += [f"<0x{b:02X}>" for b in range(256)] + list(string.digits) + characters
    names += list(dict.fromkeys(a + b for a, b in merges))
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = space
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CONTROL.values()]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())


class Renderer:
    """Renders chats through the template, as the server does, and encodes them."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.template = environment.from_string(TEMPLATE.read_text())
        self.tokenizer = tokenizer

    def text(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """Returns the prompt's text; `variables` are tools, enable_thinking, add_generation_prompt."""
        return self.template.render(messages=messages, bos_token="<bos>", **variables)

    def chat(self, chat: Chat) -> str:
        """Returns the text of a whole chat, answers included."""
        return self.text(chat.messages, tools=chat.tools, enable_thinking=chat.thinking)

    def encode(self, chat: Chat) -> Encoded:
        """Returns a chat's ids and which of them the model says.

        Said are the ids of a model turn up to and with its end, and the 50 that follows a call; not the results. With thinking
        on, only the last turn counts: earlier ones stand in the history without the thoughts they would have had.
        """
        if self.tokenizer is None:
            raise ValueError("this renderer was made without a tokenizer; pass one to encode")
        text = self.chat(chat)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        opening = self.tokenizer.encode("<|turn>model\n", add_special_tokens=False).ids
        said = [False] * len(ids)
        inside = False
        for i, token in enumerate(ids):
            if token == TURN or (token == TOOL_RESPONSE and ids[i - 1] != TOOL_CALL_END):
                inside = False
            said[i] = inside
            if token in (TOOL_RESPONSE, TURN_END):
                inside = False
            elif token == TOOL_RESPONSE_END or ids[i - len(opening) + 1 : i + 1] == opening:
                # After a result the model speaks, unless another result follows.
                inside = ids[i + 1 : i + 2] != [TOOL_RESPONSE]
        if chat.thinking:
            last = max(i for i in range(len(ids)) if ids[i : i + len(opening)] == opening)
            said[:last] = [False] * last
        return Encoded(ids, said)

    def judged(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Returns the prompt's ids and those of the answer that is judged, its stop id included."""
        ids, said = self.encode(chat)
        starts = [i for i in range(1, len(ids)) if said[i] and not said[i - 1]]
        if chat.last_span == 0:
            last = max(i for i in range(len(ids)) if ids[i] == TURN)
            starts = [next(i for i in starts if i > last)]
        start = starts[-1]
        end = next(i for i in range(start, len(ids)) if i + 1 == len(ids) or not said[i + 1])
        return ids[:start], ids[start : end + 1]

"""A checkpoint's text files, with Gemma 4's control tokens at their real ids, and messages to talk with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from server.chat import ChatTemplate
from server.tokenizer import Tokenizer

CONTROLS = {
    0: "<pad>",
    1: "<eos>",
    2: "<bos>",
    3: "<unk>",
    4: "<mask>",
    46: "<|tool>",
    47: "<tool|>",
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    51: "<tool_response|>",
    52: '<|"|>',
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
    # The published vocabulary has these near its end, where a small one has no room.
    90: "<|image>",
    91: "<image|>",
    92: "<|image|>",
    93: "<|audio|>",
    94: "<unused5>",
}
NAMES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
TEMPLATE = Path(__file__).with_name("gemma4_chat_template.jinja")
VOCABULARY = 900

Message = dict[str, Any]


def train_tokenizer() -> tokenizers.Tokenizer:
    """Train merges on a file of the standard library, then make the tokenizer as Gemma 4's is made."""
    reserved = [CONTROLS.get(i, f"<reserved{i}>") for i in range(107)]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=reserved + alphabet, show_progress=False
    )
    trained.train([argparse.__file__], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    gemma = tokenizers.Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    gemma.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    gemma.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROLS.values()])
    return gemma


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    folder = tmp_path_factory.mktemp("text")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "backend": "tokenizers",
        **NAMES,
        "extra_special_tokens": [text for text in CONTROLS.values() if text not in NAMES.values()],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text("utf-8"), "utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(text_folder: Path) -> Tokenizer:
    """The tokenizer of `text_folder`."""
    return Tokenizer.from_folder(text_folder)


@pytest.fixture(scope="session")
def template(text_folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of `text_folder`."""
    template = ChatTemplate.from_folder(text_folder, tokenizer)
    assert template is not None
    return template


def call(name: str, arguments: object, call_id: str = "call_1") -> Message:
    """Return a tool call as a message of the assistant carries it."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tool(name: str = "weather", description: str = "Says.", **properties: object) -> Message:
    """Return a declaration; `properties` are its parameters."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def weather(arguments: object = '{"city":"Oslo"}', **fields: object) -> list[Message]:
    """Return a question, a call with `arguments` and its result; `fields` are added to the call's message."""
    return [
        {"role": "user", "content": "Weather in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("weather", arguments)],
            **fields,
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4 C"},
    ]

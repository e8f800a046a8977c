"""Small vocabularies as llama.cpp's converter writes them: Gemma 3's with scores, Gemma 4's with merges."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from text_fixtures import CONTROLS, train_tokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tests import gguf_files

if TYPE_CHECKING:
    from pathlib import Path

Metadata = dict[str, Any]

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
# What Gemma 4's converter has printed though tokenizer.json calls them special.
VISIBLE = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"]
VISIBLE += ["<|tool_response>", "<tool_response|>", '<|"|>']


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with Gemma 3's kind of vocabulary and no weights, written by the package gguf."""
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny-Q4_K_M.gguf", gemma3(), {})


def gemma3() -> Metadata:
    """Gemma 3's order of ids: controls, runs of line ends, of spaces and tags, bytes, learned pieces, runs of tabs."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<unused0>", "<unused1>"]
    control += ["<start_of_turn>", "<end_of_turn>"]
    written = ["[multimodal]", *("\n" * n for n in range(1, 8)), *(" " * n for n in range(2, 8))]
    written += ["<table>", "<b>", "</b>", "<start_of_image>"]
    late = ["\t", "\t\t", "\t\t\t"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    known = {*control, *written, *late, *bytes_}
    learned = [piece for piece in _learned() if piece not in known]
    tokens = [*control, *written, *bytes_, *learned, *late]
    kinds = {
        **dict.fromkeys(control, CONTROL),
        **dict.fromkeys([*written, *late], USER_DEFINED),
        **dict.fromkeys(bytes_, BYTE),
    }
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [
            -1000.0 if kinds.get(token) in (CONTROL, USER_DEFINED) else -float(token_id)
            for token_id, token in enumerate(tokens)
        ],
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def gemma4() -> Metadata:
    """The vocabulary of `train_tokenizer`, its merges as lines."""
    model = json.loads(train_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = {
        **{f"<0x{byte:02X}>": BYTE for byte in range(256)},
        **dict.fromkeys(CONTROLS.values(), CONTROL),
        **dict.fromkeys(VISIBLE, USER_DEFINED),
    }
    return {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 106,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _learned() -> list[str]:
    """Pieces in the order in which merges made them, then single characters, as in Gemma's vocabulary."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train([argparse.__file__], trainers.BpeTrainer(vocab_size=700, show_progress=False))
    vocabulary = trained.get_vocab()
    return sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))

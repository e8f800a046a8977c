"""A broken or hostile GGUF file is a ValueError that names the file, and the key or the tensor.

What a reader of the format can meet in a header is in rust/src/gguf/tests.rs, changed at random too. Here one thing is wrong with a
good model, as a user or an attacker would have it, and the process is none the worse.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

import torchtpu_rs
from tests import gguf_files
from tests.gguf_files import Kind, Tensors

LIKE = torch.zeros(1)
Keys = dict[str, Any]


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory, dense: Path
) -> tuple[Keys, Tensors, dict[str, torch.Tensor]]:
    return gguf_files.parts_of(dense, Kind.Q8_0)


@pytest.fixture
def file(tmp_path: Path, parts: tuple[Keys, Tensors, Any]) -> Path:
    """A good model."""
    return gguf_files.write(tmp_path / "model.gguf", *parts[:2])


def refused(path: Path, *wanted: str) -> None:
    with pytest.raises(torchtpu_rs.CheckpointError) as caught:
        torchtpu_rs.Engine(path, LIKE, 32)
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(part in text for part in wanted), text
    assert len(text) < 1000


def test_a_good_model_loads(file: Path) -> None:
    assert torchtpu_rs.Engine(file, LIKE, 32).info()["vocab_size"] == 512


@pytest.mark.parametrize("size", [0, 3, 4, 8, 23, 24, 25, 1000, 50_000])
def test_a_file_cut_short_is_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    refused(file, "model.gguf", "expected")


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("general.architecture", "llama", "`llama` (expected gemma3 or gemma4)"),
        ("gemma4.block_count", 0, "`gemma4.block_count`"),
        ("gemma4.block_count", 2**31, "`gemma4.block_count`"),
        ("gemma4.block_count", 8, "each of 8 layers, found 9"),
        ("gemma4.block_count", "nine", "expected a number"),
        ("gemma4.embedding_length", 2**31, "`gemma4.embedding_length (hidden_size)`"),
        ("gemma4.embedding_length", 1.5, "`gemma4.embedding_length (hidden_size)`"),
        ("gemma4.embedding_length", 32, "[512, 32]"),
        ("gemma4.vocab_size", 2**30, "vocab_size"),
        ("gemma4.vocab_size", 262_144, "at least vocab_size 262144, found 512"),
        ("gemma4.attention.head_count", -1.0, "gemma4.attention.head_count"),
        ("gemma4.attention.head_count_kv", [3] * 9, "gemma4.attention.head_count_kv"),
        ("gemma4.attention.head_count_kv", [2, 1] * 4 + [2], "gemma4.attention.head_count_kv"),
        ("gemma4.attention.head_count_kv", [2] * 8, "one for each of 9 layers"),
        ("gemma4.attention.key_length", True, "gemma4.attention.key_length"),
        ("gemma4.attention.sliding_window", 0, "gemma4.attention.sliding_window"),
        ("gemma4.attention.sliding_window_pattern", [True] * 8, "each of 9 layers, found 8"),
        ("gemma4.attention.sliding_window_pattern", ["a"] * 9, "expected a boolean"),
        ("gemma4.attention.shared_kv_layers", 10, "gemma4.attention.shared_kv_layers"),
        ("gemma4.attention.shared_kv_layers", 9, "drafter"),
        ("gemma4.attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon"),
        ("gemma4.rope.freq_base", 0.0, "rope_theta"),
        ("gemma4.feed_forward_length", [128] * 8 + [100], "gemma4.feed_forward_length"),
        ("tokenizer.ggml.eos_token_id", 512, "512"),
        ("general.alignment", 48, "`general.alignment`"),
        ("split.count", 3, "`split.count`"),
    ],
)
def test_a_key_that_cannot_be_is_named(
    tmp_path: Path, parts: tuple[Keys, Tensors, Any], key: str, value: object, part: str
) -> None:
    keys, tensors, _ = parts
    refused(gguf_files.write(tmp_path / "x.gguf", keys | {key: value}, tensors), "x.gguf", part)


@pytest.mark.parametrize(
    "key", ["gemma4.block_count", "gemma4.embedding_length", "gemma4.attention.key_length"]
)
def test_a_key_that_is_missing_is_named(
    tmp_path: Path, parts: tuple[Keys, Tensors, Any], key: str
) -> None:
    keys, tensors, _ = parts
    keys = {name: value for name, value in keys.items() if name != key}
    refused(gguf_files.write(tmp_path / "x.gguf", keys, tensors), "x.gguf", f"`{key}`", "none")


def f32(*shape: int) -> tuple[np.ndarray, GGMLQuantizationType]:
    return np.ones(shape, np.float32), Kind.F32


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda t: t.pop("output_norm.weight"), ["`model.norm.weight` is missing"]),
        (lambda t: t.update({"output_norm.weight": f32(65)}), ["`output_norm.weight`", "[65]"]),
        (lambda t: t.update({"blk.0.attn_qkv.weight": f32(4)}), ["`blk.0.attn_qkv.weight`"]),
        (lambda t: t.update({"blk.9.attn_norm.weight": f32(64)}), ["`blk.9.attn_norm.weight`"]),
        (lambda t: t.update({"rope_freqs.weight": f32(2, 8)}), ["`rope_freqs.weight`"]),
        (
            lambda t: t.update({"rope_freqs.weight": (np.full(16, 2, np.float32), Kind.F32)}),
            ["`rope_freqs.weight`", "expected factors 1"],
        ),
        (
            lambda t: t.update({"output_norm.weight": (np.ones(64, np.int32), Kind.I32)}),
            ["type I32 of tensor `output_norm.weight`", "expected F32"],
        ),
    ],
)
def test_a_tensor_that_cannot_be_is_named(
    tmp_path: Path,
    parts: tuple[Keys, Tensors, Any],
    change: Callable[[Tensors], object],
    wanted: list[str],
) -> None:
    keys, tensors = parts[0], dict(parts[1])
    change(tensors)
    refused(gguf_files.write(tmp_path / "x.gguf", keys, tensors), *wanted)


def test_a_type_that_is_not_read_is_refused_by_its_name(file: Path) -> None:
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (Kind.Q8_0,)
    struct.pack_into("<I", data, at, Kind.IQ4_NL)
    file.write_bytes(data)
    refused(file, "type IQ4_NL of tensor `blk.0.attn_q.weight`", "not supported")


def test_a_set_of_which_a_file_is_missing_names_it(file: Path) -> None:
    first = file.rename(file.with_name("model-00001-of-00002.gguf"))
    refused(first, "model-00002-of-00002.gguf")


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "expected a file")
    (tmp_path / "a.txt").write_text("no model")
    refused(tmp_path / "a.txt", "expected a checkpoint folder or a GGUF file, found another file")
    refused(tmp_path / "nowhere.gguf", "expected a checkpoint folder or a GGUF file, found none")


def test_after_a_refusal_a_good_model_answers_as_before(file: Path) -> None:
    wanted = torchtpu_rs.Engine(file, LIKE, 32).decode([2, 110, 120], 5, stop=[]).ids
    broken = file.with_name("broken.gguf")
    broken.write_bytes(file.read_bytes()[:-1000])
    for _ in range(3):
        refused(broken, "cut short")
    assert torchtpu_rs.Engine(file, LIKE, 32).decode([2, 110, 120], 5, stop=[]).ids == wanted

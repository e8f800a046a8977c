"""`gguf_metadata` gives what the package `gguf` reads of the same file."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

import torchtpu_rs
from tests import gguf_files

KEYS: dict[str, Any] = {
    "general.architecture": "gemma4",
    "general.name": "ein Modell — 模型 🙂",
    "gemma4.block_count": 35,
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<pad>", "▁the", "<0x0A>", "", "\n\n"] * 50_000,
    "tokenizer.ggml.scores": [-1000.0, 0.5, -3.25] * 50_000,
    "tokenizer.ggml.token_type": [3, 1, 6] * 50_000,
    "gemma4.attention.sliding_window_pattern": [True, True, False],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {"output_norm.weight": (np.ones(4, np.float32), GGMLQuantizationType.F32)}
    return gguf_files.write(tmp_path / "model.gguf", KEYS, tensors)


def test_every_kind_of_value_is_read_as_the_package_gguf_reads_it(file: Path) -> None:
    found = torchtpu_rs.gguf_metadata(file)
    fields = GGUFReader(file).fields
    assert found == {
        key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")
    }
    assert {key: type(found[key]) for key in KEYS} == {key: type(KEYS[key]) for key in KEYS}
    assert found["tokenizer.ggml.tokens"] == KEYS["tokenizer.ggml.tokens"]


def test_a_folder_and_a_text_name_the_same_file(file: Path) -> None:
    found = torchtpu_rs.gguf_metadata(file)
    assert torchtpu_rs.gguf_metadata(str(file)) == found
    assert torchtpu_rs.gguf_metadata(file.parent) == found


def test_what_is_no_gguf_model_is_refused(file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(torchtpu_rs.CheckpointError, match="empty: expected a GGUF file"):
        torchtpu_rs.gguf_metadata(empty)
    with pytest.raises(torchtpu_rs.CheckpointError, match=r"none\.gguf"):
        torchtpu_rs.gguf_metadata(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(torchtpu_rs.CheckpointError, match="expected a file"):
        torchtpu_rs.gguf_metadata(tmp_path / "pipe.gguf")
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(torchtpu_rs.CheckpointError, match="expected one GGUF model, found"):
        torchtpu_rs.gguf_metadata(tmp_path)


def test_a_value_that_is_not_what_its_type_says_names_file_and_key(file: Path) -> None:
    data = file.read_bytes()
    key = b"tokenizer.ggml.add_bos_token" + struct.pack("<I", 7)
    at = data.index(key) + len(key)
    file.write_bytes(data[:at] + b"\x05" + data[at + 1 :])
    with pytest.raises(ValueError, match=r"model\.gguf: `tokenizer.ggml.add_bos_token`.*found 5"):
        torchtpu_rs.gguf_metadata(file)

"""A broken or hostile checkpoint is a ValueError that names the file, the tensor or the key.

Each test breaks one thing in a good checkpoint; `refused` also checks that the process is none the worse:
the good checkpoint still loads.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtpu_rs
from tests import checkpoints

LIKE = torch.zeros(1)
Header = dict[str, Any]


@pytest.fixture
def broken(dense: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint, to be broken."""
    return shutil.copytree(dense, tmp_path / "broken")


def refused(folder: Path | list[Path], *parts: str) -> None:
    """Loading `folder` fails with a message that has all of `parts`."""
    with pytest.raises(torchtpu_rs.CheckpointError) as caught:
        torchtpu_rs.Engine(folder, LIKE, 32)
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert all(part in text for part in parts), text
    assert len(text) < 1000


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def edit_header(folder: Path, edit: Callable[[Header], object]) -> None:
    """Rewrites the JSON header in place; the tensors' bytes stay as they are."""
    data = weights(folder).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    weights(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def edit_config(folder: Path, **keys: object) -> None:
    """Sets keys of config.json; `...` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(weights(folder)).items()}
    edit(tensors)
    save_file(tensors, weights(folder))


def test_a_truncated_file_is_refused(broken: Path) -> None:
    data = weights(broken).read_bytes()
    weights(broken).write_bytes(data[: len(data) // 2])
    refused(broken, "model.safetensors")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_a_file_too_short_for_a_header_is_refused(broken: Path, size: int) -> None:
    weights(broken).write_bytes(weights(broken).read_bytes()[:size])
    refused(broken, "model.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**12, 99_000_000])
def test_a_header_length_beyond_the_file_is_refused(broken: Path, length: int) -> None:
    data = weights(broken).read_bytes()
    weights(broken).write_bytes(struct.pack("<Q", length) + data[8:])
    refused(broken, "model.safetensors", "safetensors")


def test_a_header_that_is_no_json_is_refused(broken: Path) -> None:
    data = bytearray(weights(broken).read_bytes())
    data[8:12] = b"\xff{{{"
    weights(broken).write_bytes(data)
    refused(broken, "model.safetensors")


def test_overlapping_tensors_are_refused(broken: Path) -> None:
    def overlap(header: Header) -> None:
        first, second, *_ = sorted(
            (name for name in header if name != "__metadata__"),
            key=lambda n: header[n]["data_offsets"],
        )
        start, end = header[second]["data_offsets"]
        shift = header[first]["data_offsets"][1] - header[first]["data_offsets"][0]
        header[second]["data_offsets"] = [start - shift, end - shift]

    edit_header(broken, overlap)
    refused(broken, "model.safetensors", "model.")


@pytest.mark.parametrize("offsets", [[0, 2**62], [2**62, 2**62 + 128], [64, 0]])
def test_offsets_out_of_range_are_refused(broken: Path, offsets: list[int]) -> None:
    edit_header(broken, lambda header: header["model.norm.weight"].update(data_offsets=offsets))
    refused(broken, "model.safetensors")


def test_negative_offsets_are_refused(broken: Path) -> None:
    edit_header(broken, lambda header: header["model.norm.weight"].update(data_offsets=[-128, 0]))
    refused(broken, "model.safetensors")


def test_a_shape_whose_product_overflows_is_refused(broken: Path) -> None:
    edit_header(broken, lambda header: header["model.norm.weight"].update(shape=[2**33, 2**33]))
    refused(broken, "model.safetensors")


def test_trailing_bytes_are_refused(broken: Path) -> None:
    with weights(broken).open("ab") as file:
        file.write(b"\0" * 64)
    refused(broken, "model.safetensors")


def test_a_wrong_dtype_names_the_tensor(broken: Path) -> None:
    edit_tensors(
        broken, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int16)})
    )
    refused(broken, "model.safetensors", "`model.norm.weight`", "I16")


def test_a_wrong_shape_names_the_tensor_and_both_shapes(broken: Path) -> None:
    edit_tensors(broken, lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    refused(broken, "model.safetensors", "`model.norm.weight`", "[64]", "[65]")


def test_a_missing_tensor_is_named(broken: Path) -> None:
    edit_tensors(broken, lambda t: t.pop("model.layers.3.mlp.up_proj.weight"))
    refused(broken, "`model.layers.3.mlp.up_proj.weight` is missing", str(broken))


def test_a_tensor_without_a_place_is_named(broken: Path) -> None:
    edit_tensors(
        broken, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    )
    refused(broken, "`model.layers.0.self_attn.q_proj.bias`")


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "sliding_window",
        "hidden_size_per_layer_input",
    ],
)
def test_a_missing_config_key_is_named(broken: Path, key: str) -> None:
    edit_config(broken, **{key: ...})
    refused(broken, "config.json", f"`{key}`")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**15),
        ("hidden_size", -64),
        ("hidden_size", 2**62),
        ("vocab_size", 1e300),
        ("head_dim", 0),
        ("num_attention_heads", "four"),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", "NaN"),
        ("sliding_window", 0),
        ("rope_parameters", []),
        ("layer_types", ["full_attention"]),
        ("num_kv_shared_layers", 10),
        ("max_position_embeddings", 2**60),
        ("final_logit_softcapping", -1),
    ],
)
def test_an_absurd_config_key_is_named(broken: Path, key: str, value: object) -> None:
    edit_config(broken, **{key: value})
    refused(broken, "config.json", f"`{key}`", "expected")


def test_a_config_that_promises_more_than_the_file_holds_allocates_nothing(broken: Path) -> None:
    """262,144 rows would fit the bounds; the file's own shape is compared before anything is made."""
    edit_config(broken, vocab_size=262144, vocab_size_per_layer_input=262144)
    refused(broken, "`model.embed_tokens.weight`", "[262144, 64]", "[512, 64]")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "\x00", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    refused(broken, "config.json", "expected")


def test_a_generation_config_with_an_id_outside_the_vocabulary_is_refused(broken: Path) -> None:
    (broken / "generation_config.json").write_text('{"eos_token_id": [1, 512]}')
    refused(broken, "eos_token_id", "512")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method` gptq"),
        ({"num_kv_shared_layers": 9}, "drafter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    broken: Path, keys: dict[str, object], name: str
) -> None:
    edit_config(broken, **keys)
    refused(broken, "config.json", name, "not supported")


@pytest.fixture
def broken_gemma3(tmp_path: Path) -> Path:
    return checkpoints.make(tmp_path / "gemma3", checkpoints.GEMMA3)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"query_pre_attn_scalar": 0}, "`query_pre_attn_scalar`"),
        ({"query_pre_attn_scalar": 10**15}, "`query_pre_attn_scalar`"),
        ({"sliding_window": None}, "`sliding_window`"),
        ({"sliding_window_pattern": -1}, "`sliding_window_pattern`"),
        ({"layer_types": ["full_attention"]}, "`layer_types`"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads`"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "`per_layer_config`"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "`rope_parameters.sliding_attention`"),
        ({"rope_scaling": {"rope_type": "linear"}}, "`rope_scaling.factor`"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "`rope_scaling.rope_type`"),
        ({"rope_parameters": {"full_attention": []}}, "`rope_parameters.full_attention`"),
        ({"rope_parameters": None, "rope_local_base_freq": "x"}, "`rope_local_base_freq`"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_type `yarn`"),
        ({"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping`"),
        ({"use_bidirectional_attention": True}, "embedding model"),
        # What is left out is the class's default, which these weights do not fit.
        ({"vocab_size": ...}, "[262208, 64]"),
        ({"hidden_size": ...}, "[512, 2304]"),
    ],
)
def test_a_gemma_3_config_that_cannot_be_meant_is_named(
    broken_gemma3: Path, keys: dict[str, object], name: str
) -> None:
    edit_config(broken_gemma3, **keys)
    refused(broken_gemma3, name)


def test_a_gemma_3_with_tensors_of_gemma_4_is_refused(broken_gemma3: Path) -> None:
    name = "model.layers.0.layer_scalar"
    edit_tensors(broken_gemma3, lambda t: t.update({name: torch.ones(1)}))
    refused(broken_gemma3, f"`{name}`", "no place")


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", ".."]
)
def test_an_index_that_names_a_file_outside_the_folder_is_refused(broken: Path, file: str) -> None:
    index = {"weight_map": {"model.norm.weight": file}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(broken, "index.json", "model.norm.weight", "same folder")


def test_an_index_that_names_a_missing_shard_is_refused(broken: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(broken, "model-00002.safetensors")


def test_an_index_that_promises_a_tensor_its_shard_lacks_is_refused(broken: Path) -> None:
    index = {"weight_map": {"model.gone.weight": "model.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(broken, "index.json", "`model.gone.weight`")


def test_the_same_tensor_in_two_files_is_refused(broken: Path) -> None:
    shutil.copy(weights(broken), broken / "copy.safetensors")
    refused(broken, "twice")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_without_waiting_for_it(
    broken: Path, make: Callable[[Path], None]
) -> None:
    weights(broken).unlink()
    make(weights(broken))
    refused(broken, "model.safetensors", "expected a file")


def test_a_folder_without_a_config_is_refused(broken: Path) -> None:
    (broken / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        torchtpu_rs.Engine(broken, LIKE)


def test_a_folder_without_weights_is_refused(broken: Path) -> None:
    weights(broken).unlink()
    with pytest.raises(ValueError, match="safetensors"):
        torchtpu_rs.Engine(broken, LIKE)


def test_a_path_that_is_no_folder_is_refused(broken: Path) -> None:
    refused(broken / "nowhere", "nowhere", "expected a checkpoint folder")
    refused(weights(broken), "expected a checkpoint folder")
    with pytest.raises(ValueError, match="at least one"):
        torchtpu_rs.Engine([], LIKE)


def test_after_a_refusal_a_good_checkpoint_loads_and_answers(broken: Path, dense: Path) -> None:
    expected = torchtpu_rs.Engine(dense, LIKE).decode(checkpoints.prompt(9), 5, stop=[]).ids
    edit_tensors(broken, lambda t: t.pop("model.norm.weight"))
    for _ in range(3):
        refused(broken, "`model.norm.weight` is missing")
    assert torchtpu_rs.Engine(dense, LIKE).decode(checkpoints.prompt(9), 5, stop=[]).ids == expected

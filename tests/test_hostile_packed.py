"""A packed weight that is not as config.json says is refused by its name; nothing is read as what it is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtpu_rs
from tests import checkpoints, pack
from tests.pack import Packing
from tests.test_hostile_checkpoints import edit_config, edit_tensors, refused

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def packed(dense: Path, tmp_path: Path) -> Path:
    return pack.make(tmp_path / "packed", dense, Packing())


@pytest.mark.parametrize(
    ("ending", "replacement", "words"),
    [
        ("packed", torch.zeros(64, 7, dtype=torch.int32), "words [64, 7]"),
        ("packed", torch.zeros(63, 8, dtype=torch.int32), "words [63, 8]"),
        ("packed", torch.zeros(64, 16, dtype=torch.int32), "4 bits, symmetric, groups of 32"),
        ("packed", torch.zeros(64, 8, dtype=torch.int64), "expected I32, found I64"),
        ("packed", torch.zeros(512, dtype=torch.int32), "words [512]"),
        ("scale", torch.ones(64, 1, dtype=torch.bfloat16), "factors [64, 1]"),
        ("scale", torch.ones(64, 4, dtype=torch.bfloat16), "factors [64, 4]"),
        ("scale", torch.ones(64, 2, dtype=torch.int8), "expected BF16, F16 or F32, found I8"),
        ("shape", torch.tensor([64, 63]), "expected [64, 64] by config.json, found [64, 63]"),
        ("shape", torch.tensor([64]), "expected I64 [2], found I64 [1]"),
        ("shape", torch.zeros(1_000_000, dtype=torch.int64), "found I64 [1000000]"),
        ("shape", torch.tensor([-64, 64]), "found [-64, 64]"),
        ("shape", torch.tensor([64.0, 64.0]), "expected I64 [2], found F32 [2]"),
        ("packed", torch.zeros([1] * 60, dtype=torch.int32), "words 60 dimensions"),
        ("zero_point", torch.zeros(8, 2, dtype=torch.int32), "zero points [8, 2]"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_part_of_another_shape_or_type_is_refused(
    packed: Path, ending: str, replacement: torch.Tensor, words: str
) -> None:
    edit_tensors(packed, lambda t: t.update({f"{Q_PROJ}_{ending}": replacement}))
    refused(packed, Q_PROJ, words)


@pytest.mark.parametrize("ending", ["scale", "shape"])
def test_a_part_that_is_missing_is_named(packed: Path, ending: str) -> None:
    edit_tensors(packed, lambda t: t.pop(f"{Q_PROJ}_{ending}"))
    refused(packed, f"`{Q_PROJ}_{ending}` is missing")


def test_columns_stored_out_of_order_are_refused(packed: Path) -> None:
    edit_tensors(packed, lambda t: t.update({f"{Q_PROJ}_g_idx": torch.arange(64)}))
    refused(packed, f"{Q_PROJ}_g_idx", "quantized", "not supported")


def test_a_packed_weight_needs_quantization_config(packed: Path) -> None:
    edit_config(packed, quantization_config=...)
    refused(packed, "quantization_config", "weight_packed", "not supported")


def test_a_weight_that_is_there_twice_is_refused(packed: Path) -> None:
    edit_tensors(packed, lambda t: t.update({Q_PROJ: torch.ones(64, 64, dtype=torch.bfloat16)}))
    refused(packed, Q_PROJ, "twice, packed and not")


def test_packed_keys_and_values_that_sharing_layers_never_use_are_ignored(packed: Path) -> None:
    """As dense ones are: uploads of Google's keep them."""

    def keep(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.startswith("model.layers.0.self_attn.k_proj."):
                tensors[name.replace("layers.0", "layers.8")] = tensor.clone()

    ids = checkpoints.prompt(10)
    wanted = torchtpu_rs.Engine(packed, torch.zeros(1)).logits(ids)
    edit_tensors(packed, keep)
    assert torch.equal(torchtpu_rs.Engine(packed, torch.zeros(1)).logits(ids), wanted)


def weights_of(packed: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    quantization = json.loads((packed / "config.json").read_text())["quantization_config"]
    return quantization, quantization["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 3),
        ("type", "float"),
        ("strategy", "block"),
        ("actorder", "group"),
        ("dynamic", True),
    ],
)
def test_another_way_of_packing_is_refused_by_name(packed: Path, key: str, value: object) -> None:
    quantization, weights = weights_of(packed)
    weights[key] = value
    edit_config(packed, quantization_config=quantization)
    refused(packed, "config.json", "quantized", key, "not supported")


def test_groups_that_do_not_divide_the_columns_are_refused(packed: Path) -> None:
    quantization, weights = weights_of(packed)
    weights["group_size"] = 48
    edit_config(packed, quantization_config=quantization)
    refused(packed, "weight_packed", "groups of 48")


def test_a_config_without_groups_is_refused(packed: Path) -> None:
    quantization, _ = weights_of(packed)
    quantization["config_groups"] = {}
    edit_config(packed, quantization_config=quantization)
    refused(packed, "config_groups", "found none")

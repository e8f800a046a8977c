"""Exact mode on packed checkpoints is transformers with compressed-tensors, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtpu_rs
from bench.exact import equal_bits, load_transformers, run_transformers
from tests import checkpoints, pack
from tests.pack import Packing

STEPS = 24

PACKINGS = {
    "w4a16": Packing(),
    "groups_of_16": Packing(group_size=16),
    "channel": Packing(group_size=None),
    "asymmetric": Packing(symmetric=False),
    "w8a16": Packing(num_bits=8, group_size=None),
    "w8a16_asymmetric_groups": Packing(num_bits=8, symmetric=False),
    "float16_factors": Packing(scale_dtype=torch.float16),
    "float32_factors": Packing(scale_dtype=torch.float32),
}


def assert_same_bits(
    folders: list[Path], model: Any, dtype: torch.dtype = torch.bfloat16, length: int = 40
) -> None:
    ids = checkpoints.prompt(length)
    reference = run_transformers(model, ids, STEPS)
    name = str(dtype).removeprefix("torch.")
    engine = torchtpu_rs.Engine(folders, torch.zeros(1), dtype=name)
    assert equal_bits(engine.logits(ids, all=True), reference.prompt) is None
    assert equal_bits(engine.logits(ids, reference.new_ids[:-1]), reference.steps) is None
    assert engine.decode(ids, STEPS, stop=[]).ids == reference.new_ids


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_projections_give_transformers_bits(
    dense: Path, tmp_path: Path, packing: str, dtype: torch.dtype
) -> None:
    folder = pack.make(tmp_path, dense, PACKINGS[packing])
    # transformers 5.24 cannot run asymmetric ones as stored: it expects zero points that are not packed.
    dequantize = not PACKINGS[packing].symmetric
    assert_same_bits([folder], load_transformers(folder, dtype, dequantize=dequantize), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_tables_are_unpacked_in_the_type_of_their_factors(
    dense: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """transformers 5.24 runs them only with `dequantize=True`, which rounds there."""
    folder = pack.make(tmp_path, dense, Packing(tables=True))
    assert_same_bits([folder], load_transformers(folder, dtype, dequantize=True), dtype)


def test_both_naming_forms_and_tables_from_another_folder_give_the_same_logits(
    dense: Path, tmp_path: Path
) -> None:
    packing = Packing(tables=True)
    whole = pack.make(tmp_path / "whole", dense, packing)
    long_names = "model.language_model."
    renamed = pack.make(tmp_path / "long", dense, packing, prefix=long_names)
    rest = pack.make(tmp_path / "rest", dense, packing, only="rest")
    tables = pack.make(tmp_path / "tables", dense, packing, only="tables")
    ids = checkpoints.prompt(20)
    wanted = torchtpu_rs.Engine(whole, torch.zeros(1)).logits(ids, all=True)
    for folders in ([renamed], [rest, tables], [tables, rest], [whole, dense]):
        found = torchtpu_rs.Engine(folders, torch.zeros(1)).logits(ids, all=True)
        assert torch.equal(found, wanted)


def test_without_a_dtype_in_config_json_the_norms_say_it(dense: Path, tmp_path: Path) -> None:
    folder = pack.make(tmp_path, dense, Packing(tables=True))
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert torchtpu_rs.Engine(folder, torch.zeros(1)).info()["dtype"] == "bfloat16"


def test_a_strategy_that_is_not_named_follows_from_the_group_size(
    dense: Path, tmp_path: Path
) -> None:
    """As compressed-tensors has it; what is null counts as missing."""
    ids = checkpoints.prompt(10)
    for number, (packing, size) in enumerate([(Packing(), 32), (Packing(group_size=None), -1)]):
        folder = pack.make(tmp_path / str(number), dense, packing)
        wanted = torchtpu_rs.Engine(folder, torch.zeros(1)).logits(ids)
        config = json.loads((folder / "config.json").read_text())
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights |= {"strategy": None, "group_size": size, "symmetric": None}
        (folder / "config.json").write_text(json.dumps(config))
        assert torch.equal(torchtpu_rs.Engine(folder, torch.zeros(1)).logits(ids), wanted)


def test_groups_of_other_modules_do_not_change_how_text_weights_are_rounded(
    dense: Path, tmp_path: Path
) -> None:
    """An asymmetric vision tower is none of the text model's business."""
    folder = pack.make(tmp_path, dense, Packing())
    ids = checkpoints.prompt(10)
    wanted = torchtpu_rs.Engine(folder, torch.zeros(1), dtype="float32").logits(ids)
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    tower = json.loads(json.dumps(groups["group_0"]))
    tower["weights"]["symmetric"] = False
    groups["group_1"] = tower | {"targets": ["re:.*vision_tower.*"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = torchtpu_rs.Engine(folder, torch.zeros(1), dtype="float32").logits(ids)
    assert torch.equal(found, wanted)


def test_a_weight_comes_whole_from_the_first_folder_that_has_it(
    dense: Path, tmp_path: Path
) -> None:
    """A dense weight in the first folder is not replaced by a packed one in the second."""
    packed = pack.make(tmp_path, dense, Packing())
    ids = checkpoints.prompt(20)
    wanted = torchtpu_rs.Engine(dense, torch.zeros(1)).logits(ids, all=True)
    found = torchtpu_rs.Engine([dense, packed], torch.zeros(1)).logits(ids, all=True)
    assert torch.equal(found, wanted)

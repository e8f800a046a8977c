"""Experts that `quantize` packs: as published packed checkpoints have them, and with the bits that transformers reads there."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForConditionalGeneration,
    conversion_mapping,
)

import torchtpu_rs
from bench.exact import equal_bits, load_transformers, run_transformers
from quantize import QuantizeError, convert
from tests import checkpoints
from tests.quantize.test_conversion import LIKE, STEPS, dense_copy, tensors, unpacked

README = Path(__file__).parents[2] / "README.md"
IDS = checkpoints.prompt(40)
LAYER = "model.layers.0."
WEIGHTS = 6 * 8 * 3 * 64 * 64
"""Of all experts."""


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("fused"), checkpoints.EXPERTS)


@pytest.fixture
def names_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows the names of split experts in this test, by the README's lines."""
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "register_checkpoint_conversion_mapping" in block]
    exec(block, {})


@pytest.mark.parametrize("form", ["w4a16", "int8", "emb4"])
@pytest.mark.usefixtures("names_told")
def test_transformers_that_is_told_the_names_and_the_engine_read_the_same_bits(
    fused: Path, tmp_path: Path, form: str
) -> None:
    done = convert(fused, tmp_path / "packed", form)
    assert done.expert_weights == WEIGHTS
    reference = run_transformers(load_transformers(done.out, dequantize=form == "emb4"), IDS, STEPS)
    engine = torchtpu_rs.Engine(done.out, LIKE, arithmetic="exact")
    assert equal_bits(engine.logits(IDS, all=True), reference.prompt) is None
    assert equal_bits(engine.logits(IDS, reference.new_ids[:-1]), reference.steps) is None
    copy = dense_copy(done.out, tmp_path / "dense")
    dense = torchtpu_rs.Engine(copy, LIKE, arithmetic="exact")
    assert torch.equal(dense.logits(IDS, all=True), engine.logits(IDS, all=True))


@pytest.mark.usefixtures("names_told")
def test_the_published_multimodal_form_is_packed_likewise(fused: Path, tmp_path: Path) -> None:
    """Without its tower, which is copied."""
    source = tmp_path / "source"
    source.mkdir()
    text = json.loads((fused / "config.json").read_text())
    towers = {"vision_config": None, "audio_config": None}
    config = {"model_type": "gemma4", "text_config": text, **towers}
    (source / "config.json").write_text(json.dumps(config))
    renamed = {n.replace("model.", "model.language_model."): t for n, t in tensors(fused).items()}
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    out = convert(source, tmp_path / "packed", "w4a16").out
    assert "model.language_model.layers.5.experts.7.up_proj.weight_packed" in tensors(out)
    model = Gemma4ForConditionalGeneration.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    engine = torchtpu_rs.Engine(out, LIKE, arithmetic="exact")
    assert equal_bits(engine.logits(IDS, all=True), wanted) is None


def test_transformers_that_is_not_told_the_names_says_that_the_experts_are_missing(
    fused: Path, tmp_path: Path
) -> None:
    """Why the README has lines for it; they can go when this fails."""
    out = convert(fused, tmp_path / "packed", "w4a16").out
    _, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert f"{LAYER}experts.gate_up_proj" in told["missing_keys"]
    assert f"{LAYER}experts.0.gate_proj.weight_packed" in told["unexpected_keys"]


def test_the_error_that_is_told_is_that_of_the_experts_too(fused: Path, tmp_path: Path) -> None:
    split = tensors(checkpoints.split_experts(tmp_path / "split", fused))
    done = convert(fused, tmp_path / "packed", "w4a16")
    found = unpacked(done.out)
    assert found.keys() == split.keys()
    packed = [n.removesuffix("_shape") for n in tensors(done.out) if n.endswith("weight_shape")]
    assert f"{LAYER}experts.7.down_proj.weight" in packed
    assert f"{LAYER}router.proj.weight" not in packed
    squares = sum((found[n].double() - split[n].double()).square().sum().item() for n in packed)
    wanted = sum(split[n].double().square().sum().item() for n in packed)
    assert done.relative_error == pytest.approx((squares / wanted) ** 0.5, rel=1e-6)
    assert done.packed_weights == sum(split[n].numel() for n in packed)
    for name, tensor in split.items():
        assert name in packed or torch.equal(found[name], tensor), name
        near = (found[name].double() - split[name].double()).square().sum()
        assert near < 0.02 * split[name].double().square().sum(), name


def test_experts_that_are_split_already_and_cut_files_give_the_same_tensors(
    fused: Path, tmp_path: Path
) -> None:
    wanted = tensors(convert(fused, tmp_path / "one", "w4a16").out)
    split = checkpoints.split_experts(tmp_path / "split", fused)
    other = convert(split, tmp_path / "other", "w4a16")
    assert other.expert_weights == WEIGHTS
    many = convert(fused, tmp_path / "many", "w4a16", shard_bytes=60_000)
    assert len(list(many.out.glob("*.safetensors"))) > 2
    for found in (tensors(other.out), tensors(many.out)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    engine = torchtpu_rs.Engine(many.out, LIKE, arithmetic="fast")
    one = torchtpu_rs.Engine(tmp_path / "one", LIKE, arithmetic="fast")
    assert engine.info()["weight_format"] == "int4"
    assert torch.equal(engine.logits(IDS, all=True), one.logits(IDS, all=True))


def test_experts_trained_on_the_grid_are_packed_without_loss(fused: Path, tmp_path: Path) -> None:
    on_grid = tmp_path / "grid"
    dense_copy(convert(fused, tmp_path / "first", "w4a16").out, on_grid)
    done = convert(on_grid, tmp_path / "second", "w4a16")
    assert done.expert_weights == WEIGHTS
    assert done.lossless == done.groups > 0
    wanted = torchtpu_rs.Engine(on_grid, LIKE, arithmetic="exact").logits(IDS, all=True)
    packed = torchtpu_rs.Engine(done.out, LIKE, arithmetic="exact").logits(IDS, all=True)
    assert torch.equal(packed, wanted)


def test_experts_whose_width_is_no_whole_groups_stay_fused_and_transformers_reads_them(
    tmp_path: Path,
) -> None:
    settings = checkpoints.EXPERTS | {"moe_intermediate_size": 48}
    source = checkpoints.make(tmp_path / "source", settings)
    done = convert(source, tmp_path / "packed", "w4a16")
    found, wanted = tensors(done.out), tensors(source)
    experts = [name for name in wanted if ".experts." in name]
    assert set(done.left) == set(experts)
    assert done.expert_weights == 0
    assert all(torch.equal(found[name], wanted[name]) for name in experts)
    reference = run_transformers(load_transformers(done.out), IDS, STEPS)
    engine = torchtpu_rs.Engine(done.out, LIKE, arithmetic="exact")
    assert equal_bits(engine.logits(IDS, all=True), reference.prompt) is None


def refused(fused: Path, folder: Path, change: dict[str, torch.Tensor]) -> str:
    source = folder / "source"
    source.mkdir()
    save_file(load_file(fused / "model.safetensors") | change, source / "model.safetensors")
    (source / "config.json").write_text((fused / "config.json").read_text())
    with pytest.raises(QuantizeError) as caught:
        convert(source, folder / "out", "w4a16")
    assert [file.name for file in folder.iterdir()] == ["source"]
    return str(caught.value)


def test_experts_that_cannot_be_are_refused_by_name(fused: Path, tmp_path: Path) -> None:
    name = f"{LAYER}experts.gate_up_proj"
    weights = load_file(fused / "model.safetensors")[name]
    nan = weights.clone()
    nan[5, 70, 3] = float("nan")
    for index, (change, words) in enumerate(
        [
            ({name: weights[0]}, f"{name}: expected [experts, 2 x rows, columns] of"),
            ({name: weights[:, :127].clone()}, f"{name}: expected [experts, 2 x rows, columns] of"),
            (
                {name: weights.view(torch.int16)},
                f"{name}: expected [experts, 2 x rows, columns] of",
            ),
            (
                {name: nan},
                f"found NaN or infinity, or values past BF16, in rows 0 to 63 of {LAYER}",
            ),
            ({name: nan}, "experts.5.up_proj"),
            (
                {f"{LAYER}experts.3.up_proj.weight": weights[0, :64].clone()},
                f"experts.3.up_proj.weight_packed would be made of it and of {LAYER}experts.",
            ),
        ]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert words in refused(fused, folder, change)

"""Experts in every form they are published in give the bits of the fused form; a broken mixture is refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtpu_rs
from bench.exact import equal_bits, load_transformers, run_transformers
from tests import checkpoints, pack
from tests.pack import Packing
from tests.test_fast_arithmetic import distance
from tests.test_hostile_checkpoints import edit_config, edit_tensors, refused

LIKE = torch.zeros(1)
PROMPT = checkpoints.prompt(40)
STEPS = 12
LAYER = "model.layers.2."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("fused"), checkpoints.EXPERTS)


@pytest.fixture(scope="module")
def split(fused: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.split_experts(tmp_path_factory.mktemp("split") / "split", fused)


def dequantized(packed: Tensors, num_bits: int) -> Tensors:
    """The values that packed tensors stand for, as transformers rounds them in bfloat16."""
    values = {name: t for name, t in packed.items() if ".weight_" not in name}
    for name, words in packed.items():
        if not name.endswith("_packed"):
            continue
        weight = name.removesuffix("_packed")
        columns = packed[f"{weight}_shape"][1]
        shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
        integers = (words.unsqueeze(-1) >> shifts) & (2**num_bits - 1)
        integers = integers.flatten(1)[:, :columns] - 2 ** (num_bits - 1)
        scale = packed[f"{weight}_scale"]
        scale = scale.repeat_interleave(int(columns) // scale.shape[1], 1)
        values[weight] = integers.to(torch.bfloat16) * scale
    return values


def joined(tensors: Tensors) -> Tensors:
    """Split experts as the two fused tensors of a layer."""
    kept = {name: t for name, t in tensors.items() if ".experts." not in name}
    experts = range(checkpoints.EXPERTS["num_experts"])
    for layer in range(checkpoints.EXPERTS["num_hidden_layers"]):
        start = f"model.layers.{layer}.experts."
        gate_up = [
            torch.cat([tensors[f"{start}{e}.{part}.weight"] for part in ("gate_proj", "up_proj")])
            for e in experts
        ]
        kept[f"{start}gate_up_proj"] = torch.stack(gate_up)
        kept[f"{start}down_proj"] = torch.stack(
            [tensors[f"{start}{e}.down_proj.weight"] for e in experts]
        )
    return kept


def judged(folder: Path, judge: Path, dtype: torch.dtype) -> None:
    """`folder` gives the bits that transformers gives of `judge`."""
    reference = run_transformers(load_transformers(judge, dtype), PROMPT, STEPS)
    engine = torchtpu_rs.Engine(folder, LIKE, dtype=str(dtype).removeprefix("torch."))
    assert equal_bits(engine.logits(PROMPT, all=True), reference.prompt) is None
    assert equal_bits(engine.logits(PROMPT, reference.new_ids[:-1]), reference.steps) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_split_experts_give_transformers_bits_of_fused_ones(
    fused: Path, split: Path, dtype: torch.dtype
) -> None:
    judged(split, fused, dtype)


@pytest.mark.parametrize(
    "packing",
    [Packing(), Packing(num_bits=8, group_size=None)],
    ids=["w4a16", "w8a16"],
)
def test_packed_experts_give_transformers_bits_of_fused_ones_with_their_values(
    fused: Path, split: Path, tmp_path: Path, packing: Packing
) -> None:
    """transformers 5.24 loads no packed experts: the judge is a dense checkpoint of the values they stand for."""
    packed = pack.make(tmp_path / "packed", split, packing)
    judge = tmp_path / "judge"
    judge.mkdir()
    values = dequantized(load_file(packed / "model.safetensors"), packing.num_bits)
    save_file(joined(values), judge / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (judge / name).write_text((fused / name).read_text())
    judged(packed, judge, torch.bfloat16)


@pytest.mark.parametrize("prefill_chunk", [2, 7, 64])
def test_a_prompt_in_chunks_goes_through_the_same_experts(fused: Path, prefill_chunk: int) -> None:
    """In float32, where rounding turns no choice; padding of the last chunk goes its own way."""
    whole = torchtpu_rs.Engine(fused, LIKE, dtype="float32")
    cut = torchtpu_rs.Engine(fused, LIKE, dtype="float32", prefill_chunk=prefill_chunk)
    assert torch.allclose(cut.logits(PROMPT), whole.logits(PROMPT), atol=1e-4)


@pytest.mark.parametrize("prefill_chunk", [2, 16])
def test_programs_arithmetic_takes_experts_one_by_one_or_all_at_once_with_the_same_choices(
    fused: Path, prefill_chunk: int
) -> None:
    """Two tokens take four of eight one by one, sixteen take all."""
    wanted = torchtpu_rs.Engine(fused, LIKE, dtype="float32").decode(PROMPT, 30, stop=[]).ids
    compiled = torchtpu_rs.Engine(
        fused, LIKE, dtype="float32", prefill_chunk=prefill_chunk, arithmetic="compiled"
    )
    assert compiled.decode(PROMPT, 30, stop=[]).ids == wanted


def test_fast_mode_multiplies_packed_experts_in_four_bits(split: Path, tmp_path: Path) -> None:
    packed = pack.make(tmp_path, split, Packing())
    fast = torchtpu_rs.Engine(packed, LIKE, arithmetic="fast")
    assert fast.info()["weight_format"] == "int4"
    truth = torchtpu_rs.Engine(packed, LIKE, dtype="float32").logits(PROMPT, all=True)
    exact = torchtpu_rs.Engine(packed, LIKE).logits(PROMPT, all=True)
    # Rounding sends some tokens to other experts, in transformers' bfloat16 too.
    assert 0 < distance(fast.logits(PROMPT, all=True), truth) < distance(exact, truth)
    part = {name for name, _, _ in (fast.decode(PROMPT, 3, stop=[]), fast.parts())[1]}
    assert "experts" in part


def test_fast_mode_reads_fused_and_split_experts_alike(fused: Path, split: Path) -> None:
    one, other = (torchtpu_rs.Engine(f, LIKE, arithmetic="fast") for f in (fused, split))
    assert torch.equal(one.logits(PROMPT, all=True), other.logits(PROMPT, all=True))
    assert one.info()["weight_bytes"] == other.info()["weight_bytes"]


def test_a_layers_experts_come_whole_from_the_first_folder_that_has_any(
    fused: Path, split: Path, tmp_path: Path
) -> None:
    packed = pack.make(tmp_path / "packed", split, Packing())
    for folders in ([fused, packed], [split, packed]):
        first = torchtpu_rs.Engine(folders[0], LIKE).logits(PROMPT)
        assert torch.equal(torchtpu_rs.Engine(folders, LIKE).logits(PROMPT), first)


def changed(folder: Path, out: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of `folder` whose tensors `edit` has changed."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    edit_tensors(out, edit)
    return out


def test_fused_experts_of_another_number_or_width_are_refused(fused: Path, tmp_path: Path) -> None:
    name = f"{LAYER}experts.gate_up_proj"
    for index, found in enumerate([(7, 128, 64), (8, 64, 64), (8, 64, 128), (1024, 64)]):
        bad = changed(
            fused,
            tmp_path / str(index),
            lambda t, found=found: t.update({name: torch.zeros(found, dtype=torch.bfloat16)}),
        )
        refused(bad, name, "expected shape [8, 128, 64] by the model's config", str(list(found)))


def test_an_expert_or_a_part_of_one_that_is_missing_is_named(split: Path, tmp_path: Path) -> None:
    for number, part in ((0, "gate_proj"), (7, "down_proj"), (3, "up_proj")):
        name = f"{LAYER}experts.{number}.{part}.weight"
        bad = changed(split, tmp_path / part, lambda t, name=name: t.pop(name))
        refused(bad, f"`{name}` is missing")


def test_layers_without_any_experts_are_refused(fused: Path, tmp_path: Path) -> None:
    for name in ("experts.gate_up_proj", "experts.down_proj", "router.proj.weight", "router.scale"):
        bad = changed(fused, tmp_path / name, lambda t, name=name: t.pop(f"{LAYER}{name}"))
        refused(bad, f"`{LAYER}{name}` is missing")


def test_more_experts_than_config_json_says_are_refused(split: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{LAYER}experts.8.{part}.weight"] = tensors[
                f"{LAYER}experts.0.{part}.weight"
            ].clone()

    refused(changed(split, tmp_path / "more", add), "experts 0 to 7", "found 8", "num_experts")


def test_experts_in_both_forms_are_refused(fused: Path, split: Path, tmp_path: Path) -> None:
    name = f"{LAYER}experts.down_proj"
    both = load_file(fused / "model.safetensors")[name]
    bad = changed(split, tmp_path / "both", lambda t: t.update({name: both}))
    refused(bad, "here twice", "down_proj")
    packed = pack.make(tmp_path / "packed", split, Packing())
    again = f"{LAYER}experts.1.up_proj.weight"
    dense = load_file(split / "model.safetensors")[again]
    refused(changed(packed, tmp_path / "twice", lambda t: t.update({again: dense})), again, "twice")


def test_experts_packed_in_one_tensor_are_refused(split: Path, tmp_path: Path) -> None:
    """As some quantizers store the fused parameters."""
    packed = pack.make(tmp_path / "packed", split, Packing())
    name = f"{LAYER}experts.gate_up_proj_packed"
    words = torch.zeros(8, 128, 8, dtype=torch.int32)
    bad = changed(packed, tmp_path / "bad", lambda t: t.update({name: words}))
    refused(bad, name, f"expected each one's, `{LAYER}experts.0.gate_proj.weight_packed`")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"top_k_experts": 9}, "at most num_experts 8, found 9"),
        ({"top_k_experts": 0}, "top_k_experts"),
        ({"num_experts": None}, "num_experts"),
        ({"num_experts": 10**12}, "num_experts"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"enable_moe_block": False}, "describes no place"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused_by_its_key(
    fused: Path, tmp_path: Path, keys: dict[str, object], words: str
) -> None:
    bad = changed(fused, tmp_path / "bad", lambda tensors: None)
    edit_config(bad, **keys)
    refused(bad, words)

"""The same model in every form a checkpoint may have gives the same tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtpu_rs
from tests import checkpoints

LIKE = torch.zeros(1)
PROMPT = checkpoints.prompt(20)


def tokens(folder: Path | list[Path], **options: object) -> list[int]:
    return torchtpu_rs.Engine(folder, LIKE, 128, **options).decode(PROMPT, 12, stop=[]).ids


@pytest.fixture
def copy(dense: Path, tmp_path: Path) -> Path:
    return shutil.copytree(dense, tmp_path / "copy")


def rename(folder: Path, old: str, new: str) -> None:
    file = folder / "model.safetensors"
    save_file({name.replace(old, new, 1): tensor for name, tensor in load_file(file).items()}, file)


def test_saved_and_hub_spelling_of_full_layers(dense: Path, tmp_path: Path) -> None:
    saved = checkpoints.make(tmp_path, saved_form=True)
    assert "per_layer_config" in (saved / "config.json").read_text()
    assert tokens(saved) == tokens(dense)


def test_shards_with_an_index(dense: Path, tmp_path: Path) -> None:
    sharded = checkpoints.make(tmp_path, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert tokens(sharded) == tokens(dense)


def test_shards_without_an_index(dense: Path, tmp_path: Path) -> None:
    sharded = checkpoints.make(tmp_path, max_shard_size="100KB")
    (sharded / "model.safetensors.index.json").unlink()
    assert tokens(sharded) == tokens(dense)


def test_names_of_a_multimodal_checkpoint_under_a_text_config(dense: Path, copy: Path) -> None:
    rename(copy, "model.", "model.language_model.")
    assert tokens(copy) == tokens(dense)


def test_a_multimodal_checkpoint_with_its_towers(dense: Path, copy: Path) -> None:
    rename(copy, "model.", "model.language_model.")
    file = copy / "model.safetensors"
    towers = {
        f"model.{tower}.x.weight": torch.ones(3)
        for tower in ("vision_tower", "audio_tower", "embed_vision")
    }
    save_file(load_file(file) | towers, file)
    text = json.loads((copy / "config.json").read_text())
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
    }
    (copy / "config.json").write_text(json.dumps(whole))
    assert tokens(copy) == tokens(dense)


def test_keys_and_values_of_sharing_layers_are_ignored(dense: Path, copy: Path) -> None:
    """google's own E2B upload has them for all layers; using them gives garbage."""
    file = copy / "model.safetensors"
    junk = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.full((1,), torch.nan)
        for layer in range(4, 9)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    save_file(load_file(file) | junk, file)
    assert tokens(copy) == tokens(dense)


def test_an_untied_head_is_used(dense: Path, copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head.clone()}, file)
    assert tokens(copy) == tokens(dense)
    save_file(tensors | {"lm_head.weight": head.roll(1, 0).contiguous()}, file)
    assert tokens(copy)[0] == tokens(dense)[0] + 1


def test_a_tensor_is_taken_from_the_first_folder_that_has_it(
    dense: Path, copy: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    name = "model.embed_tokens.weight"
    table = load_file(dense / "model.safetensors")[name]
    save_file({name: table.flip(0).contiguous()}, first / "tables.safetensors")
    file = copy / "model.safetensors"
    save_file(load_file(file) | {name: table.flip(0).contiguous()}, file)
    assert tokens([first, dense]) == tokens(copy)
    assert tokens([dense, first]) == tokens(dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_element_type_loads_and_runs(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = checkpoints.make(tmp_path, dtype=dtype)
    engine = torchtpu_rs.Engine(folder, LIKE)
    assert engine.info()["dtype"] == str(dtype).removeprefix("torch.")
    logits = engine.logits(PROMPT)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_dtype_converts_at_load(dense: Path, tmp_path: Path) -> None:
    file = shutil.copytree(dense, tmp_path / "f32") / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)
    assert tokens(file.parent, dtype="bfloat16") == tokens(dense)
    assert tokens(dense, dtype="float32") == tokens(file.parent, dtype="float32")


def test_suppressed_tokens_are_never_chosen(dense: Path, copy: Path) -> None:
    chosen = tokens(dense)[0]
    generation = {"eos_token_id": [1], "suppress_tokens": [chosen]}
    (copy / "generation_config.json").write_text(json.dumps(generation))
    assert chosen not in tokens(copy)


def test_end_ids_fall_back_from_generation_config_to_config(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    assert torchtpu_rs.Engine(copy, LIKE).info()["eos_token_ids"] == [1]


def test_weights_are_mapped_not_copied(e2b_slice: Path) -> None:
    """Loading in the file's own type allocates nothing near the weights' size."""

    def anonymous_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0])

    before = anonymous_kib()
    engine = torchtpu_rs.Engine(e2b_slice, LIKE, 64)
    grown = (anonymous_kib() - before) * 1024
    assert grown < engine.info()["weight_bytes"] / 4

"""What doctor says of a GGUF file's memory, by its header: here one with E2B's shapes, and a hole where weights would be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import get_tensor_name_map
from gguf.constants import MODEL_ARCH
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from server import doctor
from tests import gguf_files
from tests.gguf_files import Kind
from tpu import E2B

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As llama.cpp's recipe of this name has them, but for some layers: tables and the way down in six bits, the rest in four."""
    config = json.loads((E2B / "config.json").read_text("utf-8"))
    with torch.device("meta"):
        model = Gemma4ForCausalLM(Gemma4TextConfig(**config))
    names = get_tensor_name_map(MODEL_ARCH.GEMMA4, config["num_hidden_layers"])
    tensors = {}
    for name, weight in model.state_dict().items():
        six = "embed_tokens" in name or "down_proj" in name
        kind = Kind.F32 if weight.ndim < 2 else Kind.Q6_K if six else Kind.Q4_K
        if name != "lm_head.weight":  # tied
            tensors[gguf_files.gguf_name(name, names)] = tuple(weight.shape), kind
    file = tmp_path_factory.mktemp("e2b") / "e2b-Q4_K_M.gguf"
    return gguf_files.outline(file, gguf_files.keys_of(config), tensors)


def memory(file: Path, available: int, load: doctor.Load) -> dict[str, Any]:
    models = [str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_available_bytes", lambda: available)
        return doctor._memory(doctor._places(models), load)


def test_the_weights_of_a_gguf_file_are_as_large_as_they_will_be_in_memory(q4_k_m: Path) -> None:
    check = memory(q4_k_m, 6_000_000_000, doctor.Load())
    assert check["status"] == "ok"
    assert "3.8 GB of weights in int4" in check["message"]
    # Beside the file's own, a second form of the table multiplies.
    assert 1 < check["weight_bytes"] / q4_k_m.stat().st_size < 1.12
    exact = memory(q4_k_m, 12_000_000_000, doctor.Load(exact=True))
    assert exact["status"] == "ok"
    assert "9.3 GB of weights in bfloat16" in exact["message"]


@pytest.mark.parametrize(
    ("load", "available", "advice"),
    [
        (doctor.Load(), 3.5, "It fits with a Q4_0 file of it (3.0 GB)"),
        (doctor.Load(), 2, "Take a smaller model or a larger machine (3.0 GB at least, a Q4_0"),
        (doctor.Load(context=131_072), 4, "It fits with --context 16384 (4.0 GB)"),
        (doctor.Load(exact=True), 4, "It fits with --fast (3.9 GB)"),
        (doctor.Load(exact=True), 3.5, "It fits with a Q4_0 file of it"),
        (doctor.Load(dtype="float32"), 4, "It fits with --fast --dtype bfloat16 (3.9 GB)"),
    ],
    ids=["file", "none", "context", "fast", "fast_is_not_enough", "dtype"],
)
def test_what_is_advised_for_a_gguf_file_can_be_had(
    q4_k_m: Path, load: doctor.Load, available: float, advice: str
) -> None:
    check = memory(q4_k_m, int(available * 1e9), load)
    assert check["status"] == "warning"
    assert advice in check["message"]

"""libtpu's compiler on a small step: its memory plan is ours, and the loop copies no cache."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import DENSE
from torchtpu_rs.recording import Plan, Program, Recording
from tpu import estimate, v5e

PLAN = Plan(slots=8, chunks=(16,), steps=(4,))
CONFIG = DENSE | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip


def describe(folder: Path, **changes: object) -> Path:
    """A folder with nothing but config.json: estimates need no weights."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return describe(tmp_path_factory.mktemp("described"))


def size(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_libtpu_plans_one_copy_of_weights_and_cache_and_the_loop_copies_neither(
    tmp_path: Path, kv_heads: int
) -> None:
    described = describe(tmp_path, num_key_value_heads=kv_heads)
    recording = Recording([str(described)], 256, PLAN, Program(0, 4, 272), torch.bfloat16)
    mlir, hlo = tmp_path / "step.mlir", tmp_path / "step.hlo"
    mlir.write_text(estimate.stablehlo(recording))
    report = v5e.compile_program(mlir, hlo)
    # Small tensors are padded to whole tiles, so the plan may be larger than the sum, and never twice it.
    arguments = size(recording.arguments)
    assert arguments <= report.argument_bytes <= 2 * arguments + 1_000_000
    assert report.aliased_bytes >= size(recording.state)
    text = hlo.read_text()
    name = re.search(r"while\(.*body=(%[\w.\-]+)", text)
    assert name is not None
    body = re.search(rf"^{re.escape(name[1])} .*?^\}}", text, re.M | re.S)
    assert body is not None
    copied = re.findall(r"= \(?\w+\[([\d,]+)\]\S* copy(?:-start)?\(", body[0])
    # XLA may name a ring by another shape of the same size.
    sizes = {math.prod(map(int, shape.split(","))) for shape in copied}
    assert not sizes & {ring.numel() for ring in recording.state}


def test_the_estimate_tool_says_what_a_step_costs_and_that_it_is_an_estimate(
    described: Path,
) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tpu.estimate",
            str(described),
            "--rows",
            "8",
            "--context",
            "256",
            "--format",
            "int8",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = run.stdout
    for word in (
        "estimate",
        "floor",
        "expected",
        "an estimate",
        "GB arguments",
        "tokens/s for one stream",
    ):
        assert word in shown
    milliseconds = [float(x) for x in re.findall(r"(?:estimate|expected) +([\d.]+) ms", shown)]
    assert len(milliseconds) == 2
    assert 0 < milliseconds[0] <= milliseconds[1]

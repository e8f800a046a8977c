"""Real weights: a GGUF model of llama.cpp's, read as transformers reads it.

For whoever has such a file and some minutes: `TORCHTPU_GGUF=model.gguf pytest tests/test_gguf_real.py`.
"""

import os
from pathlib import Path

import pytest
import torch

import torchtpu_rs

FILE = os.environ.get("TORCHTPU_GGUF", "")
PROMPT = [2, 818, 5279, 529, 7001, 563, 886, 529, 506, 7001]

pytestmark = [
    pytest.mark.skipif(not FILE, reason="TORCHTPU_GGUF names no GGUF file of a Gemma 3 model"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


def test_logits_are_transformers_own_bit_for_bit() -> None:
    """With tied embeddings every row of every tensor has a part in them."""
    from transformers import AutoModelForCausalLM

    file = Path(FILE)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    engine = torchtpu_rs.Engine(file, torch.zeros(1), 64)
    assert torch.equal(engine.logits(PROMPT, all=True), wanted)

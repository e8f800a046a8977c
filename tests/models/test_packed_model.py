"""The embedded model in four bits: made from the other by `torchtpu-rs quantize`, read as transformers reads it."""

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer

import torchtpu_rs
from bench.exact import equal_bits, load_transformers, run_transformers
from models import EMBEDDED, EMBEDDED_W4A16
from quantize import convert

STEPS = 24


def test_quantize_makes_the_shipped_files_again(tmp_path: Path) -> None:
    made = convert(EMBEDDED, tmp_path / "made", "emb4").out
    shipped = {file.name for file in EMBEDDED_W4A16.iterdir()}
    assert {file.name for file in made.iterdir()} == shipped
    for name in shipped:
        assert (made / name).read_bytes() == (EMBEDDED_W4A16 / name).read_bytes(), name
    assert sum(file.stat().st_size for file in EMBEDDED_W4A16.iterdir()) < 2_100_000


def test_its_logits_are_transformers_bits() -> None:
    model = load_transformers(EMBEDDED_W4A16, dequantize=True)
    tokenizer = Tokenizer.from_file(str(EMBEDDED_W4A16 / "tokenizer.json"))
    ids = tokenizer.encode(
        "<bos><|turn>user\nWhat is a ring cache?<turn|>\n<|turn>model\n", add_special_tokens=False
    ).ids
    reference = run_transformers(model, ids, STEPS)
    engine = torchtpu_rs.Engine(EMBEDDED_W4A16, torch.zeros(1))
    assert equal_bits(engine.logits(ids, all=True), reference.prompt) is None
    assert equal_bits(engine.logits(ids, reference.new_ids[:-1]), reference.steps) is None
    assert "cache" in tokenizer.decode(reference.new_ids)


def test_the_readme_says_a_score_within_two_points_of_bfloat16() -> None:
    readme = (EMBEDDED.parent / "README.md").read_text()
    packed = re.search(r"in four bits (\d+) of (\d+) are right \(([\d.]+) %\)", readme)
    whole = re.search(r"^\| all \| (\d+) \| (\d+) \|", readme, re.M)
    assert packed
    assert whole
    assert packed[2] == whole[2]
    assert int(packed[1]) >= int(whole[1]) - 0.02 * int(whole[2])

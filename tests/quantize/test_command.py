"""`torchtpu-rs quantize`: what it says at the end, and an error is a line and a status."""

import re
from pathlib import Path

from typer.testing import CliRunner

from models import EMBEDDED
from quantize import FORMATS
from server.cli import app
from server.quantize_command import Format
from tests import checkpoints


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_every_format_can_be_asked_for() -> None:
    assert [form.value for form in Format] == list(FORMATS)


def test_it_says_what_it_wrote_and_how_near_it_is(tmp_path: Path) -> None:
    code, said, _ = run(EMBEDDED, tmp_path / "out", "--format", "emb4")
    assert code == 0
    assert f"{tmp_path / 'out'}: 0.005 GB are 0.002 GB as emb4; 2,695,168 weights packed" in said
    error = re.search(r"^relative error (0\.\d+); 0\.0% of 84,224 groups", said, re.M)
    assert error
    assert 0.07 < float(error[1]) < 0.09
    assert "10 projections have no whole groups of columns and stay as they are" in said
    assert "dequantize=True" in said


def test_it_says_that_transformers_must_be_told_the_names_of_experts(tmp_path: Path) -> None:
    source = checkpoints.make(tmp_path / "source", checkpoints.EXPERTS)
    code, said, _ = run(source, tmp_path / "out")
    assert code == 0
    assert "589,824 of the packed weights are experts'" in said
    assert "transformers puts random weights in their place unless it is told their names" in said


def test_an_error_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    code, said, error = run(tmp_path, tmp_path / "out")
    assert (code, said) == (1, "")
    assert error.startswith(f"error: {tmp_path}: expected config.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, _, error = run(EMBEDDED, tmp_path / "full")
    assert code == 1
    assert error.count("\n") == 1
    assert "replace it with --force" in error
    assert [file.name for file in tmp_path.iterdir()] == ["full"]

"""Around the sides of the real model's benchmark: what becomes of those that do not run, and of an engine that computes something else."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cpu.sides import Ready, Side
from bench.process import ProcessError
from bench.real import forms, mistralrs, speed
from models import EMBEDDED


def _side(reason: str) -> Callable[[], Ready]:
    def prepare() -> Ready:
        raise ProcessError(reason)

    return prepare


def test_sides_that_do_not_run_are_in_the_results_with_their_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    sides = {"one": Side("one", _side("no such class")), "two": Side("two", _side("no such file"))}
    monkeypatch.setattr(speed, "SIDES", sides)
    monkeypatch.setattr(sys, "argv", ["speed", "--sides", "one", "two", "--out", str(out)])
    speed.main()
    found = json.loads(out.read_text())
    assert found == {"not_run": {"one": "no such class", "two": "no such file"}, "runs": []}
    assert "not run: one: no such class" in capsys.readouterr().out


def test_a_prompt_for_mistralrs_has_exactly_the_ids_asked_for() -> None:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "  ", "▁a", "a", "é", "<0x0A>", "▁▁"]
    made = mistralrs.word_for_word(words, 3)
    ids = [2, 4, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 3]
    assert made.encode(mistralrs.BETWEEN.join(words[i] for i in ids)).ids == ids
    # mistral.rs compares each of them with the file's.
    assert [made.id_to_token(i) for i in range(len(words))] == words


def test_text_that_is_not_the_models_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "dense", lambda: EMBEDDED)
    monkeypatch.setattr(
        mistralrs, "PROMPT", "<bos><|turn>user\nWho are you?<turn|>\n<|turn>model\n"
    )
    mistralrs.check("I am")
    for said in ("", " t the t the t the t the", "zebra }{ Größe 93 seven oil"):
        with pytest.raises(ProcessError, match="not the model's"):
            mistralrs.check(said)

"""mistral.rs on the real model: the tokenizer that it needs, and whether what it computes is the model.

It reads the package's file and `Gemma3ForCausalLM`'s folder. Knows nothing of speed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import torchtpu_rs
from bench import process
from bench.cpu import install
from bench.cpu.sides import Ready, of_python
from bench.real import forms

PROMPT = "Once upon a time, there was a"
TOKENS = 24
NATS = 2.0
"""A token of its text costs at most so much on average, by our exact arithmetic: 1.0 to 1.4 in forms that are right (of 4 to 32 bits).
One letter over and over, which is what wrong tokens of a prompt bring about, costs 3.5, and words at random 9."""
# A code point that Unicode keeps for insiders; no word of the vocabulary has it.
BETWEEN = "\ufdd0"


def tokenizer() -> Path:
    """The tokenizer.json of `word_for_word` for the file's vocabulary.

    Its own reading of the file makes 11 tokens of "The capital of France is", for Gemma's 6, and it refuses Gemma's tokenizer.json: the
    file has spaces in its user-defined tokens where that has "▁" (llama.cpp's converter writes them so).
    """
    out = forms.folder("mistralrs-tokenizer.json")
    if not out.is_file():
        found: Any = torchtpu_rs.gguf_metadata(forms.packaged())
        made = word_for_word(
            found["tokenizer.ggml.tokens"], found["tokenizer.ggml.unknown_token_id"]
        )
        part = out.with_suffix(".part")
        made.save(str(part))
        part.rename(out)
    return out


def word_for_word(words: Sequence[str], unknown: int) -> Tokenizer:
    """A tokenizer of texts that are words of a vocabulary with `BETWEEN` between them."""
    vocab = {word: token_id for token_id, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=words[unknown]))
    made.pre_tokenizer = pre_tokenizers.Split(BETWEEN, "removed")
    # mistral.rs looks at the decoder to tell the kind of tokenizer; this is Gemma's.
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


def prepare(form: str, checkpoint: Path) -> Ready:
    """The side that measures it, if it computes the model.

    Raises:
        process.ProcessError: it does not load the checkpoint, or what it says is not the model's.
    """
    python = install.environment("mistralrs", install.MISTRALRS)
    check(_said(python, form, checkpoint))
    return of_python(checkpoint, [python, "-m", "bench.cpu.mistralrs_engine", form, tokenizer()])


def check(said: str) -> None:
    """Whether text behind `PROMPT` may be the model's.

    Raises:
        process.ProcessError: by our exact arithmetic it is too unlikely.
    """
    cost = nats_a_token(PROMPT, said)
    print(f"mistral.rs says {PROMPT + said!r}: {cost:.2f} nats a token", flush=True)
    if not cost <= NATS:
        raise process.ProcessError(
            f"what it says is not the model's: {PROMPT + said!r} costs {cost:.1f} nats a token, expected at most {NATS}"
        )


def _said(python: Path, form: str, checkpoint: Path) -> str:
    ids = _gemma()(PROMPT).input_ids
    command: list[str | Path] = [python, "-m", "bench.real.mistralrs_text", checkpoint, form]
    done = process.run(
        [*command, tokenizer(), str(TOKENS)],
        text=json.dumps(ids),
        environment={"PYTHONPATH": str(process.ROOT)},
        log=forms.folder(f"mistralrs-{form}.log"),
    )
    text: str = json.loads(done.output.splitlines()[-1])
    return text.replace("▁", " ")


def _gemma() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(forms.dense())


def nats_a_token(prompt: str, text: str) -> float:
    """What the tokens of `text` behind `prompt` cost on average, by our exact arithmetic; infinite if there are none."""
    gemma = _gemma()
    begun, ids = len(gemma(prompt).input_ids), gemma(prompt + text).input_ids
    if len(ids) <= begun:
        return float("inf")
    engine = torchtpu_rs.Engine(forms.dense(), torch.zeros(1), len(ids), arithmetic="exact")
    logits = engine.logits(ids, all=True)[begun - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[begun:])).item()

"""How far each form of the same real weights is from transformers, by teacher forcing.

    python -m bench.real.quality [--texts 4] [--tokens 256] [--no-llama] [--out bench/results/real-quality.json]

Every token of a fixed text is predicted from the true ones before it. The yardstick is transformers in bfloat16 with its defaults, reading the
package's GGUF file; its own noise stands beside it (eager attention in place of sdpa). KL is of the yardstick's
distribution from the other's, in nats; llama.cpp runs in an environment of its own.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

import torchtpu_rs
from bench import process
from bench.cpu import install
from bench.quality import judge
from bench.real import forms
from bench.real.texts import digest, texts

CHUNK = 64
LLAMA = (("Q4_K_M", "as the package has it"), ("Q4_0", "made of it"), ("Q8_0", "made of it"))
Logits = list[torch.Tensor]
"""`[tokens, vocab]` of each text."""


def _transformers(ids: list[list[int]], attention: str) -> Logits:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        forms.dense(), dtype=torch.bfloat16, attn_implementation=attention
    )
    model.eval()
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0] for text in ids]


def _ours(
    ids: list[list[int]],
    checkpoint: Path,
    arithmetic: Literal["exact", "fast", "int8"],
) -> Logits:
    engine = torchtpu_rs.Engine(
        checkpoint,
        torch.zeros(1),
        max(map(len, ids)),
        prefill_chunk=CHUNK if arithmetic == "int8" else None,
        arithmetic=arithmetic,
    )
    return [engine.logits(text, all=True) for text in ids]


def _llama(ids: list[list[int]], file: Path) -> Logits:
    python = install.environment("llama-cpp-python", install.LLAMA, "numpy")
    out = forms.folder("llama-logits.npy")
    script = Path(__file__).with_name("llama_logits.py")
    process.run([python, script, file, out], text=json.dumps(ids), log=out.with_suffix(".log"))
    found = torch.from_numpy(numpy.load(out))
    out.unlink()
    ends = numpy.cumsum([len(text) for text in ids])
    return [found[end - len(text) : end] for text, end in zip(ids, ends, strict=True)]


def sides(ids: list[list[int]], *, with_llama: bool) -> Iterator[tuple[str, Callable[[], Logits]]]:
    """What is compared with the yardstick, and how its logits are had."""
    package, w4a16 = forms.packaged(), "w4a16 by torchtpu-rs quantize"
    yield "transformers, eager attention", lambda: _transformers(ids, "eager")
    yield "ours, exact", lambda: _ours(ids, package, "exact")
    yield "ours, fast", lambda: _ours(ids, package, "fast")
    yield f"ours, {w4a16}, fast", lambda: _ours(ids, forms.packed("w4a16"), "fast")
    yield (
        "ours, int8 by torchtpu-rs quantize, exact",
        lambda: _ours(ids, forms.packed("int8"), "exact"),
    )
    yield "ours, int8 as a TPU has it", lambda: _ours(ids, package, "int8")
    if with_llama:
        for form, how in LLAMA:
            file = package if form == "Q4_K_M" else forms.llama(form)
            yield f"llama.cpp, {form} {how}", lambda file=file: _llama(ids, file)  # type: ignore[misc]


def perplexity(ids: list[list[int]], logits: Logits) -> float:
    """Of each text's tokens after its first."""
    losses = [
        torch.nn.functional.cross_entropy(
            rows[:-1].float(), torch.tensor(text[1:]), reduction="none"
        )
        for text, rows in zip(ids, logits, strict=True)
    ]
    return math.exp(torch.cat(losses).double().mean().item())


def compared(name: str, ids: list[list[int]], wanted: Logits, found: Logits) -> dict[str, Any]:
    """One row of the table. A text at a time: one of 256 tokens has 134 MB of logits in bfloat16, several times that in float64."""
    kl, agrees = [], []
    for one, other in zip(wanted, found, strict=True):
        for start in range(0, len(one), CHUNK):
            judged = judge(one[start : start + CHUNK], other[start : start + CHUNK])
            kl.append(judged.divergence)
            agrees.append(judged.agrees)
    divergence, same = torch.cat(kl), torch.cat(agrees)
    return {
        "side": name,
        "perplexity": round(perplexity(ids, found), 4),
        "mean_kl": float(f"{divergence.mean().item():.3g}"),
        "p99_kl": float(f"{divergence.quantile(0.99).item():.3g}"),
        "top1_agreement": round(same.double().mean().item(), 4),
        "equal_bits": all(
            torch.equal(a.to(b.dtype), b) for a, b in zip(found, wanted, strict=True)
        ),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| | perplexity | KL mean | KL p99 | top-1 the same |", "|---|---|---|---|---|"]
    for row in rows:
        kl = "0, every bit" if row["equal_bits"] else f"{row['mean_kl']:.2g}"
        lines.append(
            f"| {row['side']} | {row['perplexity']:.3f} | {kl} | {row['p99_kl']:.2g} | {row['top1_agreement']:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, compares, prints the table, writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/real-quality.json"))
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(forms.dense())
    ids = texts(lambda text: list(tokenizer(text).input_ids), arguments.texts, arguments.tokens)
    wanted = _transformers(ids, "sdpa")
    rows = [compared("transformers, bfloat16", ids, wanted, wanted)]
    for name, logits in sides(ids, with_llama=not arguments.no_llama):
        rows.append(compared(name, ids, wanted, logits()))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    found = {"text": digest(), "tokens": sum(map(len, ids)), "rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    main()

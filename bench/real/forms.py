"""The same weights in several forms, each made once below the scratch folder: as the package has them, as transformers reads them, packed
by `torchtpu-rs quantize` and by llama.cpp."""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from bench import e2b_shape, process
from bench.cpu import install
from bench.exact import load_gguf
from server.packaged import assemble

NAME = "gemma-3-270m"


def folder(name: str) -> Path:
    """A place of this benchmark's own."""
    place = e2b_shape.scratch().parent / NAME
    place.mkdir(parents=True, exist_ok=True)
    return place / name


def packaged() -> Path:
    """The package's file, Q4_K_M, where `torchtpu-rs serve gemma3-270m` has it too.

    Raises:
        PackagedError: the extra gemma3-270m is not installed.
    """
    return assemble("gemma3-270m")


def dense() -> Path:
    """What transformers makes of that file, in bfloat16, as safetensors with its tokenizer."""
    out = folder("transformers")
    if not (out / "config.json").is_file():
        file = packaged()
        part = out.with_name(out.name + ".part")
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(part)
        load_gguf(file).save_pretrained(part)
        part.rename(out)
    return out


def packed(form: str) -> Path:
    """`dense` packed by our own converter."""
    out = folder(form)
    if not out.is_dir():
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "server",
            "quantize",
            dense(),
            out,
            "--format",
            form,
        ]
        process.run(command, log=out.with_suffix(".log"))
    return out


def llama(form: str) -> Path:
    """The package's file packed again by `llama-quantize`, from the values it has."""
    out = folder(f"{form}.gguf")
    if not out.is_file():
        tool = install.llama() / "build" / "bin" / "llama-quantize"
        part = out.with_suffix(".part")
        command: list[str | Path] = [tool, "--allow-requantize", packaged(), part, form]
        process.run(command, log=out.with_suffix(".log"))
        part.rename(out)
    return out

"""Gemma 3 270M itself, from its package, and transformers reading the same file: once a session, for every check here.

`make real` runs them all, `make real-short` those marked `short`. They take minutes, so they are no part of `make test`.
"""

from pathlib import Path
from typing import Any

import pytest

from server.packaged import assemble

NAME = "gemma3-270m"


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The GGUF file in the user's cache, where `torchtpu-rs serve gemma3-270m` has it too."""
    return assemble(NAME)


@pytest.fixture(scope="session")
def reference_tokenizer(model_file: Path) -> Any:
    """transformers' tokenizer from the file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)


@pytest.fixture(scope="session")
def reference_folder(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers reads from the file, in bfloat16, as a checkpoint of config.json and safetensors.

    Its reading takes most of a minute; whoever wants the model again takes it from here.
    """
    from bench.exact import load_gguf

    folder = tmp_path_factory.mktemp("reference")
    load_gguf(model_file).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(reference_folder: Path) -> Any:
    """transformers' model, in bfloat16."""
    from bench.exact import load_transformers

    return load_transformers(reference_folder)

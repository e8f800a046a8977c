"""The tree's rules that no compiler checks: who may import whom, and where `unsafe` and pyo3 may stand."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUST = ROOT / "rust" / "src"

# Each module of the crate may use the ones after it, `error` and `json` aside, which all may.
RUST_ORDER = [
    "lib",
    "bindings",
    "engine",
    "captured",
    "compiled",
    "fast",
    "step",
    "sampler",
    "model",
    "cache",
    "weights",
    "config",
    "checkpoint",
    "gguf",
    "kernels",
    "aten",
]


TORCH_IN_SERVER = {"engine.py", "doctor.py"}
# Only the door may know HTTP; text and engine sides must work without it.
HTTP_FREE = {"engine.py", "worker.py", "tokenizer.py", "chat.py", "tools.py", "checkpoint.py"}


def rust_files() -> list[Path]:
    return sorted(RUST.rglob("*.rs"))


def module_of(file: Path) -> str:
    return file.relative_to(RUST).parts[0].removesuffix(".rs")


def imports_of(file: Path) -> set[str]:
    """Top-level names of every module that a Python file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("file", rust_files(), ids=lambda f: str(f.relative_to(RUST)))
def test_rust_modules_use_only_what_is_below_them(file: Path) -> None:
    own = module_of(file)
    if own in {"error", "json"}:
        return
    used = set(re.findall(r"crate::\{?(\w+)", file.read_text()))
    used |= {
        name
        for block in re.findall(r"use crate::\{(.*?)\};", file.read_text(), re.DOTALL)
        for name in re.findall(r"^\s*(\w+)(?:::|,|$)", block, re.MULTILINE)
    }
    below = RUST_ORDER[RUST_ORDER.index(own) + 1 :]
    for name in used & set(RUST_ORDER):
        assert name == own or name in below, f"{own} uses {name}"


def test_unsafe_stands_only_in_aten_and_the_kernels() -> None:
    unsafe = {file for file in rust_files() if re.search(r"\bunsafe\b(?!_)", file.read_text())}
    assert {module_of(file) for file in unsafe} == {"aten", "kernels"}


def test_pyo3_stands_only_at_the_border() -> None:
    border = {
        file.relative_to(RUST).as_posix() for file in rust_files() if "pyo3" in file.read_text()
    }
    assert {file for file in border if not file.startswith("bindings/")} == {"aten/python.rs"}


@pytest.mark.parametrize("file", sorted((ROOT / "server").glob("*.py")), ids=lambda f: f.name)
def test_server_modules_import_only_what_they_may(file: Path) -> None:
    imported = imports_of(file)
    if file.name not in TORCH_IN_SERVER:
        assert not imported & {"torch", "torchtpu_rs"}
    if file.name in HTTP_FREE:
        assert not imported & {"fastapi", "starlette", "uvicorn"}


@pytest.mark.parametrize(
    "folder", ["server", "torchtpu_rs", "quantize", "models", "bench", "rig", "page", "demo"]
)
def test_files_are_read_in_one_sitting(folder: str) -> None:
    long = {
        f.name: n
        for f in (ROOT / folder).rglob("*.py")
        if (n := len(f.read_text().splitlines())) > 450
    }
    assert not long


def test_the_crates_files_are_read_in_one_sitting() -> None:
    """Tests at the foot of a file do not count."""
    long = {
        file.name: lines
        for file in rust_files()
        if (lines := len(file.read_text().split("#[cfg(test)]")[0].splitlines())) > 450
    }
    assert not long

"""The documents are true where a machine can tell: files they name exist, targets they name run."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "models/README.md",
    "rust/PYO3.md",
    *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").glob("*.md")),
]
MAKE_TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CODE_SUFFIXES = (".py", ".rs", ".md", ".pyi", ".h", ".cpp", ".toml")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    file = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
        if not target.startswith("http"):
            assert (file.parent / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_with_a_folder_exist(document: str) -> None:
    for name in re.findall(r"`([\w./-]+/[\w.-]+)`", (ROOT / document).read_text()):
        if name.endswith(CODE_SUFFIXES):
            places = (ROOT, ROOT / "rust", ROOT / "rust" / "src", (ROOT / document).parent)
            assert any((place / name).exists() for place in places), f"{document} names {name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`make ([a-z0-9-]+)`|^make ([a-z0-9-]+)", text, re.MULTILINE))
    for target in {a or b for a, b in named}:
        assert target in MAKE_TARGETS, f"{document} names make {target}"


def test_the_readmes_tree_is_the_disks() -> None:
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    named = set(re.findall(r"^(\w+)/", tree, re.MULTILINE))
    ignored = {"target", "build", "dist"}
    on_disk = {
        folder.name
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name[0] not in "._" and folder.name not in ignored
    }
    assert named == on_disk


def test_the_readmes_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "torchtpu_rs.Engine" in block]
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert " stop " in done.stdout


def test_every_dependency_has_a_reason() -> None:
    reasons = set(re.findall(r"`([\w-]+)`", (ROOT / "docs" / "decisions.md").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["dependencies"] + project["optional-dependencies"]["dev"]
    crate = tomllib.loads((ROOT / "rust" / "Cargo.toml").read_text())
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in python}
    for table in ("dependencies", "build-dependencies", "dev-dependencies"):
        names |= set(crate[table])
    assert not names - reasons


def test_locks_hold_no_address() -> None:
    for lock in (ROOT / "requirements").glob("*.txt"):
        text = lock.read_text()
        assert "--hash=sha256:" in text
        assert not re.search(r"https?://|--index-url|--find-links", text)

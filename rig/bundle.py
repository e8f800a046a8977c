"""What travels in the VM's metadata: the project's sources packed, the settings, and startup.sh. The same sources give the same bytes.

Limits are Compute Engine's: 256 KiB for a value and 512 KB for all. Metadata can be read by anyone who may read the VM, so what
looks like a secret is refused, in the settings and in the sources, before they are packed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import lzma
import re
import shutil
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rig.settings import ROOT, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

MAX_VALUE = 256 * 1024
MAX_ALL = 512 * 1000
LINE = 76

CRATE = ("rust", "pyproject.toml", "README.md", "LICENSE")
# Of these the VM needs no more: the build asks for them to be there, and the rest would fill the metadata.
PARTLY = {
    "models": ("models/__init__.py",),
    "demo": ("demo/__init__.py",),
    # `torchtpu-rs bench`, where no network is between.
    "bench": ("bench/__init__.py", "bench/load"),
    # The units, and what rig/keeper.py imports.
    "rig": (
        "rig/torchtpu-rs.service", "rig/torchtpu-rs-keeper.service", "rig/__init__.py", "rig/keeper.py", "rig/api.py",
        "rig/google.py", "rig/plan.py", "rig/settings.py", "rig/states.py", "rig/tokens.py",
    ),
}  # fmt: skip
SUFFIXES = {
    ".rs",
    ".toml",
    ".lock",
    ".cpp",
    ".h",
    ".py",
    ".pyi",
    ".typed",
    ".md",
    ".service",
    ".sh",
    ".html",
    ".css",
    ".js",
    "",
}
# `tests.rs`: modules that only `cargo test` compiles.
LEFT_OUT = {"target", "__pycache__", "simulated", "tests.rs"}

LOCK = "requirements/lock.txt"
PINS = "requirements/pins.txt"
"""The lock without its hashes, which would fill the metadata: the versions that the VM installs too."""

# A private key, a token of Hugging Face, Google, GitHub, OpenAI or AWS: what must not stand where others read.
SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\b(hf_[A-Za-z0-9]{30,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{30,}|sk-[\w-]{32,}|AKIA[A-Z0-9]{16})"
)


class BundleError(ValueError):
    """What should travel cannot; the text says what it is and by how much."""


@dataclass(frozen=True)
class Bundle:
    """Packed sources, as text."""

    crate: str
    server: str
    sha256: str
    """Of both archives, one after the other; the VM compares it before it builds."""


def files(parts: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The source files of `parts`, in order of their names; hidden ones are nobody's sources."""
    found: list[Path] = []
    for part in parts:
        path = root / part
        candidates = (
            [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        )
        found += [file for file in candidates if _is_source(file.relative_to(root))]
    return sorted(found)


def _is_source(file: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.parts)
    return file.suffix in SUFFIXES and not hidden and not LEFT_OUT & set(file.parts)


def packages(root: Path = ROOT) -> list[str]:
    """What the build installs besides the crate, as pyproject.toml names it."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    names: list[str] = project["tool"]["maturin"]["python-packages"]
    return [part for name in names for part in PARTLY.get(name, (name,))]


def contents(parts: Iterable[str], root: Path = ROOT) -> dict[str, bytes]:
    """What is in the source files of `parts`, by their names.

    Raises:
        BundleError: one of them holds what looks like a secret.
    """
    found = {file.relative_to(root).as_posix(): file.read_bytes() for file in files(parts, root)}
    for name, content in found.items():
        _refuse_secrets(name, content.decode(errors="replace"))
    return found


def pins(lock: str) -> bytes:
    """The lines of a requirements file that name a version, without hashes; conditions stay."""
    lines = [line.rstrip("\\ ") for line in lock.splitlines() if re.match(r"[a-z0-9]", line)]
    return "".join(f"{line}\n" for line in lines).encode()


def archive(named: Mapping[str, bytes]) -> bytes:
    """A tar, compressed; nothing of when or by whom it was made gets in."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted(named.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def bundle(root: Path = ROOT) -> Bundle:
    """The crate, and the server with the versions of what it needs.

    Raises:
        BundleError: a source file holds what looks like a secret.
    """
    crate = archive(contents(CRATE, root))
    server = archive({**contents(packages(root), root), PINS: pins((root / LOCK).read_text())})
    return Bundle(_text(crate), _text(server), hashlib.sha256(crate + server).hexdigest())


def _text(data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE)) + "\n"


def settings_text(settings: Settings) -> str:
    """tpu.env as the VM reads it: every key that has a value, one a line.

    Raises:
        BundleError: a value cannot be written so that bash, systemd and pydantic read the same.
    """
    found = {key.upper(): _word(value) for key, value in settings if value is not None}
    return "".join(f"{key}={_quoted(key, text)}\n" for key, text in found.items())


def _quoted(key: str, text: str) -> str:
    if "\n" in text or "\r" in text:
        raise BundleError(f"{key}: expected one line, found several")
    if text == text.strip() and not text.startswith(("'", '"')) and " #" not in text:
        return text
    if '"' in text or "\\" in text:
        raise BundleError(
            f"{key}: expected a value without double quotes and backslashes, found {text}"
        )
    return f'"{text}"'


def _word(value: object) -> str:
    if isinstance(value, timedelta):
        return f"{int(value.total_seconds())}s"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def metadata(
    settings: Settings, api_key: str | None, packed: Bundle, root: Path = ROOT
) -> dict[str, str]:
    """All metadata of the VM. `api_key` is generated where no secret is named in its place.

    Raises:
        BundleError: a value or all of them are too large, one looks like a secret, or the script is none.
    """
    script = (root / "rig" / "startup.sh").read_text()
    _check_script(script)
    found = {
        "enable-guest-attributes": "TRUE",
        "startup-script": script,
        "settings": settings_text(settings),
        "bundle-crate": packed.crate,
        "bundle-server": packed.server,
        "bundle-sha256": packed.sha256,
    }
    check(found)
    # Not checked: it is a secret, which this VM alone has and whoever may read the VM's metadata.
    return {**found, "api-key": api_key} if api_key else found


def check(found: Mapping[str, str]) -> None:
    """Refuses what the service would refuse, and secrets.

    Raises:
        BundleError: a value or all of them are too large, or one looks like a secret.
    """
    for key, value in found.items():
        size = len(value.encode())
        if size > MAX_VALUE:
            raise BundleError(f"expected metadata {key} of at most {MAX_VALUE} bytes, found {size}")
        _refuse_secrets(f"metadata {key}", value)
    size = sum(len(key) + len(value.encode()) for key, value in found.items())
    if size > MAX_ALL:
        raise BundleError(f"expected metadata of at most {MAX_ALL} bytes in all, found {size}")


def _refuse_secrets(where: str, text: str) -> None:
    if SECRET.search(text):
        raise BundleError(
            f"expected no secret in {where}, found what looks like one (use Secret Manager: API_KEY_SECRET, HF_TOKEN_SECRET)"
        )


def _check_script(script: str) -> None:
    # A VM that cannot read it would start, cost money and say nothing. Without bash here, the VM is the first to know.
    if (bash := shutil.which("bash")) is None:
        return
    done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"expected startup.sh to be a bash script: {done.stderr.strip()}")

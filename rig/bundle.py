"""What travels in the VM's metadata: the project's sources packed, the settings, and startup.sh. The same sources give the same bytes.

Limits are Compute Engine's: 256 KiB for a value and 512 KB for all. Metadata can be read by anyone who may read the VM, so what
looks like a secret of its own accord is refused.
"""

from __future__ import annotations

import base64
import hashlib
import io
import lzma
import re
import tarfile
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
SERVER = ("torchtpu_rs", "server", "tpu", "models/__init__.py", "bench/__init__.py", "rig")
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
LEFT_OUT = {"target", "__pycache__", "simulated"}

# A private key, a Hugging Face or Google API token: what must not stand where others read.
SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_[A-Za-z0-9]{30,}|\bAIza[A-Za-z0-9_-]{30,}"
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
    """The source files of `parts`, in order of their names."""
    found: list[Path] = []
    for part in parts:
        path = root / part
        candidates = (
            [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        )
        found += [
            file
            for file in candidates
            if file.suffix in SUFFIXES and not LEFT_OUT & set(file.relative_to(root).parts)
        ]
    return sorted(found)


def archive(sources: Iterable[Path], root: Path = ROOT) -> bytes:
    """A tar of `sources`, compressed; nothing of when or by whom it was made gets in."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for source in sources:
            info = tarfile.TarInfo(source.relative_to(root).as_posix())
            content = source.read_bytes()
            info.size = len(content)
            info.mode = 0o755 if source.suffix == ".sh" else 0o644
            tar.addfile(info, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def bundle(root: Path = ROOT) -> Bundle:
    """The crate and the server."""
    crate, server = (archive(files(parts, root), root) for parts in (CRATE, SERVER))
    return Bundle(_text(crate), _text(server), hashlib.sha256(crate + server).hexdigest())


def _text(data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE)) + "\n"


def settings_text(settings: Settings) -> str:
    """tpu.env as the VM reads it: every key that has a value, one a line."""
    found = {key: value for key, value in settings if value is not None}
    return "".join(f"{key.upper()}={_word(value)}\n" for key, value in found.items())


def _word(value: object) -> str:
    if isinstance(value, timedelta):
        return f"{int(value.total_seconds())}s"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def metadata(
    settings: Settings, api_key: str | None, packed: Bundle, root: Path = ROOT
) -> dict[str, str]:
    """All metadata of the VM. `api_key` is generated where no secret is named in its place.

    Raises:
        BundleError: a value or all of them are too large, or one looks like a secret.
    """
    found = {
        "enable-guest-attributes": "TRUE",
        "startup-script": (root / "rig" / "startup.sh").read_text(),
        "settings": settings_text(settings),
        "bundle-crate": packed.crate,
        "bundle-server": packed.server,
        "bundle-sha256": packed.sha256,
    }
    check(found)
    # Not checked: it is a secret, which this VM alone has and whoever may read the VM's metadata.
    return {**found, "api-key": api_key} if api_key else found


def check(found: Mapping[str, str]) -> None:
    """Refuses what the service would refuse, and secrets."""
    for key, value in found.items():
        size = len(value.encode())
        if size > MAX_VALUE:
            raise BundleError(f"expected metadata {key} of at most {MAX_VALUE} bytes, found {size}")
        if SECRET.search(value):
            raise BundleError(
                f"expected no secret in metadata {key}, found what looks like one (use Secret Manager: API_KEY_SECRET, HF_TOKEN_SECRET)"
            )
    size = sum(len(key) + len(value.encode()) for key, value in found.items())
    if size > MAX_ALL:
        raise BundleError(f"expected metadata of at most {MAX_ALL} bytes in all, found {size}")

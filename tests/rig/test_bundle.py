"""The metadata of a VM: within the service's limits, the same bytes for the same sources, no secrets, and enough to build from."""

import base64
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from rig.bundle import (
    MAX_ALL,
    MAX_VALUE,
    Bundle,
    BundleError,
    archive,
    bundle,
    check,
    files,
    metadata,
    settings_text,
)
from rig.settings import ROOT, Settings, read


@pytest.fixture(scope="module")
def packed() -> Bundle:
    return bundle()


def members(text: str) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text)), mode="r:xz") as tar:
        return {member.name: member for member in tar.getmembers()}


def test_sources_and_settings_fit_the_metadata_with_room(packed: Bundle) -> None:
    found = metadata(Settings(), "k" * 43, packed)
    assert max(len(value) for value in found.values()) < 0.9 * MAX_VALUE
    assert sum(len(key) + len(value) for key, value in found.items()) < 0.9 * MAX_ALL


def test_the_same_sources_give_the_same_bytes(packed: Bundle) -> None:
    assert bundle() == packed
    archives = base64.b64decode(packed.crate) + base64.b64decode(packed.server)
    assert hashlib.sha256(archives).hexdigest() == packed.sha256


def test_everything_that_a_build_reads_is_there_and_nothing_of_its_outputs(packed: Bundle) -> None:
    names = members(packed.crate) | members(packed.server)
    tracked = subprocess.run(
        ["git", "ls-files", "rust", "torchtpu_rs", "server"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert set(tracked) <= set(names)
    assert {
        "pyproject.toml",
        "rig/startup.sh",
        "rig/torchtpu-rs.service",
        "models/__init__.py",
    } <= set(names)
    assert not [
        name for name in names if "target/" in name or name.endswith((".so", ".safetensors"))
    ]
    assert {member.mtime for member in names.values()} == {0}
    assert {(member.uid, member.uname) for member in names.values()} == {(0, "")}


def test_settings_come_out_on_the_vm_as_they_went_in(tmp_path: Path) -> None:
    settings = Settings(project_id="p", max_run_duration="90m", source_range="203.0.113.7/32")
    file = tmp_path / "tpu.env"
    file.write_text(settings_text(settings))
    assert read(file) == settings


def test_what_is_too_large_or_looks_like_a_secret_is_refused_by_its_key() -> None:
    with pytest.raises(
        BundleError, match=f"metadata big of at most {MAX_VALUE} bytes, found {MAX_VALUE + 1}"
    ):
        check({"big": "x" * (MAX_VALUE + 1)})
    with pytest.raises(BundleError, match=f"at most {MAX_ALL} bytes in all"):
        check(dict.fromkeys("abc", "x" * 200000))
    for secret in ("hf_" + "a" * 34, "AIza" + "b" * 35, "-----BEGIN PRIVATE KEY-----"):
        with pytest.raises(BundleError, match="metadata settings, found what looks like one"):
            check({"settings": f"HF_TOKEN={secret}"})


def test_build_outputs_beside_the_sources_are_left_out(tmp_path: Path) -> None:
    for name in ("rust/src/lib.rs", "rust/target/debug/x.rs", "rust/__pycache__/y.py", "rust/z.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = files(["rust"], tmp_path)
    assert [file.name for file in found] == ["lib.rs"]
    assert archive(found, tmp_path) == archive(found, tmp_path)

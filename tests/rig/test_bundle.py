"""The metadata of a VM: within the service's limits, the same bytes for the same sources, no secrets, and enough to build from."""

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rig.bundle import (
    LOCK,
    MAX_ALL,
    MAX_VALUE,
    PINS,
    Bundle,
    BundleError,
    archive,
    bundle,
    check,
    contents,
    metadata,
    pins,
    settings_text,
)
from rig.settings import ROOT, Settings, read

SECRETS = (
    "hf_" + "a" * 34,
    "AIza" + "b" * 35,
    "ya29." + "c" * 40,
    "ghp_" + "d" * 36,
    "sk-" + "e" * 48,
    "AKIA" + "F" * 16,
    "-----BEGIN PRIVATE KEY-----",
)


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
        ["git", "ls-files", "rust", "torchtpu_rs", "server", "page"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted = {name for name in tracked if "/." not in name and not name.endswith("/tests.rs")}
    assert wanted <= set(names)
    assert {
        "pyproject.toml",
        "rig/torchtpu-rs.service",
        "rig/torchtpu-rs-keeper.service",
        "models/__init__.py",
        PINS,
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


def test_a_value_that_begins_with_a_quote_or_holds_a_hash_arrives_whole(tmp_path: Path) -> None:
    file = tmp_path / "tpu.env"
    for spec in ("'jinja2>=3.1.6' torch", "torch # the newest", "torch 'jinja2>=3.1.6'"):
        settings = Settings(torch_pip_spec=spec)
        file.write_text(settings_text(settings))
        assert read(file) == settings


@pytest.mark.parametrize("spec", ["torch\nPROJECT_ID=other", "'a' \"b\""])
def test_a_value_that_readers_would_read_differently_is_refused_by_its_key(spec: str) -> None:
    with pytest.raises(BundleError, match="TORCH_PIP_SPEC: expected"):
        settings_text(Settings(torch_pip_spec=spec))


def test_the_vm_installs_the_versions_of_the_lock() -> None:
    lock = (ROOT / LOCK).read_text()
    lines = pins(lock).decode().splitlines()
    assert len(lines) == lock.count("==") - lock.count("== '") > 50
    assert {"fastapi", "maturin", "pydantic-settings", "uvicorn"} <= {
        line.partition("==")[0] for line in lines
    }
    assert not [line for line in lines if "--hash" in line or line.endswith("\\")]


def test_what_the_keeper_imports_is_packed_or_installed_on_the_vm(packed: Bundle) -> None:
    script = "import rig.keeper, sys; print(*(getattr(m, '__file__', '') or '' for m in sys.modules.values()), *sys.modules)"
    imported = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    ours = {name.removeprefix(f"{ROOT}/") for name in imported if name.startswith(f"{ROOT}/rig/")}
    assert "rig/keeper.py" in ours
    assert ours <= set(members(packed.server))
    # Of the extra `rig`, which is for the machine that asks for VMs.
    assert not {"google.auth", "mcp", "requests", "torch"} & set(imported)


def test_what_is_too_large_or_looks_like_a_secret_is_refused_by_its_key() -> None:
    with pytest.raises(
        BundleError, match=f"metadata big of at most {MAX_VALUE} bytes, found {MAX_VALUE + 1}"
    ):
        check({"big": "x" * (MAX_VALUE + 1)})
    with pytest.raises(BundleError, match=f"at most {MAX_ALL} bytes in all"):
        check(dict.fromkeys("abc", "x" * 200000))
    for secret in SECRETS:
        with pytest.raises(BundleError, match="metadata settings, found what looks like one"):
            check({"settings": f"HF_TOKEN={secret}"})


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_the_sources_is_refused_by_its_file(secret: str, tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server/app.py").write_text(f'TOKEN = "{secret}"\n')
    with pytest.raises(BundleError, match=r"no secret in server/app\.py"):
        contents(["server"], tmp_path)


def test_a_script_that_bash_cannot_read_is_refused(tmp_path: Path, packed: Bundle) -> None:
    (tmp_path / "rig").mkdir()
    (tmp_path / "rig/startup.sh").write_text("if true; then echo\n")
    with pytest.raises(BundleError, match=r"expected startup\.sh to be a bash script: .*line"):
        metadata(Settings(), None, packed, tmp_path)


def test_build_outputs_and_hidden_files_beside_the_sources_are_left_out(tmp_path: Path) -> None:
    for name in (
        "rust/src/lib.rs",
        "rust/target/debug/x.rs",
        "rust/__pycache__/y.py",
        "rust/z.so",
        "rust/.env",
        "rust/.git/config",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = contents(["rust"], tmp_path)
    assert found == {"rust/src/lib.rs": b"x"}
    assert archive(found) == archive(found)

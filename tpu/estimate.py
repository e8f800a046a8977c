"""What our compiled step should cost on one TPU v5e chip: `python -m tpu.estimate CONFIG.JSON --rows 8 --format bf16`.

The Rust step is recorded over fake tensors (no weights needed), lowered by TorchTPU and compiled by libtpu, which needs
no chip. Everything printed is an estimate:

* estimate: the compiler's own cycles at 1.5 GHz. They leave out the wait for weights that are brought in beforehand.
* floor: bytes that a step must read over 819 GB/s, the chip's published bandwidth.
* expected: 1.16 times the estimate, and never below the floor. Two published rates of E2B in bf16 on one v5e chip say so: 45.1
  tokens/s, 22.2 ms, where 19.0 ms are estimated (one row), and 144.1 tokens/s, 6.9 ms, for 6.0 ms (eight rows).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu import E2B, device
from tpu.v5e import CLOCK_HZ, HBM_BYTES, HBM_BYTES_PER_SECOND, Instructions, Report, compile_program

if TYPE_CHECKING:
    from torchtpu_rs.recording import Plan, Program, Recording

REAL_OVER_ESTIMATE = 1.16
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Estimate:
    """One program on one v5e chip; all times in milliseconds for a step, or for a whole chunk of a prompt."""

    program: str
    estimate_ms: float
    once_ms: float
    """Of a launch of several steps: what it costs beside its steps."""
    floor_ms: float
    expected_ms: float
    tokens_per_second: float | None
    """Of one stream, from `expected_ms`; None for a prompt."""
    compile_seconds: float
    read_bytes: int
    memory: dict[str, float]
    """Gigabytes: arguments, temporaries, and what is left of the chip's 16."""
    costliest: list[Instructions]


def record(checkpoint: Path, context: int, plan: Plan, program: Program) -> Recording:
    """The Rust step over fake tensors in bfloat16."""
    import torch

    from torchtpu_rs.recording import Recording

    return Recording([str(checkpoint)], context, plan, program, torch.bfloat16)


def stablehlo(recording: Recording) -> str:
    """The program's text, as TorchTPU gives it to its compiler."""
    from torch_tpu._internal.compile import tpu_torch_compile

    from torchtpu_rs.capture import lower

    module = lower(recording, keep_module=True).module
    text: str = tpu_torch_compile.serialize_mlir_text(module)
    # torch_tpu 0.2.0 writes an attribute of `chlo.top_k` that jaxlib 0.10.2 does not read yet. No cost depends on it.
    return text.replace(", is_stable = false", "")


def read_bytes(recording: Recording, config: dict[str, Any]) -> int:
    """Bytes that a step must read: every weight once, but of tables only the rows it looks up; every ring once, as far
    as it is read. Layers that share a ring larger than the chip's vector memory read more.
    """
    vocab = int(config["vocab_size"])
    tables = [t for t in recording.parameters if t.dim() == 2 and t.shape[0] == vocab]
    weights = sum(t.numel() * t.element_size() for t in recording.parameters)
    weights -= sum(t.numel() * t.element_size() for t in tables)
    rows = recording.inputs[0].numel()
    looked_up = sum(rows * t.shape[1] * t.element_size() for t in tables)
    rings = 0
    read = max(recording.program.read, 1)
    for ring in recording.state:
        slots, heads, length, width = ring.shape
        batch = 1 if recording.program.tokens else slots
        rings += batch * heads * min(length, read) * width * ring.element_size()
    return weights + looked_up + rings


def summarize(recording: Recording, report: Report, config: dict[str, Any]) -> Estimate:
    """Puts the compiler's report in milliseconds."""
    steps = recording.program.steps
    bodies = [name for name in report.computations if name != "entry"]
    costs = {name: report.cycles(name) / CLOCK_HZ * 1e3 for name in report.computations}
    # Of several computations besides the entry the loop's body is the one that costs.
    step = max(bodies, key=lambda name: costs[name]) if steps > 1 and bodies else "entry"
    once = 0.0 if step == "entry" else costs.get("entry", 0.0)
    bytes_read = read_bytes(recording, config)
    floor = bytes_read / HBM_BYTES_PER_SECOND * 1e3
    expected = max(REAL_OVER_ESTIMATE * costs[step], floor)
    launch = expected + REAL_OVER_ESTIMATE * once / max(steps, 1)
    arguments, temporaries = report.argument_bytes / 1e9, report.temporary_bytes / 1e9
    return Estimate(
        program=str(recording.program),
        estimate_ms=costs[step],
        once_ms=once,
        floor_ms=floor,
        expected_ms=expected,
        tokens_per_second=1e3 / launch if steps else None,
        compile_seconds=report.compile_seconds,
        read_bytes=bytes_read,
        memory={
            "arguments": arguments,
            "temporaries": temporaries,
            "left": HBM_BYTES / 1e9 - arguments - temporaries,
        },
        costliest=report.computations[step][:SHOWN],
    )


def estimate(checkpoint: Path, context: int, plan: Plan, program: Program) -> Estimate:
    """Records, lowers and compiles one program.

    Raises:
        tpu.v5e.CompilationError: libtpu refused it.
    """
    recording = record(checkpoint, context, plan, program)
    with tempfile.TemporaryDirectory() as folder:
        mlir = Path(folder) / "program.mlir"
        mlir.write_text(stablehlo(recording))
        report = compile_program(mlir)
    return summarize(recording, report, json.loads((checkpoint / "config.json").read_text()))


def lines(found: Estimate) -> list[str]:
    """For people."""
    memory = found.memory
    rate = (
        f", {found.tokens_per_second:.0f} tokens/s for one stream"
        if found.tokens_per_second
        else ""
    )
    once = f" + {found.once_ms:.2f} ms once a launch" if found.once_ms else ""
    return [
        f"{found.program}",
        f"  estimate   {found.estimate_ms:7.2f} ms{once} (libtpu's cycles at 1.5 GHz)",
        f"  floor      {found.floor_ms:7.2f} ms ({found.read_bytes / 1e9:.2f} GB over 819 GB/s)",
        f"  expected   {found.expected_ms:7.2f} ms{rate} (an estimate: 1.16 x the estimate, at least the floor)",
        f"  memory     {memory['arguments']:.2f} GB arguments + {memory['temporaries']:.2f} GB temporaries, {memory['left']:.2f} of 16 GB left",
        f"  compiled   in {found.compile_seconds:.1f} s here",
        *(
            f"  {i.cycles / CLOCK_HZ * 1e3:9.3f} ms {i.count:4d}x {i.kind} {i.shape}"
            for i in found.costliest
        ),
    ]


def main() -> None:
    """Reads the command line, prints one estimate for each program asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        default=E2B,
        help="config.json, or a folder with one; weights are not needed. Default: Gemma 4 E2B",
    )
    parser.add_argument("--rows", type=int, default=8, help="slots of a decode step")
    parser.add_argument("--format", choices=["bf16", "int8"], default="bf16")
    parser.add_argument("--context", type=int, default=8192, help="positions the cache holds")
    parser.add_argument("--read", type=int, help="rows of full rings that are read; default: all")
    parser.add_argument("--steps", type=int, default=1, help="decode steps a launch")
    parser.add_argument("--prefill", type=int, help="tokens of a prompt, instead of a decode step")
    parser.add_argument("--all", action="store_true", help="every program of the plan")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.checkpoint
    folder = folder.parent if folder.is_file() else folder
    device.start(simulate=True)
    from torchtpu_rs.recording import Plan, Program

    plan = Plan(slots=arguments.rows, int8=arguments.format == "int8")
    read = arguments.read if arguments.read is not None else arguments.context
    if arguments.all:
        programs = plan.programs(arguments.context)
    elif arguments.prefill:
        programs = [Program(arguments.prefill, 0, read)]
    else:
        programs = [Program(0, arguments.steps, read)]
    for program in programs:
        found = estimate(folder, arguments.context, plan, program)
        if arguments.json:
            from dataclasses import asdict

            sys.stdout.write(json.dumps(asdict(found)) + "\n")
        else:
            sys.stdout.write("\n".join(lines(found)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

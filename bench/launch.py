"""What one launch of E2B's compiled step costs on the host, without its arithmetic: `python -m bench.launch`.

E2B's programs have about 900 arguments, and handing them over takes the host some time. Here a program with as many
arguments, donated rings and results as E2B's decode step, which computes next to nothing, is launched as the engine does
it, on the simulated TPU. On a TPU the step itself runs elsewhere; here it would share these cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from tpu import E2B, device

if TYPE_CHECKING:
    import torch

WIDTH = 8


class Handover:
    """The form of a `torchtpu_rs.recording.Recording`: many arguments and hardly any work."""

    def __init__(self, parameters: int, state: int, inputs: int) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        self.donated = list(range(parameters, parameters + state))

        def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rings = tensors[parameters : parameters + state]
            return [*tensors[parameters + state :], *(ring + 1 for ring in rings)]

        with FakeTensorMode():
            count = parameters + state + inputs
            self.arguments = [torch.empty(WIDTH, device="tpu") for _ in range(count)]
            self._graph = make_fx(step)(*self.arguments)

    def launchable(self) -> torch.fx.GraphModule:
        """The graph to compile."""
        return self._graph


def milliseconds(counts: tuple[int, int, int], launches: int) -> list[float]:
    """Of each launch, until the call returns; the device is idle when it begins. `counts`: parameters, rings, inputs."""
    parameters, state, inputs = counts
    import torch

    from torchtpu_rs.capture import Programs, _Built, compile_recording
    from torchtpu_rs.recording import Plan, Program

    handover: Any = Handover(parameters, state, inputs)
    tensors = [torch.zeros(WIDTH, device="tpu") for _ in range(parameters + state + inputs)]
    programs = Programs([str(E2B)], Plan())
    # What `bind` does for programs of a plan.
    programs._parameters = tensors[:parameters]
    programs._state = tensors[parameters : parameters + state]
    programs._built = [_Built(Program(0, 1, 0), compile_recording(handover))]
    found = []
    for _ in range(launches):
        began = time.perf_counter()
        results = programs.launch(0, tensors[parameters + state :])
        found.append((time.perf_counter() - began) * 1e3)
        results[0].cpu()
    return found


def main() -> None:
    """Reads the command line, prints one JSON line a weight format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--launches", type=int, default=1000)
    arguments = parser.parse_args()
    device.start(simulate=True)
    import torch

    from torchtpu_rs.recording import Plan, Program, Recording

    torch.set_num_threads(1)
    for int8 in (False, True):
        recording = Recording(
            [str(E2B)], 8192, Plan(int8=int8), Program(0, 1, 1024), torch.bfloat16
        )
        counts = (len(recording.parameters), len(recording.state), len(recording.inputs))
        found = sorted(milliseconds(counts, arguments.launches))
        line = {
            "format": "int8" if int8 else "bf16",
            "parameters": counts[0],
            "rings": counts[1],
            "launches": len(found),
            "median_ms": round(statistics.median(found), 3),
            "p90_ms": round(found[len(found) * 9 // 10], 3),
            "least_ms": round(found[0], 3),
        }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

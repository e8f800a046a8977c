"""Which compiled programs there are, and the Rust step behind each as a graph of ATen calls.

PyTorch's dispatcher sees every operation whichever language calls it. So the Rust step runs once over fake tensors
while `make_fx` records it; the recording is a program of its own, or the body of a loop over several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchtpu_rs import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SHORTEST_READ = 1024
"""Fewest rows of a full layer for which a program of its own is worth its compilation."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program: a chunk of a prompt (`tokens`) or `steps` tokens of every slot, reading `read` rows of full layers."""

    tokens: int
    steps: int
    read: int

    def __str__(self) -> str:
        work = (
            f"{self.steps} tokens a launch" if self.steps else f"{self.tokens} tokens of a prompt"
        )
        return f"{work}, reading {self.read}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which programs there are."""

    slots: int = 8
    """Rows of a decode step: one row would leave out a TPU's matrix unit."""
    chunks: tuple[int, ...] = (64, 512)
    steps: tuple[int, ...] = (8, 32)
    reads: int = 4
    """Lengths of full rings at most: powers of two from 1024 on, and the whole."""
    int8: bool = False
    """Projections as int8, one factor an output row."""

    @property
    def largest(self) -> int:
        """Most tokens that one launch adds to a slot."""
        return max(*self.chunks, *self.steps)

    def programs(self, context: int) -> list[Program]:
        """All programs, those first without which nothing can be served."""
        rows = context + self.largest
        reads = [rows]
        while len(reads) < self.reads and SHORTEST_READ << (len(reads) - 1) < context:
            reads.append(SHORTEST_READ << (len(reads) - 1))
        prefill = [Program(tokens, 0, read) for read in (rows, 0) for tokens in self.chunks]
        decode = [Program(0, steps, read) for read in reads for steps in self.steps]
        first = [prefill[0], decode[0]]
        return first + [p for p in (*prefill[1:], *decode[1:]) if p not in first]


class Recording:
    """A Rust step as a graph of ATen calls, recorded from tensors that have shapes and no values."""

    def __init__(
        self,
        checkpoint: Sequence[str],
        context: int,
        plan: Plan,
        program: Program,
        dtype: torch.dtype,
        device: str = "tpu",
    ) -> None:
        with FakeTensorMode(), torch.no_grad():
            like = torch.empty(1, dtype=dtype, device=device)
            step = _native.Step(
                list(checkpoint),
                like,
                context=context,
                slots=plan.slots,
                spare=plan.largest,
                read=program.read,
                prefill=program.tokens > 0,
                int8=plan.int8,
            )
            self.parameters, self.state = step.stand_ins()
            rows = (
                [(1, program.tokens), (1,), (1,), (1,)] if program.tokens else [(plan.slots,)] * 2
            )
            self.inputs = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in rows]
            self.graph = make_fx(step)(*self.parameters, *self.state, *self.inputs)
        self.program = program

    @property
    def arguments(self) -> list[Tensor]:
        """Stand-ins of all arguments: parameters, state, inputs."""
        return [*self.parameters, *self.state, *self.inputs]

    @property
    def donated(self) -> list[int]:
        """Indices of the state among the arguments: its memory may be overwritten."""
        first = len(self.parameters)
        return list(range(first, first + len(self.state)))

    def launchable(self) -> torch.fx.GraphModule:
        """The program's graph: the step itself, or a loop of `steps` steps over it.

        A loop's results: ids `[steps, slots]`, then the last ids and positions, then the state.
        """
        if not self.program.steps:
            return self.graph
        if self.program.steps == 1:
            return self._once()
        parameters, state = len(self.parameters), len(self.state)
        # The loop's body: what is carried from turn to turn, the turn, and what stays the same.
        body_graph = torch.fx.Graph()
        ids, positions = body_graph.placeholder("ids"), body_graph.placeholder("positions")
        carried = [body_graph.placeholder(f"state_{i}") for i in range(state)]
        body_graph.placeholder("turn")
        fixed = [body_graph.placeholder(f"parameter_{i}") for i in range(parameters)]
        results = body_graph.call_module("step", (*fixed, *carried, ids, positions))
        parts = [body_graph.call_function(_item, (results, i)) for i in range(state + 2)]
        # Each turn leaves its ids once as what is carried and once as what is stacked.
        made = body_graph.call_function(torch.ops.aten.clone.default, (parts[0],))
        body_graph.output((*parts, made))
        body = torch.fx.GraphModule({"step": self.graph}, body_graph)

        graph = torch.fx.Graph()
        fixed = [graph.placeholder(f"parameter_{i}") for i in range(parameters)]
        carried = [graph.placeholder(f"state_{i}") for i in range(state)]
        ids, positions = graph.placeholder("ids"), graph.placeholder("positions")
        loop = (graph.get_attr("body"), self.program.steps, [ids, positions, *carried], fixed)
        looped = graph.call_function(_loop, loop)
        parts = [graph.call_function(_item, (looped, i)) for i in range(state + 3)]
        graph.output((parts[-1], *parts[:-1]))
        return torch.fx.GraphModule({"body": body}, graph)

    def _once(self) -> torch.fx.GraphModule:
        """One step with a loop's results."""
        graph = torch.fx.Graph()
        arguments = [graph.placeholder(f"argument_{i}") for i in range(len(self.arguments))]
        results = graph.call_module("step", tuple(arguments))
        parts = [graph.call_function(_item, (results, i)) for i in range(len(self.state) + 2)]
        made = graph.call_function(torch.ops.aten.unsqueeze.default, (parts[0], 0))
        graph.output((made, *parts))
        return torch.fx.GraphModule({"step": self.graph}, graph)


def _loop(
    body: torch.fx.GraphModule, turns: int, carried: list[Tensor], fixed: list[Tensor]
) -> list[Tensor]:
    """`turns` turns of `body` as one `stablehlo.while`: the last carried values, then what each turn made, stacked.

    torch's own `scan` leads to the same operation of TorchTPU, but compiles the body once more by itself.
    """
    from torch_tpu._internal.compile import scan, tpu_torch_compile

    turn = torch.zeros(turns, 1, device="tpu")
    operands = [scan._to_placeholder(t) for t in carried]
    operands += [scan._to_placeholder(turn, [1])]
    operands += [scan._to_placeholder(t) for t in fixed]
    made = torch.zeros(turns, *carried[0].shape, dtype=carried[0].dtype, device="meta")
    results: list[Tensor] = tpu_torch_compile.create_scan_op(
        inits=carried,
        inputs=[turn, *fixed],
        body_module=scan._build_body_mlir(body, operands),
        scan_direction=tpu_torch_compile.ScanDirection.kForward,
        dummy_ys=[made],
        num_scan_inputs=1,
    )
    return results


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]

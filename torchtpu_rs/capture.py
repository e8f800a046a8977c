"""Compiled programs on TorchTPU: compiles recordings of the Rust step, keeps what they run on, launches them.

Weights and cache are arguments of every program; the cache's memory is donated, so an update happens in place. What
runs when is decided in Rust (`compiled.rs`).
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import pickle
import threading
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtpu_rs import _native, recording
from torchtpu_rs.recording import Plan, Program, Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

logger = logging.getLogger(__name__)


def lower(recorded: Recording, *, keep_module: bool = False) -> Any:
    """Gives a recording to TorchTPU's compiler: its executable, and with `keep_module` its StableHLO too.

    Raises:
        RuntimeError: TorchTPU or its compiler refuses the program.
    """
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.export import export

    placeholders = [tpu_torch_compile.placeholder_like(t) for t in recorded.arguments]
    return export.fx_to_mlir(
        recorded.launchable(),
        placeholders,
        build_mlir_module=keep_module,
        donated_inputs=recorded.donated,
    )


def compile_recording(recorded: Recording) -> Any:
    """TorchTPU's executable of a recording: called with a list of all arguments, it gives the list of results.

    Raises:
        RuntimeError: as `lower`.
    """
    from torch_tpu._internal.compile import torch_tpu_compiled_executable

    lowered = lower(recorded)
    return torch_tpu_compiled_executable.TorchTpuCompiledExecutable(
        executable=lowered.executable,
        reconstruct_fx_outputs_fn=lowered.reconstruct_fx_outputs_fn,
        updates_default_generator_state=lowered.updates_default_generator_state,
        dynamic_outputs=lowered.dynamic_outputs,
        unique_output_indices=lowered.unique_output_indices,
    )


class CompilationError(RuntimeError):
    """TorchTPU or its compiler refused a program."""


@dataclass(slots=True)
class _Built:
    """A program on its way to an executable."""

    program: Program
    executable: Any = None
    seconds: float = 0.0
    from_disk: bool = False


@dataclass
class Programs:
    """All programs of one engine: compiles them, keeps weights and cache as their arguments, launches them.

    `bind`, `launch` and `reset` belong to the engine's thread. After `bind` returns, the first programs are there and a
    thread of its own compiles the others; nothing but `executable` of a `_Built` is shared with it.
    """

    checkpoint: Sequence[str]
    plan: Plan = field(default_factory=Plan)
    cache_dir: Path | None = None
    """Where executables are kept between runs; None keeps none."""
    on_progress: Callable[[int, int, str], object] | None = None
    """Called with (programs there, programs in all, the one that comes next)."""

    def __post_init__(self) -> None:
        self.compilations = 0
        self.failure: BaseException | None = None
        self._built: list[_Built] = []
        self._parameters: list[Tensor] = []
        self._state: list[Tensor] = []
        self._context = 0
        self._code = _code()
        self._worker: threading.Thread | None = None
        self._closing = threading.Event()

    # What the Rust side asks for.

    @property
    def slots(self) -> int:
        """Rows of a decode step."""
        return self.plan.slots

    @property
    def largest(self) -> int:
        """Most tokens that one launch adds to a slot."""
        return self.plan.largest

    @property
    def int8(self) -> bool:
        """Whether projections are int8."""
        return self.plan.int8

    def bind(self, context: int, parameters: list[Tensor], state: list[Tensor]) -> None:
        """Takes the arguments of every launch, and compiles what is needed to begin.

        Raises:
            CompilationError: one of the first programs cannot be compiled.
        """
        self._context, self._parameters, self._state = context, parameters, state
        self._built = [_Built(program) for program in self.plan.programs(context)]
        first = 2
        for built in self._built[:first]:
            self._build(built)
        self._report()
        if len(self._built) > first:
            self._worker = threading.Thread(
                target=self._build_rest, args=(first,), name="compile", daemon=True
            )
            self._worker.start()
            # TorchTPU takes its compiler down when the interpreter ends; a compilation must not meet that.
            atexit.register(self.close)

    def ready(self) -> list[tuple[int, int, int, int]]:
        """(number, tokens, steps, read) of each program that can be launched now."""
        return [
            (number, built.program.tokens, built.program.steps, built.program.read)
            for number, built in enumerate(self._built)
            if built.executable is not None
        ]

    def launch(self, number: int, inputs: list[Tensor]) -> list[Tensor]:
        """Runs a program; its results, the new state taken out."""
        results = self._built[number].executable([*self._parameters, *self._state, *inputs])
        first = len(results) - len(self._state)
        self._state = list(results[first:])
        return list(results[:first])

    def reset(self) -> None:
        """An empty cache in place of one that a failed launch took with it."""
        self._state = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in self._state]

    # What the server shows.

    def info(self) -> dict[str, Any]:
        """Programs and what they took."""
        return {
            "mode": "compiled",
            "compilations": self.compilations,
            "programs": [
                {
                    "program": str(built.program),
                    "seconds": round(built.seconds, 3),
                    "from_disk": built.from_disk,
                }
                for built in self._built
                if built.executable is not None
            ],
            "pending": sum(built.executable is None for built in self._built),
            "failure": None if self.failure is None else str(self.failure),
        }

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until every program is there; False if that took longer.

        Raises:
            CompilationError: one of them cannot be compiled.
        """
        if self._worker is not None:
            self._worker.join(seconds)
        if self.failure is not None:
            raise CompilationError(str(self.failure)) from self.failure
        return all(built.executable is not None for built in self._built)

    def close(self) -> None:
        """Ends the compiling thread, after the program it is at."""
        self._closing.set()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()
        atexit.unregister(self.close)

    # Compiling.

    def _build_rest(self, first: int) -> None:
        try:
            for built in self._built[first:]:
                if self._closing.is_set():
                    return
                self._build(built)
            self._report()
        # The engine goes on with the programs there are; the log and `info` say why there are no more.
        except Exception as error:
            logger.exception("a program could not be compiled")
            self.failure = error

    def _build(self, built: _Built) -> None:
        self._report(built)
        began = time.monotonic()
        file = self._file_of(built.program)
        executable = _stored(file)
        built.from_disk = executable is not None
        if executable is None:
            dtype = self._state[0].dtype
            try:
                executable = compile_recording(
                    Recording(self.checkpoint, self._context, self.plan, built.program, dtype)
                )
            except RuntimeError as error:
                raise CompilationError(
                    f"cannot compile the program for {built.program}: {error}"
                ) from error
            self.compilations += 1
            _store(file, executable)
        built.seconds = time.monotonic() - began
        built.executable = executable

    def _report(self, following: _Built | None = None) -> None:
        if self.on_progress is not None:
            there = sum(built.executable is not None for built in self._built)
            self.on_progress(there, len(self._built), str(following.program) if following else "")

    def _file_of(self, program: Program) -> Path | None:
        """Where the executable is kept: named after everything it depends on."""
        if self.cache_dir is None:
            return None
        config = next(p for f in self.checkpoint if (p := Path(f) / "config.json").is_file())
        facts = {
            "program": [program.tokens, program.steps, program.read],
            "plan": [self.plan.slots, self.plan.largest, self.plan.int8],
            "context": self._context,
            "dtype": str(self._state[0].dtype),
            "config": config.read_text(),
            "versions": {name: metadata.version(name) for name in ("torch", "torch_tpu", "libtpu")},
            "plugin": os.environ.get("PJRT_FORWARD_TO", "libtpu"),
            "code": self._code,
        }
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        return self.cache_dir / f"{name}.executable"


def _code() -> list[str]:
    """Digests of what makes a program besides its plan: the Rust step, and these two modules."""
    files = (_native.__file__, recording.__file__, __file__)
    return [hashlib.sha256(Path(str(file)).read_bytes()).hexdigest() for file in files]


def _stored(file: Path | None) -> Any:
    """The executable kept in `file`, or None."""
    if file is None or not file.is_file():
        return None
    try:
        return pickle.loads(file.read_bytes())
    except Exception:  # noqa: BLE001 -- whatever is wrong with it, compiling anew puts it right
        file.unlink(missing_ok=True)
        return None


def _store(file: Path | None, executable: Any) -> None:
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(pickle.dumps(executable))
    fresh.replace(file)

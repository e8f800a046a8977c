"""The compiled half of `torchtpu_rs`, checked against the built module by `make check`.

What is copied, which thread, when the GIL is held: `PYO3.md` beside this file.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, final

from torch import Tensor

__all__ = [
    "BUILD",
    "CheckpointError",
    "ContextFullError",
    "Decoded",
    "DeviceError",
    "Engine",
    "Step",
    "gguf_metadata",
    "matmul_sum",
    "memory_needed",
]

BUILD: dict[str, str]
"""Versions that built the module: `torch`, `rustc`, `python`, `crate`."""

class CheckpointError(ValueError):
    """A file of the checkpoint is missing, broken or not supported; the text names file, tensor or key."""

class ContextFullError(ValueError):
    """The tokens do not fit the engine's cache."""

class DeviceError(RuntimeError):
    """PyTorch or the device failed during a call; the engine stays usable."""

@final
class Decoded:
    """The answer of `Engine.decode`."""

    @property
    def ids(self) -> list[int]:
        """The new token ids, without the stop id."""

    @property
    def finish(self) -> Literal["stop", "length", "cancelled"]:
        """Why the answer ended."""

    @property
    def stop_id(self) -> int | None:
        """The id that ended it when `finish` is `stop`."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the call to the first token."""

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""

@final
class Engine:
    """A loaded checkpoint. Only the thread that made it may use it.

    A call from another thread raises `pyo3_runtime.PanicException`, which is no `Exception`.
    """

    def __new__(
        cls,
        checkpoint: str | PathLike[str] | Sequence[str | PathLike[str]],
        like: Tensor,
        context: int = 8192,
        *,
        dtype: Literal["bfloat16", "float16", "float32"] | None = None,
        prefill_chunk: int | None = None,
        arithmetic: Literal["auto", "exact", "fast", "compiled", "int8"] = "exact",
        instructions: Literal["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
        | None = None,
        programs: Any | None = None,
        on_load: Callable[[int, int], object] | None = None,
    ) -> Engine:
        """Loads a checkpoint.

        Args:
            checkpoint: one or more folders of safetensors, GGUF files (of a set of files any one), or folders with one GGUF
                model; a tensor is taken from the first that has it, the config from the first that has one. A GGUF
                model runs in bfloat16 unless `dtype` says otherwise.
            like: a floating-point tensor of one element; weights go to its device.
            context: positions the cache holds; at most the checkpoint's `max_position_embeddings` count.
            dtype: element type to run in; the checkpoint's own by default.
            prefill_chunk: static shapes, for devices that compile: prompts run in padded chunks of this many
                tokens and the cache is a ring. By default so on `tpu` (128); on `cpu` and `cuda` shapes follow
                the text, and on `cpu` results are transformers' own, bit for bit. In fast arithmetic the tokens of a
                prompt that go through the layers together (512), which changes no bit.
            arithmetic: what steps that run one operation at a time compute with: transformers' operations (`exact`); kernels of
                our own for a CPU and bfloat16, which multiply weights as they are stored (`fast`; elsewhere it is `exact`); these
                for quantized weights and exactness for others (`auto`); the operations of compiled programs (`compiled`), and these with projections as int8 (`int8`), which are
                slow and there for judging programs. `programs` bring their own.
            instructions: those that fast arithmetic uses; by default the fastest of this machine.
            programs: a `torchtpu_rs.capture.Programs` for this checkpoint: steps are recorded, compiled whole by TorchTPU and
                launched from there. Without it each ATen call runs by itself, as TorchTPU's execution mode says.
            on_load: called with (layers done, layers in all); what it raises ends the load.

        Raises:
            CheckpointError: names file, tensor or key.
            OSError: a file is there but cannot be read.
            ValueError: an argument is out of range.
            DeviceError: the device refused a tensor.
        """

    def decode(
        self,
        ids: Sequence[int],
        max_new: int,
        stop: Sequence[int] | None = None,
        read_every: int = 1,
        on_tokens: Callable[[list[int]], object] | None = None,
    ) -> Decoded:
        """Answers the prompt `ids` greedily with at most `max_new` tokens.

        Args:
            ids: token ids of the whole prompt; every call begins anew.
            max_new: most tokens to make; fewer come when the cache is full (`finish` is `length`).
            stop: ids that end the answer; the checkpoint's `eos_token_id` list by default.
            read_every: tokens handed to `on_tokens` at a time; with `programs` also the most that a launch makes,
                and each launch is handed out by itself.
            on_tokens: gets each batch of new ids, never the stop id; in fast arithmetic also an empty list between two chunks of
                a long prompt. A false value (None too) ends the answer with `finish="cancelled"`; an exception
                ends it and is raised from here.

        Raises:
            ContextFullError: the prompt is longer than the cache.
            ValueError: no prompt, an id outside the vocabulary, a count below 1.
            DeviceError: the device failed.
        """

    def logits(
        self, ids: Sequence[int], forced: Sequence[int] | None = None, *, all: bool = False
    ) -> Tensor:
        """Logits `[rows, vocab]` on the CPU, for judging the model: in its element type, in fast arithmetic in float32.

        Rows: the last prompt token (or with `all` every one), then one for each id of `forced`, which is fed
        as if the model had chosen it.

        Raises: as `decode`.
        """

    def parts(self) -> list[tuple[str, float, int]]:
        """Where the time of the last answer went after its first token, in fast arithmetic: each part's name, seconds, and
        bytes of weights that it read. Empty elsewhere."""

    def info(self) -> dict[str, Any]:
        """What is loaded: `layout` (`full_rings`, `sliding_rings`, `shared_layers`, `context`), `device`,
        `dtype`, `weight_format` and `weight_bytes` (as weights are multiplied: `int4` to `int8`, the fewest bits that some have),
        `stored_bytes` (of the same weights in their files, by the files' types: `BF16`, `Q4_K`, …), `cache_bytes`, `static_shapes`, `vocab_size`,
        `eos_token_ids`, `load_seconds`, `threads`, `checkpoint`, `slots`; with `programs` also `launches`, `host_reads`,
        `decoded_tokens`, `mode`, `compilations`, `programs`, `pending` and `failure`."""

@final
class Step:
    """One step of the model over stand-in tensors, for a tracer to call: `torchtpu_rs.capture` records it.

    Built under `FakeTensorMode` it reads config.json and no weights. It is the same Rust code that other steps run.
    """

    def __new__(
        cls,
        checkpoint: str | PathLike[str] | Sequence[str | PathLike[str]],
        like: Tensor,
        *,
        context: int,
        slots: int,
        spare: int,
        read: int,
        prefill: bool = False,
        int8: bool = False,
    ) -> Step:
        """Builds the step.

        Args:
            checkpoint: as of `Engine`; config.json in a folder is enough.
            like: a fake tensor of one element that names device and element type.
            context: positions of the cache.
            slots: sequences of the cache, and rows of a decode step.
            spare: rows that full rings have beyond `context`: the most tokens that one launch adds.
            read: rows of full rings that attention reads.
            prefill: a chunk of one slot's prompt, as long as the ids it is called with; else one token of every slot.
            int8: projections as int8 with a factor for each output.

        Raises:
            CheckpointError: config.json, or the headers of weights that are there, are wrong.
        """

    def stand_ins(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and state, in the order in which a call takes others for them."""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Runs the step on parameters, state and inputs: results, then the new state.

        Inputs of a decode step: ids and positions `[slots]`, int64; results: the next ids and positions.
        Inputs of a prompt's chunk: ids `[1, tokens]`, slot, position of the first, count without padding, `[1]` each;
        result: in its first element the id that follows.

        Raises:
            ValueError: the number of tensors is wrong.
            DeviceError: an operation failed.
        """

def gguf_metadata(
    path: str | PathLike[str],
) -> dict[
    str,
    int | float | bool | str | list[int] | list[float] | list[bool] | list[str],
]:
    """The metadata of a GGUF model, by key: the tokenizer, the chat template, sizes.

    Args:
        path: a file (of a set of files any one), or a folder that has the files of one model.

    Raises:
        CheckpointError: names file and key.
        OSError: the file cannot be read.
    """

def matmul_sum(like: Tensor) -> Tensor:
    """The sum of an 8x8 product of ones, a tensor that is still on `like`'s device: 512.

    Raises:
        ValueError: `like` is no floating-point tensor of one element.
        DeviceError: the device failed.
    """

def memory_needed(
    checkpoint: str | PathLike[str] | Sequence[str | PathLike[str]],
    context: int = 8192,
    *,
    dtype: str | None = None,
    arithmetic: Literal["auto", "exact", "fast", "compiled"] = "auto",
    weight_format: Literal["dense", "int8", "int4"] | None = None,
    slots: int = 8,
    spare: int = 512,
) -> dict[str, Any]:
    """Bytes that a checkpoint will need, computed from config.json or a GGUF file's header alone: no weight is read, no device
    touched.

    `weight_bytes` and `cache_bytes` are what `Engine.info()` will say; `working_bytes` is an estimate of what a step works in
    beside them. Also `weight_format` and `context`, which is at most the checkpoint's own. A GGUF file's tensors count in the forms
    in which `arithmetic` keeps them, as if a folder before the file replaced none.

    `arithmetic` is the engine's; `compiled` counts rings for `slots` sequences with `spare` rows beyond the context, and the
    second form of the embedding table that programs multiply. `weight_format` is asked what if; `dense` is the element
    type, and of a GGUF file `int4` and `int8` mean one with all matrices and tables in Q4_0 and Q8_0. No program computes in
    int4 on a TPU yet.

    Raises:
        ValueError: config.json is missing or wrong, or a GGUF file's header is (CheckpointError), or an argument is.
    """

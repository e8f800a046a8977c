"""Which tensors are packed and how, from names, shapes and config.json, and what config.json says of it then.

Hugging Face's names decide: all projections of the text model, experts' too, and with `tables` the vocabulary tables and the head.
Fused experts become three projections each, as published packed checkpoints have them. Towers, norms and the router stay as they are.
Reads no weight.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quantize.files import DTYPES, ELEMENT_BYTES, QuantizeError, Tensor
from quantize.grid import W4, W8, Packing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MODEL_TYPES = ("gemma3_text", "gemma4_text", "gemma4_unified_text")
"""Of the text model; a multimodal config has it in `text_config`."""

_TEXT = r"^model\.(?:language_model\.)?"
_PROJECTION = re.compile(
    _TEXT + r"(?:layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj"
    r"|experts\.\d+\.(?:gate|up|down)_proj|per_layer_input_gate|per_layer_projection)"
    r"|per_layer_model_projection)\.weight$"
)
_TABLE = re.compile(_TEXT + r"(embed_tokens(?:_per_layer)?)\.weight$")
_HEAD = "lm_head.weight"
_KEYS_OF_LAYER = re.compile(_TEXT + r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.weight$")
_EXPERTS = re.compile(_TEXT + r"layers\.\d+\.experts\.")
_FUSED = re.compile(_EXPERTS.pattern + r"(gate_up_proj|down_proj)$")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What a fused tensor holds of each expert, one above the other."""
# Modules of class Linear that stay as they are, by the part of a tensor's name that tells them.
_LEFT = {
    ".vision_tower.": r"re:.*\.vision_tower\..*",
    ".vision_embedder.": r"re:.*\.vision_embedder\..*",
    ".audio_tower.": r"re:.*\.audio_tower\..*",
    ".embed_vision.": r"re:.*\.embed_vision\..*",
    ".embed_audio.": r"re:.*\.embed_audio\..*",
    ".router.proj.": r"re:.*\.router\.proj$",
}


@dataclass(frozen=True)
class Format:
    """What a checkpoint becomes."""

    packing: Packing
    tables: bool = False
    """Also the vocabulary tables, with float16 factors as the published checkpoints have them, and a head of their own."""


FORMATS = {"w4a16": Format(W4), "int8": Format(W8), "emb4": Format(W4, tables=True)}
"""What `--format` takes."""


@dataclass(frozen=True)
class Job:
    """What becomes of one tensor."""

    source: Tensor
    packing: Packing | None = None
    """None: it is copied."""
    scale_dtype: str = ""
    modules: tuple[tuple[str, ...], ...] = ()
    """Who gets its packed rows, cut into so many equal parts: the module itself, with a tied table the head, each expert's projection."""

    @property
    def shape(self) -> tuple[int, int]:
        """`[rows, columns]` of one module's weight."""
        *heights, columns = self.source.shape
        return math.prod(heights) // len(self.modules), columns

    @property
    def written_modules(self) -> list[str]:
        """All modules whose weights come of it."""
        return [module for modules in self.modules for module in modules]

    @property
    def is_experts(self) -> bool:
        """Whether it is one expert's weight, or all experts'."""
        return _EXPERTS.match(self.source.name) is not None

    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors that are written for it: `(dtype, shape)` by name."""
        if self.packing is None:
            return {self.source.name: (self.source.dtype, self.source.shape)}
        rows, columns = self.shape
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for module in self.written_modules:
            found |= {
                f"{module}.weight_packed": ("I32", (rows, columns // self.packing.values_per_word)),
                f"{module}.weight_scale": (self.scale_dtype, (rows, self.packing.groups(columns))),
                f"{module}.weight_shape": ("I64", (2,)),
            }
        return found

    @property
    def written_bytes(self) -> int:
        """Size of what is written for it."""
        return sum(
            ELEMENT_BYTES[dtype] * math.prod(shape) for dtype, shape in self.outputs().values()
        )


@dataclass(frozen=True)
class Plan:
    """What is written."""

    jobs: list[Job]
    config: dict[str, Any]
    left: list[str] = field(default_factory=list)
    """Projections that are no whole groups and stay as they are."""
    dropped: list[str] = field(default_factory=list)
    """Tensors that no layer reads: keys and values of layers that share another's."""


def make(config: dict[str, Any], tensors: Sequence[Tensor], wanted: Format) -> Plan:
    """The plan for a checkpoint.

    Raises:
        QuantizeError: it is packed already, of an unknown `model_type`, or a tensor cannot be packed.
    """
    text = _text_config(config, tensors)
    layers_with_keys = _layers_with_keys(text)
    names = {tensor.name for tensor in tensors}
    jobs: list[Job] = []
    left: list[str] = []
    dropped: list[str] = []
    for tensor in tensors:
        keys = _KEYS_OF_LAYER.match(tensor.name)
        if keys and int(keys[1]) >= layers_with_keys:
            dropped.append(tensor.name)
            continue
        job = _job(tensor, wanted, tied=_HEAD not in names)
        if job.packing is None and (_PROJECTION.match(tensor.name) or _FUSED.match(tensor.name)):
            left.append(tensor.name.removesuffix(".weight"))
        jobs.append(job)
    _check_names(jobs)
    if not any(job.packing for job in jobs):
        raise QuantizeError(
            "expected projections under `model.layers.` or `model.language_model.layers.` with whole groups of columns, found none; "
            "is it a checkpoint in Hugging Face's names?"
        )
    if wanted.tables and not any(_TABLE.match(job.source.name) for job in jobs):
        raise QuantizeError("expected embed_tokens.weight to be packed, found none")
    ignored = [*left, *_ignored(names), *([] if wanted.tables else ["lm_head"])]
    made = config | {"quantization_config": quantization_config(wanted, ignored)}
    if wanted.tables:
        made["tie_word_embeddings"] = False
        if "tie_word_embeddings" in text and "text_config" in made:
            made["text_config"] = text | {"tie_word_embeddings": False}
    return Plan(jobs, made, left, dropped)


def quantization_config(wanted: Format, ignored: Iterable[str] = ()) -> dict[str, Any]:
    """As the published checkpoints have it in config.json; `ignored` are names or `re:` patterns of modules."""
    packing = wanted.packing
    weights = {
        "num_bits": packing.num_bits,
        "type": "int",
        "symmetric": True,
        "group_size": packing.group_size,
        "strategy": "group" if packing.group_size else "channel",
        "dynamic": False,
    }

    def group(target: str) -> dict[str, Any]:
        return {
            "targets": [target],
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": dict(weights),
        }

    groups = {"group_0": group("Linear")}
    if wanted.tables:
        tables = ("embed_tokens", "embed_tokens_per_layer")
        groups |= {f"group_{table}": group(rf"re:.*\.{table}$") for table in tables}
        groups["group_lm_head"] = group("re:^lm_head$")
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def _text_config(config: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise QuantizeError(
            f"config.json: text_config: expected an object, found {type(text).__name__}"
        )
    for holder in (config, text):
        if holder.get("quantization_config") is not None:
            method = holder["quantization_config"]
            told = method.get("quant_method") if isinstance(method, dict) else method
            raise QuantizeError(
                f"config.json: expected weights that are not packed yet, found quantization_config ({told}); give the checkpoint it was made from"
            )
    packed = next(
        (t.name for t in tensors if t.name.endswith((".weight_packed", ".qweight"))), None
    )
    if packed:
        raise QuantizeError(
            f"{packed}: expected weights that are not packed yet; give the checkpoint it was made from"
        )
    model_type = text.get("model_type")
    if model_type not in MODEL_TYPES:
        raise QuantizeError(
            f"config.json: model_type: expected {', '.join(MODEL_TYPES)}, found {model_type!r}; other models have other projections"
        )
    return text


def _layers_with_keys(text: dict[str, Any]) -> int:
    """The first so many layers have keys and values of their own."""
    layers, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers") or 0
    if type(layers) is not int or type(shared) is not int or not 0 <= shared < layers:
        raise QuantizeError(
            f"config.json: expected num_hidden_layers above num_kv_shared_layers, found {layers!r} and {shared!r}"
        )
    return layers - shared


def _job(tensor: Tensor, wanted: Format, *, tied: bool) -> Job:
    if _FUSED.match(tensor.name):
        return _fused_job(tensor, wanted)
    table = _TABLE.match(tensor.name)
    vocabulary = table is not None or tensor.name == _HEAD
    if not (wanted.tables and vocabulary) and not _PROJECTION.match(tensor.name):
        return Job(tensor)
    if len(tensor.shape) != 2 or tensor.dtype not in DTYPES:
        raise QuantizeError(
            f"{tensor.name}: expected a matrix of {', '.join(DTYPES)}, found {tensor.dtype} {list(tensor.shape)}"
        )
    if not wanted.packing.fits(tensor.shape[1]):
        if vocabulary:
            raise QuantizeError(
                f"{tensor.name}: expected whole groups of {wanted.packing.group_size} columns, found {tensor.shape[1]}; use w4a16"
            )
        return Job(tensor)
    module = tensor.name.removesuffix(".weight")
    is_head_too = table is not None and table[1] == "embed_tokens" and tied
    return Job(
        tensor,
        wanted.packing,
        # Linears get factors of the weights' type, so that both ways in which transformers unpacks give the same bits.
        "F16" if vocabulary else tensor.dtype,
        ((module, "lm_head") if is_head_too else (module,),),
    )


def _fused_job(tensor: Tensor, wanted: Format) -> Job:
    """Experts `[experts, rows of all parts, columns]`."""
    module, name = tensor.name.rsplit(".", 1)
    parts = _PARTS[name]
    if len(tensor.shape) != 3 or tensor.dtype not in DTYPES or tensor.shape[1] % len(parts):
        raise QuantizeError(
            f"{tensor.name}: expected [experts, {len(parts)} x rows, columns] of {', '.join(DTYPES)}, "
            f"found {tensor.dtype} {list(tensor.shape)}"
        )
    experts, rows, columns = tensor.shape
    # One tensor's rows are the other's columns: both are packed, or both stay fused.
    if not experts or not all(map(wanted.packing.fits, (rows // len(parts), columns))):
        return Job(tensor)
    names = [f"{module}.{expert}.{part}" for expert in range(experts) for part in parts]
    return Job(tensor, wanted.packing, tensor.dtype, tuple((name,) for name in names))


def _check_names(jobs: Iterable[Job]) -> None:
    """Experts may stand there fused and split, an expert each."""
    sources: dict[str, str] = {}
    for job in jobs:
        for name in job.outputs():
            if name in sources:
                raise QuantizeError(
                    f"{job.source.name}: {name} would be made of it and of {sources[name]} too; leave one of the two in the checkpoint"
                )
            sources[name] = job.source.name


def _ignored(names: set[str]) -> list[str]:
    return [pattern for part, pattern in _LEFT.items() if any(part in name for name in names)]

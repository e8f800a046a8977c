"""From settings to a warm engine: the checkpoint's place, its text side, the weights, one decode to warm up.

`ModelLoader` is called once, on the engine thread. It owns the order of these steps and what each reports; it knows
no HTTP and serves nothing.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.admission import NO_TEMPLATE, TextSide
from server.chat import ChatTemplate
from server.checkpoint import CheckpointError, resolve, served_name, weight_bytes
from server.engine import Tpu, engine_build, gguf_metadata, load_engine
from server.tokenizer import Tokenizer
from server.tokenizer_gguf import TEMPLATE, template_source, tokenizer_from_metadata
from server.worker import Progress
from tpu import user_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.engine import Engine
    from server.settings import Settings

logger = logging.getLogger(__name__)

# Prefill and two steps: on a device that compiles, that is every program a request needs.
WARMUP_TOKENS = 3

# Below this size a step's matrices are too small to share: threads gain nothing on an idle machine, and on a busy one
# each of a step's hundreds of barriers waits for the scheduler (docs/log.md, 2026-11-30).
ONE_THREAD_BYTES = 64 << 20


def default_threads(places: Sequence[Path], device: str) -> int | None:
    """1 for a small model on the CPU, else PyTorch's own choice."""
    return 1 if device == "cpu" and weight_bytes(places) < ONE_THREAD_BYTES else None


def compile_cache(folder: str | None) -> Path | None:
    """Where compiled programs are kept: the folder given, none for an empty name, the user's cache by default."""
    if folder == "":
        return None
    if folder is not None:
        return Path(folder).expanduser()
    return user_cache() / "programs"


def load_text_side(place: Path) -> TextSide:
    """Tokenizer and, where it has one, chat template of a checkpoint's folder or GGUF file.

    Raises:
        CheckpointError: the tokenizer is missing, or one of them is unusable.
        ValueError: the GGUF file is broken.
        OSError: it cannot be read.
        ImportError: a GGUF file cannot be read without torchtpu_rs.
    """
    if place.is_dir():
        tokenizer = Tokenizer.from_folder(place)
        return TextSide(tokenizer, ChatTemplate.from_folder(place, tokenizer))
    return text_side_of(gguf_metadata(place), str(place))


def text_side_of(metadata: Mapping[str, object], where: str) -> TextSide:
    """The same from the metadata of a GGUF file, which `where` names.

    Raises:
        CheckpointError: the tokenizer is missing, or one of them is unusable.
    """
    tokenizer = tokenizer_from_metadata(metadata, where)
    source = template_source(metadata, where)
    template = source and ChatTemplate(source, tokenizer, f"{where}, {TEMPLATE}")
    return TextSide(tokenizer, template or None)


class ModelLoader:
    """Loads one model; what it learned on the way stays readable here."""

    def __init__(self, settings: Settings) -> None:
        self.names = settings.served_model_name or (served_name(settings.model),)
        self.text: TextSide | None = None
        self.programs: Mapping[str, Any] | None = None
        """Compiled programs there and in all; None where steps are not compiled."""
        self._warm = False
        self.build: Mapping[str, str] = {}
        self.load_seconds = 0.0
        self.warmup_seconds = 0.0
        self._settings = settings

    def __call__(self, report: Callable[[Progress], None]) -> Engine:
        """Load on the calling thread, which owns the engine from then on.

        Raises:
            CheckpointError: the checkpoint cannot be used.
            ValueError: the engine refused it, or the device.
        """
        report(Progress("files"))
        places = resolve(self._settings.model)
        text = load_text_side(places[0])
        if text.template is None:
            logger.warning("%s: %s", self.names[0], NO_TEMPLATE)
        report(Progress("weights"))
        engine = self.build_engine(
            places,
            lambda *seen: report(Progress("weights", *seen)),
            lambda done, total, program: self._compiling(report, done, total, program),
        )
        self._warm = True
        loaded = time.monotonic()
        report(Progress("warmup"))
        bos_id = text.tokenizer.bos_id
        if bos_id is None:
            raise CheckpointError(
                f"{places[0]}: the tokenizer has no {text.tokenizer.names['bos_token']} token"
            )
        engine.decode([bos_id], WARMUP_TOKENS, [])
        # The engine's own number: ours would have the import of torch in it.
        self.load_seconds = float(engine.info()["load_seconds"])
        self.warmup_seconds = time.monotonic() - loaded
        self.text = text
        return engine

    def _compiling(
        self, report: Callable[[Progress], None], done: int, total: int, program: str
    ) -> None:
        """Those after the first come from a thread of their own while requests are served already."""
        self.programs = {"ready": done, "total": total}
        if program:
            logger.info("compiling program %d of %d: %s", done + 1, total, program)
        if not self._warm:
            report(Progress("compile", done, total))

    def build_engine(
        self,
        places: Sequence[Path],
        on_load: Callable[[int, int], object],
        on_compile: Callable[[int, int, str], object],
    ) -> Engine:
        """The Rust engine on `places`; a test puts another engine in its place."""
        engine = load_engine(
            places,
            context=self._settings.context,
            device=self._settings.device,
            dtype=self._settings.dtype,
            prefill_chunk=self._settings.prefill_chunk,
            exact=self._settings.exact,
            threads=self._settings.threads or default_threads(places, self._settings.device),
            tpu=Tpu(
                mode=self._settings.mode or "compiled",
                simulate=self._settings.simulate_tpu,
                slots=self._settings.slots,
                int8=self._settings.weight_format == "int8",
                cache=compile_cache(self._settings.compile_cache),
            ),
            on_load=on_load,
            on_compile=on_compile,
        )
        self.build = engine_build()
        return engine

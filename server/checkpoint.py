"""Where a checkpoint lies: a local folder or GGUF file, the Hugging Face Hub's name for one, or a model from a package.

Owns looking a folder over and fetching one through huggingface_hub, with its cache, its token and its progress bars.
Knows no tensor and no tokenizer: what is inside the files is for their readers to judge.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from httpx2 import HTTPError  # what huggingface_hub 2 lets through when a transfer breaks off
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from server.packaged import PACKAGED, PackagedError, assemble

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

# Everything the server reads and nothing else: a repository may hold the same weights in several more formats.
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
# llama.cpp's name for a part of a split file, and for what goes with a model to see and hear.
_PART: Final = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PROJECTOR: Final = "mmproj"
# What llama.cpp takes from a repository where no quantization is asked for.
_DEFAULT_QUANTIZATION: Final = "Q4_K_M"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file or the model and says what to do."""


def resolve(
    model: str | Sequence[str],
    *,
    revision: str | None = None,
    console: Console | None = None,
    cache_dir: Path | None = None,
) -> list[Path]:
    """Return the places of one or several checkpoints, fetching those that are named by a Hub id.

    A place is a folder with config.json and safetensors, or a GGUF file, the first of its parts if it is split. The
    first place is the model; folders after it may only add or replace tensors, so they need no config.json.

    Raises:
        CheckpointError: a place lacks what is needed, or the Hub does not give the model.
    """
    models = [model] if isinstance(model, str) else list(model)
    if not models:
        raise CheckpointError("expected the folder or the Hub id of a model, found none")
    places = [_place(name, revision, console, cache_dir) for name in models]
    for position, place in enumerate(places):
        if place.is_dir():
            _check(place, is_model=position == 0)
    return places


def weight_bytes(places: Iterable[Path]) -> int:
    """Bytes of all safetensors files of folders, and of GGUF files with all their parts."""
    files = [file for place in places for file in _weight_files(place)]
    return sum(file.stat().st_size for file in files)


def served_name(model: str | Sequence[str]) -> str:
    """Return the name clients see: the Hub id, or the name of the local folder or GGUF file."""
    first = model if isinstance(model, str) else model[0]
    path = Path(first).expanduser()
    if not path.exists():
        return first
    if path.is_dir():
        return path.resolve().name
    return _stem(path)


def is_local(name: str) -> bool:
    """Whether looking `name` over asks no Hub: it is there, or comes from an installed package."""
    return Path(name).expanduser().exists() or name in PACKAGED


def _weight_files(place: Path) -> list[Path]:
    if place.is_dir():
        return list(place.glob("*.safetensors"))
    return _parts(place)


def _place(
    name: str, revision: str | None, console: Console | None, cache_dir: Path | None
) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf_file(path)
    if path.is_dir():
        return _in_folder(path)
    if name in PACKAGED:
        try:
            return assemble(name)
        except PackagedError as error:
            raise CheckpointError(str(error)) from error
    repository, _, wanted = name.partition(":")
    if repository.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name}: there is no such folder, and it is no Hub id; give a checkpoint's folder, a GGUF file, an id "
            f"like google/gemma-4-E2B-it, or one of {', '.join(PACKAGED)}"
        )
    if console is not None:
        console.print(f"Looking for [bold]{name}[/bold] on the Hub and in its cache")
    if wanted:
        return _gguf_from_hub(repository, wanted, revision, cache_dir)
    folder = _download(repository, revision, cache_dir, _WANTED, ["*/*"])  # folders: other formats
    if any(folder.glob("*.safetensors")):
        return folder
    return _gguf_from_hub(repository, _DEFAULT_QUANTIZATION, revision, cache_dir)


def _gguf_from_hub(
    repository: str, wanted: str, revision: str | None, cache_dir: Path | None
) -> Path:
    """Fetch `wanted`, a GGUF file of the repository or a quantization in any case, as llama.cpp's `-hf` does."""
    if wanted.endswith(".gguf"):
        part = _PART.fullmatch(wanted)
        pattern = f"{part['name']}-*-of-{part['count']}.gguf" if part else wanted
    else:
        either_case = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in wanted)
        pattern = f"*{either_case}*.gguf"
    folder = _download(repository, revision, cache_dir, [pattern], [f"*{_PROJECTOR}*"])
    if wanted.endswith(".gguf"):
        found = [folder / wanted] if (folder / wanted).is_file() else []
    else:
        tagged = re.compile(rf"(?:.*[-._])?{re.escape(wanted)}", re.IGNORECASE)
        found = [file for file in sorted(folder.rglob("*.gguf")) if tagged.fullmatch(_stem(file))]
    if not found:
        raise CheckpointError(
            f"{repository}: expected a GGUF file {wanted} in the repository, found none; name a quantization or a file it "
            f"has, as {repository}:Q8_0, or give the id of a repository with safetensors"
        )
    return _only(folder, found)


def _in_folder(folder: Path) -> Path:
    """The folder itself, or the one GGUF file of a folder without safetensors."""
    found = [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith(_PROJECTOR)]
    return _only(folder, found) if found and not any(folder.glob("*.safetensors")) else folder


def _gguf_file(file: Path) -> Path:
    if file.suffix != ".gguf":
        raise CheckpointError(
            f"{file}: expected a GGUF file or a checkpoint folder with config.json and safetensors, found another file"
        )
    return _parts(file)[0]


def _only(folder: Path, files: list[Path]) -> Path:
    """The first part of the one model among `files`."""
    models = {_parts(file)[0]: None for file in files}
    if len(models) > 1:
        names = " and ".join(str(file.relative_to(folder)) for file in list(models)[:2])
        raise CheckpointError(
            f"{folder}: expected one model, found {len(models)} in GGUF files, as {names}; name one"
        )
    return next(iter(models))


def _parts(file: Path) -> list[Path]:
    """A GGUF file, or all the parts of the split one that `file` is a part of, in order."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part["count"])
    parts = [
        file.with_name(f"{part['name']}-{number:05d}-of-{part['count']}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [other.name for other in parts if not other.is_file()]
    if missing or file not in parts:
        raise CheckpointError(
            f"{file}: expected {count} parts of a split GGUF file, found {count - len(missing)}"
            + (f"; {missing[0]} is missing" if missing else "")
        )
    return parts


def _stem(file: Path) -> str:
    part = _PART.fullmatch(file.name)
    return part["name"] if part else file.stem


def _download(
    name: str,
    revision: str | None,
    cache_dir: Path | None,
    wanted: Sequence[str],
    unwanted: Sequence[str],
) -> Path:
    try:
        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
        )
    except HFValidationError as error:
        raise CheckpointError(
            f"{name}: there is no such folder, and it is no Hub id: {error}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: the model has no revision {revision!r}; name one of its branches, tags or commits"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the model is gated; accept its terms on its page on the Hub, then log in with "
            "`hf auth login` or set HF_TOKEN to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: there is no such folder, and the Hub shows no such model; check the spelling, and for a "
            "private model log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        raise CheckpointError(
            f"{name}: there is no such folder, the Hub cannot be reached and its cache holds no complete copy; "
            f"go online once, or give the folder of a copy ({str(error).splitlines()[0]})"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"{name}: the Hub answered {error.response.status_code}; try again later, or give the folder of a copy"
        ) from error
    except (HTTPError, OSError) as error:
        raise CheckpointError(
            f"{name}: the download broke off ({error}); run the same command to go on from there"
        ) from error
    return Path(found)


def _check(folder: Path, *, is_model: bool) -> None:
    if is_model and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: expected config.json, found none; is it a model's folder?"
        )
    if not any(folder.glob("*.safetensors")):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth"))
        found = f"found only {others[0]}, which is not read here" if others else "found none"
        raise CheckpointError(f"{folder}: expected weights as *.safetensors or *.gguf, {found}")
    for index in folder.glob("*.safetensors.index.json"):
        _check_index(index)


def _check_index(index: Path) -> None:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: expected JSON with a weight_map from tensors to files"
        ) from error
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(shards)} files are missing, first {missing[0]}; "
            "the download may have been cut"
        )

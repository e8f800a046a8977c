"""Where a checkpoint lies: a local folder, or the Hugging Face Hub's name for one.

Owns looking a folder over and fetching one through huggingface_hub, with its cache, its token and its progress bars.
Knows no tensor and no tokenizer: what is inside the files is for their readers to judge.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

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


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file or the model and says what to do."""


def resolve(
    model: str | Sequence[str],
    *,
    revision: str | None = None,
    console: Console | None = None,
    cache_dir: Path | None = None,
) -> list[Path]:
    """Return the folders of one or several checkpoints, fetching those that are named by a Hub id.

    The first folder is the model; the others may only add or replace tensors, so they need no config.json.

    Raises:
        CheckpointError: a folder lacks what is needed, or the Hub does not give the model.
    """
    models = [model] if isinstance(model, str) else list(model)
    if not models:
        raise CheckpointError("expected the folder or the Hub id of a model, found none")
    folders = [_folder(name, revision, console, cache_dir) for name in models]
    for position, folder in enumerate(folders):
        _check(folder, is_model=position == 0)
    return folders


def weight_bytes(folders: Iterable[Path]) -> int:
    """Bytes of all safetensors files."""
    return sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))


def served_name(model: str | Sequence[str]) -> str:
    """Return the name clients see: the Hub id, or the name of the local folder."""
    first = model if isinstance(model, str) else model[0]
    folder = Path(first).expanduser()
    return folder.resolve().name if folder.exists() else first


def _folder(
    name: str, revision: str | None, console: Console | None, cache_dir: Path | None
) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path}: expected a checkpoint folder with config.json and safetensors, found a file"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{name}: there is no such folder, and it is no Hub id; give a checkpoint's folder or an id "
            "like google/gemma-4-E2B-it"
        )
    if console is not None:
        console.print(f"Looking for [bold]{name}[/bold] on the Hub and in its cache")
    return _download(name, revision, cache_dir)


def _download(name: str, revision: str | None, cache_dir: Path | None) -> Path:
    try:
        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(_WANTED),
            ignore_patterns=["*/*"],  # folders hold the same weights once more, in other formats
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
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".gguf", ".bin", ".pth"))
        found = f"found only {others[0]}, which is not read here" if others else "found none"
        raise CheckpointError(f"{folder}: expected weights as *.safetensors, {found}")
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

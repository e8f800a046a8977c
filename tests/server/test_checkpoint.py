"""Checkpoints: local folders are looked over, Hub ids are fetched by the real huggingface_hub from a loopback Hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from server.checkpoint import CheckpointError, resolve, served_name, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ bos_token }}",
    "model.safetensors": b"weights" * 1000,
    "model.gguf": b"other weights",
    "pytorch_model.bin": b"more weights",
    "original/consolidated.safetensors": b"the same weights",
    "README.md": b"words",
}

GGUF_FILES = {
    "README.md": b"words",
    "config.json": b"{}",
    "tiny-q4_k_m.gguf": b"small weights",
    "tiny-Q8_0.gguf": b"large weights",
    "mmproj-tiny-Q8_0.gguf": b"sight",
    "BF16/tiny-BF16-00001-of-00002.gguf": b"one half",
    "BF16/tiny-BF16-00002-of-00002.gguf": b"another half",
}
REPOSITORIES = {"tiny": FILES, "packed": GGUF_FILES}


def write(folder: Path, **files: str) -> Path:
    """Write files into a folder; `__` in a name stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, "utf-8")
    return folder


# Local folders


def test_a_whole_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", config__json="{}", model__safetensors="w")
    assert resolve(str(folder)) == [folder]
    assert served_name(str(folder)) == "tiny"
    assert served_name([f"{folder}/", "other"]) == "tiny"


def test_further_folders_may_hold_only_tensors(tmp_path: Path) -> None:
    model = write(tmp_path / "model", config__json="{}", model__safetensors="w")
    extra = write(tmp_path / "extra", tables__safetensors="w")
    assert resolve([str(model), str(extra)]) == [model, extra]
    with pytest.raises(CheckpointError, match=r"extra: expected config\.json, found none"):
        resolve([str(extra), str(model)])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model__safetensors": "w"}, r"expected config\.json, found none"),
        ({"config__json": "{}"}, r"expected weights as \*\.safetensors or \*\.gguf, found none"),
        (
            {"config__json": "{}", "model__bin": "w"},
            r".* found only model\.bin, which is not read",
        ),
        (
            {"a__gguf": "w", "b__gguf": "w", "c__gguf": "w"},
            r"expected one model, found 3 in GGUF files, as a\.gguf and b\.gguf; name one",
        ),
    ],
)
def test_a_folder_that_lacks_something_is_named_with_it(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    folder = write(tmp_path / "tiny", **files)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder))}: {message}"):
        resolve(str(folder))


def test_missing_shards_and_broken_indexes_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", config__json="{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write(folder, one__safetensors="w", model__safetensors__index__json=json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 of 2 files are missing, first two\.safetensors"):
        resolve(str(folder))
    for broken in ("not json", "[]", "{}", '{"weight_map": 7}'):
        write(folder, model__safetensors__index__json=broken)
        with pytest.raises(CheckpointError, match="expected JSON with a weight_map"):
            resolve(str(folder))


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere", "a/b/c", "nowhere", "has space/x", "a--b/c"]
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder, and it is no Hub id"):
        resolve(name)
    assert served_name(name) == name


def test_a_gguf_file_is_taken_by_its_name_or_its_folders(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", **{"a-Q4_K_M__gguf": "weights", "mmproj-a__gguf": "sight"})
    file = folder / "a-Q4_K_M.gguf"
    assert resolve(str(file)) == resolve(str(folder)) == [file]
    assert (served_name(str(file)), served_name(str(folder))) == ("a-Q4_K_M", "tiny")
    assert weight_bytes([file]) == len("weights")
    write(folder, config__json="{}", model__safetensors="w")
    assert resolve(str(folder)) == [folder]
    assert weight_bytes([folder]) == 1


def test_a_split_gguf_file_is_taken_by_any_of_its_parts(tmp_path: Path) -> None:
    names = [f"a-0000{number}-of-00003__gguf" for number in (1, 2, 3)]
    folder = write(tmp_path / "split", **dict.fromkeys(names, "part"))
    first, second, third = sorted(folder.iterdir())
    for place in (first, second, folder):
        assert resolve(str(place)) == [first]
    assert served_name(str(second)) == "a"
    assert weight_bytes([first]) == 12
    third.unlink()
    for place in (first, folder):
        with pytest.raises(
            CheckpointError, match=r"expected 3 parts .* found 2; a-00003-of-00003\.gguf is missing"
        ):
            resolve(str(place))


def test_a_file_and_no_model_at_all_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(CheckpointError, match=r"expected a GGUF file or .* found another file"):
        resolve(str(file))
    with pytest.raises(CheckpointError, match="found none"):
        resolve([])


# The Hub


@dataclass
class Hub:
    """Where a loopback Hub is, and how it behaves."""

    url: str = ""
    store: str = (
        ""  # the same server by another name, since the Hub keeps large files on another host
    )
    cuts_downloads: bool = False


class _HubHandler(BaseHTTPRequestHandler):
    """Speaks the part of the Hub's HTTP that a download uses; weights are behind a redirect, as LFS files are."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        match path:
            case ["api", "models", "acme", "gated", *_]:
                self._refuse(401, "GatedRepo", "Access to model acme/gated is restricted.")
            case ["api", "models", "acme", "broken", *_]:
                self._send(500, b"{}")
            case ["api", "models", "acme", repo] | [
                "api",
                "models",
                "acme",
                repo,
                "revision",
                "main",
            ] if repo in REPOSITORIES:
                siblings = [{"rfilename": name} for name in REPOSITORIES[repo]]
                info = {"id": f"acme/{repo}", "sha": COMMIT, "siblings": siblings}
                self._send(200, json.dumps(info).encode())
            case ["api", "models", "acme", "tiny", "revision", _]:
                self._refuse(404, "RevisionNotFound", "Invalid rev id")
            case ["api", "models", "acme", repo, "tree", *_] if repo in REPOSITORIES:
                entries = [_entry(name) for name in REPOSITORIES[repo]]
                self._send(200, json.dumps(entries).encode())
            case ["acme", repo, "resolve", _, *name] if "/".join(name) in REPOSITORIES[repo]:
                self._resolve("/".join(name))
            case ["cdn", *name]:
                self._send(200, _data("/".join(name)), cut=self.hub.cuts_downloads)
            case _:
                self._refuse(404, "RepoNotFound", "Repository not found")

    def _resolve(self, name: str) -> None:
        data = _data(name)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(data)}"'}
        if not name.endswith((".safetensors", ".gguf")):
            self._send(200, data, headers)
            return
        headers |= {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers |= {"X-Linked-Size": str(len(data)), "Location": f"{self.hub.store}/cdn/{name}"}
        self._send(302, b"", headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut


def _data(name: str) -> bytes:
    return FILES.get(name) or GGUF_FILES[name]


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _entry(name: str) -> dict[str, Any]:
    data = _data(name)
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
    if name.endswith((".safetensors", ".gguf")):
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
    return entry


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    """Serve the Hub's HTTP on a port of its own."""
    hub = Hub()
    handler = type("Handler", (_HubHandler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        hub.store = f"http://localhost:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(10)


def fetch(hub: Hub, home: Path, model: str, revision: str | None = None) -> tuple[str, str]:
    """Resolve a model in a new process, since huggingface_hub reads its endpoint at import.

    Returns the kind of the outcome and the folder or the message.
    """
    program = (
        "import sys; from server.checkpoint import CheckpointError, resolve\n"
        "try: print('folder', resolve(sys.argv[1], revision=sys.argv[2] or None)[0])\n"
        "except CheckpointError as error: print('error', error)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", program, model, revision or ""],
        cwd=ROOT,
        env={
            **kept,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1,localhost",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    kind, _, rest = done.stdout.strip().partition(" ")
    return kind, rest


def test_a_model_is_fetched_once_and_then_served_from_the_cache_without_the_hub(
    tmp_path: Path,
) -> None:
    with loopback_hub() as hub:
        kind, folder = fetch(hub, tmp_path, "acme/tiny")
    assert kind == "folder", folder
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {*FILES} - {
        "model.gguf",
        "pytorch_model.bin",
        "original/consolidated.safetensors",
        "README.md",
    }
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert fetch(hub, tmp_path, "acme/tiny") == ("folder", folder)


@pytest.mark.parametrize(
    ("model", "first", "fetched"),
    [
        ("acme/packed", "tiny-q4_k_m.gguf", {"tiny-q4_k_m.gguf"}),
        ("acme/packed:q8_0", "tiny-Q8_0.gguf", {"tiny-Q8_0.gguf"}),
        ("acme/packed:tiny-Q8_0.gguf", "tiny-Q8_0.gguf", {"tiny-Q8_0.gguf"}),
        (
            "acme/packed:bf16",
            "tiny-BF16-00001-of-00002.gguf",
            {"tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"},
        ),
    ],
)
def test_a_quantization_is_fetched_from_the_hub_alone_and_found_again_without_it(
    tmp_path: Path, model: str, first: str, fetched: set[str]
) -> None:
    with loopback_hub() as hub:
        kind, place = fetch(hub, tmp_path, model)
    assert kind == "folder", place
    assert Path(place).name == first
    weights = {path.name for path in tmp_path.rglob("*.gguf")}
    assert weights == fetched
    assert fetch(hub, tmp_path, model) == ("folder", place)


def test_a_quantization_that_the_repository_lacks_is_named(tmp_path: Path) -> None:
    with loopback_hub() as hub:
        kind, message = fetch(hub, tmp_path, "acme/packed:Q2_K")
    assert kind == "error"
    assert message.startswith(
        "acme/packed: expected a GGUF file Q2_K in the repository, found none"
    )


def test_a_model_that_is_not_in_the_cache_needs_the_hub(tmp_path: Path) -> None:
    with loopback_hub() as hub:
        pass
    kind, message = fetch(hub, tmp_path, "acme/tiny")
    assert kind == "error"
    assert "the Hub cannot be reached and its cache holds no complete copy" in message


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("acme/gated", None, "accept its terms .* `hf auth login`"),
        ("acme/missing", None, "the Hub shows no such model; check the spelling"),
        ("acme/broken", None, "the Hub"),
        ("acme/tiny", "v9", "no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(
    tmp_path: Path, model: str, revision: str | None, expected: str
) -> None:
    with loopback_hub() as hub:
        kind, message = fetch(hub, tmp_path, model, revision)
    assert kind == "error"
    assert re.search(f"^{model}: .*{expected}", message), message


def test_a_download_that_breaks_off_is_said_to_go_on_later(tmp_path: Path) -> None:
    with loopback_hub() as hub:
        hub.cuts_downloads = True
        kind, message = fetch(hub, tmp_path, "acme/tiny")
        assert kind == "error"
        assert "the download broke off" in message
        hub.cuts_downloads = False
        assert fetch(hub, tmp_path, "acme/tiny")[0] == "folder"

"""A Hugging Face Hub on loopback that has folders of this tree as its repositories, for the real `hf download`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from tests.rig.fake_http import Door, Handler

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COMMIT = "c0ffee" * 6 + "c0ff"


class Asked:
    """What came."""

    def __init__(self) -> None:
        self.tokens: set[str | None] = set()
        self.files: list[str] = []
        self.cut: list[str] = []


def hub_door(repositories: Mapping[str, Path], asked: Asked, *, cut_first: str = "") -> Door:
    """The Hub; the first download of one that ends with `cut_first` breaks off in the middle."""

    def entry(file: Path) -> dict[str, Any]:
        data = file.read_bytes()
        oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        return {"type": "file", "path": file.name, "size": len(data), "oid": oid}

    class Hub(Handler):
        def any_method(self) -> None:
            path = self.path.partition("?")[0].strip("/").split("/")
            asked.tokens.add(self.headers.get("Authorization"))
            match path:
                case ["api", "models", owner, name, "tree", *_] if (
                    f"{owner}/{name}" in repositories
                ):
                    folder = repositories[f"{owner}/{name}"]
                    self.answer_json(200, [entry(file) for file in sorted(folder.iterdir())])
                case ["api", "models", owner, name, *_] if f"{owner}/{name}" in repositories:
                    folder = repositories[f"{owner}/{name}"]
                    names = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                    found = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": names}
                    self.answer_json(200, found)
                case [owner, name, "resolve", _, file] if f"{owner}/{name}" in repositories:
                    self.file(repositories[f"{owner}/{name}"] / file)
                case _:
                    self.answer_json(404, {"error": "Repository not found"})

        def file(self, file: Path) -> None:
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "HEAD":
                return
            asked.files.append(file.name)
            if cut_first and file.name.endswith(cut_first) and not asked.cut:
                asked.cut.append(file.name)
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            else:
                self.wfile.write(data)

        do_GET = do_HEAD = any_method  # noqa: N815

    return Door(Hub)

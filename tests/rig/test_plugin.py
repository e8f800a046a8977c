"""The Claude Code plugin: its manifests say what is there, its skill names what exists, its launcher starts the server; and the
real `claude` takes it, where that is installed (`make check-plugin` brings it)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from rig.mcp.results import Phase
from rig.mcp_server import TOOLS
from rig.settings import ROOT, Settings

PLUGIN, MARKET = "gemma4-rust-rig", "torchtpu-rs"
SKILL = ROOT / "skills" / PLUGIN
LAUNCHER = ROOT / "rig" / "torchtpu-rig-mcp"
CLAUDE = os.environ.get("CLAUDE") or shutil.which("claude")
HELLO = json.dumps({
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}},
})  # fmt: skip


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / name).read_text())
    return found


def version() -> str:
    found: str = tomllib.loads((ROOT / "rust" / "Cargo.toml").read_text())["package"]["version"]
    return found


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = project["optional-dependencies"]["rig"]
    return found


def test_the_manifests_say_the_same_as_the_tree() -> None:
    plugin = manifest(".claude-plugin/plugin.json")
    market = manifest(".claude-plugin/marketplace.json")
    assert (plugin["name"], plugin["version"], plugin["license"]) == (
        PLUGIN,
        version(),
        "Apache-2.0",
    )
    assert market["name"] == MARKET
    (listed,) = market["plugins"]
    assert (listed["name"], listed["source"]) == (PLUGIN, "./")
    assert listed["description"] == plugin["description"]
    (server,) = plugin["mcpServers"].values()
    assert server["command"] == f"${{CLAUDE_PLUGIN_ROOT}}/{LAUNCHER.relative_to(ROOT)}"
    used = set(re.findall(r"\$\{user_config\.(\w+)\}", json.dumps(server)))
    assert used == set(plugin["userConfig"])
    # Whoever opens the tree itself, without the plugin.
    (own,) = manifest(".mcp.json")["mcpServers"].values()
    assert own["command"] == f"./{LAUNCHER.relative_to(ROOT)}"
    assert os.access(LAUNCHER, os.X_OK)
    assert sorted(file.name for file in (ROOT / ".claude-plugin").iterdir()) == [
        "marketplace.json",
        "plugin.json",
    ]


def test_the_skill_can_be_found_and_is_short() -> None:
    text = (SKILL / "SKILL.md").read_text()
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert fields["name"] == SKILL.name
    assert fields["description"].startswith("Use when ")
    assert len(fields["description"]) < 1024
    assert len(body.split()) < 600
    for target in re.findall(r"\]\(([^)]+)\)", body):
        assert (SKILL / target).is_file(), target


def test_the_skill_names_every_tool_and_none_that_is_not_there() -> None:
    tools = {tool.__name__ for tool, _, _ in TOOLS}
    everything = "\n".join(file.read_text() for file in SKILL.rglob("*.md"))
    named = set(
        re.findall(r"\b(?:create|get|delete|find|estimate|rig|check|run)_[a-z_]+\b", everything)
    )
    assert named == tools


def test_the_skills_references_are_true() -> None:
    states = (SKILL / "references" / "states-and-errors.md").read_text()
    assert set(re.findall(r"^\| (\w+) \| [A-Z |]", states, re.MULTILINE)) >= set(get_args(Phase))
    settings = (SKILL / "references" / "settings.md").read_text()
    rows = re.findall(r"^\| ([A-Z_]+) \| ([^|]+?) \|", settings, re.MULTILINE)
    assert rows
    published = dict(
        line.split("=", 1) for line in (ROOT / "tpu.env").read_text().splitlines() if re.match(r"[A-Z_]+=", line)
    )  # fmt: skip
    for key, default in rows:
        assert key.lower() in Settings.model_fields
        if default not in {"empty", "this machine's address"}:
            assert published[key] == default
        else:
            assert published[key] == ""


# -- the launcher --------------------------------------------------------------------------------------


def launch(
    path: str, launcher: Path = LAUNCHER, says: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(launcher)],
        env={"PATH": path, **environment}, input=says, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As much of the tree as the server needs, without a .venv."""
    place = tmp_path / "a tree"
    shutil.copytree(ROOT / "rig", place / "rig", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tpu.env", "rust/Cargo.toml"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    return place


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def test_the_launcher_starts_the_server_from_a_folder_that_has_modules_of_the_same_names(
    tree: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    for name in ("rig", "mcp", "httpx"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "__init__.py").write_text("raise SystemExit('not this one')")
    done = subprocess.run(
        [str(tree / "rig" / LAUNCHER.name)],
        cwd=theirs, env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PROJECT_ID": ""},
        input=HELLO + "\n", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["result"]["serverInfo"]
    assert found["name"] == "torchtpu-rig"
    assert found["version"]


def test_an_empty_project_of_the_plugins_settings_does_not_win_over_tpu_env(
    tree: Path, tmp_path: Path
) -> None:
    show = tmp_path / "python"
    # Has everything, and only shows its environment when it is to serve.
    executable(show, f'[[ $3 == rig.mcp_server ]] && exec env; exec {sys.executable} "$@"')
    launcher = tree / "rig" / LAUNCHER.name
    path = os.environ["PATH"]
    assert "PROJECT_ID" not in launch(path, launcher, PYTHON=str(show), PROJECT_ID="").stdout
    assert "PROJECT_ID=mine" in launch(path, launcher, PYTHON=str(show), PROJECT_ID="mine").stdout


def test_packages_are_installed_once_beside_the_plugin_and_what_fails_is_told_on_stderr(
    tree: Path, tmp_path: Path
) -> None:
    bin_, data, record = tmp_path / "bin", tmp_path / "data", tmp_path / "record"
    bare = f'[[ $2 == -c && $3 == *find_spec* ]] && exit 1; exec {sys.executable} "$@"'
    executable(bin_ / "python3", bare)
    # In place of the package index: notes what it was asked for, and makes an environment that has it.
    executable(
        bin_ / "uv",
        f'echo "$@" >>{record}; [[ -z $REFUSE ]] || {{ echo "no network"; exit 1; }}\n'
        f'if [[ $1 == venv ]]; then mkdir -p "${{@: -1}}/bin"; ln -s {sys.executable} "${{@: -1}}/bin/python"; else cat "${{@: -1}}" >>{record}; fi',
    )  # fmt: skip
    path = f"{bin_}:/usr/bin:/bin"
    launcher = tree / "rig" / LAUNCHER.name
    failed = launch(path, launcher, CLAUDE_PLUGIN_DATA=str(data), REFUSE="yes")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no network" in failed.stderr
    assert "Once it can be reached, start again" in failed.stderr
    assert list(data.iterdir()) == []
    record.unlink()
    for _ in range(2):
        # The link leads to the tests' Python, whose packages are found by the environment of the tests.
        done = launch(
            path,
            launcher,
            HELLO + "\n",
            CLAUDE_PLUGIN_DATA=str(data),
            PYTHONPATH="",
            VIRTUAL_ENV=sys.prefix,
        )
        assert done.returncode in {0, 1}, done.stderr
    lines = record.read_text().splitlines()
    assert [line for line in lines if ">=" in line] == requirements()
    assert len([line for line in lines if line.startswith("venv ")]) == 1
    (venv,) = data.iterdir()
    assert venv.name.startswith("venv-")


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ('[[ $1 == --version ]] && { echo "Python 3.9.2"; exit 0; }; exit 1', r"expected Python 3.11 to 3.14, found Python 3.9.2.*apt install"),
        (f'[[ $2 == *ensurepip* ]] && exit 1; [[ $2 == -c && $3 == *find_spec* ]] && exit 1; exec {sys.executable} "$@"', r"with the module venv, found it without.*apt install python3\.\d+-venv"),
    ],
    ids=["old", "without-venv"],
)  # fmt: skip
def test_what_is_missing_is_told_on_stderr_with_how_to_install_it(
    tree: Path, tmp_path: Path, python: str, says: str
) -> None:
    bin_ = tmp_path / "bin"
    for name in ("bash", "dirname", "mkdir", "mktemp", "cksum", "cut", "rm", "env"):
        found = shutil.which(name)
        assert found is not None
        bin_.mkdir(exist_ok=True)
        (bin_ / name).symlink_to(found)
    executable(bin_ / "python3", python)
    done = launch(
        str(bin_), tree / "rig" / LAUNCHER.name, CLAUDE_PLUGIN_DATA=str(tmp_path / "data")
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(says, done.stderr), done.stderr


ALONE = """
import importlib.abc, importlib.metadata as metadata, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

def closure(wanted):
    found, open_ = set(), [(Requirement(one), "") for one in wanted]
    while open_:
        one, extra = open_.pop()
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(one.name)
        for wanted_extra in ["", *one.extras]:
            if (name, wanted_extra) not in found:
                found.add((name, wanted_extra))
                open_ += [(Requirement(need), wanted_extra) for need in metadata.requires(name) or []]
    return {name for name, _ in found}

have = closure(sys.argv[1:])
ours = {"torchtpu-rs"}
hidden = {
    module
    for module, owners in metadata.packages_distributions().items()
    if not (have | ours) & {canonicalize_name(one) for one in owners}
}

class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
    del sys.modules[name]
sys.meta_path.insert(0, NotInstalled())
import rig.cli, rig.mcp_server
"""


def test_the_list_that_the_launcher_installs_is_all_that_the_rig_needs() -> None:
    def imports(wanted: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", ALONE, *wanted],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    done = imports(requirements())
    assert done.returncode == 0, done.stderr
    without = imports([one for one in requirements() if not one.startswith("httpx")])
    assert "No module named 'httpx'" in without.stderr


# -- the real thing ------------------------------------------------------------------------------------


@pytest.fixture
def claude(tmp_path: Path) -> Any:
    if CLAUDE is None:
        pytest.skip("Claude Code is not installed: set CLAUDE, or run `make check-plugin`")
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(CLAUDE), *arguments],
            cwd=home, env=environment, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The tree as others get it: without what was built in it."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "target", "__pycache__", ".*_cache", "*.so", "build", "dist"
    )
    return Path(shutil.copytree(ROOT, tmp_path / "published", ignore=left_out, symlinks=True))


def test_claude_code_finds_nothing_wrong_with_the_plugin(claude: Any, published: Path) -> None:
    done = claude("plugin", "validate", str(published), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"skills: {PLUGIN}:{PLUGIN}" in done.stdout
    file = published / ".claude-plugin" / "plugin.json"
    file.write_text(file.read_text().replace('"keywords"', '"keywordz"'))
    assert claude("plugin", "validate", str(published), "--strict").returncode != 0


def test_claude_code_installs_the_plugin_and_its_server_connects(
    claude: Any, published: Path
) -> None:
    assert claude("plugin", "marketplace", "add", str(published)).returncode == 0
    installed = claude("plugin", "install", f"{PLUGIN}@{MARKET}")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    listed = claude("mcp", "list")
    assert re.search(
        rf"plugin:{PLUGIN}:rig: .*/rig/{LAUNCHER.name} .*✔ Connected", listed.stdout
    ), listed.stdout
    details = claude("plugin", "details", f"{PLUGIN}@{MARKET}")
    assert re.search(r"Skills \(1\)\s+gemma4-rust-rig", details.stdout)

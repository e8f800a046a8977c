"""`torchtpu-rs bench` and `torchtpu-rs compare` as they are typed: on the real server, on one that is scripted, and typed wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.load import command
from bench.load.display import Display
from bench.load.figures import Load
from bench.load.result import Result, Settings, read
from bench.load.sweep import Running
from server.cli import app
from tests.bench.scripted import MODEL, Script, Scripted
from tests.fakes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from typer.testing import Result as Typed

    from tests.rig.served import Served

pytest_plugins = ["tests.rig.served"]

ROOT = Path(__file__).parents[2]
SMALL = ("--concurrency", "1,2", "--requests-per-level", "4", "--warmup", "0")
QUICK = Script(first=0.01, gap=0.001, tokens=5)


def typed(*words: str) -> Typed:
    return CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.fixture(scope="module")
def measured(served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What was said of a whole run on the real server, and its folder with key, x.json and x.svg."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "key").write_text(served.key)
    files = (
        "--api-key-file",
        folder / "key",
        "--json",
        folder / "x.json",
        "--plot",
        folder / "x.svg",
    )
    done = typed("bench", f"{served.url}/v1", *SMALL, "--usd-per-hour", "1.2", *map(str, files))
    assert done.exit_code == 0, done.output
    return done.output, folder


def test_a_run_says_the_published_lines_then_a_line_a_level_and_what_tokens_cost(
    measured: tuple[str, Path], served: Served
) -> None:
    lines = measured[0].splitlines()
    assert lines[0].startswith(f"gemma4-embedded at {served.url}, torchtpu-rs ")
    assert [line.partition(":")[0] for line in lines[1:16]] == [
        *(f"request {number}" for number in range(1, 6)),
        lines[6],
        *(f"stream {number}" for number in range(1, 9)),
        "streamed",
    ]
    assert lines[6].startswith("median decode tok/s ")
    assert lines[16].startswith("load: closed loop")
    form = (
        r" 4 done, 0 failed, [\d.]+ tok/s, [\d.]+ tok/s each, [\d.]+ requests/s, "
        r"first token \d+/\d+/\d+ ms \(p50/p90/p99\), between pieces [\d.]+/[\d.]+ ms \(p50/p99\)"
    )
    for line, load in zip(lines[17:19], ("1 caller", "2 callers"), strict=True):
        name, _, figures = line.partition(":")
        assert name == load
        assert re.fullmatch(form, figures)
    costs = [line for line in lines if "per million output tokens" in line]
    assert [line.partition(":")[0] for line in costs] == ["one at a time", "1 caller", "2 callers"]


def test_the_file_has_all_that_is_needed_to_do_it_again_and_no_key(
    measured: tuple[str, Path], served: Served
) -> None:
    text = (measured[1] / "x.json").read_text()
    assert served.key not in text
    found = read(measured[1] / "x.json")
    assert found.complete
    assert (found.endpoint.url, found.endpoint.server) == (served.url, "torchtpu-rs")
    assert found.endpoint.info["device"] == "cpu"
    assert found.endpoint.info["versions"]["torch"].startswith("2.")
    assert not {"checkpoint", "thread"} & found.endpoint.info.keys()
    assert found.settings.concurrency == (1, 2)
    assert (found.settings.model, found.settings.requests_per_level) == ("gemma4-embedded", 4)
    assert found.client.versions["httpx"] != "not installed"
    assert found.published
    assert len(found.published.requests) == 5
    for level in found.levels:
        assert [one.failure for one in level.samples] == [None] * 4
        for one in level.samples:
            # One piece a token, the one that ends the turn aside; the engine's time is inside the client's.
            assert len(one.pieces) == one.tokens - (one.finish == "stop")
            assert one.timings
            assert one.timings["predicted_n"] == one.tokens
            assert one.timings["predicted_ms"] / 1e3 < one.ended
            assert one.fingerprint == "torchtpu_rs-greedy"


def test_the_plot_is_a_picture_with_its_words(measured: tuple[str, Path]) -> None:
    drawn = (measured[1] / "x.svg").read_text()
    for words in ("Tokens a second", "First token, ms", "Between pieces of text", "callers"):
        assert words in drawn


def test_a_run_compared_with_itself_changes_nothing(measured: tuple[str, Path]) -> None:
    file = str(measured[1] / "x.json")
    done = typed("compare", file, file)
    assert done.exit_code == 0, done.output
    assert "better" not in done.output
    assert "warning" not in done.output
    ratios = re.findall(r" (\d\.\d\d) *$", done.output, re.MULTILINE)
    assert len(ratios) > 15
    assert set(ratios) == {"1.00"}


def test_the_benchmark_needs_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'matplotlib'))\n"
        "import bench.load.command, bench.load.comparison, bench.load.plot, rig.mcp.tools\n"
        "from bench.load.wire import BenchmarkError\n"
        "try: bench.load.plot.check()\n"
        "except BenchmarkError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("found none; install it: pip install matplotlib")


def test_json_on_stdout_is_json_alone() -> None:
    with Scripted(QUICK) as endpoint:
        done = typed("bench", endpoint.url, "--only", "load", *SMALL, "--json", "-")
    assert done.exit_code == 0
    found = Result.model_validate_json(done.stdout)
    assert (found.endpoint.model, found.published) == (MODEL, None)
    assert (found.endpoint.server, found.endpoint.version) == ("vLLM", "0.0-scripted")
    assert found.endpoint.info == {"max_model_len": 4096}
    assert "1 caller: 4 done" in done.stderr


def test_the_published_part_alone_says_whose_clock_it_was() -> None:
    script = Script(first=0.01, gap=0.001, tokens=5)
    prompts = ("--prompt", "one", "--prompt", "two")
    with Scripted(script) as endpoint:
        done = typed("bench", endpoint.url, "--only", "published", "--requests", "2", *prompts)
    assert done.exit_code == 0
    assert "by the client: the server gives no timings" in done.stdout
    asked = [body["messages"][0]["content"] for body in script.asked]
    assert asked == ["one", "one", "one", "two"]
    assert {body["model"] for body in script.asked} == {MODEL}


def test_failures_are_said_with_their_reason_and_a_level_without_answers_is_an_error() -> None:
    with Scripted(Script(tokens=2, refuse={2: (429, {})})) as endpoint:
        done = typed("bench", endpoint.url, "--only", "load", *SMALL)
        assert done.exit_code == 0
        assert "1 caller: 1 failed: expected an answer, found HTTP 429" in done.stdout
        endpoint.script.refuse = {0: (500, {})}
        done = typed("bench", endpoint.url, "--only", "load", *SMALL)
    assert done.exit_code == 1
    assert "1 caller: 0 done, 4 failed" in done.stdout
    assert "not complete" in done.stdout
    assert "2 callers" not in done.stdout


def test_what_is_not_counted_by_the_server_is_said() -> None:
    with Scripted(Script(first=0, gap=0, tokens=3, usage=False)) as endpoint:
        done = typed("bench", endpoint.url, "--only", "load", *SMALL)
    assert "tokens are pieces of text as this side saw them" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--body", "{"), "--body: expected a JSON object, found '{'"),
        (("--body", "[]"), "--body: Input should be"),
        (("--only", "all"), "--only: Input should be 'published' or 'load'"),
        (("--concurrency", "1,two"), "--concurrency: Input should be a valid integer"),
        (("--concurrency", "0"), "expected concurrency and rates above 0"),
        (("--concurrency", ""), "expected a concurrency or a rate"),
        (("--max-tokens", "0"), "--max-tokens: Input should be greater than"),
        (("--duration", "1", "--requests-per-level", "1"), "give requests per level or a duration"),
        (("--json", "/nowhere/x.json"), "expected the folder of /nowhere/x.json to be there"),
        (("--only", "published", "--plot", "x.svg"), "--plot: expected the load protocol"),
        (("--api-key-file", "/nowhere/key"), "--api-key-file: expected a file with a key"),
    ],
)
def test_what_is_typed_wrong_is_told_before_anybody_is_asked(
    words: tuple[str, ...], says: str
) -> None:
    script = Script()
    with Scripted(script) as endpoint:
        done = typed("bench", endpoint.url, *words)
    assert done.exit_code
    assert says in done.stderr
    assert not script.asked


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://", "http://127.0.0.1/?a=b"])
def test_what_is_no_address_is_told(url: str) -> None:
    done = typed("bench", url)
    assert (done.exit_code, done.stderr) == (
        1, f"error: expected an address like http://127.0.0.1:8000, found {url!r}\n",
    )  # fmt: skip


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    done = typed("bench", "http://me:hunter2@127.0.0.1")
    assert done.exit_code == 1
    assert "hunter2" not in done.output


def test_a_wrong_key_and_nobody_at_the_port_are_told(served: Served) -> None:
    done = typed("bench", served.url, "--api-key", "not-the-key")
    assert (done.exit_code, "HTTP 401" in done.stderr) == (1, True)
    assert "not-the-key" not in done.output
    with Scripted() as gone:
        pass
    done = typed("bench", gone.url)
    assert (done.exit_code, "found ConnectError" in done.stderr) == (1, True)


def test_a_model_that_is_not_there_is_asked_for_and_refused(served: Served) -> None:
    done = typed("bench", served.url, "--api-key", served.key, "--model", "another")
    assert (done.exit_code, "HTTP 404" in done.stderr) == (1, True)


def test_ctrl_c_keeps_the_levels_that_are_over(tmp_path: Path) -> None:
    with Scripted(Script(first=0, gap=0, tokens=2, answers=4)) as endpoint:
        bench = [sys.executable, "-m", "server", "bench", endpoint.url, "--only", "load", *SMALL]
        with subprocess.Popen(
            [*bench, "--json", tmp_path / "x.json"], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            # As a terminal has it: whoever runs the tests in the background ignores SIGINT, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:  # fmt: skip
            end = threading.Timer(PATIENCE_SECONDS, process.kill)
            end.start()
            try:
                assert process.stdout is not None
                assert any(line.startswith("1 caller") for line in process.stdout)
                process.send_signal(signal.SIGINT)
                rest = process.stdout.read()
                assert process.wait() == command.INTERRUPTED
            finally:
                end.cancel()
                process.kill()
    found = read(tmp_path / "x.json")
    assert (found.complete, [str(level.load) for level in found.levels]) == (False, ["1 caller"])
    assert "not complete" in rest


def test_on_a_terminal_the_table_lives_while_it_is_measured() -> None:
    console = Console(force_terminal=True, width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    settings = Settings(requests_per_level=9)
    display = Display(console, settings)
    with console.file, display.load():
        running = Running(Load(kind="closed", size=2))
        display.begins(running)
        console.print(display._table())
        running.warming_up, running.running = False, 2
        console.print(display._table())
        display.level(running.level())
    shown = console.export_text()
    assert "2 callers, warm-up" in shown
    assert "2 callers, 2 running" in shown
    assert "0 of 9" in shown
    assert re.search(r"2 callers +0 +0 *$", shown, re.MULTILINE)


def test_a_file_that_is_no_result_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"form": "another"}))
    done = typed("compare", str(tmp_path / "x.json"), str(tmp_path / "none.json"))
    assert done.exit_code == 1
    assert "expected a result of `torchtpu-rs bench --json`" in done.stderr
    assert "form: Input should be 'torchtpu-rs bench 1'" in done.stderr
    done = typed("compare", str(tmp_path / "none.json"), str(tmp_path / "x.json"))
    assert "No such file" in done.stderr

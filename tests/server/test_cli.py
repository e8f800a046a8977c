"""The command line: help, settings from flags and environment, render, doctor."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from models import EMBEDDED
from server import cli, doctor, serving, terminal
from server.settings import Settings
from tpu import E2B

if TYPE_CHECKING:
    from pathlib import Path

pytest_plugins = ["tests.server.http_fixtures"]

MESSAGES = [{"role": "user", "content": "Say hi."}]


def run(*arguments: str, stdin: str = "", **environment: str) -> Any:
    return CliRunner().invoke(
        cli.app,
        list(arguments),
        input=stdin,
        env={"COLUMNS": "120", "NO_COLOR": "1", **environment},
    )


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `serve` up to where the server would start and returns its settings."""
    seen: list[Settings] = []

    def serve(settings: Settings, _console: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(cli, "_set_up_logging", lambda *_: None)

    def settings(*arguments: str, **environment: str) -> Settings:
        result = run("serve", *arguments, **environment)
        assert result.exit_code == 0, result.output
        return seen[-1]

    return settings


def test_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "chat", "render", "doctor", "--version"):
        assert command in result.stdout


def test_the_version_is_one_line() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("torchtpu-rs ")
    assert result.stdout.count("\n") == 1


def test_every_setting_is_a_flag_and_a_variable() -> None:
    help_text = run("serve", "--help").stdout
    for name in Settings.model_fields:
        if name != "model":
            assert f"--{name.replace('_', '-')}" in help_text
        assert f"TORCHTPU_{name.upper()}" in help_text


def test_the_defaults_serve_the_embedded_model_on_localhost(settings_of: Any) -> None:
    assert settings_of() == Settings(model=(str(EMBEDDED),))
    assert settings_of("--exact").exact is True
    assert settings_of("--fast").exact is False
    defaults = Settings(model=("x",))
    assert (defaults.host, defaults.port, defaults.context, defaults.device) == (
        "127.0.0.1",
        8000,
        8192,
        "cpu",
    )


def test_flags_win_over_the_environment(settings_of: Any) -> None:
    environment = {
        "TORCHTPU_MODEL": "org/first second",
        "TORCHTPU_PORT": "9000",
        "TORCHTPU_CONTEXT": "512",
        "TORCHTPU_API_KEY": "key",
        "TORCHTPU_SERVED_MODEL_NAME": "a b",
    }
    settings = settings_of("--port", "9001", "--cors-origin", "http://x", **environment)
    assert settings.model == ("org/first", "second")
    assert (settings.port, settings.context) == (9001, 512)
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "key"
    assert "key" not in repr(settings).replace("api_key", "")
    assert settings.served_model_name == ("a", "b")
    assert settings.cors_origin == ("http://x",)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--port", "70000"], "--port"),
        (["--context", "0"], "--context"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--log-level", "loud"], "--log-level"),
        (["--ping-seconds", "0"], "--ping-seconds"),
    ],
)
def test_a_setting_out_of_range_is_named_in_one_line(arguments: list[str], flag: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 78
    assert result.stderr.startswith(f"error: {flag}: ")
    assert result.stderr.count("\n") == 1


def test_smoke_computes_on_the_device_and_says_where() -> None:
    result = run("smoke")
    assert result.exit_code == 0
    assert result.stdout.endswith("matmul_sum 512.0 on cpu\nCPU smoke OK\n")
    refused = run("smoke", "--device", "nonsense")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: expected nonsense to compute, found: ")


@pytest.mark.parametrize("flag", ["--exact", "--fast"])
def test_which_arithmetic_a_cpu_uses_is_refused_on_tpu(flag: str) -> None:
    result = run("serve", "--device", "tpu", flag)
    assert result.exit_code == 78
    assert f"{flag} is for --device cpu, found --device tpu" in result.stderr


def test_the_key_can_come_from_a_file(settings_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    key = settings_of("--api-key-file", str(file)).api_key
    assert key.get_secret_value() == "secret"
    file.write_text("\n")
    for wrong in (file, tmp_path / "none", tmp_path):
        result = run("serve", "--api-key-file", str(wrong))
        assert result.exit_code == 78
        assert result.stderr.startswith("error: --api-key-file: expected a ")


def test_an_address_that_cannot_be_bound_is_one_line(
    settings_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> int:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(serving, "serve", taken)
    result = run("serve", "--port", "8123")
    assert result.exit_code == 1
    assert result.stderr == "error: cannot listen on 127.0.0.1:8123: Address already in use\n"


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("from_stdin", [True, False])
def test_render_prints_the_prompt_and_its_ids(
    model_folder: Path, tmp_path: Path, wrapped: bool, from_stdin: bool
) -> None:
    text = json.dumps({"messages": MESSAGES} if wrapped else MESSAGES)
    (tmp_path / "chat.json").write_text(text, "utf-8")
    file = "-" if from_stdin else str(tmp_path / "chat.json")
    as_json = run("render", file, "--model", str(model_folder), "--json", stdin=text)
    assert as_json.exit_code == 0, as_json.output
    rendered = json.loads(as_json.stdout)
    assert rendered["text"].startswith("<bos><|turn>user\nSay hi.")
    plain = run("render", file, TORCHTPU_MODEL=str(model_folder), stdin=text)
    assert plain.stdout == f"{rendered['text']}\n{rendered['token_ids']}\n"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not valid JSON"),
        ("[]", "messages"),
        ('[{"role": "wizard", "content": "x"}]', "messages[0].role"),
    ],
)
def test_render_refuses_in_one_line(model_folder: Path, text: str, part: str) -> None:
    result = run("render", "-", "--model", str(model_folder), stdin=text)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert part in result.stderr
    assert result.stderr.count("\n") == 1


def test_chat_talks_to_the_url_without_its_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def talk(*arguments: object, **fields: object) -> int:
        seen.append((arguments[:3], fields))
        return 3

    monkeypatch.setattr(terminal, "run", talk)
    result = run("chat", "--url", "http://host:1/v1/", "--system", "Be brief.", "--api-key", "k")
    assert result.exit_code == 3
    assert seen == [(("http://host:1", None, "Be brief."), {"api_key": "k"})]


def test_doctor_reports_every_check_as_json(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "engine_build", lambda: {"crate": "0.1.0", "torch": "2.14.1", "rustc": "1.95"}
    )
    result = run("doctor", str(model_folder), "--json")
    report = json.loads(result.stdout)
    checks = report["checks"]
    assert list(checks) == [
        "python",
        "torch",
        "module",
        "torch_tpu",
        "device",
        "threads",
        "checkpoint",
        "memory",
    ]
    assert all(check["status"] in ("ok", "warning", "failed") for check in checks.values())
    assert (report["ok"], result.exit_code) == (True, 0), report
    assert checks["checkpoint"]["architecture"] == "Gemma4ForCausalLM"
    assert checks["module"]["build"]["torch"] == "2.14.1"
    assert checks["threads"]["usable"] >= 1
    assert checks["memory"]["available_bytes"] > 0
    plain = run("doctor", str(model_folder))
    assert plain.stdout.count("\n") == len(checks)


def test_doctor_says_what_is_wrong_and_exits_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_module() -> dict[str, str]:
        raise ImportError("built for torch 2.13.0, found 2.14.1; run `make build`")

    monkeypatch.setattr(doctor, "engine_build", no_module)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    result = run("doctor", str(tmp_path), "--device", "tpu", "--json")
    report = json.loads(result.stdout)
    assert (report["ok"], result.exit_code) == (False, 1)
    checks = report["checks"]
    assert "make build" in checks["module"]["message"]
    assert "safetensors" in checks["checkpoint"]["message"]
    assert "found none; --simulate-tpu" in checks["device"]["message"]
    failed = [name for name, check in checks.items() if check["status"] == "failed"]
    assert {"module", "checkpoint"} <= set(failed)


def test_doctor_does_not_download() -> None:
    models = ["google/gemma-4-E2B-it"]
    check = doctor._checkpoint(models, doctor._places(models))
    assert check["status"] == "warning"
    assert "Hub" in check["message"]


def members_memory(member: str, load: doctor.Load, available: int | None = None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if available is not None:
            patch.setattr(doctor, "_available_bytes", lambda: available)
        return doctor._memory([E2B.parent / member], load)


def test_doctor_says_what_a_model_needs_before_it_is_loaded_and_what_to_do_if_that_is_too_much() -> (
    None
):
    """By config.json alone: the folders have nothing else."""
    fits = members_memory("e2b", doctor.Load(), 12_000_000_000)
    assert fits["status"] == "ok"
    assert "9.3 GB of weights in bfloat16" in fits["message"]
    mapped = members_memory("26b_a4b", doctor.Load(), 20_000_000_000)
    assert mapped["status"] == "warning"
    assert "50.5 GB" in mapped["message"]
    assert "fits with a W4A16 checkpoint of it" in mapped["message"]
    none = members_memory("31b", doctor.Load(), 4_000_000_000)
    assert "a smaller model or a larger machine" in none["message"]
    cut = members_memory("e2b", doctor.Load(context=131_072), 12_000_000_000)
    assert re.search(r"fits with --context \d+ ", cut["message"])


def test_doctor_measures_a_chip_by_its_own_memory() -> None:
    chip = doctor.Load(device="tpu")
    assert members_memory("e2b", chip)["status"] == "ok"
    e4b = members_memory("e4b", chip)
    assert e4b["status"] == "failed"
    assert "fits with --weight-format int8 (" in e4b["message"]
    assert members_memory("e4b", replace(chip, int8=True))["status"] == "ok"
    twelve = members_memory("12b", replace(chip, int8=True))["message"]
    assert "--slots 2" in twelve
    large = members_memory("26b_a4b", chip)
    assert "a smaller model or a larger machine" in large["message"]
    # The simulated chip has the machine's memory.
    simulated = doctor._memory([E2B], chip, simulate_tpu=True)
    assert simulated["available_bytes"] != 16_000_000_000


def test_doctor_does_not_guess_the_memory_of_a_model_that_is_not_here() -> None:
    check = doctor._memory(None, doctor.Load())
    assert (check["status"], "needed_bytes" in check) == ("warning", False)
    assert "not known" in check["message"]

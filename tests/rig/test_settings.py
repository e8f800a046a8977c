"""tpu.env and its model say the same, and every wrong setting is an error that names its key."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from rig.settings import FILE, Settings, SettingsError, read


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in Settings.model_fields:
        monkeypatch.delenv(key.upper(), raising=False)


def written(folder: Path, **changed: str) -> Path:
    """tpu.env with some values changed or added."""
    text = FILE.read_text()
    for key, value in changed.items():
        line = f"{key}={value}"
        text, count = re.subn(rf"^{key}=.*$", line, text, flags=re.MULTILINE)
        if not count:
            text += f"{line}\n"
    file = folder / "tpu.env"
    file.write_text(text)
    return file


def test_the_file_has_every_setting_once_in_the_models_order_with_its_default() -> None:
    keys = re.findall(r"^([A-Z_0-9]+)=", FILE.read_text(), re.MULTILINE)
    assert keys == [key.upper() for key in Settings.model_fields]
    assert read() == Settings()


def test_every_setting_has_a_comment_above_it_or_above_its_neighbour() -> None:
    blocks = re.split(r"\n\n", FILE.read_text())
    for block in blocks:
        if re.search(r"^[A-Z_0-9]+=", block, re.MULTILINE):
            assert block.lstrip().startswith("#") or "NETWORK=" in block or "PYTHON_BIN=" in block


def test_arguments_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, ZONE="us-east1-d", SERVE_PORT="8001", PROJECT_ID="from-file")
    monkeypatch.setenv("SERVE_PORT", "8002")
    monkeypatch.setenv("PROJECT_ID", "from-environment")
    settings = read(file, project_id="given", queued_resource=None)
    assert (settings.zone, settings.serve_port, settings.project_id) == (
        "us-east1-d",
        8002,
        "given",
    )
    assert settings.queued_resource == "gemma4-rust-qr"
    assert settings.parent == "projects/given/locations/us-east1-d"
    assert settings.node_id == "gemma4-rust-qr-node"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ZONE", "us-west4"),
        ("QUEUED_RESOURCE", "Gemma"),
        ("QUEUED_RESOURCE", "a" * 60),
        ("ACCELERATOR_TYPE", "v5e"),
        ("PROVISIONING_MODEL", "cheap"),
        ("MAX_RUN_DURATION", "4 hours"),
        ("MAX_RUN_DURATION", "1m"),
        ("MAX_RUN_DURATION", "8d"),
        ("MAX_COST_USD", "0"),
        ("IDLE_MINUTES", "-1"),
        ("SOURCE_RANGE", "10.0.0.1/8"),
        ("CHECKPOINTS", ""),
        ("REVISIONS", "main"),
        ("SERVE_CONTEXT", "one"),
        ("SERVE_STEP", "captured"),
        ("SERVE_DEFER_AND_FUSE", "yes"),
        ("SERVE_WEIGHT_FORMAT", "int3"),
        ("SERVE_SLOTS", "0"),
        ("SERVE_PORT", "70000"),
        ("PYTHON_BIN", "python2.7"),
        ("RUST_TOOLCHAIN", "stable; reboot"),
        ("SERVE_CONTEXTS", "8192"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_found(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{key}: ") as refused:
        read(written(tmp_path, **{key: value}))
    assert "http" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"SERVE_STEP": "eager", "SERVE_DEFER_AND_FUSE": "1"}, "SERVE_DEFER_AND_FUSE"),
        ({"SERVE_STEP": "fused", "SERVE_WEIGHT_FORMAT": "int8"}, "SERVE_WEIGHT_FORMAT"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    tmp_path: Path, changed: dict[str, str], key: str
) -> None:
    with pytest.raises(SettingsError, match=key):
        read(written(tmp_path, **changed))


def test_the_published_rigs_switch_means_fused_steps(tmp_path: Path) -> None:
    assert read().mode == "compiled"
    assert read(written(tmp_path, SERVE_DEFER_AND_FUSE="1")).mode == "fused"


def test_durations_are_a_number_and_a_unit(tmp_path: Path) -> None:
    for text, wanted in (("90m", 5400), ("4h", 14400), ("1d", 86400), ("900s", 900)):
        settings = read(written(tmp_path, MAX_RUN_DURATION=text))
        assert settings.max_run_duration == timedelta(seconds=wanted)


def test_without_a_project_or_a_file_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"PROJECT_ID: .*--project"):
        assert read().parent
    with pytest.raises(SettingsError, match=r"found no such file"):
        read(tmp_path / "tpu.env")

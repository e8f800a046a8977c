"""From settings to the request that creates the queued resource, and to the gcloud command that would do the same. Pure: it asks nobody.

Shapes are those of the TPU API v2alpha1's discovery document (revision 20261001); the official client library has no flex-start.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rig.settings import Settings

LABELS = {"rig": "gemma4-rust"}
"""What is ours carries these, and nothing else is ever touched."""
METADATA = ("startup-script", "settings", "bundle-crate", "bundle-server", "bundle-sha256")
"""Keys whose values are too long for a command line (rig/bundle.py)."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True)
class Plan:
    """A request and what it is for."""

    parent: str
    queued_resource_id: str
    body: dict[str, Any]
    """A `QueuedResource` of v2alpha1."""


def plan(settings: Settings, metadata: Mapping[str, str]) -> Plan:
    """The request for the settings' one VM.

    Raises:
        SettingsError: no project is set.
    """
    node: dict[str, Any] = {
        "acceleratorType": settings.accelerator_type,
        "runtimeVersion": settings.runtime_version,
        "networkConfig": _without_none(
            {
                "network": settings.network,
                "subnetwork": settings.subnetwork,
                "enableExternalIps": True,
            }
        ),
        "tags": list(settings.network_tags),
        "labels": LABELS,
        "metadata": dict(metadata),
    }
    if settings.service_account:
        node["serviceAccount"] = {"email": settings.service_account, "scope": [SCOPE]}
    spec = {"parent": settings.parent, "nodeId": settings.node_id, "node": node}
    body: dict[str, Any] = {"tpu": {"nodeSpec": [spec]}, **_provisioning(settings)}
    body["queueingPolicy"] = {"validUntilDuration": f"{int(settings.valid_until.total_seconds())}s"}
    return Plan(settings.parent, settings.queued_resource, body)


def _provisioning(settings: Settings) -> dict[str, Any]:
    match settings.provisioning_model:
        case "flex-start":
            seconds = int(settings.max_run_duration.total_seconds())
            return {
                "provisioningModel": "FLEX_START",
                "runDuration": {"maxRunDuration": f"{seconds}s"},
            }
        case "spot":
            return {"provisioningModel": "SPOT"}
        case "reserved":
            return {"guaranteed": {"reserved": True}}
        case _:
            return {}


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def gcloud(settings: Settings, folder: str = "rendered") -> str:
    """The same as a command for a shell; of the metadata, `folder` has a file for each key (`torchtpu-rig render`).

    Flex-start is in gcloud's alpha track only.
    """
    keys = [*METADATA, *([] if settings.api_key_secret else ["api-key"])]
    fixed = {
        "--project": settings.project_id,
        "--zone": settings.zone,
        "--node-id": settings.node_id,
        "--accelerator-type": settings.accelerator_type,
        "--runtime-version": settings.runtime_version,
        "--network": settings.network,
        "--subnetwork": settings.subnetwork,
        "--tags": ",".join(settings.network_tags) or None,
        "--labels": ",".join(f"{key}={value}" for key, value in LABELS.items()),
        "--service-account": settings.service_account,
        "--scopes": SCOPE if settings.service_account else None,
        "--valid-until-duration": f"{int(settings.valid_until.total_seconds())}s",
        "--metadata": "enable-guest-attributes=TRUE",
        "--metadata-from-file": ",".join(f"{key}={folder}/{key}" for key in keys),
    }
    flags = [f"{flag}={value}" for flag, value in fixed.items() if value]
    match settings.provisioning_model:
        case "flex-start":
            seconds = int(settings.max_run_duration.total_seconds())
            flags += ["--provisioning-model=flex-start", f"--max-run-duration={seconds}s"]
        case "spot":
            # Not --spot, which asks for a standard VM as well.
            flags.append("--provisioning-model=spot")
        case "reserved":
            flags.append("--reserved")
        case _:
            pass
    command = "gcloud alpha compute tpus queued-resources create"
    return shlex.join([*command.split(), settings.queued_resource, *flags])

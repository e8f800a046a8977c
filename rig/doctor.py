"""What would make creating fail, or cost more than meant, looked at before anything is created. Changes nothing.

Each look is its own: one that fails hides no other. A service that does not answer is asked once, not by every look.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rig import capacity, cost, keeper, prices
from rig.bundle import MAX_ALL, MAX_VALUE, BundleError, bundle, metadata
from rig.errors import RigError, advice
from rig.google import GoogleError, UnreachableError
from rig.network import EVERYBODY, Firewall
from rig.secret_manager import Secrets
from rig.tokens import TokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rig.session import Session
    from rig.settings import Settings

# By what they are needed for. Queued resources have no permissions of their own: they are nodes'
# (cloud.google.com/iam/docs/roles-permissions/tpu).
PERMISSIONS = {
    "roles/tpu.admin": (
        *("tpu.nodes.create", "tpu.nodes.delete", "tpu.nodes.get", "tpu.nodes.list"),
        *("tpu.operations.get", "tpu.acceleratortypes.list", "tpu.runtimeversions.list"),
    ),
    "roles/iam.serviceAccountUser": ("iam.serviceAccounts.actAs",),
    "roles/compute.securityAdmin": (
        *("compute.firewalls.create", "compute.firewalls.delete", "compute.firewalls.get"),
        *("compute.firewalls.update", "compute.networks.updatePolicy"),
    ),
}
SECRET_PERMISSIONS = {
    "roles/secretmanager.admin": (
        *("secretmanager.secrets.create", "secretmanager.versions.add"),
        "secretmanager.versions.access",
    )
}
READS_SECRETS = "roles/secretmanager.secretAccessor"

V5E_IMAGE = "v2-alpha-tpuv5-lite"
# What flex-start and spot count against (github.com/marin-community/marin, issues 87 and 1612).
V5E_QUOTA = "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str
    do: str | None = None


def examine(session: Session) -> Iterator[Finding]:
    """Everything, one by one as it is found."""
    blocked = None
    if not session.settings.project_id:
        blocked = "no project is set"
        do = "Set PROJECT_ID in tpu.env, or give --project."
        yield Finding("project", False, "PROJECT_ID is empty", do)
    down: set[str] = set()
    for name, service, look in LOOKS:
        if service and (blocked or service in down):
            why = blocked or f"{service}.googleapis.com does not answer"
            yield Finding(name, False, f"not looked at: {why}")
            continue
        try:
            yield from look(session)
        except TokenError as error:
            blocked = "nobody is signed in"
            yield Finding(name, False, *_told(error))
        except UnreachableError as error:
            down.add(service)
            do = "See that this machine reaches it, through a proxy if need be (HTTPS_PROXY)."
            yield Finding(name, False, str(error), do)
        except GoogleError as error:
            yield _refused(name, service, error, session.settings)
        except (RigError, cost.CostError, BundleError) as error:
            yield Finding(name, False, *_told(error))


def _refused(name: str, service: str, error: GoogleError, settings: Settings) -> Finding:
    known = advice(str(error), settings)
    if known is None:
        return Finding(name, False, str(error))
    text, do = f"{known.what} ({error})", known.do
    if "roles/tpu.admin there" in do and service != "tpu":
        # The TPU API's role has nothing to do with this service.
        do = f"Ask an owner of {settings.project_id} for roles/viewer: creating may work without, looking does not."
    return Finding(name, False, text, do)


def _told(error: Exception) -> tuple[str, str | None]:
    """Our own errors say what is wrong and then what to do."""
    text, _, do = str(error).rpartition("; ")
    return (text, do) if text else (do, None)


def _project(session: Session) -> Iterator[Finding]:
    project = session.settings.project_id
    yield Finding("account", True, session.google.who)
    try:
        found = session.google.call("GET", "cloudresourcemanager", f"v1/projects/{project}")
    except GoogleError as error:
        if error.code not in {403, 404} or "has not been used" in error.message:
            raise
        # The service does not tell a missing project from one that this account may not see.
        text = f"{project} does not exist, or {session.google.who} may not see it"
        yield Finding("project", False, text, "Set PROJECT_ID to the project's id, not its name.")
        return
    state = found.get("lifecycleState", "ACTIVE")
    do = None if state == "ACTIVE" else "Restore the project, or use another."
    yield Finding("project", state == "ACTIVE", f"{project} is {state}", do)


def _services(session: Session) -> Iterator[Finding]:
    project = session.settings.project_id
    wanted = ["tpu", "compute"]
    if _secrets(session.settings):
        wanted.append("secretmanager")
    for name in wanted:
        host = f"{name}.googleapis.com"
        found = session.google.call("GET", "serviceusage", f"v1/projects/{project}/services/{host}")
        is_on = found.get("state") == "ENABLED"
        do = f"Run `gcloud services enable {host} --project={project}` and wait a minute."
        text = "enabled" if is_on else "not enabled"
        yield Finding(f"API {host}", is_on, text, None if is_on else do)


def _permissions(session: Session) -> Iterator[Finding]:
    project = session.settings.project_id
    by_role = PERMISSIONS | (SECRET_PERMISSIONS if session.settings.api_key_secret else {})
    wanted = [one for permissions in by_role.values() for one in permissions]
    path = f"v1/projects/{project}:testIamPermissions"
    body = {"permissions": wanted}
    answer = session.google.call("POST", "cloudresourcemanager", path, body=body)
    missing = set(wanted) - set(answer.get("permissions", []))
    if not missing:
        yield Finding("permissions", True, f"all {len(wanted)} that are needed")
    for role, permissions in by_role.items():
        if lacking := [one for one in permissions if one in missing]:
            text = f"{session.google.who} lacks {', '.join(lacking)}"
            do = f"Ask an owner of {project} for {role}."
            if role == "roles/iam.serviceAccountUser":
                do += (
                    " On the VM's service account alone it is enough, and cannot be seen from here."
                )
            yield Finding("permissions", False, text, do)


def _chip(session: Session) -> Iterator[Finding]:
    settings = session.settings
    wanted, zone, model = settings.accelerator_type, settings.zone, settings.provisioning_model
    has = session.api.accelerator_types(settings.parent)
    if wanted not in has:
        text = f"{zone} has no {wanted}; it has {', '.join(sorted(has)) or 'nothing'}"
        do = "`torchtpu-rig capacity` lists zones that have it."
        yield Finding("chip", False, text, do)
    elif not capacity.is_taken(model, wanted, zone):
        text = f"{zone} has {wanted}, and does not take {model} for it"
        places = " or ".join(sorted(capacity.FLEX_START_V5E))
        do = f"Use ZONE={places}, or PROVISIONING_MODEL=spot here."
        yield Finding("chip", False, text, do)
    else:
        refused = capacity.last_refusal(settings)
        text = f"{zone} has {wanted} for {model}"
        yield Finding("chip", True, f"{text}; last refusal {refused}" if refused else text)


def _image(session: Session) -> Iterator[Finding]:
    settings = session.settings
    path = f"v2alpha1/{settings.parent}/runtimeVersions"
    has = {str(one["version"]) for one in session.google.pages("tpu", path, "runtimeVersions")}
    wanted = settings.runtime_version
    if wanted not in has:
        text = f"{settings.zone} has no {wanted}; it has {', '.join(sorted(has))}"
        yield Finding("image", False, text, f"Set RUNTIME_VERSION={V5E_IMAGE} for v5e.")
    elif settings.accelerator_type.startswith("v5litepod-") and wanted != V5E_IMAGE:
        text = f"{wanted} is there, and may boot v5e without its chip"
        yield Finding("image", False, text, f"Set RUNTIME_VERSION={V5E_IMAGE}.")
    else:
        yield Finding("image", True, wanted)


def _network(session: Session) -> Iterator[Finding]:
    network = Firewall(session.google, session.settings).network
    try:
        session.google.call("GET", "compute", f"compute/v1/{network}")
    except GoogleError as error:
        if not error.is_not_found:
            raise
        do = "Set NETWORK to one that is there, or make it: `gcloud compute networks create default`."
        yield Finding("network", False, f"there is no {network}", do)
        return
    yield Finding("network", True, network)


def _way_in(session: Session) -> Iterator[Finding]:
    firewall = Firewall(session.google, session.settings)
    found, wanted = firewall.rule(), firewall.wanted()
    who = f"{', '.join(wanted.ports)} from {', '.join(wanted.sources)} to {', '.join(wanted.tags)}"
    if found and not found.is_ours:
        text = f"the firewall rule {found.name} is somebody else's, and is left alone"
        yield Finding("way in", False, text, "Rename it, or set another SERVE_PORT.")
    elif EVERYBODY in wanted.sources:
        text = f"{who}: the whole internet, in plain HTTP, with the API key as the only guard"
        do = "Leave SOURCE_RANGE empty for this machine alone, or set ACCESS=iap."
        yield Finding("way in", True, text, do)
    else:
        state = "open" if found == wanted else "corrected" if found else "made"
        text = f"{who}, {'as it is' if state == 'open' else f'which will be {state}'}"
        yield Finding("way in", True, text)


def _quota(session: Session) -> Iterator[Finding]:
    settings = session.settings
    holding = session.rig.holding_quota()
    for one in holding:
        text = f"{one.short_name} in {one.zone} is {one.state} and holds quota"
        do = f"Run `torchtpu-rig delete --zone {one.zone} --name {one.short_name}`."
        yield Finding("quota", False, text, do)
    if not holding:
        text = "nothing of ours holds any for nothing"
        if settings.accelerator_type.startswith("v5litepod-"):
            text += f"; flex-start and spot v5e count against {V5E_QUOTA}"
        see = f"`gcloud alpha quotas info list --service=tpu.googleapis.com --project={settings.project_id}` lists limits."
        yield Finding("quota", True, text, see)


def _price(session: Session) -> Iterator[Finding]:
    found = prices.current(session.google, session.settings)
    cost.check(session.settings, found=found)
    yield Finding("price", True, str(found))


def _metadata(session: Session) -> Iterator[Finding]:
    # The key's length is that of a generated one.
    found = metadata(session.settings, "k" * 43, bundle())
    largest = max(found, key=lambda key: len(found[key].encode()))
    size = sum(len(key) + len(value.encode()) for key, value in found.items())
    text = (
        f"{size / 1024:.0f} of {MAX_ALL / 1024:.0f} KiB; "
        f"the largest value, {largest}, {len(found[largest].encode()) / 1024:.0f} of {MAX_VALUE / 1024:.0f}"
    )
    yield Finding("metadata", True, text)


def _secrets(settings: Settings) -> list[str]:
    named = (settings.api_key_secret, settings.hf_token_secret)
    return [one for one in named if one]


def _secret(session: Session) -> Iterator[Finding]:
    settings = session.settings
    secrets = Secrets(session.google, settings.project_id or "")
    reader = f"; the VM's account needs {READS_SECRETS} on it"
    if name := settings.api_key_secret:
        state = "is there" if secrets.has(name) else "will be made with a new key"
        yield Finding("secret", True, f"{name} for the API key {state}{reader}")
    if name := settings.hf_token_secret:
        is_there = secrets.has(name)
        do = f"Write the token: `gcloud secrets create {name} --data-file=- --project={settings.project_id}`."
        state = f"is there{reader}" if is_there else "is not there, or has no value"
        text = f"{name} for the Hugging Face token {state}"
        yield Finding("secret", is_there, text, None if is_there else do)


def _end(session: Session) -> Iterator[Finding]:
    settings = session.settings
    longest = f"{settings.max_run_duration.total_seconds() / 3600:g} h"
    if not keeper.is_needed(settings):
        yield Finding("end", True, f"the service ends the VM after {longest}")
        return
    by_itself = [f"after {longest}"] if settings.provisioning_model != "flex-start" else []
    if settings.idle_minutes:
        by_itself.append(f"after {settings.idle_minutes} min without a request")
    account = settings.service_account or "the project's default Compute Engine account"
    member = settings.service_account or "PROJECT_NUMBER-compute@developer.gserviceaccount.com"
    text = (
        f"the VM deletes itself {' and '.join(by_itself)}; for that {account} needs {keeper.ROLE}"
    )
    do = (
        f"Unless it has it: `gcloud projects add-iam-policy-binding {settings.project_id} "
        f"--member=serviceAccount:{member} --role={keeper.ROLE}`."
    )
    yield Finding("end", True, text, do)


def _tools(session: Session) -> Iterator[Finding]:
    where = shutil.which("gcloud")
    is_needed = session.settings.access == "iap"
    if where or is_needed:
        do = "Install it: https://cloud.google.com/sdk/docs/install."
        text = where or "not installed, and the way in with ACCESS=iap"
        yield Finding("gcloud", bool(where), text, None if where else do)
    else:
        yield Finding("gcloud", True, "not installed; only `torchtpu-rig ssh` and `tunnel` need it")


# Name, the service that is asked, and the look; those without one do without a project.
LOOKS: tuple[tuple[str, str, Callable[[Session], Iterator[Finding]]], ...] = (
    ("project", "cloudresourcemanager", _project),
    ("APIs", "serviceusage", _services),
    ("permissions", "cloudresourcemanager", _permissions),
    ("chip", "tpu", _chip),
    ("image", "tpu", _image),
    ("network", "compute", _network),
    ("way in", "compute", _way_in),
    ("quota", "tpu", _quota),
    ("secret", "secretmanager", _secret),
    ("price", "", _price),
    ("metadata", "", _metadata),
    ("end", "", _end),
    ("gcloud", "", _tools),
)

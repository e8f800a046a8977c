"""What the service refuses with → what a person can do about it.

Signatures are those that users have met (public issues of marin, SkyPilot, terraform-provider-google, jax and Google's guides).
Knows texts and states, and asks nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rig.settings import Settings
    from rig.states import QueuedResource

LONG_WAIT = timedelta(hours=1)


class RigError(RuntimeError):
    """What was asked for cannot be; the text says why and what to do."""


@dataclass(frozen=True)
class Advice:
    """An error in words, and what to do."""

    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.what} {self.do}"


# In order: the first that fits is taken. `{zone}`, `{name}`, `{project}` and named groups are filled in.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"FLEX_START provisioning model is not supported",
        "Flex-start v5e-1 is not offered in {zone}.",
        "Use ZONE=us-west4-a, or PROVISIONING_MODEL=spot here.",
    ),
    (
        r"alternate release tracks|unrecognized arguments",
        "Flex-start is not in this track of gcloud.",
        "Use `gcloud alpha`, as `torchtpu-rig plan` prints it; `gcloud components install alpha` adds it.",
    ),
    (
        r"Quota limit '(?P<quota>[^']+)' has been exceeded. Limit: (?P<limit>\d+)",
        "The project's quota {quota} of {limit} is used up in {zone}.",
        "Ask for more at https://console.cloud.google.com/iam-admin/quotas?project={project}, or free what holds it: "
        "`torchtpu-rig status` lists FAILED and SUSPENDED resources, which hold quota until they are deleted.",
    ),
    (
        r"Insufficient reserved capacity",
        "The reservation has no free chip in {zone}.",
        "Use another PROVISIONING_MODEL, or a reservation with room.",
    ),
    (
        r"no more capacity in the zone|RESOURCE_EXHAUSTED|STOCKOUT",
        "There is no free chip in {zone} now.",
        "Flex-start waits for one as long as VALID_UNTIL says; spot and on-demand fail at once. Try again, or another zone.",
    ),
    (
        r"accelerator .* was not found in zone|accelerator type .* not found",
        "{zone} has no {accelerator}.",
        "`torchtpu-rig doctor` lists what the zone has.",
    ),
    (
        r"update is not supported while in state PREEMPTED|was preempted",
        "The VM was preempted while it was being created.",
        "Delete it and create it again: `torchtpu-rig delete`, then `torchtpu-rig create`.",
    ),
    (
        r"must be in FAILED or SUSPENDED state|force must be set",
        "{name} still has a VM, and was asked to go without force.",
        "`torchtpu-rig delete` deletes the VM with it.",
    ),
    (
        r"requires a quota project",
        "Your sign-in does not say which project its calls are counted for.",
        "Run `gcloud auth application-default set-quota-project {project}`.",
    ),
    (
        r"serviceusage.services.use|required permission to use project",
        "Your account may not have its calls counted for the project.",
        "It needs roles/serviceusage.serviceUsageConsumer there.",
    ),
    (
        r"(?:(?P<api>\w[\w ]* API) has not been used in project|SERVICE_DISABLED|it is disabled)(?:.*/apis/api/(?P<service>[\w.-]+))?",
        "The {api} is not enabled in {project}.",
        "Run `gcloud services enable {service} --project={project}` and wait a minute.",
    ),
    (
        r"iam.serviceAccounts.actAs|does not have access to service account",
        "You may not run a VM as the service account.",
        "You need roles/iam.serviceAccountUser on it, beside roles/tpu.admin.",
    ),
    (
        r"PERMISSION_DENIED|does not have permission",
        "Your account may not do this in {project}.",
        "It needs roles/tpu.admin there.",
    ),
    (
        r"UNAUTHENTICATED|invalid authentication credentials",
        "The service does not know who you are.",
        "Run `gcloud auth application-default login`.",
    ),
    (
        r"Failed to perform tenant project creation",
        "The project cannot hold TPUs; this happens to projects that were deleted and restored.",
        "Make a new project.",
    ),
    (
        r"ALREADY_EXISTS|already exists",
        "{name} exists already in {zone}.",
        "`torchtpu-rig status` shows it; delete it, or set another QUEUED_RESOURCE.",
    ),
    (
        r"not allowed to use the machine type",
        "v5e cannot be had from Compute Engine.",
        "Use the TPU API, as this rig does, or GKE.",
    ),
    (
        r"code 13|Internal Error|INTERNAL",
        "The service failed inside; new projects without v5e quota meet this while PROVISIONING.",
        "Try once more; then ask Google's support to allow the project.",
    ),
)


def advice(text: str, settings: Settings) -> Advice | None:
    """What to say about an error of the service; None when it is not a known one."""
    for pattern, what, do in _KNOWN:
        found = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
        if found:
            named = {key: value for key, value in found.groupdict().items() if value}
            words = _words(settings) | named
            return Advice(what.format(**words), do.format(**words))
    return None


def _words(settings: Settings) -> dict[str, str]:
    return {
        "zone": settings.zone,
        "name": settings.queued_resource,
        "project": settings.project_id or "the project",
        "accelerator": settings.accelerator_type,
        "api": "Cloud TPU API",
        "service": "tpu.googleapis.com",
    }


def ended(resource: QueuedResource, settings: Settings, now: datetime | None = None) -> Advice:
    """Why a SUSPENDED resource has no VM any more: the run was over, the chip was taken away, or somebody stopped it."""
    name = resource.short_name
    hours = f"{settings.max_run_duration.total_seconds() / 3600:g} h"
    end = resource.run_duration.get("terminationTime")
    if resource.initiator == "USER":
        what = f"The VM of {name} was stopped by somebody who may."
    elif resource.provisioning_model != "FLEX_START":
        what = f"The VM of {name} was preempted: its chip went to somebody else."
    elif end is None:
        what = f"The {hours} of {name} were up, or it was preempted."
    elif datetime.fromisoformat(end) <= (now or datetime.now(UTC)):
        what = f"The {hours} of {name} were up."
    else:
        what = f"{name} was preempted before its {hours} were up."
    return Advice(
        what,
        "It holds quota until `torchtpu-rig delete`; then `torchtpu-rig create` asks for another.",
    )


def waiting(
    resource: QueuedResource, settings: Settings, now: datetime | None = None
) -> Advice | None:
    """What to look at when a request has waited for more than an hour; None before."""
    begun = resource.create_time
    if begun is None or not resource.state.is_waiting:
        return None
    waited = (now or datetime.now(UTC)) - begun
    if waited < LONG_WAIT:
        return None
    hours = waited.total_seconds() / 3600
    return Advice(
        f"{resource.short_name} has waited for a chip for {hours:.1f} h.",
        "Chips may be rare, or the project may lack quota without the service saying so: see that GPUS_ALL_REGIONS is above 0 at "
        f"https://console.cloud.google.com/iam-admin/quotas?project={settings.project_id}, and ask once with "
        "PROVISIONING_MODEL=spot under another QUEUED_RESOURCE: spot does not queue and names the reason.",
    )

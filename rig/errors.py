"""What the service refuses with → what a person can do about it.

Signatures are those that users have met (public issues of marin, SkyPilot, terraform-provider-google, jax and Google's guides).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rig.settings import Settings


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
        r"has not been used in project|SERVICE_DISABLED|it is disabled",
        "The Cloud TPU API is not enabled in {project}.",
        "Run `gcloud services enable tpu.googleapis.com --project={project}` and wait a minute.",
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
        found = re.search(pattern, text, re.IGNORECASE)
        if found:
            words = {
                "zone": settings.zone,
                "name": settings.queued_resource,
                "project": settings.project_id or "the project",
                "accelerator": settings.accelerator_type,
                **found.groupdict(),
            }
            return Advice(what.format(**words), do.format(**words))
    return None

"""Money is counted before it is spent, and what the service refuses is told with what to do."""

from datetime import UTC, datetime, timedelta

import pytest

from rig.cost import CostError, check, cost
from rig.errors import advice, ended, waiting
from rig.settings import Settings
from rig.states import QueuedResource

OURS = Settings(project_id="p")


def test_a_run_costs_its_longest_hours_at_the_list_price() -> None:
    found = cost(OURS)
    assert found.at_most == pytest.approx(2.40)
    assert str(found) == "at most USD 2.40: 4 h at USD 0.60 (list price of 2026-11)"
    four = Settings(accelerator_type="v5litepod-4", max_run_duration=timedelta(hours=1))
    assert cost(four).at_most == pytest.approx(2.40)


def test_what_could_cost_more_than_the_cap_is_refused_with_both_numbers() -> None:
    assert check(OURS, 2).at_most == pytest.approx(2.40)
    with pytest.raises(CostError, match=r"at most USD 5.00 .*found 3 VMs, each at most USD 2.40"):
        check(OURS, 3)
    with pytest.raises(CostError, match=r"USD 14.40: 24 h"):
        check(Settings(max_run_duration=timedelta(days=1)))


def test_without_a_known_price_nothing_is_allowed() -> None:
    with pytest.raises(CostError, match="none for v5litepod-1 spot in europe-west4"):
        check(Settings(zone="europe-west4-b", provisioning_model="spot"))
    with pytest.raises(CostError, match="none for v6e-1"):
        check(Settings(accelerator_type="v6e-1"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'FLEX_START provisioning model is not supported for accelerator type "v5litepod-1" in location "us-east1-c"',
            "us-west4-a",
        ),
        (
            "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0",
            "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI of 0",
        ),
        ("There is no more capacity in the zone", "waits for one"),
        ("Insufficient reserved capacity", "reservation"),
        (
            "Cloud TPU received a bad request. the accelerator v5litepod-1 was not found in zone us-east1-c",
            "doctor",
        ),
        (
            "PERMISSION_DENIED: Cloud TPU API has not been used in project 12 before",
            "gcloud services enable",
        ),
        (
            "PERMISSION_DENIED: The caller does not have permission iam.serviceAccounts.actAs",
            "serviceAccountUser",
        ),
        ("PERMISSION_DENIED: The caller does not have permission", "roles/tpu.admin"),
        ("Failed to perform tenant project creation", "new project"),
        ("ALREADY_EXISTS: Resource 'projects/p/x' already exists", "gemma4-rust-qr exists already"),
        ("update is not supported while in state PREEMPTED", "create it again"),
        ("INTERNAL: Internal Error", "once more"),
        (
            "UNAUTHENTICATED: Request had invalid authentication credentials",
            "application-default login",
        ),
        (
            "PERMISSION_DENIED: Compute Engine API has not been used in project 12 before or it is disabled. Enable it by visiting "
            "https://console.developers.google.com/apis/api/compute.googleapis.com/overview?project=12 then retry.",
            "The Compute Engine API is not enabled in p. Run `gcloud services enable compute.googleapis.com",
        ),
        (
            "ERROR: (gcloud.compute.tpus.queued-resources.create) unrecognized arguments:\n --provisioning-model flag is available "
            "in one or more alternate release tracks",
            "gcloud alpha",
        ),
        (
            "FAILED_PRECONDITION: Queued resource must be in FAILED or SUSPENDED state, or force must be set, to be deleted.",
            "deletes the VM with it",
        ),
        (
            "PERMISSION_DENIED: Your application is authenticating by using local Application Default Credentials. "
            "The cloudbilling.googleapis.com API requires a quota project, which is not set by default.",
            "set-quota-project p",
        ),
        (
            "PERMISSION_DENIED: Caller does not have required permission to use project p. Grant the caller the roles/x",
            "serviceUsageConsumer",
        ),
        (
            "code 13: an internal error, please try again",
            "allow the project",
        ),
        (
            "This user agent is not allowed to use the machine type 'ct5lp-hightpu-1t'",
            "Use the TPU API",
        ),
    ],
)
def test_errors_that_users_have_met_are_told_with_what_to_do(text: str, says: str) -> None:
    found = advice(text, OURS)
    assert found is not None
    assert says in str(found)
    assert "{" not in str(found)


def test_an_error_that_nobody_has_met_is_not_explained() -> None:
    assert advice("the moon is full", OURS) is None


def resource(
    state: str = "SUSPENDED", initiator: str = "SERVICE", **fields: object
) -> QueuedResource:
    name = "projects/p/locations/us-west4-a/queuedResources/gemma4-rust-qr"
    known = {"provisioningModel": "FLEX_START", "createTime": "2026-12-01T08:00:00Z"}
    told = {"state": state, "stateInitiator": initiator}
    return QueuedResource.model_validate({"name": name, "state": told, **known, **fields})


NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            resource(runDuration={"terminationTime": "2026-12-01T12:00:00Z"}),
            "The 4 h of gemma4-rust-qr were up.",
        ),
        (
            resource(runDuration={"terminationTime": "2026-12-01T14:00:00Z"}),
            "preempted before its 4 h were up",
        ),
        (resource(runDuration={"maxRunDuration": "14400s"}), "were up, or it was preempted"),
        (resource(provisioningModel="SPOT"), "its chip went to somebody else"),
        (resource(initiator="USER"), "stopped by somebody who may"),
    ],
)
def test_a_vm_that_is_gone_is_told_with_why_and_how_to_have_another(
    found: QueuedResource, says: str
) -> None:
    told = str(ended(found, OURS, NOON))
    assert says in told
    assert "`torchtpu-rig delete`; then `torchtpu-rig create`" in told


def test_a_long_wait_is_explained_and_a_short_one_is_not() -> None:
    waits = resource("WAITING_FOR_RESOURCES")
    told = str(waiting(waits, OURS, NOON))
    assert "waited for a chip for 4.0 h" in told
    assert "GPUS_ALL_REGIONS" in told
    assert "PROVISIONING_MODEL=spot" in told
    assert waiting(waits, OURS, NOON - timedelta(hours=3, minutes=1)) is None
    assert waiting(resource("ACTIVE"), OURS, NOON) is None

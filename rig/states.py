"""What the TPU API says of queued resources, nodes and boots, typed; fields that we do not read are left aside.

Sources: the v2alpha1 discovery document (revision 20261001) and cloud.google.com/tpu/docs/queued-resources.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rig.plan import LABELS

STAGES = ("python", "torch", "rust", "crate", "weights", "smoke", "unit", "serving")
"""Of a boot, in order (startup.sh)."""


class State(StrEnum):
    """`QueuedResourceState.state`; one that is not known yet counts as waiting."""

    CREATING = "CREATING"
    ACCEPTED = "ACCEPTED"
    WAITING_FOR_RESOURCES = "WAITING_FOR_RESOURCES"
    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    FAILED = "FAILED"
    DELETING = "DELETING"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def _missing_(cls, value: object) -> State:
        return cls.UNKNOWN

    @property
    def is_waiting(self) -> bool:
        """A chip may still come."""
        return self in {
            State.CREATING,
            State.ACCEPTED,
            State.WAITING_FOR_RESOURCES,
            State.PROVISIONING,
            State.UNKNOWN,
        }

    @property
    def holds_quota_for_nothing(self) -> bool:
        """It has no VM and still counts against the quota until it is deleted."""
        return self in {State.FAILED, State.SUSPENDED}


class _Answer(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


class ApiStatus(_Answer):
    """`google.rpc.Status`."""

    code: int = 0
    message: str = ""


class Node(_Answer):
    """A VM with its chip."""

    name: str
    state: str = "UNKNOWN"
    health: str | None = None
    health_description: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    network_endpoints: list[dict[str, Any]] = Field(default_factory=list)
    scheduling_config: dict[str, Any] = Field(default_factory=dict)
    symptoms: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def external_ip(self) -> str | None:
        """Its address on the internet, once it has one."""
        for endpoint in self.network_endpoints:
            address = endpoint.get("accessConfig", {}).get("externalIp")
            if address:
                return str(address)
        return None

    @property
    def ends_at(self) -> datetime | None:
        """When its longest run is over."""
        text = self.scheduling_config.get("terminationTimestamp")
        return datetime.fromisoformat(text) if text else None


class QueuedResource(_Answer):
    """A request for a chip, and what became of it."""

    name: str
    state_fields: dict[str, Any] = Field(default_factory=dict, alias="state")
    tpu: dict[str, Any] = Field(default_factory=dict)
    create_time: datetime | None = None
    provisioning_model: str | None = None
    run_duration: dict[str, Any] = Field(default_factory=dict)

    @property
    def short_name(self) -> str:
        """Its last part, which users give."""
        return self.name.rsplit("/", 1)[-1]

    @property
    def zone(self) -> str:
        """Where it is."""
        return self.name.split("/")[3]

    @property
    def state(self) -> State:
        """Where it stands."""
        return State(self.state_fields.get("state", "UNKNOWN"))

    @property
    def initiator(self) -> str | None:
        """USER or SERVICE: who brought it to this state."""
        found = self.state_fields.get("stateInitiator")
        return str(found) if found else None

    @property
    def error(self) -> ApiStatus | None:
        """Why it failed."""
        found = self.state_fields.get("failedData", {}).get("error")
        return ApiStatus.model_validate(found) if found else None

    @property
    def nodes(self) -> list[str]:
        """Full names of its nodes, whether they exist yet or not."""
        return [f"{spec['parent']}/nodes/{spec['nodeId']}" for spec in self.tpu.get("nodeSpec", [])]

    @property
    def is_ours(self) -> bool:
        """It carries our labels, so that we may change or delete it."""
        specs = self.tpu.get("nodeSpec", [])
        labels = [spec.get("node", {}).get("labels", {}) for spec in specs]
        return bool(labels) and all(LABELS.items() <= label.items() for label in labels)


class Operation(_Answer):
    """A long-running operation."""

    name: str
    done: bool = False
    error: ApiStatus | None = None


class Boot(_Answer):
    """What a VM's startup.sh has published so far."""

    stage: str | None = None
    """`STAGE: crate`, or `FAILED: crate`; None before the first."""
    progress: str = ""
    """A line for each stage that is done, with its seconds; then DONE, or why one failed and the end of the log."""
    keeper: str | None = None
    """What the VM's keeper says: how long until it deletes the VM, or why it cannot."""

    @property
    def failed(self) -> bool:
        """A stage failed."""
        return bool(self.stage and self.stage.startswith("FAILED"))

    @property
    def is_done(self) -> bool:
        """The server answers on the VM."""
        return self.progress.rstrip().endswith("DONE")

    @property
    def done(self) -> list[tuple[str, str]]:
        """Stages that are over, each with what is told of its time."""
        lines = self.progress.partition("FAILED")[0].splitlines()
        named = [line.partition(" ") for line in lines]
        return [(name, rest) for name, _, rest in named if name in STAGES]

    @property
    def failure(self) -> str | None:
        """Which stage failed, where and with what at the end of its log."""
        _, found, rest = self.progress.partition("FAILED")
        return f"FAILED{rest.rstrip()}" if found else None

"""What the tools answer, typed: one model for each tool, made from what the rig says, with its text for people as `str`.

The schemas that clients see are made from these annotations.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from bench.load.published import Benchmark, usd_per_million_tokens
from rig import replies

if TYPE_CHECKING:
    from rig.cost import Cost
    from rig.provision import Status
    from rig.settings import Settings
    from rig.states import QueuedResource

Phase = Literal["absent", "waiting", "booting", "serving", "failed", "ended", "deleting"]


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class Named(_Result):
    """Which queued resource an answer is about."""

    name: str
    zone: str
    project: str


def named(settings: Settings) -> dict[str, str]:
    """The fields of `Named`."""
    return {
        "name": settings.queued_resource,
        "zone": settings.zone,
        "project": settings.project_id or "",
    }


class Price(_Result):
    """By list price; taxes and discounts are not in it."""

    usd_per_hour: float
    hours: float = Field(description="The longest the VM can run; it is deleted after that")
    at_most_usd: float
    text: str = Field(description="The same as a sentence, with where the price is from")

    @classmethod
    def of(cls, cost: Cost) -> Self:
        """The same, rounded to cents of a cent."""
        return cls(
            usd_per_hour=round(cost.usd_per_hour, 4),
            hours=cost.longest.total_seconds() / 3600,
            at_most_usd=round(cost.at_most, 4),
            text=str(cost),
        )


class Created(Named):
    """Of create_tpu_queued_resource."""

    already_there: bool = Field(description="It existed; nothing new was created")
    differences: list[str] = Field(description="In what it is not as the settings want it now")
    state: str | None = Field(description="As the service says it; null until it shows it")
    provisioning_model: str
    serving: str = Field(description="The checkpoint that it will serve")
    price: Price

    def __str__(self) -> str:
        if self.already_there:
            return (
                f"{self.name} in {self.zone} is there already ({self.state}); nothing was created."
            )
        line = replies.initiated(self.name, self.zone, self.serving)
        return f"{line}\nIt costs {self.price.text}. Follow it with get_rig_progress."


class Stage(_Result):
    """One stage of a boot that is over."""

    name: str
    took: str


class Progress(Named):
    """Of get_rig_progress."""

    phase: Phase
    state: str | None
    stage: str | None = Field(description="`STAGE: crate`, or `FAILED: crate`")
    stages: list[Stage] = Field(description="Those that are over, in order")
    failure: str | None = Field(description="Which stage failed and the end of its log")
    address: str | None
    ends_at: datetime | None
    settled: bool = Field(description="Waiting longer changes nothing")
    advice: str | None = Field(description="What to do, where something is to be done")

    @classmethod
    def of(cls, status: Status, settings: Settings) -> Self:
        """What `status` says of the boot."""
        resource, node, boot = status.resource, status.node, status.boot
        return cls(
            **named(settings),
            phase=status.phase,
            state=str(resource.state) if resource else None,
            stage=boot.stage,
            stages=[Stage(name=name, took=took) for name, took in boot.done],
            failure=boot.failure,
            address=node.external_ip if node else None,
            ends_at=node.ends_at if node else None,
            settled=status.is_settled,
            advice=status.advice(settings),
        )

    def __str__(self) -> str:
        took = [(one.name, one.took) for one in self.stages]
        lines = [f"{self.name} in {self.zone}: {_state(self.state, self.phase)}"]
        lines += replies.stages(took, self.stage, self.failure)
        lines += [self.advice] if self.advice else []
        if self.phase == "serving":
            lines.append(f"It serves at {self.address}. check_endpoint asks the server itself.")
        return "\n".join(lines)


def _state(state: str | None, phase: Phase) -> str:
    if state is None:
        return "there is none" if phase == "absent" else "asked for and not shown yet"
    return f"{state}, {phase}"


class Held(_Result):
    """A queued resource without a VM that counts against the quota until it is deleted."""

    name: str
    zone: str
    state: str
    reason: str | None


class Resource(Named):
    """Of get_queued_resource."""

    phase: Phase
    state: str | None
    initiator: str | None = Field(description="USER or SERVICE: who brought it to this state")
    error: str | None = Field(description="Why the service failed it")
    advice: str | None = Field(description="What to do about that")
    provisioning_model: str | None
    created_at: datetime | None
    node_state: str | None
    health: str | None
    symptoms: list[str]
    address: str | None
    ends_at: datetime | None
    seconds_left: int | None
    keeper: str | None = Field(description="What the VM says of its own end")
    holding_quota: list[Held]

    @classmethod
    def of(cls, status: Status, holding: list[QueuedResource], settings: Settings) -> Self:
        """Everything that the service says."""
        resource, node = status.resource, status.node
        error = resource.error if resource else None
        ends = node.ends_at if node else None
        return cls(
            **named(settings),
            phase=status.phase,
            state=str(resource.state) if resource else None,
            initiator=resource.initiator if resource else None,
            error=error.message if error else None,
            advice=status.advice(settings),
            provisioning_model=resource.provisioning_model if resource else None,
            created_at=resource.create_time if resource else None,
            node_state=node.state if node else None,
            health=node.health if node else None,
            symptoms=[str(one.get("symptomType", one)) for one in node.symptoms] if node else [],
            address=node.external_ip if node else None,
            ends_at=ends,
            seconds_left=int((ends - datetime.now(UTC)).total_seconds()) if ends else None,
            keeper=status.boot.keeper,
            holding_quota=[_held(one) for one in holding],
        )

    def __str__(self) -> str:
        by = f", by {self.initiator}" if self.initiator else ""
        lines = [f"{self.name} in {self.zone}: {_state(self.state, self.phase)}{by}"]
        lines += [line for line in (self.error, self.advice, self.keeper) if line]
        if self.node_state:
            health = f", {', '.join([self.health or 'health unknown', *self.symptoms])}"
            lines.append(f"VM {self.node_state}{health}, address {self.address or 'none yet'}")
        if self.ends_at and self.seconds_left is not None:
            lines.append(f"It ends at {self.ends_at:%H:%M} UTC, in {self.seconds_left // 60} min")
        lines += [
            replies.holding_quota(one.name, one.zone, one.state, _to_free(one))
            for one in self.holding_quota
        ]
        return "\n".join(lines)


def _held(one: QueuedResource) -> Held:
    reason = one.error.message if one.error else None
    return Held(name=one.short_name, zone=one.zone, state=str(one.state), reason=reason)


def _to_free(one: Held) -> str:
    return f'delete_tpu_queued_resource(queued_resource="{one.name}", zone="{one.zone}")'


class Deleted(Named):
    """Of delete_tpu_queued_resource."""

    existed: bool

    def __str__(self) -> str:
        if not self.existed:
            return f"There was no {self.name} in {self.zone}."
        return replies.deleted(self.name, self.zone)


class Estimate(Named):
    """Of estimate_cost."""

    provisioning_model: str
    price: Price
    cap_usd: float = Field(description="MAX_COST_USD: nothing is created that could cost more")
    allowed: bool
    usd_per_million_tokens: float | None = Field(
        description="Of output at tokens_per_second, one request at a time"
    )

    def __str__(self) -> str:
        lines = [
            f"{self.name}, {self.provisioning_model} in {self.zone}, costs {self.price.text}.",
            f"Cap: USD {self.cap_usd:.2f} (MAX_COST_USD).",
        ]
        if not self.allowed:
            lines.append(
                "It would not be created: give fewer hours, or raise MAX_COST_USD in tpu.env."
            )
        if self.usd_per_million_tokens is not None:
            lines.append(f"USD {self.usd_per_million_tokens:.2f} per million output tokens.")
        return "\n".join(lines)


class Finding(_Result):
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str
    do: str | None


class Examined(_Result):
    """Of rig_doctor."""

    ok: bool
    findings: list[Finding]

    def __str__(self) -> str:
        return "\n".join(replies.found(one.ok, one.name, one.text, one.do) for one in self.findings)


class Offer(_Result):
    """A zone with a way to have a chip."""

    zone: str
    provisioning_model: str
    has_type: bool = Field(description="The zone has the accelerator type; not that one is free")
    usd_per_hour: float | None
    last_refusal: str | None = Field(description="What the service last said here")

    def __str__(self) -> str:
        has = "can be asked for" if self.has_type else "is not offered"
        price = (
            "no known price"
            if self.usd_per_hour is None
            else f"USD {self.usd_per_hour:.2f} an hour"
        )
        refused = f"; last refusal: {self.last_refusal}" if self.last_refusal else ""
        return f"{self.zone} {self.provisioning_model}: {has}, {price}{refused}"


class Capacity(_Result):
    """Of find_tpu_capacity."""

    accelerator_type: str
    offers: list[Offer]

    def __str__(self) -> str:
        return "\n".join(str(one) for one in self.offers) or "No zone was found."


class BootLog(Named):
    """Of get_boot_log."""

    phase: Phase
    stage: str | None
    log: str = Field(
        description="What the VM has published; the end of the log where a stage failed"
    )
    failed: bool

    def __str__(self) -> str:
        return self.log or f"{self.name} is {self.phase}; nothing is published yet."


class Measured(Benchmark):
    """Of run_rust_benchmark."""

    median_tokens_per_second: float
    usd_per_million_tokens: float | None

    @classmethod
    def of(cls, found: Benchmark, cost: Cost | None) -> Self:
        """With the money, where a price is known."""
        # One token has no rate by the engine's timer.
        rate = found.median
        usd = usd_per_million_tokens(cost.usd_per_hour, rate) if cost and rate else None
        return cls(
            **found.model_dump(),
            median_tokens_per_second=round(found.median, 2),
            usd_per_million_tokens=round(usd, 2) if usd else None,
        )

    def __str__(self) -> str:
        lines = self.lines()
        if self.usd_per_million_tokens is not None:
            lines.append(f"USD per million output tokens {self.usd_per_million_tokens:.2f}")
        return "\n".join(lines)

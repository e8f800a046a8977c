"""What must be agreed to before anything costs or is deleted: a person is asked where the client can ask, and else named as asked.

A client that can ask always does: that a model says "the user agreed" counts only where nobody can be asked. Each resolver may
run several times for one call and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcp.server.mcpserver import AcceptedElicitation, Elicit, ElicitationResult
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from rig import cost, prices
from rig.errors import RigError
from rig.mcp.calls import Ctx, in_session, settings

if TYPE_CHECKING:
    from rig.session import Session


class Agreement(BaseModel):
    """To a cost."""

    proceed: bool = Field(title="Create it", description="Create the VM at this cost?")


class AlreadyThere(Agreement):
    """Nobody was asked: there is one, so creating costs nothing new."""

    proceed: bool = False


class TypedName(BaseModel):
    """What a person typed to delete."""

    name: str = Field(title="Name", description="The name of the queued resource to delete")


class NothingThere(TypedName):
    """Nobody was asked: there is none."""

    name: str = ""


async def cost_agreed(
    ctx: Ctx,
    project: str | None,
    zone: str | None,
    queued_resource: str | None,
    provisioning_model: str | None,
    hours: float | None,
    user_agreed: bool,
) -> Agreement | Elicit[Agreement]:
    """Asks with the cost at hand, unless there is nothing to agree to."""
    wanted = settings(
        ctx,
        project_id=project,
        zone=zone,
        queued_resource=queued_resource,
        provisioning_model=provisioning_model,
        hours=hours,
    )

    def question(session: Session) -> str | None:
        now = session.rig.status()
        if now.phase == "deleting":
            raise RigError(
                f"expected {wanted.queued_resource} to be there or not, found it DELETING; create again in a few minutes"
            )
        if now.phase != "absent":
            return None
        price = cost.check(wanted, found=prices.current(session.google, wanted))
        what = f"{wanted.queued_resource} ({wanted.accelerator_type}, {wanted.provisioning_model})"
        return f"Create {what} in {wanted.zone}, project {wanted.project_id}: {price}."

    text = await in_session(ctx, wanted, question)
    if text is None:
        return AlreadyThere()
    if can_ask(ctx):
        return Elicit(text, Agreement)
    if user_agreed:
        return Agreement(proceed=True)
    raise ToolError(
        f"{text} This client cannot ask the user: show them the cost, and call again with user_agreed=true if they agree."
    )


async def name_typed(
    ctx: Ctx,
    project: str | None,
    zone: str | None,
    queued_resource: str | None,
    confirm_name: str | None,
) -> TypedName | Elicit[TypedName]:
    """Asks for the name, unless there is nothing of that name."""
    wanted = settings(ctx, project_id=project, zone=zone, queued_resource=queued_resource)
    now = await in_session(ctx, wanted, lambda session: session.rig.status())
    name = wanted.queued_resource
    if now.phase == "absent":
        return NothingThere()
    if now.resource is None:
        raise ToolError(
            f"expected {name} to be there or not, found that the service still takes in the request for it; delete it in a minute"
        )
    where = f"{wanted.zone}, project {wanted.project_id}"
    text = f"Delete {name} in {where} ({now.resource.state}), with its VM and all that is on it? Type {name} to do it."
    if can_ask(ctx):
        return Elicit(text, TypedName)
    if confirm_name is not None:
        return TypedName(name=confirm_name)
    raise ToolError(
        f'{text} This client cannot ask the user: ask them, and call again with confirm_name="{name}" if they agree.'
    )


def agreed(outcome: ElicitationResult[Agreement]) -> Agreement:
    """What was agreed to.

    Raises:
        ToolError: it was not.
    """
    if isinstance(outcome, AcceptedElicitation):
        found = outcome.data
        if found.proceed or isinstance(found, AlreadyThere):
            return found
    raise ToolError(
        f"Nothing was created: {_why(outcome)}. Do not try again unless they ask for it."
    )


def typed(outcome: ElicitationResult[TypedName], name: str) -> TypedName:
    """The name, if it is the right one.

    Raises:
        ToolError: it is not, or none was typed.
    """
    if not isinstance(outcome, AcceptedElicitation):
        raise ToolError(
            f"Nothing was deleted: {_why(outcome)}. Do not try again unless they ask for it."
        )
    found = outcome.data
    if found.name.strip() != name and not isinstance(found, NothingThere):
        raise ToolError(f"Nothing was deleted: expected the name {name}, found {found.name!r}.")
    return found


def can_ask(ctx: Ctx) -> bool:
    """The client shows its user a form; `elicitation: {}` is how older ones say so."""
    capabilities = ctx.client_capabilities
    asking = capabilities.elicitation if capabilities else None
    return asking is not None and (asking.form is not None or asking.url is None)


def _why(outcome: ElicitationResult[Agreement] | ElicitationResult[TypedName]) -> str:
    return "the user closed the question" if outcome.action == "cancel" else "the user said no"

"""What a Google Cloud project has besides TPUs: firewall rules, secrets, prices, enabled services, and who may do what."""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.rig.fake_http import RefusedError, Request, not_found

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = "https://www.googleapis.com/compute/v1/"
# Of Google's lists (cloud.google.com/iam/docs/roles-permissions); another word is refused there too.
PERMISSIONS = {
    *(f"tpu.nodes.{verb}" for verb in ("create", "delete", "get", "list", "reimage", "reset", "start", "stop", "update")),
    *(f"tpu.{kind}.{verb}" for kind in ("acceleratortypes", "locations", "operations", "runtimeversions") for verb in ("get", "list")),
    *(f"compute.firewalls.{verb}" for verb in ("create", "delete", "get", "list", "update")),
    "compute.networks.get", "compute.networks.updatePolicy", "iam.serviceAccounts.actAs",
    "secretmanager.secrets.create", "secretmanager.secrets.get",
    "secretmanager.versions.access", "secretmanager.versions.add", "secretmanager.versions.get",
}  # fmt: skip
TPU_PRICES = "services/6F81-5844-456A"


def sku(
    description: str,
    regions: tuple[str, ...],
    usd: float,
    usage_type: str = "OnDemand",
    unit: str = "h",
) -> dict[str, Any]:
    """An entry of the Cloud Billing Catalog."""
    units, nanos = divmod(round(usd * 1e9), 10**9)
    price = {"currencyCode": "USD", "units": str(units), "nanos": nanos}
    expression = {
        "usageUnit": unit,
        "tieredRates": [
            {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": 0}},
            {"startUsageAmount": 0, "unitPrice": price},
        ],
    }
    return {
        "name": f"{TPU_PRICES}/skus/{uuid.uuid4().hex[:4]}",
        "description": description,
        "category": {"resourceFamily": "Compute", "resourceGroup": "TPU", "usageType": usage_type},
        "serviceRegions": list(regions),
        "pricingInfo": [{"pricingExpression": expression, "effectiveTime": "2026-11-30T00:00:00Z"}],
    }


def catalog() -> list[dict[str, Any]]:
    """As it stood in 2026-11, with neighbours that are easily taken for what is looked for."""
    return [
        sku("N1 Predefined Instance Core running in Las Vegas", ("us-west4",), 0.0356),
        sku("DWS Defined Duration V5e running in Las Vegas", ("us-west4",), 0.60, "OnDemand"),
        sku("DWS Defined Duration V5p running in Las Vegas", ("us-west4",), 2.10, "OnDemand"),
        sku("DWS Calendar Mode V5e running in Las Vegas", ("us-west4",), 0.84, "OnDemand"),
        sku("TpuV5e attached to Spot Preemptible VMs running in Las Vegas", ("us-west4",), 0.607, "Preemptible"),
        sku("Commitment v1: TpuV5e in Las Vegas for 1 Year", ("us-west4",), 0.84, "Commit1Yr"),
        sku("TpuV5e running in Las Vegas", ("us-west4",), 1.20, "OnDemand"),
        sku("TpuV5e running in Las Vegas for committed use", ("us-west4",), 0.54, "Commit3Yr"),
        sku("TpuV5e running in Netherlands", ("europe-west4",), 1.56, "OnDemand"),
        sku("TpuV5e attached to Spot Preemptible VMs running in Netherlands", ("europe-west4",), 0.78, "Preemptible"),
    ]  # fmt: skip


@dataclass
class FakeProject:
    """What the services know of it."""

    firewalls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: `projects/P/global/firewalls/NAME`."""
    networks: set[str] = field(default_factory=lambda: {"default"})
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    operation_error: str | None = None
    """What the next change of a rule ends with."""
    secrets: dict[str, list[str]] = field(default_factory=dict)
    """Values by `projects/P/secrets/NAME`, the newest last."""
    skus: list[dict[str, Any]] = field(default_factory=catalog)
    page_size: int = 4
    enabled: set[str] = field(
        default_factory=lambda: {
            f"{name}.googleapis.com"
            for name in (
                "tpu",
                "compute",
                "secretmanager",
                "cloudbilling",
                "serviceusage",
                "cloudresourcemanager",
            )
        }
    )
    is_there: bool = True
    lifecycle: str = "ACTIVE"
    permissions: set[str] | None = None
    """What the caller may; None is everything."""

    def refuse_if_disabled(self, service: str, _token: str | None = None) -> None:
        if service not in self.enabled:
            title = {
                "tpu.googleapis.com": "Cloud TPU API",
                "compute.googleapis.com": "Compute Engine API",
            }
            message = (
                f"{title.get(service, service)} has not been used in project 12 before or it is disabled. "
                f"Enable it by visiting https://console.developers.google.com/apis/api/{service}/overview?project=12 then retry."
            )
            raise RefusedError(403, "PERMISSION_DENIED", message)

    # -- Compute Engine ------------------------------------------------------------------------------

    def rule(self, name: str) -> dict[str, Any]:
        if name not in self.firewalls:
            raise _no_compute(name)
        return self.firewalls[name]

    def insert_rule(self, project: str, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{project}/firewalls/{body['name']}"
        if name in self.firewalls:
            raise RefusedError(409, "", f"The resource '{name}' already exists")
        rule = {
            "network": "global/networks/default",
            "priority": 1000,
            "direction": "INGRESS",
            **body,
        }
        network = rule["network"].rsplit("/", 1)[1]
        if network not in self.networks:
            message = f"Invalid value for field 'resource.network': '{rule['network']}'. The referenced network resource cannot be found."
            raise RefusedError(400, "", message)
        rule["network"] = ROOT + rule["network"]
        return self.change(name, lambda: self.firewalls.update({name: rule}))

    def patch_rule(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        rule = self.rule(name)
        if "network" in body and not rule["network"].endswith(body["network"]):
            raise RefusedError(
                400, "", "Invalid value for field 'resource.network': cannot be changed."
            )
        changed = {key: value for key, value in body.items() if key not in {"network", "name"}}
        return self.change(name, lambda: rule.update(changed))

    def delete_rule(self, name: str) -> dict[str, Any]:
        self.rule(name)
        return self.change(name, lambda: self.firewalls.pop(name))

    def change(self, target: str, effect: Callable[[], object]) -> dict[str, Any]:
        """An operation whose effect is there when it has been asked after twice."""
        project = target.split("/firewalls/")[0]
        name = f"operation-{uuid.uuid4().hex[:8]}"
        answer = {"name": name, "status": "PENDING", "targetLink": ROOT + target}
        self.operations[f"{project}/operations/{name}"] = {"answer": answer, "effect": effect}
        return answer

    def operation(self, name: str) -> dict[str, Any]:
        found = self.operations[name]
        answer: dict[str, Any] = found["answer"]
        if answer["status"] == "PENDING":
            answer["status"] = "RUNNING"
        elif answer["status"] == "RUNNING":
            answer["status"] = "DONE"
            if self.operation_error:
                answer["error"] = {
                    "errors": [{"code": "QUOTA_EXCEEDED", "message": self.operation_error}]
                }
                self.operation_error = None
            else:
                found["effect"]()
        return answer

    def network(self, name: str) -> dict[str, Any]:
        if name.rsplit("/", 1)[1] not in self.networks:
            raise _no_compute(name)
        return {"name": name.rsplit("/", 1)[1], "selfLink": ROOT + name}

    # -- Secret Manager ------------------------------------------------------------------------------

    def create_secret(
        self, parent: str, query: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        name = f"{parent}/secrets/{query['secretId']}"
        if name in self.secrets:
            raise RefusedError(409, "ALREADY_EXISTS", f"Secret [{name}] already exists.")
        if not body.get("replication"):
            raise RefusedError(400, "INVALID_ARGUMENT", "Secret.replication must be set")
        self.secrets[name] = []
        return {"name": name, **body}

    def add_version(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name not in self.secrets:
            raise RefusedError(404, "NOT_FOUND", f"Secret [{name}] not found.")
        data = body["payload"]["data"]
        value = base64.b64decode(data).decode()
        if len(value) > 65536:
            raise RefusedError(400, "INVALID_ARGUMENT", f"Invalid value at 'payload.data': {data}")
        self.secrets[name].append(value)
        return {"name": f"{name}/versions/{len(self.secrets[name])}", "state": "ENABLED"}

    def secret(self, name: str) -> dict[str, Any]:
        if name not in self.secrets:
            raise RefusedError(404, "NOT_FOUND", f"Secret [{name}] not found.")
        return {"name": name, "replication": {"automatic": {}}}

    def version(self, version: str) -> dict[str, Any]:
        name = version.removesuffix("/versions/latest")
        if not self.secrets.get(name):
            raise RefusedError(404, "NOT_FOUND", f"Secret [{name}] not found or has no versions.")
        return {"name": f"{name}/versions/{len(self.secrets[name])}", "state": "ENABLED"}

    def access(self, version: str) -> dict[str, Any]:
        name = version.removesuffix("/versions/latest")
        values = self.secrets.get(name)
        if not values:
            raise RefusedError(404, "NOT_FOUND", f"Secret [{name}] not found or has no versions.")
        data = base64.b64encode(values[-1].encode()).decode()
        return {"name": f"{name}/versions/{len(values)}", "payload": {"data": data}}

    # -- what it costs, and who may ------------------------------------------------------------------

    def prices(self, service: str, query: dict[str, str]) -> dict[str, Any]:
        if service != TPU_PRICES:
            raise not_found(service)
        start = int(query.get("pageToken", 0))
        end = start + self.page_size
        answer: dict[str, Any] = {"skus": self.skus[start:end], "nextPageToken": ""}
        if end < len(self.skus):
            answer["nextPageToken"] = str(end)
        return answer

    def read(self, name: str) -> dict[str, Any]:
        if not self.is_there:
            message = f"Permission 'resourcemanager.projects.get' denied on resource '{name}' (or it may not exist)."
            raise RefusedError(403, "PERMISSION_DENIED", message)
        return {"projectId": name.rsplit("/", 1)[1], "lifecycleState": self.lifecycle}

    def allowed(self, wanted: list[str]) -> dict[str, Any]:
        for one in wanted:
            if one not in PERMISSIONS:
                raise RefusedError(
                    400, "INVALID_ARGUMENT", f"Permission {one} is not valid for this resource."
                )
        found = [one for one in wanted if self.permissions is None or one in self.permissions]
        return {"permissions": found} if found else {}

    def service(self, name: str) -> dict[str, Any]:
        state = "ENABLED" if name.rsplit("/", 1)[1] in self.enabled else "DISABLED"
        return {"name": name, "state": state}


def _no_compute(name: str) -> RefusedError:
    return RefusedError(404, "", f"The resource '{name}' was not found")


def _of(service: str, handler: Callable[[FakeProject, Request], dict[str, Any]]) -> Any:
    def asked(project: FakeProject, request: Request) -> dict[str, Any]:
        project.refuse_if_disabled(f"{service}.googleapis.com")
        return handler(project, request)

    return asked


METHODS: dict[str, Callable[[FakeProject, Request], dict[str, Any]]] = {
    method: _of(method.split(".", 1)[0], handler)
    for method, handler in {
        "compute.firewalls.get": lambda p, r: p.rule(r.name),
        "compute.firewalls.insert": lambda p, r: p.insert_rule(r.name, r.body),
        "compute.firewalls.patch": lambda p, r: p.patch_rule(r.name, r.body),
        "compute.firewalls.delete": lambda p, r: p.delete_rule(r.name),
        "compute.globalOperations.get": lambda p, r: p.operation(r.name),
        "compute.networks.get": lambda p, r: p.network(r.name),
        "secretmanager.projects.secrets.create": lambda p, r: p.create_secret(r.name, r.query, r.body),
        "secretmanager.projects.secrets.get": lambda p, r: p.secret(r.name),
        "secretmanager.projects.secrets.addVersion": lambda p, r: p.add_version(r.name, r.body),
        "secretmanager.projects.secrets.versions.get": lambda p, r: p.version(r.name),
        "secretmanager.projects.secrets.versions.access": lambda p, r: p.access(r.name),
        "cloudbilling.services.skus.list": lambda p, r: p.prices(r.name, r.query),
        "serviceusage.services.get": lambda p, r: p.service(r.name),
        "cloudresourcemanager.projects.get": lambda p, r: p.read(r.name),
        "cloudresourcemanager.projects.testIamPermissions": lambda p, r: p.allowed(r.body["permissions"]),
    }.items()
}  # fmt: skip

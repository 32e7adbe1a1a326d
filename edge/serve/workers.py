"""The workers of a server's models, and those that a person leaves out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge.api.config import EngineConfig
from edge.cluster.fleet import device
from edge.errors import NotAllowed
from edge.serve.client import EngineClient
from edge.serve.plan_devices import devices_of
from partition.plan.plan import LOCAL, Plan


class ModelWorkers:
    """Implements `edge.serve.served.ServedWorkers`, which documents the methods."""

    def __init__(self, configs: Mapping[str, EngineConfig], models: Mapping[str, EngineClient]) -> None:
        """configs: current configurations, by the name of the model. models: the loaded models."""
        self._configs, self._models = configs, models
        self._known: dict[str, bool] = {}
        self.left_out: Sequence[str] = ()
        self.known()

    def known(self) -> Mapping[str, bool]:
        for config in self._configs.values():  # workers of earlier plans stay known
            addresses = map(device, devices_of({"": config}))
            self._known |= {address: config.insecure for address in addresses if address != LOCAL}
        return self._known

    def leave_out(self, addresses: Collection[str]) -> None:
        self.left_out = sorted(addresses)
        for model in self._models.values():
            model.replicas.leave_out(self.left_out)

    def check(self, plan: Mapping[str, Any]) -> None:
        """Raise NotAllowed if a plan has a device that is left out, and PlanError if it is not a plan."""
        devices = Plan.from_json(dict(plan)).all_devices
        if unused := [address for address in devices if device(address) in self.left_out]:
            raise NotAllowed(f"the plan has the device {unused[0]}, which is paused or removed; resume it first")

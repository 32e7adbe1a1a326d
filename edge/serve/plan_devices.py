"""Devices of plans: which ones a server uses, and whether a model needs a plan at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from devices.names import parse_address
from edge.api.config import EngineConfig
from edge.errors import NotAllowed
from partition.plan.plan import LOCAL, Plan


def devices_of(configs: Mapping[str, EngineConfig]) -> tuple[str, ...]:
    """Return the addresses of the workers and plans in these configurations."""
    plans = [Plan.from_json(dict(config.plan)) for config in configs.values() if config.plan is not None]
    workers = [worker for config in configs.values() for worker in config.workers]
    return (*workers, *(device for plan in plans for device in plan.all_devices))


def needs_no_plan(plan: Plan, config: EngineConfig) -> bool:
    """Return True if a plan runs the model on this device alone, just as its options do."""
    own, options = plan.shard(0), config.options
    as_options = own.threads in (None, options.threads) and own.memory in (None, options.memory)
    return (
        plan.all_devices == (LOCAL,)
        and as_options
        and own.gpu_layers in (None, options.gpu_layers)
        and not own.affinity
    )


def checked_plan(plan: Mapping[str, Any], devices: Collection[str]) -> Plan:
    """Return a plan that uses this device and those in `devices`. Raises PlanError, and NotAllowed for others."""
    known, checked = {_address(device) for device in (LOCAL, *devices)}, Plan.from_json(dict(plan))
    if foreign := [device for device in checked.all_devices if _address(device) not in known]:
        raise NotAllowed(
            f"the plan has the device {foreign[0]}, but this server only uses the workers of --workers, of --plan"
            " and of plans in --front or by POST /v1/front; make plans with it, or start the server with it"
        )
    return checked


def _address(device: str) -> tuple[str, int]:
    """Return the host and port of a device's address in any notation."""
    try:
        return parse_address(device)
    except ValueError:
        return device, 0

"""/v1/cluster: the devices of the server, invitations, and changes of devices."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from edge.serve.apis import state
from edge.serve.apis.fields import Fields
from edge.serve.devices.devices import ServedDevices
from edge.serve.served import ServedModels

LIFETIME_S, LEAST_LIFETIME_S, MOST_LIFETIME_S = 3600, 60, 30 * 86_400


class InvitationRequest(Fields):
    name: str = Field(max_length=200, description="name for the device: letters, digits, '-', '_' and '.'")
    browser: bool = Field(False, description="invite a browser, such as a phone's, by a link")
    expires_s: float = Field(
        LIFETIME_S, ge=LEAST_LIFETIME_S, le=MOST_LIFETIME_S, description="seconds within which the device must join"
    )
    init: bool = Field(False, description="create a cluster first if this machine has none")


class DeviceRequest(Fields):
    paused: bool | None = Field(None, description="true: plans leave the device out; false: they use it again")
    address: str | None = Field(
        None, max_length=300, description="HOST or HOST:PORT at which the device answers, if it is not found by itself"
    )


async def cluster(models: ServedModels, devices: ServedDevices) -> dict[str, Any]:
    """Return the status of the loaded models, or the error of a model whose engine process ended, and all devices."""
    statuses = await state.statuses(models)
    return {"names": list(models.names), "models": statuses, **await devices.to_json(statuses)}


async def invite(request: InvitationRequest, devices: ServedDevices) -> dict[str, Any]:
    """Invite a device. Raises BadRequest."""
    return await devices.invite(request.name, request.expires_s, browser=request.browser, init=request.init)


async def change(name: str, request: DeviceRequest, models: ServedModels, devices: ServedDevices) -> dict[str, Any]:
    """Pause a device, use it again, or note its address. Raises NotThere and BadRequest."""
    await devices.change(name, await state.statuses(models), request.paused, request.address)
    return {"status": "ok"}


async def remove(name: str, models: ServedModels, devices: ServedDevices, *, revoke: bool) -> dict[str, Any]:
    """Leave a device out for good. Raises NotThere and BadRequest."""
    await devices.remove(name, await state.statuses(models), revoke=revoke)
    return {"status": "ok"}

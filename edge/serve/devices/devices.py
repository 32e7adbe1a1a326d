"""The devices of a server: their state, invitations, and pausing, removing and revoking them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from devices.errors import TrustError
from devices.names import check_name
from edge.cluster.fleet import device as canonical
from edge.net.channel import is_loopback
from edge.serve.devices import members as cluster
from edge.serve.devices.bridge import Bridge
from edge.serve.devices.left_out import LeftOut, LeftOutDevices
from edge.serve.devices.members import KnownMember, Members
from edge.serve.devices.view import Device, DevicesView, joined
from edge.serve.devices.watch import DeviceWatch, Sight
from edge.serve.http.errors import BadRequest, NotThere
from edge.serve.options import ServeOptions
from edge.serve.served import ServedModels
from partition.plan.plan import LOCAL

_NO_CLUSTER = "this machine has no cluster yet; send `init`: true to create one, or run `edge cluster init`"
_ONLY_HERE = (
    "It works on this machine only, because this machine has no cluster, whose certificate secures links to others."
)
_WARNS = "The browser warns that it does not know the cluster's certificate: choose to continue."


class ServedDevices:
    """The devices of a server. Use it in one event loop."""

    def __init__(self, models: ServedModels, options: ServeOptions) -> None:
        self._models, self._host = models, options.host
        self._watch, self._view, self._members = DeviceWatch(), DevicesView(), Members()
        self._bridge = Bridge(options.host)
        self._file = LeftOutDevices()
        self._left_out: dict[str, LeftOut] | None = None  # by name; None: not read yet
        self._left_out_addresses: frozenset[str] = frozenset()
        self._addresses: dict[str, str] = {}  # addresses that a person gave, by name of the member

    async def start(self) -> None:
        """Leave out the devices that were left out before. Call it before a model is loaded."""
        if self._left_out is None:
            self._left_out = await asyncio.to_thread(self._file.load)
            self._leave_out()
            members = await asyncio.to_thread(self._members.known)
            if any(member.is_browser and member.state == "joined" for member in members):
                self._bridge.begin(has_cluster=await asyncio.to_thread(cluster.has_cluster))

    async def close(self) -> None:
        """Stop watching, and end the bridge."""
        self._watch.close()
        await self._bridge.close()

    async def to_json(self, statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the keys `devices`, `links`, `removed` and `cluster` of /v1/cluster. statuses: of the models."""
        await self.start()
        members, problem = await asyncio.to_thread(lambda: (self._members.known(), self._members.problem))
        workers, sights = self._look(members)
        assert self._left_out is not None
        devices = joined(statuses, sights, workers, members, self._left_out)
        await self._follow(devices)
        return {**self._view.to_json(devices, statuses, self._left_out), "cluster": {"problem": problem}}

    async def addresses(self) -> list[str]:
        """Return the addresses of all workers that plans may use."""
        await self.start()
        workers, _ = self._look(await asyncio.to_thread(self._members.known))
        return [address for address in workers if address not in self._left_out_addresses]

    def _look(self, members: Sequence[KnownMember]) -> tuple[dict[str, bool], dict[str, Sight]]:
        """Return all workers by address, and what the watch knows about them."""
        workers = dict(self._models.workers.known())
        unknown = set()
        for member in members:
            address = self._addresses.get(member.name) or self._watch.announced.get(member.name) or member.address
            if address:
                workers.setdefault(canonical(address), False)
            else:
                unknown.add(member.name)
        sights = self._watch.look(workers, frozenset(unknown))
        answering = {sight.name for sight in sights.values() if sight.answers}
        missing = frozenset(member.name for member in members) - answering
        return workers, self._watch.look(workers, missing)

    def _leave_out(self) -> None:
        """Tell the models which workers are left out."""
        assert self._left_out is not None
        addresses = frozenset(entry.address for entry in self._left_out.values()) - {""}
        if addresses != self._left_out_addresses:
            self._left_out_addresses = addresses
            self._models.workers.leave_out(addresses)

    async def _follow(self, devices: Sequence[Device]) -> None:
        """Leave devices out at their present addresses, which may have changed."""
        assert self._left_out is not None
        moved = [
            replace(entry, address=device.address)
            for device in devices
            if (entry := device.left_out) and entry.name == device.name and device.address not in ("", entry.address)
        ]
        self._left_out |= {entry.name: entry for entry in moved}
        self._leave_out()
        for entry in moved:
            if self._left_out.get(entry.name) is entry:  # otherwise a request has changed it meanwhile
                await asyncio.to_thread(self._file.put, entry)

    # --- changes ---

    async def invite(self, name: str, lifetime_s: float, *, browser: bool, init: bool) -> dict[str, Any]:
        """Invite a device. Raises BadRequest with what to do.

        browser: return a link for a browser instead of a command.
        init: create a cluster first if this machine has none.
        """
        try:
            check_name(name)
            problem = await asyncio.to_thread(lambda: self._members.problem)
            if problem and init:
                await asyncio.to_thread(cluster.create_cluster)
            elif problem and not (browser and is_loopback(self._host)):
                raise BadRequest(problem if "another machine" in problem else _NO_CLUSTER, "name")
            await self.start()
            members = await asyncio.to_thread(self._members.known)
            if any(member.name == name and member.state == "joined" and not member.is_browser for member in members):
                raise BadRequest(f"there is a device {name} already; choose another name", "name")
            expires = time.time() + lifetime_s
            values = {"name": name, "token": None, "command": None, "link": None, "qr": None, "note": None}
            if browser:
                has_cluster = await asyncio.to_thread(cluster.has_cluster)
                link = await self._bridge.link(name, lifetime_s, has_cluster=has_cluster)
                note = _WARNS if link.startswith("https:") else _ONLY_HERE
                values |= {"link": link, "qr": await asyncio.to_thread(_qr_code, link), "note": note}
            else:
                token = await asyncio.to_thread(cluster.invite, name, lifetime_s)
                values |= {"token": token, "command": f"edge worker --join {token}"}
        except TrustError as error:
            raise BadRequest(str(error), "name") from error
        await self._use_again(name)
        return {**values, "expires": expires}

    async def change(
        self, name: str, statuses: Sequence[Mapping[str, Any]], paused: bool | None, address: str | None
    ) -> None:
        """Pause a device or use it again, and note where it answers.

        name: name or address.
        Raises NotThere for an unknown device, and BadRequest for this device and for an invalid address.
        """
        device = await self._known(name, statuses)
        if address is not None:
            if device.member is None:
                raise BadRequest(f"{device.name} is no member of this machine's cluster; invite it first", "address")
            try:
                self._addresses[device.member.name] = canonical(address)
            except ValueError as error:
                raise BadRequest(str(error), "address") from error
        if paused is None:
            return
        if paused:
            await self._put(device, removed=False)
        else:
            await self._use_again(device.left_out.name if device.left_out else device.name)

    async def remove(self, name: str, statuses: Sequence[Mapping[str, Any]], *, revoke: bool) -> None:
        """Leave a device out for good. An invitation is withdrawn.

        revoke: also refuse its certificate from now on.
        Raises NotThere for an unknown device, and BadRequest for this device.
        """
        device = await self._known(name, statuses)
        member = device.member
        if revoke and member is None:
            raise BadRequest(f"{device.name} has no certificate of this machine's cluster; remove it instead")
        if member is not None and (revoke or member.state == "invited"):
            try:
                await asyncio.to_thread(cluster.revoke, member.name)
            except TrustError as error:
                raise BadRequest(str(error)) from error
            if member.state == "invited":
                return
        await self._put(device, removed=True)

    async def _known(self, name: str, statuses: Sequence[Mapping[str, Any]]) -> Device:
        """Return a device by its name or address."""
        await self.start()
        members = await asyncio.to_thread(self._members.known)
        workers, sights = self._look(members)
        assert self._left_out is not None
        devices = joined(statuses, sights, workers, members, self._left_out)
        for device in devices:
            if name in (device.name, device.address):
                if device.address == LOCAL:
                    raise BadRequest("this device runs the server, so it always takes part")
                return device
        if (entry := self._left_out.get(name)) is not None:  # removed, and in no plan
            return Device(entry.address, entry.name, left_out=entry)
        known = ", ".join(device.name for device in devices if device.address != LOCAL)
        raise NotThere(f"there is no device {name[:80]!r} here; there are {known or 'none besides this one'}")

    async def _put(self, device: Device, *, removed: bool) -> None:
        assert self._left_out is not None
        entry = LeftOut(device.name, device.address, removed, time.time())
        if device.left_out is not None and device.left_out.name != device.name:
            self._left_out.pop(device.left_out.name, None)
            await asyncio.to_thread(self._file.forget, device.left_out.name)
        self._left_out[device.name] = entry
        await asyncio.to_thread(self._file.put, entry)
        self._leave_out()

    async def _use_again(self, name: str) -> None:
        assert self._left_out is not None
        if self._left_out.pop(name, None) is not None:
            await asyncio.to_thread(self._file.forget, name)
            self._leave_out()


def _qr_code(link: str) -> str:
    """Return a QR code as SVG."""
    import segno

    code: str = segno.make(link, error="l").svg_inline(scale=1, border=2, svgclass=None, lineclass=None)
    return code

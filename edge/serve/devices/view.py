"""State of the devices as JSON, from the watch, the members of the cluster and the status of the models.

`docs/serve.md` describes the keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.serve.devices.left_out import LeftOut
from edge.serve.devices.members import KnownMember
from edge.serve.devices.watch import Sight
from partition.plan.plan import LOCAL
from quant.text import listed

THIS_DEVICE, WORKER, BROWSER = "this device", "worker", "browser"
COMPUTING, READY, JOINING, PAUSED, SLOW, LOST = "computing", "ready", "joining", "paused", "slow", "lost"
_BUSY = 0.01  # a device with a larger share of compute time counts as computing
_BEFORE_S = 3.0  # an event may be written before the watch notices the loss
_WASM = "wasm32"  # machine of a browser's page
_MOST_LINES = 2  # events in the text of a lost device: the loss, and what became of the answers
_STEPS = ("Loading ", "Reading ")  # begin of events about loading


@dataclass
class Device:
    """Everything that is known about one device."""

    address: str  # canonical address, or "" if it is not known
    name: str
    sight: Sight = field(default_factory=Sight)
    member: KnownMember | None = None
    left_out: LeftOut | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)  # its part of each model that runs on it
    models: list[Mapping[str, Any]] = field(default_factory=list)  # status of each of these models
    gpu: Mapping[str, int] | None = None
    left: list[str] = field(default_factory=list)  # models that do not use it any more


class DevicesView:
    """Joins the facts about devices. It remembers since when each device is in its state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, tuple[str, float]] = {}  # by name: state, and the time of its beginning

    def to_json(
        self, devices: Sequence[Device], statuses: Sequence[Mapping[str, Any]], left_out: Mapping[str, LeftOut]
    ) -> dict[str, Any]:
        """Return the keys `devices`, `links` and `removed` of /v1/cluster.

        devices: all known devices, from `joined`.
        statuses: status of each loaded model.
        left_out: devices that a person leaves out, by name.
        """
        shown = [device for device in devices if not (device.left_out and device.left_out.removed and not device.parts)]
        values = [self._device(device, statuses) for device in shown]
        self._states = {value["name"]: self._states[value["name"]] for value in values}
        removed = sorted(entry.name for entry in left_out.values() if entry.removed)
        return {"devices": values, "links": list(_links(shown, statuses)), "removed": removed}

    def _device(self, device: Device, statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        state, text = _state(device, statuses, self._lost_s(device))
        profile, sight = device.sight.profile, device.sight
        return {
            "name": device.name,
            "address": device.address or None,
            "kind": _kind(device),
            "state": state,
            "since": self._since(device, state),
            "text": text,
            "member": device.member is not None,
            "invited": _is_invited(device),
            "secure": sight.is_member,
            "memory": _tiers(device),
            "load": profile.load if profile and sight.answers else None,
            "busy": max((part["busy"] for part in device.parts), default=0.0) if sight.answers else 0.0,
            "temperature_c": profile.temperature_c if profile and sight.answers else None,
            "battery_percent": profile.battery_percent if profile and sight.answers else None,
            "tokens_per_s": sum(model.get("tokens_per_s", 0.0) for model in device.models),
            "cpu": profile.cpu if profile else None,
            "system": profile.system if profile else None,
            "models": device.parts,
        }

    def _lost_s(self, device: Device) -> float | None:
        return None if device.sight.lost_at is None else self._clock() - device.sight.lost_at

    def _since(self, device: Device, state: str) -> float:
        """Return the seconds since the device is in a state."""
        now = self._clock()
        before = self._states.get(device.name)
        # The change between computing and ready is not news.
        same = before is not None and (before[0] == state or {before[0], state} <= {COMPUTING, READY})
        at = before[1] if before is not None and same else now
        if state == LOST and device.sight.lost_at is not None:
            at = device.sight.lost_at
        elif state == PAUSED and device.left_out is not None:
            at = now - max(0.0, time.time() - device.left_out.since)
        elif device.member is not None and _is_invited(device):
            at = now - max(0.0, time.time() - device.member.since)
        self._states[device.name] = state, at
        return max(0.0, now - at)


def joined(
    statuses: Sequence[Mapping[str, Any]],
    sights: Mapping[str, Sight],
    workers: Mapping[str, bool],
    members: Sequence[KnownMember],
    left_out: Mapping[str, LeftOut],
) -> list[Device]:
    """Return all known devices, this one first, each with a name of its own.

    workers: canonical addresses of all workers.
    left_out: devices that a person leaves out, by name.
    """
    devices = {LOCAL: Device(LOCAL, THIS_DEVICE, sights.get(LOCAL, Sight()))}
    for address in workers:
        sight = sights.get(address, Sight())
        devices[address] = Device(address, sight.name or address, sight)
    for status in statuses:
        for part in status.get("devices", ()):
            address = part.get("address", "")
            device = devices.setdefault(address, Device(address, part["name"], sights.get(address, Sight())))
            if address != LOCAL and not device.sight.name:
                device.name = part["name"]
            _add_part(device, part, status)
    by_name = {device.sight.name: device for device in devices.values() if device.sight.is_member}
    for member in members:
        known = by_name.get(member.name) or devices.get(member.address)
        if known is None or (known.sight.name and known.sight.name != member.name):
            known = devices.setdefault(f" {member.name}", Device("", member.name))
        known.member, known.name = member, member.name
    unique: dict[str, Device] = {}
    for device in devices.values():
        if device.name in unique:
            device.name = f"{device.name} at {device.address}"
        unique[device.name] = device
        own = left_out.get(device.name)
        by_address = (entry for entry in left_out.values() if entry.address and entry.address == device.address)
        device.left_out = None if device.address == LOCAL else own or next(by_address, None)
    return list(unique.values())


def _add_part(device: Device, part: Mapping[str, Any], status: Mapping[str, Any]) -> None:
    """Add the part of a model that a device has, or had until another plan took over."""
    model = status["model"]["name"]
    device.gpu = part.get("gpu_bytes") or device.gpu
    if "left_s" in part:
        device.left.append(model)
        return
    keys = ("rank", "layers", "heads", "memory_bytes", "busy", "replica")
    stops = [other["layers"][1] for other in status["devices"] if other.get("layers")]
    heads = [other["heads"][1] for other in status["devices"] if other.get("heads")]
    totals = {"n_layers": max(stops, default=0), "n_heads": max(heads, default=0)}
    device.parts.append({"model": model, **{key: part[key] for key in keys if key in part}, **totals})
    if status not in device.models:  # a device may have parts of several copies
        device.models.append(status)


def _kind(device: Device) -> str:
    if device.address == LOCAL:
        return THIS_DEVICE
    profile = device.sight.profile
    is_page = (profile is not None and profile.machine == _WASM) or (
        device.member is not None and device.member.is_browser
    )
    return BROWSER if is_page else WORKER


def _tiers(device: Device) -> dict[str, dict[str, int] | None]:
    """Return total and free bytes of each tier; None if they are not known."""
    profile = device.sight.profile if device.sight.answers else None
    if profile is None:
        return {"gpu": None, "memory": None, "disk": None}
    total = min(profile.memory_total_bytes, profile.memory_limit_bytes or profile.memory_total_bytes)
    disk = None
    if profile.disk_total_bytes is not None and profile.disk_free_bytes is not None:
        disk = {"total": profile.disk_total_bytes, "free": profile.disk_free_bytes}
    gpu = None if device.gpu is None else dict(device.gpu)
    if gpu is None and profile.gpu_total_bytes and profile.gpu_free_bytes is not None:  # free when its process began
        gpu = {"total": profile.gpu_total_bytes, "free": profile.gpu_free_bytes}
    return {
        "gpu": gpu,
        "memory": {"total": total, "free": min(total, profile.memory_available_bytes)},
        "disk": disk,
    }


def _state(device: Device, statuses: Sequence[Mapping[str, Any]], lost_s: float | None) -> tuple[str, str]:
    """Return the state of a device, and the line that explains it.

    lost_s: seconds since its loss; None if it is not lost.
    """
    names = listed(sorted({part["model"] for part in device.parts}))
    if device.left_out is not None:
        moving = f"; {names} moves to other devices" if names else ""
        return PAUSED, f"{'removed' if device.left_out.removed else 'paused'}: no plan uses it{moving}"
    member, sight = device.member, device.sight
    if member is not None and _is_invited(device):
        until = time.strftime("%H:%M", time.localtime(member.expires))
        what = "its link is opened there" if member.is_browser else "`edge worker --join` runs there"
        return JOINING, f"invited until {until}: it joins when {what}"
    if sight.lost_at is not None:
        return LOST, _loss(device, statuses, lost_s or 0.0)
    if sight.profile is None and device.address != LOCAL:
        if device.address:
            return JOINING, "this server is connecting to it"
        if _kind(device) == BROWSER:
            return JOINING, "its page is being checked; keep it open and visible"
        return LOST, f"it has not answered since this server started; {_back(device)}"
    if sight.is_slow:
        return SLOW, f"a model found it slower than before{f'; it is used by {names}' if names else ''}"
    holds = listed([_part_text(part) for part in device.parts])
    if any(part["busy"] >= _BUSY for part in device.parts) or (
        any(model.get("slots") for model in device.models) and device.parts
    ):
        return COMPUTING, f"computes {holds}"
    if holds:
        return READY, f"holds {holds}"
    return READY, "no model uses it" if device.address != LOCAL else "no model is loaded"


def _is_invited(device: Device) -> bool:
    """Return True if the device has not used its invitation yet."""
    return device.member is not None and device.member.state == "invited" and not device.sight.answers


def _part_text(part: Mapping[str, Any]) -> str:
    start, stop = part["layers"] or (0, 0)
    if stop <= start:
        return f"no layer of {part['model']}"
    layers = f"layer {start}" if stop - start == 1 else f"layers {start}-{stop - 1}"
    return f"{layers} of {part['model']}" if stop - start < part["n_layers"] else f"all layers of {part['model']}"


def _loss(device: Device, statuses: Sequence[Mapping[str, Any]], lost_s: float) -> str:
    """Return a line about a lost device: why, and what happened to the answers."""
    why = device.sight.why or "it does not answer"
    for name in (device.name, device.address):
        why = why.removeprefix(f"{name}: ").removeprefix(f"{name} ").removeprefix("at ").removeprefix(device.address)
    why = why.strip()
    if why.startswith(("cannot ", "gave ", "went ", "is ", "did ", "has ")):  # the name was its subject
        why = f"it {why}"
    texts = [f"lost: {why or 'it does not answer'}"]
    if _kind(device) == BROWSER:
        texts[0] += f"; {_back(device)}"
    since = time.time() - lost_s - _BEFORE_S
    for status in statuses:
        lines = [event["text"] for event in status.get("events", ()) if event["time"] >= since]
        lines = [line for line in lines if not line.startswith(_STEPS)]
        about = [i for i, line in enumerate(lines) if device.name in line]
        model = status["model"]["name"]
        if about:
            texts.append(f"{model}: {'; '.join(lines[about[-1] :][:_MOST_LINES])}")
        elif any(part["model"] == model for part in device.parts):
            waits = "its answers wait until other devices take over" if status.get("slots") else "no answer was running"
            texts.append(f"{model}: {waits}")
    return ". ".join(texts)


def _back(device: Device) -> str:
    """Return what a person does to use a lost device again."""
    return "open its page there, and keep it visible" if _kind(device) == BROWSER else "start `edge worker` there"


def _links(devices: Sequence[Device], statuses: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the links of the running models, and this device's links to all other devices that answer."""
    names = {device.address: device.name for device in devices}
    pairs: set[frozenset[str]] = set()
    for status in statuses:
        by_label = {part["name"]: names.get(part.get("address", "")) for part in status.get("devices", ())}
        for link in status.get("links", ()):
            ends = by_label.get(link["from"]), by_label.get(link["to"])
            if None not in ends and ends[0] != ends[1] and frozenset(map(str, ends)) not in pairs:
                pairs.add(frozenset(map(str, ends)))
                yield {**link, "from": ends[0], "to": ends[1]}
    for device in devices:
        sight, pair = device.sight, frozenset({THIS_DEVICE, device.name})
        if device.address != LOCAL and sight.answers and pair not in pairs:
            figures = {"latency_s": sight.latency_s, "bytes_per_s": None}
            yield {"from": THIS_DEVICE, "to": device.name, "kind": "grpc", **figures}

"""A pool of devices in homes that come and go: groups of them serve a model, and lose devices.

By discrete events, a request and a session at a time; what a token takes is `partition.predict`'s of the group's plan.
Every figure that is published has its source in docs/large-pools.md; those marked "assumed" have none.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from devices.catalog import CATALOG
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from partition.search.planner import Planner

HOUR_S = 3600.0
SESSION_MEDIAN_S, SESSION_SHAPE = 2 * HOUR_S, 0.6  # half of the peers of IPFS leave within 2 h; shape assumed
ONLINE = 0.6  # part of the time, assumed
UPLINK, DOWNLINK, SPREAD = 18.03e6 / 8, 119.84e6 / 8, 0.6  # medians of homes in the USA; spread (lognormal) assumed
ACCESS_S = 0.015 / 2  # from a home to a server near it and back takes 15 ms
REGIONS = {"north america": 0.35, "europe": 0.35, "asia": 0.2, "south america": 0.1}  # assumed
FAR_S = {  # between regions, one way: half of a round trip between data centers, assumed
    ("north america", "europe"): 0.045, ("north america", "asia"): 0.08, ("north america", "south america"): 0.06,
    ("europe", "asia"): 0.1, ("europe", "south america"): 0.1, ("asia", "south america"): 0.15,
}  # fmt: skip
KINDS = {"laptop": 0.35, "phone-flagship": 0.15, "mini-pc": 0.15, "apple-m4": 0.1, "gtx-1650": 0.1, "rtx-3060": 0.15}
OWNERS = 0.1  # part of those that come who ask, and lend nothing to others; assumed
ASKS_S = 300.0  # between requests of an owner, on average; assumed
NOTICED_S = 10.0  # until a lost device is given up
DISK_BYTES_PER_S = 500e6
MOST_MEMBERS = 8
OWNER, MIRROR = "owner", "mirror"  # where slices come from


@dataclass(frozen=True)
class Setting:
    """A pool, and how groups are formed of it."""

    devices: int
    near: bool  # members are of the owner's region, while there are any
    source: str  # of slices
    spare: bool = False  # one more member has the whole model on its disk
    hours: float = 12.0
    seed: int = 0

    def describe(self) -> str:
        """For people."""
        where = "by region" if self.near else "anywhere"
        return f"{where}, slices from the {self.source}{', a spare' if self.spare else ''}"


@dataclass(eq=False)
class Device:
    """A device of the pool."""

    kind: str
    region: str
    uplink: float
    downlink: float
    group: Group | None = None
    is_online: bool = False


@dataclass(eq=False)
class Group:
    """Devices that serve their owner, the first of them."""

    members: list[Device]
    predicted: Prediction | None = None  # None: the model has no room, and it waits for devices
    slice_bytes: dict[Device, int] = field(default_factory=dict)
    spare: Device | None = None
    spare_ready_s: float = math.inf
    began_s: float = math.inf  # when it could serve the first time
    down_since_s: float = 0.0  # inf while it serves
    down_s: float = 0.0  # since it began
    queue: list[float] = field(default_factory=list)  # arrivals of requests that wait
    asked_s: float | None = None  # arrival of the one that is answered
    left: float = 0.0  # of its tokens
    resumed_s: float = 0.0
    failovers: int = 0  # that it met
    epoch: int = 0  # events of earlier ones are of no use


Served = tuple[Prediction, list[Device], dict[Device, int]]  # of a plan, its devices, the owner first, and their slices


class Plans:
    """Plans of one model for groups of devices: the cut of each mix of kinds once, and its times for each group."""

    def __init__(self, work: Work, sizes: PartSizes, weight_bytes: int) -> None:
        self.work, self.weight_bytes = work, weight_bytes
        self._speeds = {kind: preset_speed(CATALOG[kind], sizes, kind, kind) for kind in KINDS}
        self._plans: dict[tuple[str, ...], Plan | None] = {}

    def room(self, devices: Iterable[Device]) -> int:
        """Bytes that a model may take on these devices."""
        speeds = [self._speeds[device.kind] for device in devices]
        return sum(max(0, speed.memory_bytes - speed.runtime_bytes) for speed in speeds)

    def served(self, members: Sequence[Device]) -> Served | None:
        """Return the plan of these devices; None where they have no room for the model. members: the owner first."""
        if self.room(members) < self.weight_bytes:
            return None
        ordered = [members[0], *sorted(members[1:], key=lambda device: device.kind)]
        kinds = tuple(device.kind for device in ordered)
        if kinds not in self._plans:
            self._plans[kinds] = self._planned(kinds)
        plan = self._plans[kinds]
        if plan is None:
            return None
        names = dict(zip(_names(len(ordered)), ordered, strict=True))
        links = Links({(a, b): link(names[a], names[b]) for a, b in permutations(names, 2)})
        predicted = predict(plan, self.work, self._named(kinds), links, 1)
        layers = self.work.limits.sizes.layers
        current = {
            names[stage.shards[0].device]: round(self.weight_bytes * len(stage.layers) / layers)
            for stage in plan.stages
        }
        return predicted, [device for device in ordered if device in current or device is ordered[0]], current

    def _planned(self, kinds: tuple[str, ...]) -> Plan | None:
        """The stages of least latency over links between homes."""
        speeds = self._named(kinds)
        links = Links(dict.fromkeys(permutations(speeds, 2), LinkSpeed(0.03, UPLINK)))
        planner = Planner(self.work, list(speeds.values()), links, "model", "", tensor=False)
        result, _ = planner.front(("latency",), microbatches=[1])
        return result[0].plan if result else None

    def _named(self, kinds: tuple[str, ...]) -> dict[str, DeviceSpeed]:
        return {
            name: replace(self._speeds[kind], device=name, disk_bytes_per_s=None)
            for name, kind in zip(_names(len(kinds)), kinds, strict=True)
        }


def _names(n: int) -> list[str]:
    return [LOCAL, *(f"d{i}" for i in range(1, n))]


def link(a: Device, b: Device) -> LinkSpeed:
    """The way from one home to another."""
    far_s = 0.0 if a.region == b.region else FAR_S.get((a.region, b.region)) or FAR_S[b.region, a.region]
    return LinkSpeed(2 * ACCESS_S + far_s, min(a.uplink, b.downlink))


def first_token_s(group: Group) -> float:
    """Seconds of a prompt, or of one whose tokens are computed again."""
    assert group.predicted is not None
    return group.predicted.ttft_s or 0.0


class Pool:
    """A simulation of one setting."""

    def __init__(self, setting: Setting, plans: Plans, tokens: int) -> None:
        """tokens: of an answer."""
        self._setting, self._plans, self._tokens = setting, plans, tokens
        self._dice = random.Random(f"pool {setting.seed}")
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n, self.now = 0, 0.0
        self._free: dict[str, list[Device]] = {region: [] for region in REGIONS}
        self._short: list[Group] = []  # groups that wait for a device, the longest first
        self.groups: list[Group] = []  # that serve, or wait
        self.requests: list[tuple[float, int]] = []  # (seconds from arrival to end, failovers that it met)
        self.failovers = 0
        self.failover_s: list[float] = []
        self.start_s: list[float] = []  # from an owner's wish to the first request that could be served
        self.up_s, self.group_s, self.device_s = 0.0, 0.0, 0.0
        self.sent_bytes = 0.0

    def run(self) -> None:
        """Let it all happen."""
        mean_s = SESSION_MEDIAN_S / math.log(2) ** (1 / SESSION_SHAPE) * math.gamma(1 + 1 / SESSION_SHAPE)
        self._away_s = mean_s * (1 / ONLINE - 1)
        for _ in range(self._setting.devices):
            device = Device(
                self._pick(KINDS),
                self._pick(REGIONS),
                UPLINK * self._dice.lognormvariate(0, SPREAD),
                DOWNLINK * self._dice.lognormvariate(0, SPREAD),
            )
            self._at(self._dice.random() * self._away_s, self._comes, device)
        end_s = self._setting.hours * HOUR_S
        while self._events and self._events[0][0] < end_s:
            self.now, _, then, arguments = heapq.heappop(self._events)
            then(*arguments)
        self.now = end_s
        for group in self.groups:
            self._count(group)

    def _pick(self, weights: dict[str, float]) -> str:
        return self._dice.choices(list(weights), list(weights.values()))[0]

    def _at(self, time_s: float, then: Callable[..., None], *arguments: Any) -> None:
        self._n += 1
        heapq.heappush(self._events, (time_s, self._n, then, arguments))

    # --- devices ---

    def _comes(self, device: Device) -> None:
        device.is_online = True
        scale = SESSION_MEDIAN_S / math.log(2) ** (1 / SESSION_SHAPE)
        self._at(self.now + self._dice.weibullvariate(scale, SESSION_SHAPE), self._leaves, device)
        if self._dice.random() < OWNERS:
            device.group = Group([device], down_since_s=self.now)
            self.groups.append(device.group)
            self._short.append(device.group)
            self._complete(device.group)
        else:
            self._frees(device)

    def _frees(self, device: Device) -> None:
        """A device is there for any group; the one that waits the longest is the first to try."""
        device.group = None
        self._free[device.region].append(device)
        for group in self._short[:1]:
            self._complete(group)

    def _leaves(self, device: Device) -> None:
        device.is_online = False
        self._at(self.now + self._dice.expovariate(1 / self._away_s), self._comes, device)
        group = device.group
        device.group = None
        if group is None:
            self._free[device.region].remove(device)
        elif device is group.members[0]:
            self._ends(group)
        elif device is group.spare:
            group.spare = None
            self._hire_spare(group)
        else:
            self._loses(group, device)

    def _take(self, group: Group) -> Device | None:
        """A free device for a group; None where there is none."""
        region = group.members[0].region
        others = [name for name, free in self._free.items() if free and name != region]
        names = [region] if self._setting.near and self._free[region] else [*others, region]
        candidates = [name for name in names if self._free[name]]
        if not candidates:
            return None
        free = self._free[self._dice.choices(candidates, [len(self._free[name]) for name in candidates])[0]]
        place = self._dice.randrange(len(free))
        free[place], free[-1] = free[-1], free[place]
        device = free.pop()
        device.group = group
        return device

    # --- groups ---

    def _complete(self, group: Group) -> None:
        """Add free devices until the model has room; the group waits where there are too few."""
        while (served := self._plans.served(group.members)) is None:
            device = self._take(group) if len(group.members) < MOST_MEMBERS else None
            if device is None:
                return
            group.members.append(device)
        self._short.remove(group)
        before = group.slice_bytes
        unused = self._serve_by(group, served)
        self._serves_after(group, self._send(group, [device for device in group.slice_bytes if device not in before]))
        for device in unused:
            self._frees(device)
        if self._setting.spare and group.spare is None:
            self._hire_spare(group)

    def _serve_by(self, group: Group, served: Served) -> list[Device]:
        """Take a plan, and return the members that it does not use."""
        before = group.members
        group.predicted, group.members, group.slice_bytes = served
        return [device for device in before if device not in group.members]

    def _serves_after(self, group: Group, seconds: float) -> None:
        group.epoch += 1
        self._at(self.now + seconds, self._ready, group, group.epoch)

    def _send(self, group: Group, devices: Sequence[Device]) -> float:
        """Seconds until these devices have their slices. An owner, which has the file, sends to one after the other."""
        owner = group.members[0]
        sizes = {device: group.slice_bytes[device] for device in devices if device is not owner}
        self.sent_bytes += sum(sizes.values())
        if self._setting.source == MIRROR:
            return max((n / device.downlink for device, n in sizes.items()), default=0.0)
        return sum(n / min(owner.uplink, device.downlink) for device, n in sizes.items())

    def _hire_spare(self, group: Group) -> None:
        """Let one more device fetch the whole model."""
        device = self._take(group)
        if device is not None:
            mirrored = self._setting.source == MIRROR
            rate = device.downlink if mirrored else min(group.members[0].uplink, device.downlink)
            self.sent_bytes += self._plans.weight_bytes
            group.spare, group.spare_ready_s = device, self.now + self._plans.weight_bytes / rate

    def _ready(self, group: Group, epoch: int) -> None:
        """The group serves, or serves again."""
        if epoch != group.epoch:
            return
        down_s = self.now - group.down_since_s
        if group.began_s == math.inf:
            group.began_s = self.now
            self.start_s.append(down_s)
            self._at(self.now + self._dice.expovariate(1 / ASKS_S), self._asks, group)
        else:
            group.down_s += down_s
            self.failover_s.append(down_s)
        group.down_since_s = math.inf
        self._resume(group)

    def _loses(self, group: Group, device: Device) -> None:
        """A member has left: another one takes its place, and the tokens that there were are computed again."""
        group.members.remove(device)
        lost_bytes = group.slice_bytes.pop(device, 0)
        if group.predicted is None:  # it waits for devices
            return
        if group.down_since_s == math.inf:
            group.down_since_s = self.now
            self.failovers += 1
            if group.asked_s is not None:
                done = (self.now - group.resumed_s - first_token_s(group)) / group.predicted.latency_s
                group.left = max(1.0, group.left - max(0.0, done))
                group.failovers += 1
        group.predicted = None
        group.epoch += 1
        spare = group.spare
        if spare is not None and group.spare_ready_s <= self.now:
            group.spare = None
            group.members.append(spare)
            served = self._plans.served(group.members)
            if served is not None:
                unused = self._serve_by(group, served)
                self._serves_after(group, NOTICED_S + lost_bytes / DISK_BYTES_PER_S)
                for item in unused:
                    self._frees(item)
                self._hire_spare(group)
                return
        self._at(self.now + NOTICED_S, self._noticed, group, group.epoch)

    def _noticed(self, group: Group, epoch: int) -> None:
        if epoch == group.epoch:
            self._short.append(group)
            self._complete(group)

    def _ends(self, group: Group) -> None:
        """The owner has gone, and with it who asked."""
        self._count(group)
        self.groups.remove(group)
        if group in self._short:
            self._short.remove(group)
        group.epoch += 1
        for device in (*group.members[1:], *([group.spare] if group.spare else [])):
            self._frees(device)

    def _count(self, group: Group) -> None:
        """Add a group's time, and how much of it it could serve, to the sums."""
        if group.began_s < math.inf:
            down_s = group.down_s + max(0.0, self.now - group.down_since_s)
            self.group_s += self.now - group.began_s
            self.up_s += self.now - group.began_s - down_s

    # --- requests ---

    def _asks(self, group: Group) -> None:
        if group in self.groups:
            self._at(self.now + self._dice.expovariate(1 / ASKS_S), self._asks, group)
            group.queue.append(self.now)
            if group.asked_s is None:
                self._resume(group)

    def _resume(self, group: Group) -> None:
        """Begin the next request, or go on with the one that met a failover."""
        if group.predicted is None or group.down_since_s < math.inf:
            return
        if group.asked_s is None:
            if not group.queue:
                return
            group.asked_s, group.left, group.failovers = group.queue.pop(0), float(self._tokens), 0
        group.resumed_s = self.now
        ends_s = self.now + first_token_s(group) + (group.left - 1) * group.predicted.latency_s
        self._at(ends_s, self._answered, group, group.epoch)

    def _answered(self, group: Group, epoch: int) -> None:
        if epoch == group.epoch and group.asked_s is not None:
            self.requests.append((self.now - group.asked_s, group.failovers))
            self.device_s += len(group.members) * (self.now - group.resumed_s)
            group.asked_s = None
            self._resume(group)

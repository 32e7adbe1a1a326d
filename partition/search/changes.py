"""Sensitivity of a plan: effects of faster links, one more device, or smaller weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partition.plan.plan import LOCAL, MAX_WORLD_SIZE
from partition.predict.speeds import FASTEST_LINK_BYTES_PER_S, DeviceSpeed, Links, LinkSpeed
from partition.search.planner import Planner
from partition.search.replicas import Replicas

FASTER = 10.0  # factor for latency and bandwidth of links
SMALLER = 0.5  # factor for the bytes of weights, and for decode times, which memory bandwidth limits
_ANOTHER = "another"  # address of the additional device


@dataclass(frozen=True)
class Change:
    """One change and its effect."""

    what: str
    value: float | None  # objective after the change, smaller is better; None: no plan fits

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"what": self.what, "value": self.value}


def changes(planner: Planner, objective: str, caps: Mapping[str, float]) -> list[Change]:
    """Return the estimated objective after each single change. caps: largest allowed costs of objectives."""
    speeds, links = planner.speeds, planner.links
    variants = []
    if len(speeds) > 1:
        variants.append((f"links {FASTER:g} times faster", planner.like(speeds, faster_links(links))))
    like = min(speeds[1:] or speeds, key=lambda speed: min(tier.seconds for tier in speed.tiers))
    more, all_links = _with_another(speeds, links, like)
    if all_links is not None:
        variants.append((f"one more device like {like.name}", planner.like(more, all_links)))
    variants.append(
        (f"weights of {SMALLER:g} times the size", planner.like([_smaller(device) for device in speeds], links))
    )
    return [Change(what, _least(other, objective, caps)) for what, other in variants]


def _least(planner: Planner, objective: str, caps: Mapping[str, float]) -> float | None:
    """Return the objective of the best plan, or None if no plan fits. Replicas have one stage each, for speed."""
    placed = planner.best(objective, caps)
    plain = [] if placed is None else [placed]
    copies = Replicas(planner, searches=0).plans((objective,), caps, plain)
    return min((placed.objectives[0] for placed in (*plain, *copies)), default=None)


def faster_links(links: Links) -> Links:
    """Return links with latency and bandwidth improved by FASTER."""
    return Links(
        {
            pair: LinkSpeed(way.latency_s / FASTER, min(way.bytes_per_s * FASTER, FASTEST_LINK_BYTES_PER_S), True)
            for pair, way in links.between.items()
        }
    )


def _with_another(
    speeds: Sequence[DeviceSpeed], links: Links, like: DeviceSpeed
) -> tuple[list[DeviceSpeed], Links | None]:
    """Add a device like `like`. Its links equal those of `like`; its link to `like` equals the one between `like` and
    the owner.

    The links are None if they are unknown, or if there are too many devices.
    """
    if like.device == LOCAL or len(speeds) >= MAX_WORLD_SIZE:
        return list(speeds), None  # its links are unknown, or there are too many devices
    between = dict(links.between)
    for speed in speeds:
        other = LOCAL if speed.device == like.device else like.device
        # See the docstring for the choice of its links.
        is_local = speed.device == LOCAL
        between[speed.device, _ANOTHER] = links.get(LOCAL, like.device) if is_local else links.get(speed.device, other)
        between[_ANOTHER, speed.device] = links.get(like.device, LOCAL) if is_local else links.get(other, speed.device)
    return [*speeds, replace(like, device=_ANOTHER, name=f"another {like.name}", host=None)], Links(between)


def _smaller(speed: DeviceSpeed) -> DeviceSpeed:
    """Return a device's speed for smaller weights: they take less time and less memory."""
    room = max(0, speed.memory_bytes - speed.runtime_bytes)
    curves = {name: getattr(speed, name).times(SMALLER) for name in ("layer_s", "half_layer_s", "head_s")}
    memory, gpu = speed.runtime_bytes + round(room / SMALLER), speed.gpu and _smaller(speed.gpu)
    return replace(speed, **curves, memory_bytes=memory, gpu=gpu)

"""Pareto fronts of one model for several networks between the same devices, and where the best plans change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from devices.catalog import NETWORKS
from devices.cluster_file import MAX_DELAY_MS
from edge.arguments import checked
from edge.planning.front import Front
from edge.planning.moves import Move, MoveScan
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.predict.objectives import OBJECTIVES
from partition.predict.pareto import Point
from partition.predict.speeds import FASTEST_LINK_BYTES_PER_S, LinkSpeed

FORMAT = "edge-pareto-networks-1"
MOST_NETWORKS = 8
# Ranges in which moves are searched, by the property of a link: 0.1 Mbit/s to 10 Gbit/s, and 0.01 ms to 0.5 s.
RANGES: Mapping[str, tuple[float, float]] = {"bytes_per_s": (12_500.0, 1.25e9), "latency_s": (1e-5, 0.5)}
_RATE_BYTES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
_DELAY_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TYPED = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(kbit|mbit|gbit)/([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s)")


@dataclass(frozen=True)
class AssumedNetwork:
    """A network that connects all devices."""

    name: str  # name of a preset, or RATE/DELAY as the user typed it
    link: LinkSpeed  # both directions between any two devices


def network_of(text: str) -> AssumedNetwork:
    """Return the network of a preset's name, or of RATE/DELAY such as "100mbit/20ms".

    Raises PlanError if it is neither, or if the rate or the delay is out of range.
    """
    name = text.strip().lower()
    if name in NETWORKS:
        preset = NETWORKS[name]
        return AssumedNetwork(name, LinkSpeed(preset.latency_s, preset.bytes_per_s, estimate=True))
    typed = _TYPED.fullmatch(name)
    if typed is None:
        raise PlanError(
            f"the network {text[:40]!r} is unknown; choose from {', '.join(NETWORKS)}, or give RATE/DELAY such as"
            " 100mbit/20ms"
        )
    bytes_per_s = float(typed[1]) * _RATE_BYTES[typed[2]]
    latency_s = float(typed[3]) * _DELAY_S[typed[4]]
    if not 0 < bytes_per_s <= FASTEST_LINK_BYTES_PER_S or latency_s > MAX_DELAY_MS / 1e3:
        raise PlanError(
            f"the network {text[:40]!r} needs a rate above 0 and up to {FASTEST_LINK_BYTES_PER_S / 125e6:g}gbit, and a"
            f" delay up to {MAX_DELAY_MS / 1e3:g}s"
        )
    return AssumedNetwork(name, LinkSpeed(latency_s, bytes_per_s, estimate=True))


def networks_of(names: Sequence[str]) -> tuple[AssumedNetwork, ...]:
    """Return the networks of these names.

    Raises PlanError for an unknown or repeated name, and for no or too many names.
    """
    networks = tuple(map(network_of, names))
    if not 1 <= len(networks) <= MOST_NETWORKS:
        raise PlanError(f"1 to {MOST_NETWORKS} networks can be compared, got {len(networks)}")
    if len({network.name for network in networks}) < len(networks):
        raise PlanError(f"each network needs to be different, got {', '.join(network.name for network in networks)}")
    return networks


class NetworkPlans:
    """Plans of a model on devices that one network connects."""

    def __init__(self, network: AssumedNetwork, front: Front) -> None:
        """front: front whose links the network replaces."""
        self.network, self._spaces = network, front.spaces
        self.front = Front([space.with_link(network.link) for space in front.spaces], front.axes, front.options)
        self._objectives = [axis for axis in front.axes if OBJECTIVES[axis].time]

    @cached_property
    def best(self) -> dict[str, Point]:
        """Best plan by each axis that is a time or a rate."""
        return {objective: self._best(objective, self.network.link) for objective in self._objectives}

    @cached_property
    def scans(self) -> dict[tuple[str, str], MoveScan]:
        """Moves of the best plan, by objective and by the property of the link that changes.

        The other property of the link stays that of the network.
        """
        scans = {}
        for objective in self._objectives:
            for key, (low, high) in RANGES.items():
                own = getattr(self.network.link, key)
                scan = MoveScan(partial(self._best_at, objective, key), partial(self._cost_at, objective, key))
                scan.search(min(low, own or low), max(high, own))
                scans[objective, key] = scan
        return scans

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the network in the JSON of `edge pareto` over networks."""
        link = self.network.link
        return {
            "name": self.network.name,
            "latency_s": link.latency_s,
            "bytes_per_s": link.bytes_per_s,
            "best": {objective: self._plan_json(point) for objective, point in self.best.items()},
            "moves": [
                {"objective": objective, "of": key, **self._move_json(move)}
                for (objective, key), scan in self.scans.items()
                for move in scan.moves
            ],
            "moves_complete": all(scan.complete for scan in self.scans.values()),
            "front": self.front.to_json(),
        }

    def _move_json(self, move: Move) -> dict[str, Any]:
        return {"at": move.at, "below": self._plan_json(move.below), "above": self._plan_json(move.above)}

    def _plan_json(self, point: Point) -> dict[str, Any]:
        values = {"label": point.label, "type": point.type, "parallel": point.parallel, "plan": point.plan.to_json()}
        figures = {name: getattr(point.predicted, OBJECTIVES[name].key) for name in self._objectives}
        return values | {OBJECTIVES[name].key: figure for name, figure in figures.items()}

    def _link(self, key: str, value: float) -> LinkSpeed:
        link = self.network.link
        if key == "latency_s":
            return LinkSpeed(value, link.bytes_per_s, estimate=True)
        return LinkSpeed(link.latency_s, value, estimate=True)

    def _best(self, objective: str, link: LinkSpeed) -> Point:
        points = [space.with_link(link).fastest(objective) for space in self._spaces]
        return min(points, key=lambda point: OBJECTIVES[objective].cost_of(point.predicted))

    def _best_at(self, objective: str, key: str, value: float) -> Point:
        return self._best(objective, self._link(key, value))

    def _cost_at(self, objective: str, key: str, point: Point, value: float) -> float:
        space = next(space for space in self._spaces if space.type == point.type)
        return space.with_link(self._link(key, value)).cost(point, objective)


class NetworkFronts:
    """Fronts of one model on the same devices, one for each of several networks."""

    @checked
    def __init__(self, front: Front, networks: Sequence[str], steps: Steps = SILENT) -> None:
        """Plan once for each network, and find where the best plans change.

        front: its devices and options count; nothing is measured again.
        networks: names of presets ("lan", "wifi", "5g", "4g", "3g"), or RATE/DELAY such as "100mbit/20ms"; at most 8.
        Raises PlanError for invalid networks.
        """
        chosen = networks_of(networks)
        self.plans: list[NetworkPlans] = []
        with steps.step("Planning", unit="networks") as show:
            for i, network in enumerate(chosen):
                plans = NetworkPlans(network, front)
                self.plans.append(plans)
                _ = plans.best, plans.scans
                show(i + 1, len(chosen))

    def __repr__(self) -> str:
        names = ", ".join(plans.network.name for plans in self.plans)
        return f"<edge.NetworkFronts of {self.plans[0].front.spaces[0].title}: {names}>"

    def to_json(self) -> dict[str, Any]:
        """Return the object that `edge pareto` over networks prints as JSON."""
        networks = [plans.to_json() for plans in self.plans]
        first = networks[0]["front"]
        same = {key: first[key] for key in ("kind", "model", "objectives", "concurrency", "devices", "notes")}
        return {"format": FORMAT, **same, "networks": networks}

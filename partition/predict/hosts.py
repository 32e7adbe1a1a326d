"""Hosts that several devices of a plan share: devices that compute at once there share the cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that a device runs on."""

    id: str  # equal where devices share its cores
    cores: float
    threads: int  # threads the device computes with

    @property
    def capacity(self) -> float:
        """Threads that run there at once. A device was measured alone: with more threads than cores, those count."""
        return max(self.cores, self.threads)


def demand(hosts: Iterable[Host | None]) -> dict[str, float]:
    """Devices that compute at once: by host, their threads / its capacity. Above 1 each takes so many times as long."""
    named = [host for host in hosts if host is not None]
    threads: Counter[str] = Counter()
    for host in named:
        threads[host.id] += host.threads
    return {id: n / max(host.capacity for host in named if host.id == id) for id, n in threads.items()}


def used(hosts: Iterable[Host | None]) -> dict[str, float]:
    """The part of each host's cores that devices take which compute at once: demand, at most 1."""
    return {id: min(1.0, n) for id, n in demand(hosts).items()}


def crowded(hosts: Iterable[Host | None]) -> list[str]:
    """Return the hosts with too few cores for all of these devices at once."""
    return [id for id, n in demand(hosts).items() if n > 1]


def crowding(stages: Sequence[tuple[Mapping[str, float], float]]) -> list[float]:
    """Return the factor by which each stage slows down while all stages of a plan compute.

    stages: (the parts of hosts that it uses, seconds of a step). A host's cores are busy for sum(part x seconds) of its
    stages; where that is longer than the longest of them takes, all of them take so many times as long.
    """
    busy_s: Counter[str] = Counter()
    longest_s: dict[str, float] = {}
    for parts, seconds in stages:
        for id, part in parts.items():
            busy_s[id] += part * seconds  # type: ignore[assignment]  # typeshed counts in whole numbers
            longest_s[id] = max(seconds, longest_s.get(id, 0.0))
    ratio = {id: busy_s[id] / longest if longest else 1.0 for id, longest in longest_s.items()}
    return [max(1.0, *(ratio[id] for id in parts)) if parts else 1.0 for parts, _ in stages]

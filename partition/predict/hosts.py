"""Hosts that several devices of a plan share. Devices that compute at the same time there share the cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """Machine that a device runs on."""

    id: str  # equal for devices that share cores
    cores: float
    threads: int  # compute threads of the device

    @property
    def capacity(self) -> float:
        """Number of threads that run at the same time. A device with more threads than cores was measured alone, so
        its threads count.
        """
        return max(self.cores, self.threads)


def demand(hosts: Iterable[Host | None]) -> dict[str, float]:
    """Return the demand on each host if all these devices compute: threads / capacity. Above 1, each device slows
    down by this factor.
    """
    named = [host for host in hosts if host is not None]
    threads: Counter[str] = Counter()
    for host in named:
        threads[host.id] += host.threads
    return {id: n / max(host.capacity for host in named if host.id == id) for id, n in threads.items()}


def used(hosts: Iterable[Host | None]) -> dict[str, float]:
    """Return the fraction of each host's cores that these devices use together, at most 1."""
    return {id: min(1.0, n) for id, n in demand(hosts).items()}


def crowded(hosts: Iterable[Host | None]) -> list[str]:
    """Return the hosts that have too few cores for all of these devices at the same time."""
    return [id for id, n in demand(hosts).items() if n > 1]


def crowding(stages: Sequence[tuple[Mapping[str, float], float]]) -> list[float]:
    """Return the slowdown factor of each stage while all stages of a plan compute.

    stages: pairs of (fraction of each host's cores that the stage uses, seconds of its step).

    A host's cores are busy for sum(fraction x seconds) of its stages. If that is longer than the longest stage, all
    stages of the host slow down by the ratio.
    """
    busy_s: Counter[str] = Counter()
    longest_s: dict[str, float] = {}
    for parts, seconds in stages:
        for id, part in parts.items():
            busy_s[id] += part * seconds  # type: ignore[assignment]  # typeshed counts in whole numbers
            longest_s[id] = max(seconds, longest_s.get(id, 0.0))
    ratio = {id: busy_s[id] / longest if longest else 1.0 for id, longest in longest_s.items()}
    return [max(1.0, *(ratio[id] for id in parts)) if parts else 1.0 for parts, _ in stages]

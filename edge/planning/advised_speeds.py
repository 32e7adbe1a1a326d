"""Measured device speeds for each candidate: with synthetic slices for some, and interpolated for the others.

Measuring a model takes some seconds. Of models that differ only in size, three are measured: the smallest, a middle
one, and the largest that fits the devices. Their kernels and their type are the same, so the time of a layer depends on
its weight bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge.planning.candidates import Candidate
from edge.profiling.llm_survey import AMPLE
from edge.profiling.profile import ClusterProfile
from partition.predict.speeds import Curve, DeviceSpeed

MEASURED, INTERPOLATED, ESTIMATED, PRESET = "measured", "interpolated", "estimated", "preset"
Profile = ClusterProfile[DeviceSpeed]


@dataclass(frozen=True)
class CandidateSpeeds:
    """Speeds of all devices with one candidate, and their origin."""

    profile: Profile
    figures: str  # one of MEASURED, INTERPOLATED, ESTIMATED and PRESET
    sources: tuple[str, ...] = ()  # names of the measured models behind interpolated speeds


def speeds_of_all(
    all_candidates: Sequence[Candidate],
    measure: Callable[[Candidate], Profile],
    *,
    memory_bytes: int,
    every: bool = False,
) -> list[CandidateSpeeds]:
    """Return the speeds of each candidate, in the same order.

    measure: profiles the devices for one candidate.
    memory_bytes: total memory of all devices.
    every: measure each candidate instead of interpolating.
    """
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in all_candidates:
        groups.setdefault(_kind(candidate), []).append(candidate)
    speeds: dict[str, CandidateSpeeds] = {}
    for group in groups.values():
        group.sort(key=_layer_bytes)
        chosen = group if every else references(group, memory_bytes)
        profiles = {candidate.name: measure(candidate) for candidate in chosen}
        speeds |= {name: CandidateSpeeds(profile, MEASURED) for name, profile in profiles.items()}
        for candidate in group:
            if candidate.name not in speeds:
                speeds[candidate.name] = _interpolated(candidate, [(other, profiles[other.name]) for other in chosen])
    return [speeds[candidate.name] for candidate in all_candidates]


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """Return the group key of a candidate. Within a group, times follow from sizes."""
    # A mixture-of-experts model is a group of its own, because a prompt activates more experts than one token does.
    experts = (candidate.model.name,) if candidate.shape.n_experts else ()
    return candidate.mix.name, *experts


def references(group: Sequence[Candidate], memory_bytes: int) -> list[Candidate]:
    """Return the candidates of a size-sorted group to measure: three, or all if there are no more."""
    fit = [i for i, candidate in enumerate(group) if candidate.shape.weight_bytes <= memory_bytes]
    last = fit[-1] if fit else 0
    if last + 1 < len(group) and AMPLE * group[last].shape.weight_bytes < memory_bytes:
        last += 1  # also measure a model that may need the disk, to know the disk speed
    middle = (_layer_bytes(group[0]) * _layer_bytes(group[last])) ** 0.5
    between = min(range(last + 1), key=lambda i: abs(np.log(_layer_bytes(group[i]) / middle)))
    return [group[i] for i in sorted({0, between, last})]


def _layer_bytes(candidate: Candidate) -> float:
    """Return the average bytes per layer that a token reads."""
    return sum(candidate.limits.layer_bytes) / len(candidate.limits.layer_bytes)


def _interpolated(candidate: Candidate, known: Sequence[tuple[Candidate, Profile]]) -> CandidateSpeeds:
    """Return speeds interpolated from other candidates, for each part by the bytes that a token reads."""
    candidates, profiles = [other for other, _ in known], [profile for _, profile in known]
    speeds = []
    for of_each in zip(*(profile.speeds for profile in profiles), strict=True):
        pairs = list(zip(candidates, of_each, strict=True))
        tiered = [(other, speed) for other, speed in pairs if speed.gpu is not None]
        speed = _speed(candidate, tiered or pairs)
        if speed.gpu is not None:  # a smaller candidate that the GPU holds has only the times of the GPU
            gpu = _speed(candidate, [(other, each.gpu or each) for other, each in pairs])
            memory, fixed = speed.gpu.memory_bytes, speed.gpu.runtime_bytes
            gpu = replace(gpu, gpu=None, disk_bytes_per_s=None, memory_bytes=memory, runtime_bytes=fixed)
            speed = replace(speed, gpu=gpu)
        speeds.append(speed)
    profile = replace(profiles[-1], speeds=tuple(speeds))
    return CandidateSpeeds(profile, INTERPOLATED, tuple(other.model.name for other in candidates))


def _speed(candidate: Candidate, known: Sequence[tuple[Candidate, DeviceSpeed]]) -> DeviceSpeed:
    """Return the speed of one device, interpolated from its speeds with other candidates."""
    of_each = [speed for _, speed in known]
    layers = _Line([_layer_bytes(other) for other, _ in known], _layer_bytes(candidate))
    heads = _Line([other.shape.head_bytes for other, _ in known], candidate.shape.head_bytes)
    widths = _Line([_query_width(other) for other, _ in known], _query_width(candidate))
    disks = [speed.disk_bytes_per_s for speed in of_each if speed.disk_bytes_per_s is not None]
    return replace(
        of_each[-1],
        step_s=Curve(((1, float(np.median([speed.step_s.at(1) for speed in of_each]))),)),
        layer_s=_curve([speed.layer_s for speed in of_each], layers),
        half_layer_s=_curve([speed.half_layer_s for speed in of_each], layers),
        head_s=_curve([speed.head_s for speed in of_each], heads),
        token_s=widths.at([speed.token_s for speed in of_each]),
        prompt_token_s=widths.at([speed.row_token_s(prompt=True) for speed in of_each]),
        runtime_bytes=max(speed.runtime_bytes for speed in of_each),
        disk_bytes_per_s=max(disks, default=None),
        busy=any(speed.busy for speed in of_each),
        age_s=max(speed.age_s for speed in of_each),
        key="",
    )


def _query_width(candidate: Candidate) -> float:
    return float(max(candidate.shape.n_heads) * candidate.shape.head_k)


class _Line:
    """Piecewise linear interpolation at one size, and proportional extrapolation beyond the known sizes."""

    def __init__(self, sizes: Sequence[float], size: float) -> None:
        self._sizes, self._size = sizes, size

    def at(self, seconds: Sequence[float]) -> float:
        """Return the seconds at the size, from the seconds at the known sizes."""
        pairs = dict(sorted(zip(self._sizes, seconds, strict=True)))
        sizes = list(pairs)
        beyond = min(max(self._size, sizes[0]), sizes[-1])
        return float(np.interp(beyond, sizes, list(pairs.values()))) * self._size / beyond


def _curve(curves: Sequence[Curve], line: _Line) -> Curve:
    """Return the interpolated curve at row counts that all curves were timed with.

    At other row counts, some curves would only be linear extrapolations.
    """
    rows = set.intersection(*({n for n, _ in curve.points} for curve in curves))
    return Curve(tuple((n, line.at([curve.at(n) for curve in curves])) for n in sorted(rows)))

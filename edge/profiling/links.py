"""Measure the links between the sessions of a group: all pairs, both directions, one after the other, twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from devices.remembered import Remembered
from edge.cluster.session import EngineSession, measured
from edge.errors import WorkerError
from edge.net.dialling import KINDS
from partition.errors import PlanError
from partition.predict.speeds import MOST_S, Links, LinkSpeed
from transport import edge_pb2 as pb
from transport.measure import TENSOR_BYTES

_PAIR_S = 0.2  # approximate time per pair and round; half of it measures bandwidth
_ROUNDS = 2  # rounds over all pairs; the better result counts
_APART_S = 0.6  # minimum time between round starts; other work rarely occupies a CPU that long
_MOST = 1e15  # seconds, or bytes per second; larger values are invalid
# A link counts as unchanged if the time of 8 KiB differs by at most this share of their transfer time, plus noise.
_ALIKE, _NOISE_S = 0.3, 100e-6


def measure_links(
    sessions: Sequence[EngineSession],
    devices: Sequence[str],
    states: Sequence[Sequence[pb.LinkState]],
    on_pair: Callable[[], None] = lambda: None,
    *,
    fresh: bool = False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Links:
    """Measure the links between connected idle sessions. Devices are named as in a plan.

    states: result of `connect_all`.
    on_pair: called after each pair.
    fresh: ignore cached measurements.

    A link measured within the last day is not measured again if its round trip while connecting has not changed. The
    latency is that of 8 KiB, the size of decode messages, without the transfer time of these bytes.
    Raises WorkerError if a measured value is invalid, and the errors of sessions.
    """
    dialled = {(a.rank, state.rank): (a, state) for a, own in zip(sessions, states, strict=True) for state in own}
    remembered = Remembered("links")
    speeds: dict[tuple[int, int], tuple[LinkSpeed, LinkSpeed]] = {}
    pairs = list(combinations(range(len(sessions)), 2))
    trips_s, keys = {}, {}
    for a, b in pairs:
        if (a, b) not in dialled:
            raise WorkerError(
                f"{sessions[a].device} reports no link to {sessions[b].device}; install the same version of edge there"
            )
        trips_s[a, b], kind = _trip(*dialled[a, b]), dialled[a, b][1].kind
        keys[a, b] = " ".join((sessions[a].device, devices[a], sessions[b].device, devices[b], kind))
        known = None if fresh else _as_before(remembered.get(keys[a, b]), trips_s[a, b])
        if known is not None:
            speeds[a, b] = known
            on_pair()
    unknown = [pair for pair in pairs if pair not in speeds]
    for done in range(_ROUNDS if unknown else 0):
        began = clock()
        for a, b in unknown:
            now = _measured(sessions[a], sessions[b], trips_s[a, b])
            speeds[a, b] = _better(speeds[a, b], now) if done else now
            if done == _ROUNDS - 1:
                on_pair()
        if done < _ROUNDS - 1:
            pause(max(0.0, _APART_S - (clock() - began)))
    for pair in unknown:
        there, back = speeds[pair]
        values = {"there": there.bytes_per_s, "back": back.bytes_per_s}
        remembered.put(keys[pair], {"trip_s": trips_s[pair], "latency_s": there.latency_s, **values})
    between = {(devices[a], devices[b]): there for (a, b), (there, _) in speeds.items()}
    return Links(between | {(devices[b], devices[a]): back for (a, b), (_, back) in speeds.items()})


def _better(first: tuple[LinkSpeed, LinkSpeed], second: tuple[LinkSpeed, LinkSpeed]) -> tuple[LinkSpeed, LinkSpeed]:
    """Return the better values of two measurements, because other work on a machine only makes them worse."""
    there, back = (
        LinkSpeed(min(a.latency_s, b.latency_s), max(a.bytes_per_s, b.bytes_per_s))
        for a, b in zip(first, second, strict=True)
    )
    return there, back


def _as_before(remembered: tuple[Any, float] | None, trip_s: float) -> tuple[LinkSpeed, LinkSpeed] | None:
    """Return both directions of a cached link, or None if the link has changed."""
    if remembered is None:
        return None
    values, age_s = remembered
    try:
        then_s, latency_s = float(values["trip_s"]), float(values["latency_s"])
        there, back = (LinkSpeed(latency_s, float(values[way]), age_s=age_s) for way in ("there", "back"))
    except (TypeError, KeyError, ValueError, OverflowError, PlanError):  # written by another version
        return None
    of_bytes_s = max(0.0, then_s - 2 * latency_s)  # a share of the whole trip would hide changes if latency dominates
    return (there, back) if abs(trip_s - then_s) <= _ALIKE * of_bytes_s + _NOISE_S else None


def _measured(a: EngineSession, b: EngineSession, trip_s: float) -> tuple[LinkSpeed, LinkSpeed]:
    """Measure a link from a to b and back. trip_s: round trip of 8 KiB in seconds."""
    figures = measured(a, b, _PAIR_S)
    there, back, latency_s = figures.send_bytes_per_s, figures.receive_bytes_per_s, figures.round_trip_median_s / 2
    if not all(0 < figure < _MOST for figure in (there, back, latency_s)):
        raise WorkerError(f"{a.device} returned invalid measurements; install the same version of edge there")
    # A decode row takes longer than an empty message to pass through both systems.
    row_s = trip_s / 2 - TENSOR_BYTES / min(there, back)
    latency_s = max(latency_s, min(row_s, 3 * latency_s))
    try:
        return LinkSpeed(latency_s, there), LinkSpeed(latency_s, back)
    except PlanError as error:
        raise WorkerError(f"{a.device} and {b.device}: {error}") from None


def _trip(session: EngineSession, state: pb.LinkState) -> float:
    """Return the round trip of 8 KiB over a link, as measured by its lower rank."""
    if state.kind not in KINDS or not 0 <= state.round_trip_s < MOST_S:
        raise WorkerError(f"{session.device} returned invalid link states; install the same version of edge there")
    return state.round_trip_s


def rough_text(link: LinkSpeed | None) -> str:
    """Return a description of a link that is so rough that noise does not change it."""
    if link is None:
        return "none"
    return f"{max(link.latency_s, 3e-4):.0e} {min(link.bytes_per_s, 1e9):.0e}"

"""Measure the links between the sessions of a group: all pairs, both directions, one after the other, twice.

Without sessions, links are estimated from calls to the workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from devices.remembered import KEPT_AGE_S, Remembered
from edge.cluster.client import Remote
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession, measured
from edge.errors import WorkerError
from edge.net.dialling import KINDS
from edge.tasks import results, unwaited_pool
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.speeds import MOST_S, Links, LinkSpeed
from transport import edge_pb2 as pb
from transport.measure import TENSOR_BYTES

_PAIR_S = 0.2  # approximate time per pair and round; half of it measures bandwidth
_ROUNDS = 2  # rounds over all pairs; the better result counts
_APART_S = 0.6  # minimum time between round starts; other work rarely occupies a CPU that long
_MOST = 1e15  # seconds, or bytes per second; larger values are invalid
_CALLS = 3  # calls of each size; the fastest counts
_PADDING = 64 << 10  # bytes of a call that shows the bandwidth
_SLOW_S = 0.2  # seconds of a call with data on a slow link
_CALL_S = 5e-4  # seconds of a call in both systems, without the network
_ASSUMED = 12.5e6  # bytes per second, if nothing shows more
_LEAST_LATENCY_S, _MOST_ESTIMATED = 1e-4, 125e6  # limits of estimates, in seconds and bytes per second
# A link counts as unchanged if the time of 8 KiB differs by at most this share of their transfer time, plus noise.
_ALIKE, _NOISE_S = 0.3, 100e-6


def measure_links(
    sessions: Sequence[EngineSession],
    devices: Sequence[str],
    states: Sequence[Sequence[pb.LinkState]],
    on_pair: Callable[[], None] = lambda: None,
    *,
    fresh: bool = False,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Links:
    """Measure the links between connected idle sessions. Devices are named as in a plan.

    states: result of `connect_all`.
    on_pair: called after each pair.
    fresh: ignore cached measurements.
    seconds: time for measuring; links that were not measured by then are estimated from the round trips.

    A remembered link is not measured again if its round trip while connecting has not changed. The latency is that of
    8 KiB, the size of decode messages, without the transfer time of these bytes.
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
        keys[a, b] = _key((sessions[a].device, sessions[b].device), (devices[a], devices[b]), kind)
        known = None if fresh else _as_before(remembered.get(keys[a, b], KEPT_AGE_S), trips_s[a, b])
        if known is not None:
            speeds[a, b] = known
            on_pair()
    unknown = [pair for pair in pairs if pair not in speeds]
    until = clock() + seconds
    for done in range(_ROUNDS if unknown else 0):
        began = clock()
        for a, b in unknown:
            if clock() <= until:
                now = _measured(sessions[a], sessions[b], trips_s[a, b])
                speeds[a, b] = _better(speeds[a, b], now) if done else now
            if done == _ROUNDS - 1:
                if (ways := speeds.get((a, b))) is not None:  # kept at once, in case the measurement is interrupted
                    _remember(remembered, keys[a, b], trips_s[a, b], *ways)
                on_pair()
        if done < _ROUNDS - 1:
            pause(max(0.0, min(until, began + _APART_S) - clock()))
    for pair in unknown:
        if pair not in speeds:  # time was short, so only the round trip while connecting is known
            at_least = max(_ASSUMED, 2 * TENSOR_BYTES / max(trips_s[pair], _LEAST_LATENCY_S))
            link = LinkSpeed(trips_s[pair] / 2, min(at_least, _MOST_ESTIMATED), estimate=True)
            speeds[pair] = link, link
    between = {(devices[a], devices[b]): there for (a, b), (there, _) in speeds.items()}
    return Links(between | {(devices[b], devices[a]): back for (a, b), (_, back) in speeds.items()})


def _remember(remembered: Remembered, key: str, trip_s: float, there: LinkSpeed, back: LinkSpeed) -> None:
    """Keep the measured speeds of a link in both directions. trip_s: round trip of 8 KiB while connecting."""
    values = {"there": there.bytes_per_s, "back": back.bytes_per_s}
    remembered.put(key, {"trip_s": trip_s, "latency_s": there.latency_s, **values})


def _better(first: tuple[LinkSpeed, LinkSpeed], second: tuple[LinkSpeed, LinkSpeed]) -> tuple[LinkSpeed, LinkSpeed]:
    """Return the better values of two measurements, because other work on a machine only makes them worse."""
    there, back = (
        LinkSpeed(min(a.latency_s, b.latency_s), max(a.bytes_per_s, b.bytes_per_s))
        for a, b in zip(first, second, strict=True)
    )
    return there, back


def _key(names: tuple[str, str], addresses: tuple[str, str], kind: str) -> str:
    """Return the key of a link in the cache. names: what the two devices call themselves."""
    return " ".join((names[0], addresses[0], names[1], addresses[1], kind))


def estimated_links(fleet: Fleet) -> Links:
    """Return the links between this device and the workers without measuring them.

    Remembered links count. A link of this device is otherwise estimated from calls over the existing connection, and a
    link between workers is as slow as the slower one of their links to this device.
    Raises the errors of calls.
    """
    addresses = [LOCAL, *fleet.workers]
    names = {LOCAL: fleet.local_name} | {address: worker.name for address, worker in fleet.workers.items()}
    with unwaited_pool(len(fleet.workers), "round trips") as pool:
        own = dict(zip(addresses[1:], results(pool.submit(_by_calls, w) for w in fleet.workers.values()), strict=True))
    between: dict[tuple[str, str], LinkSpeed] = {}
    for a, b in combinations(addresses, 2):
        keys = [_key((names[a], names[b]), (a, b), kind) for kind in KINDS]
        known = next(filter(None, (_remembered_link(Remembered("links").get(key, KEPT_AGE_S)) for key in keys)), None)
        if known is None:
            ways = [own[address] for address in (a, b) if address != LOCAL]
            latency_s, bytes_per_s = max(way.latency_s for way in ways), min(way.bytes_per_s for way in ways)
            known = (LinkSpeed(latency_s, bytes_per_s, estimate=True),) * 2
        between[a, b], between[b, a] = known
    return Links(between)


def _by_calls(worker: Remote) -> LinkSpeed:
    """Estimate the link to a worker from the fastest of a few calls, without and with data."""
    ping_s = min(worker.ping_s() for _ in range(_CALLS))
    bare_s = min(worker.padded_s(0) for _ in range(_CALLS))
    padded_s = math.inf
    for _ in range(_CALLS):
        padded_s = min(padded_s, worker.padded_s(_PADDING))
        if padded_s > _SLOW_S:  # on such a link, more calls would only delay the start
            break
    bytes_per_s = _PADDING / max(padded_s - bare_s, _PADDING / _MOST_ESTIMATED)
    return LinkSpeed(max(_LEAST_LATENCY_S, (ping_s - _CALL_S) / 2), bytes_per_s, estimate=True)


def _as_before(remembered: tuple[Any, float] | None, trip_s: float) -> tuple[LinkSpeed, LinkSpeed] | None:
    """Return the cached speeds of a link in both directions, or None if the link has changed since then."""
    link = _remembered_link(remembered)
    if link is None or remembered is None:
        return None
    then_s = float(remembered[0]["trip_s"])
    of_bytes_s = max(0.0, then_s - 2 * link[0].latency_s)  # a share of the whole trip would hide changes of the latency
    return link if abs(trip_s - then_s) <= _ALIKE * of_bytes_s + _NOISE_S else None


def _remembered_link(remembered: tuple[Any, float] | None) -> tuple[LinkSpeed, LinkSpeed] | None:
    """Return both directions of a cached link, or None if the entry is missing or invalid."""
    if remembered is None:
        return None
    values, age_s = remembered
    try:
        _, latency_s = float(values["trip_s"]), float(values["latency_s"])
        there, back = (LinkSpeed(latency_s, float(values[way]), age_s=age_s) for way in ("there", "back"))
    except (TypeError, KeyError, ValueError, OverflowError, PlanError):  # written by another version
        return None
    return there, back


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

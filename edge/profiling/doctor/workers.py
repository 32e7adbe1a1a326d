"""Checks of workers and of the links to and between them, with the diagnosis of `edge link`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from devices.errors import TrustError
from devices.profile import DeviceProfile
from edge.cluster.client import Remote
from edge.cluster.connect import reach
from edge.cluster.diagnose import LinkReport, measure_link
from edge.cluster.fleet import check_versions
from edge.errors import WorkerError
from edge.net.channel import START_WORKER, is_loopback
from edge.profiling.doctor.findings import LOCAL, NOTE, OK, PROBLEM, Finding, Verdict, finding, run_check
from edge.profiling.doctor.machine import ENOUGH_MEMORY, LEAST_MEMORY
from edge.profiling.doctor.trust import clocks_apart
from edge.tasks import CancelScope
from quant.text import bytes_text, counted, seconds_text
from transport.errors import LinkClosed, LinkTimeout, TransportError

WORKER_TIMEOUT_S = 5.0  # time for a worker to accept a connection, and again for each answer
LINK_TIMEOUT_S = 60.0  # time to start two engine processes, even on slow devices, and to measure between them
HOT_C = 85.0  # most processors slow down at 85 to 100 degrees Celsius
LOW_PERCENT = 20.0  # battery level below which the check fails


@dataclass(frozen=True)
class WorkerFacts:
    """Worker's own description and its connection."""

    profile: DeviceProfile
    secure: bool  # encrypted, with both sides authenticated
    local: bool  # on this machine
    sessions: int
    ahead_s: float | None  # worker's clock minus this device's; None: not reported


def check_worker(address: str, *, insecure: bool = False) -> tuple[str | None, list[Finding]]:
    """Return the worker's name and the findings about it. The name is None if the worker cannot be used."""
    try:
        with reach(address, insecure=insecure, timeout_s=WORKER_TIMEOUT_S) as worker:
            facts = read_worker(worker, WORKER_TIMEOUT_S)
            name = worker.name
    except (TransportError, TrustError, WorkerError) as error:
        return None, [finding(address, "reach", unreachable(error))]
    return name, [finding(name, check, verdict) for check, verdict in worker_verdicts(address, facts).items()]


def read_worker(worker: Remote, timeout_s: float, now: Callable[[], float] = time.time) -> WorkerFacts:
    """Request a worker's facts. Its clock is compared with the middle of the round trip."""
    sent_s = now()
    profile, description = worker.describe(timeout_s)
    ahead_s = description.clock_s - (sent_s + now()) / 2 if description.clock_s else None
    return WorkerFacts(profile, worker.secure, is_loopback(worker.host), len(description.sessions), ahead_s)


def unreachable(error: Exception) -> Verdict:
    """Return a verdict for a worker that cannot be used."""
    if isinstance(error, (LinkClosed, LinkTimeout)):
        advice = "start edge worker there; check its address, and that its firewall allows the port"
    else:
        advice = "do what the message says; edge cluster list on the owner's machine shows who is a member"
    return Verdict(PROBLEM, str(error).removesuffix(START_WORKER), advice)


def worker_verdicts(address: str, facts: WorkerFacts) -> Mapping[str, Verdict]:
    """Return the verdicts on a reachable worker, by check."""
    profile = facts.profile
    verdicts = {
        "reach": Verdict(OK, f"{address} answers"),
        "versions": _versions(profile),
        "trust": _trust(facts),
        "memory": _memory(profile),
        "sessions": Verdict(OK, "no sessions run"),
        "heat": _heat(profile.temperature_c),
        "battery": _battery(profile),
        "clock": Verdict(OK, "the worker does not report it") if facts.ahead_s is None else clocks_apart(facts.ahead_s),
    }
    if facts.sessions:
        running = f"{counted(facts.sessions, 'session')} run there"
        verdicts["sessions"] = Verdict(
            NOTE, running, "measurements now only see the resources that these sessions leave free"
        )
    return verdicts


def link_findings(workers: Mapping[str, str], *, insecure: bool = False) -> Iterator[Finding]:
    """Yield a finding for each link, links of this device first. workers: addresses and names of usable workers."""
    for a, b in combinations((LOCAL, *workers), 2):
        yield check_link(a, b, f"{workers.get(a, LOCAL)} to {workers[b]}", insecure=insecure)


def check_link(a: str, b: str, where: str, *, insecure: bool) -> Finding:
    """Measure the link between two addresses; LOCAL is this device. Ends after LINK_TIMEOUT_S even if a worker
    hangs."""
    scope = CancelScope()

    def reached(address: str) -> Remote | None:
        if address == LOCAL:
            return None
        return scope.enter(reach(address, insecure=insecure, timeout_s=WORKER_TIMEOUT_S))

    def check() -> Verdict:
        try:
            first, second = reached(a), reached(b)
            assert second is not None
            return link(measure_link(first, second))
        except (TransportError, TrustError, WorkerError) as error:
            return Verdict(PROBLEM, str(error), f"edge link {a} {b} measures it alone; check the way between the two")

    with scope:
        return run_check(where, "link", check, LINK_TIMEOUT_S)


def link(report: LinkReport) -> Verdict:
    """Return a verdict on the speed of a link, with hints about problems."""
    there, back = 1e3 * report.profile.bandwidth_ab_gbps, 1e3 * report.profile.bandwidth_ba_gbps
    trip = f"{seconds_text(2 * report.profile.latency_median_s)} there and back"
    seen = f"{trip}, {there:,.0f} Mbit/s there, {back:,.0f} back"
    return Verdict(NOTE, seen, "; ".join(report.hints)) if report.hints else Verdict(OK, seen)


def _versions(profile: DeviceProfile) -> Verdict:
    try:
        check_versions(profile.name, profile)
    except WorkerError as error:
        return Verdict(PROBLEM, str(error), "pip install --upgrade edge-runtime on the device with the older one")
    return Verdict(OK, f"edge {profile.runtime}, llama-cpp-python {profile.llama_cpp}, Python {profile.python}")


def _trust(facts: WorkerFacts) -> Verdict:
    if facts.secure:
        return Verdict(OK, "encrypted and authenticated on both sides")
    if facts.local:
        return Verdict(OK, "in the clear, on this machine")
    return Verdict(
        NOTE, "in the clear: everyone in the network can read prompts and use it", "edge cluster invite, and --join"
    )


def _memory(profile: DeviceProfile) -> Verdict:
    limit = profile.memory_limit_bytes
    available = min(profile.memory_available_bytes, limit if limit is not None else profile.memory_available_bytes)
    seen = f"{bytes_text(available)} for models, of {bytes_text(profile.memory_total_bytes)}"
    if available < LEAST_MEMORY:
        return Verdict(PROBLEM, seen, "close programs there, or raise its --memory")
    return Verdict(NOTE, seen, "close programs there") if available < ENOUGH_MEMORY else Verdict(OK, seen)


def _heat(celsius: float | None) -> Verdict:
    if celsius is None:
        return Verdict(OK, "no sensor reports a temperature")
    seen = f"{celsius:g} degrees Celsius"
    hot = Verdict(NOTE, seen, "improve its cooling: it computes slower while it is hot")
    return hot if celsius >= HOT_C else Verdict(OK, seen)


def _battery(profile: DeviceProfile) -> Verdict:
    if profile.battery_percent is None:
        return Verdict(OK, "none")
    seen = f"{profile.battery_percent:g} %"
    if profile.plugged is not False:
        return Verdict(OK, seen)
    if profile.battery_percent < LOW_PERCENT:
        return Verdict(PROBLEM, f"{seen}, not plugged in", "plug it in: sessions fail when its battery is empty")
    return Verdict(NOTE, f"{seen}, not plugged in", "plug it in: on its battery it may compute slower")

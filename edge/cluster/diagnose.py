"""Measure the link between two devices, with engine processes and the same transport as a model would use."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from devices.names import join_address
from devices.paths import credentials_folder
from devices.profile import LinkProfile
from edge.cluster.client import Remote
from edge.cluster.fleet import label, own_name
from edge.cluster.session import EngineSession, LocalSession, RemoteSession, answers, connect_all, measured
from edge.net.channel import is_loopback
from edge.net.peers import SECRET_BYTES
from transport import edge_pb2 as pb
from transport.choice import Choice, choose
from transport.errors import ProtocolError, Refused

LOCAL = "local"  # stands for this device in lists of addresses
_MOST = 1e15  # upper bound on plausible figures, in seconds or bytes per second
PAYLOADS = (4, 8 << 10, 256 << 10, 4 << 20)  # bytes: a flag, one row of decode, a small prefill, a large prefill


@dataclass(frozen=True)
class LinkReport:
    """Measurements of one link, the all-reduce algorithm that suits it, and hints about problems."""

    profile: LinkProfile
    a_address: str  # HOST:PORT of the worker's daemon as this device reaches it, or LOCAL
    b_address: str
    why: str  # reason for the choice of tcp or grpc
    allreduce_s: float  # median seconds of an all-reduce of 8 KiB
    choices: dict[int, Choice]  # best algorithm for two ranks, by payload in bytes
    hints: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            **self.profile.to_json(),
            "a_address": self.a_address,
            "b_address": self.b_address,
            "why": self.why,
            "allreduce_8k_s": self.allreduce_s,
            "allreduce": {str(n): choice.algorithm for n, choice in self.choices.items()},
            "hints": self.hints,
        }


def measure_link(a: Remote | None, b: Remote, seconds: float = 1.0, transport: str = "auto") -> LinkReport:
    """Measure the link from `a` to `b` for about `seconds`; if `a` is None, measure from this device.

    Raises Refused if the two devices cannot be linked, and the errors of `EngineSession`.
    """
    if a is None:
        label([b], own_name(secure=b.secure))
    else:
        if (a.host, a.port) != (b.host, b.port):
            label([a, b])
        _check_pair(a, b)
    secret = secrets.token_bytes(SECRET_BYTES)
    with _first(a, b, secret) as first, RemoteSession(b, 1, 2, secret) as second:
        states, _ = connect_all([first, second], transport)
        figures = measured(first, second, seconds)
        for session in (first, second):
            session.tell(pb.Command(allreduce=pb.Allreduce(n_floats=2048, algorithm="mesh", wire="f32", repeats=200)))
        summed = [event.allreduced for event in answers([first, second])]
    _check_figures(first.device, figures, summed)
    latency_s = figures.round_trip_median_s / 2
    bandwidth = min(figures.send_bytes_per_s, figures.receive_bytes_per_s)
    profile = LinkProfile(
        a=first.device,
        b=b.label,
        kind=figures.kind,
        latency_best_s=figures.round_trip_best_s / 2,
        latency_median_s=latency_s,
        latency_p99_s=figures.round_trip_p99_s / 2,
        bandwidth_ab_gbps=figures.send_bytes_per_s * 8 / 1e9,
        bandwidth_ba_gbps=figures.receive_bytes_per_s * 8 / 1e9,
    )
    return LinkReport(
        profile,
        join_address(a.host, a.port) if a else LOCAL,
        join_address(b.host, b.port),
        states[0].why if states else "",
        max(timing.median_s for timing in summed),
        {n: choose(n, n, 2, latency_s, bandwidth) for n in PAYLOADS},
        list(figures.hints),
    )


def _first(a: Remote | None, b: Remote, secret: bytes) -> EngineSession:
    """Return the session that dials: on worker `a`, or on this device."""
    if a is not None:
        return RemoteSession(a, 0, 2, secret)
    return LocalSession(own_name(secure=b.secure), 2, secret, credentials_folder() if b.secure else None, threads=1)


def _check_pair(a: Remote, b: Remote) -> None:
    """Raise Refused if it is already clear that `a` cannot dial `b`."""
    if a.secure != b.secure:
        clear, other = (b, a) if a.secure else (a, b)
        raise Refused(
            f"{other.label} encrypts and {clear.label} does not, so they cannot be linked: let both join the cluster"
            " and listen on an address of the network"
        )
    if is_loopback(b.host) and not is_loopback(a.host):
        raise Refused(
            f"{b.label} was given as {b.host}, which on {a.label} means {a.label} itself: give the address that other"
            " machines reach it at"
        )


def _check_figures(device: str, link: pb.Measured, summed: list[pb.Allreduced]) -> None:
    """Raise ProtocolError if a worker returns impossible figures."""
    times = [link.round_trip_best_s, link.round_trip_median_s, link.round_trip_p99_s]
    figures = [*times, link.send_bytes_per_s, link.receive_bytes_per_s, *(timing.median_s for timing in summed)]
    if not all(0 < figure < _MOST for figure in figures):
        raise ProtocolError(f"{device} sent impossible measurements; install the same version there")

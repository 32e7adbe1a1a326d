"""Dialling of a higher rank: over TCP, or over a gRPC stream through the other's daemon.

TCP is the usual way. gRPC is taken where TCP does not reach the rank, or where gRPC is clearly and repeatedly faster
(edge/net/prefer.py).
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge.net.peers import HELLO, USE, Fetch, Peer
from edge.net.prefer import ROUNDS, Preference, fast_end, prefer
from transport.errors import LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import TENSOR_BYTES, LinkFigures, finish, measure_once, round_trips
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # loaded only where there are credentials: it takes cryptography with it
    from transport.security import Credentials

USUAL, OTHER = "tcp", "grpc"
_TRIAL_S = 0.03  # for one try of one way: the fast tenth of so many round trips is known well
_MEASURE_S = 0.1  # for the latency and bandwidth of the one in use, from which `auto` chooses an allreduce


@dataclass(frozen=True)
class Dialled:
    """A link to a peer and how it was chosen."""

    link: Link
    tcp_s: float  # round trip of 8 KiB, median; 0 where it was not reached or not tried
    grpc_s: float
    figures: LinkFigures  # a first, short measurement
    why: str
    kinds: tuple[str, ...] = ()  # the ways that reach the peer, the usual one first

    @property
    def usual(self) -> bool:
        """True if the link is of the usual kind, or of the only one that reaches the peer."""
        return self.link.kind == self.kinds[0]


class Trial:
    """Measurements of one link, as `prefer` takes them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.failed: TransportError | None = None
        self.medians_s: list[float] = []  # of the round trips of each try
        self.most_s = 0.0
        self.least_s = math.inf

    def __call__(self) -> float:
        """Seconds of a round trip of 8 KiB, at the fast end. A TransportError is kept, and raised."""
        try:
            times = round_trips(self.link, TENSOR_BYTES, _TRIAL_S)
        except TransportError as error:
            self.failed = error
            raise
        self.medians_s.append(times[len(times) // 2])
        self.most_s, self.least_s = max(self.most_s, times[-1]), min(self.least_s, times[0])
        return fast_end(times)

    @property
    def median_s(self) -> float:
        """Median round trip of the best try; 0 without one."""
        return min(self.medians_s, default=0.0)


@dataclass(frozen=True)
class Dialler:
    """Settings with which a rank dials others of its group."""

    rank: int
    secret: bytes
    deadlines: Deadlines
    credentials: Fetch | None
    poll_s: float
    transport: str = "auto"  # or the one way to use: tcp, grpc
    streams: bool = False  # what links are for (`transport.tcp_link.tune`)
    pause: Callable[[float], None] = field(default=time.sleep, compare=False)  # between rounds of a comparison

    def dial(self, peer: Peer) -> Dialled:
        """A link to a higher rank. The error of the last way tried where none works."""
        reached = (USUAL, OTHER) if peer.tcp_port else (OTHER,)
        kinds = [kind for kind in reached if self.transport in ("auto", kind)]
        if not kinds:
            raise Refused(f"{peer} takes no TCP links; use gRPC")
        trials: dict[str, Trial] = {}
        failed: dict[str, TransportError] = {}
        for kind in kinds:
            try:
                trials[kind] = Trial(self.connect(kind, peer))
            except TransportError as error:
                failed[kind] = error
        if not trials:
            raise list(failed.values())[-1]
        try:
            return self._chosen(trials, failed)
        except BaseException:
            for trial in trials.values():
                trial.link.close()
            raise

    def connect(self, kind: str, peer: Peer) -> Link:
        """Dial a peer over one kind of link and shake hands: it has answered our HELLO."""
        own = self.credentials() if self.credentials else None
        link = (self._tcp if kind == USUAL else self._grpc)(peer, own)
        hello = HELLO.pack(self.secret, self.rank, peer.rank)
        try:
            link.send(hello, Kind.HELLO)
            back = link.receive(self.deadlines.connect_timeout_s)
            if back.kind is not Kind.HELLO or bytes(back.payload) != hello:
                raise ProtocolError(f"{peer} did not return our HELLO")
        except BaseException:
            link.close()
            raise
        return link

    def compare(self, trials: dict[str, Trial], failed: dict[str, TransportError]) -> tuple[str, str]:
        """Choose among `trials`; return the kind and the reason. A link that breaks moves from there to `failed`."""
        preference: Preference | None = None
        if len(trials) == 2:
            try:
                preference = prefer(trials[USUAL], trials[OTHER], self.pause)
            except TransportError:
                broken = next(kind for kind, trial in trials.items() if trial.failed is not None)
                failed[broken] = trials.pop(broken).failed  # type: ignore[assignment]
        if preference is not None:
            best = OTHER if preference.other else USUAL
            return best, _why(best, preference)
        (best,) = trials
        fast_s = trials[best]()
        lost = "".join(f", {kind} failed: {error}" for kind, error in failed.items())
        return best, f"{_time_text(best, fast_s)} for 8 KiB there and back{lost}"

    def use(self, link: Link, trial: Trial | None = None) -> LinkFigures:
        """Tell a peer that this link is in use from now on; return its figures. trial: of a link that streams."""
        if trial is not None and self.streams:  # nobody sums over them, so nobody asks
            measured = LinkFigures(trial.median_s, trial.most_s, trial.least_s, math.inf, math.inf)
        else:
            measured = self.figures(link)
        finish(link)
        link.send(USE, Kind.CONTROL)
        return measured

    def figures(self, link: Link) -> LinkFigures:
        """Measure a link for a short time."""
        return measure_once(link, _MEASURE_S)

    def _chosen(self, trials: dict[str, Trial], failed: dict[str, TransportError]) -> Dialled:
        best, why = self.compare(trials, failed)
        for kind, trial in trials.items():
            if kind != best:
                trial.link.close()
        trips_s = {kind: trial.median_s for kind, trial in trials.items()}
        figures = self.use(trials[best].link, trials[best])
        return Dialled(trials[best].link, trips_s.get(USUAL, 0.0), trips_s.get(OTHER, 0.0), figures, why, tuple(trials))

    def _tcp(self, peer: Peer, own: Credentials | None) -> Link:
        sock = connect(peer.host, peer.tcp_port, str(peer), self.deadlines.connect_timeout_s)
        if own is not None:
            from transport import security

            context = security.client_context(own)
            tls = security.handshake(
                sock, context, server_side=False, peer=str(peer), timeout_s=self.deadlines.connect_timeout_s
            )
            try:
                identity = security.admit(tls.getpeercert(binary_form=True), own, security.MEMBERS)
                if identity.name != peer.name:
                    raise Refused(f"{peer} was to answer at {peer.host}:{peer.tcp_port}, it is {identity.name}")
            except BaseException:
                tls.close()
                raise
            sock = tls
        return TcpLink(sock, str(peer), self.deadlines, self.poll_s, self.streams)

    def _grpc(self, peer: Peer, own: Credentials | None) -> Link:
        from edge.net.channel import open_channel
        from transport import grpc_link

        # A worker without credentials was started to let everything pass in the clear.
        insecure = own is None
        channel, identity = open_channel(peer.host, peer.port, own, self.deadlines.connect_timeout_s, insecure)
        if own is not None and (identity is None or identity.name != peer.name):
            channel.close()
            name = identity.name if identity else "somebody in the clear"
            raise Refused(f"{peer} was to answer at {peer.host}:{peer.port}, it is {name}")

        def ended() -> None:  # in gRPC's thread, which closing the channel waits for
            threading.Thread(target=channel.close, daemon=True, name="close").start()

        return grpc_link.dial(channel, str(peer), peer.session, self.deadlines, ended)


def connect(host: str, port: int, peer: str, timeout_s: float) -> socket.socket:
    """A TCP connection; LinkTimeout or Refused."""
    try:
        return socket.create_connection((host, port), timeout_s)
    except TimeoutError:
        where = f"{peer} at {host}:{port}"
        raise LinkTimeout(f"{where}: no connection within {timeout_s:g} s (connect_timeout_s)") from None
    except OSError as error:
        raise Refused(f"{peer} at {host}:{port}: {error.strerror or error}") from error


def _why(best: str, preference: Preference) -> str:
    usual, other = _time_text(USUAL, preference.usual_s), _time_text(OTHER, preference.other_s)
    if preference.other:
        return f"{other} for 8 KiB there and back, {usual}: clearly slower in each of {ROUNDS} rounds"
    unclear = ", which is not clearly and repeatedly faster" if preference.other_s < preference.usual_s else ""
    return f"{usual} for 8 KiB there and back, {other}{unclear}"


def _time_text(kind: str, seconds: float) -> str:
    return f"{kind} {seconds * 1e6:.0f} us"

"""Dialling of a higher rank: over TCP, or over a gRPC stream through the other's daemon.

TCP is the usual way. gRPC is taken where TCP does not reach the rank, or where gRPC is clearly and repeatedly faster
(edge/net/prefer.py).
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from devices.network import nearest_first, own_networks
from edge.net.peers import HELLO, STRIPE, USE, Fetch, Peer
from edge.net.prefer import ROUNDS, Preference, fast_end, prefer
from edge.net.racing import race
from partition.predict.hysteresis import LINK, clearly_faster
from quant.text import bytes_text
from transport.errors import LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import TENSOR_BYTES, LinkFigures, finish, measure_once, round_trips
from transport.striped_link import StripedLink, stripes
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # loaded only where there are credentials: it takes cryptography with it
    from transport.security import Credentials

USUAL, OTHER = "tcp", "grpc"
_TRIAL_S = 0.03  # for one try of one way: the fast tenth of so many round trips is known well
_ROUND_TRIPS = 10  # in which several connections together are measured
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
    _answered: dict[tuple[str, int], str] = field(default_factory=dict, init=False, compare=False)  # hosts of ranks
    pause: Callable[[float], None] = field(default=time.sleep, compare=False)  # between rounds of a comparison

    def dial(self, peer: Peer) -> Dialled:
        """A link to a higher rank. The error of the last way tried where none works."""
        reached = (USUAL, OTHER) if peer.tcp_port else (OTHER,)
        kinds = [kind for kind in reached if self.transport in ("auto", kind)]
        if not kinds:
            raise Refused(f"{peer} takes no TCP links; use gRPC")
        trials: dict[str, Trial] = {}
        failed: dict[str, TransportError] = {}
        try:
            for kind in kinds:
                try:
                    trials[kind] = Trial(self.connect(kind, peer))
                except TransportError as error:
                    failed[kind] = error
            if not trials:
                raise list(failed.values())[-1]
            return self._chosen(peer, trials, failed)
        except BaseException:
            for trial in trials.values():
                trial.link.close()
            raise

    def connect(self, kind: str, peer: Peer, stripe: bytes = b"") -> Link:
        """Dial a peer over one kind of link and shake hands: it has answered our HELLO. stripe: what is said of one of
        several connections of a link.

        Of its addresses the one that answered last is tried first, then that of the owner, then those that its device
        told. All connections of one link go to one address.
        """
        own = self.credentials() if self.credentials else None
        known = self._answered.get((kind, peer.rank)) or self._answered.get((USUAL, peer.rank)) or peer.host
        hosts = [known]
        if peer.addresses and not stripe:
            hosts = list(dict.fromkeys([known, peer.host, *nearest_first(peer.addresses, own_networks())]))

        def dial(host: str, timeout_s: float) -> Link:
            return self._greeted(kind, replace(peer, host=host), own, timeout_s, stripe)

        timeout_s = self.deadlines.connect_timeout_s
        host, link = (known, dial(known, timeout_s)) if len(hosts) == 1 else race(hosts, dial, timeout_s)
        self._answered[kind, peer.rank] = host
        return link

    def _greeted(self, kind: str, peer: Peer, own: Credentials | None, timeout_s: float, stripe: bytes) -> Link:
        """Dial a peer at one address and shake hands. timeout_s: to connect."""
        if kind == USUAL:
            link = self._tcp(peer, own, self.streams or bool(stripe), timeout_s)
        else:
            link = self._grpc(peer, own, timeout_s)
        hello = HELLO.pack(self.secret, self.rank, peer.rank) + stripe
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

    def use(self, link: Link, measured: LinkFigures | None = None) -> LinkFigures:
        """Tell a peer that this link is in use from now on; return its figures. measured: where they are known."""
        measured = measured or self.figures(link)
        finish(link)
        link.send(USE, Kind.CONTROL)
        return measured

    def figures(self, link: Link, seconds: float = _MEASURE_S) -> LinkFigures:
        """Measure a link for a short time."""
        return measure_once(link, seconds)

    def _chosen(self, peer: Peer, trials: dict[str, Trial], failed: dict[str, TransportError]) -> Dialled:
        best, why = self.compare(trials, failed)
        if (host := self._answered.get((best, peer.rank), peer.host)) != peer.host:
            why += f"; at {host}, as {peer.host} did not answer first"
        for kind, other in trials.items():
            if kind != best:
                other.link.close()
        trips_s = {kind: trial.median_s for kind, trial in trials.items()}
        trial = trials[best]
        if self.streams:  # nobody sums over them, so nobody asks
            figures = LinkFigures(trial.median_s, trial.most_s, trial.least_s, math.inf, math.inf)
        else:
            figures = self.figures(trial.link)
            if best == USUAL and (n := stripes(figures)) > 1:
                trial.link, figures, more = self._striped(peer, n, trial.link, figures)
                why += more
        self.use(trial.link, figures)
        return Dialled(trial.link, trips_s.get(USUAL, 0.0), trips_s.get(OTHER, 0.0), figures, why, tuple(trials))

    def _striped(self, peer: Peer, n: int, link: Link, figures: LinkFigures) -> tuple[Link, LinkFigures, str]:
        """Return a link over `n` connections where it carries clearly more than `link`, else that one; with its figures
        and the reason. What cannot be dialled changes nothing."""
        stripe_id, links = secrets.token_bytes(8), list[Link]()
        try:
            for i in range(n):
                links.append(self.connect(USUAL, peer, STRIPE.pack(stripe_id, i, n)))
            striped = StripedLink(links, self.deadlines)
            # TCP takes some round trips to find out what a long path holds.
            measured = self.figures(striped, max(_MEASURE_S, _ROUND_TRIPS * figures.round_trip_best_s))
        except BaseException as error:
            for connection in links:
                connection.close()
            if isinstance(error, TransportError) and link.broken is None:
                return link, figures, f"; {n} connections at once failed: {error}"
            raise
        rates = [bytes_text(round(_slower_way(each))) for each in (measured, figures)]
        if clearly_faster(_slower_way(measured), _slower_way(figures), by=LINK):
            link.close()
            return striped, measured, f"; {n} connections carry {rates[0]}/s together, one {rates[1]}/s"
        striped.close()
        return link, figures, f"; {n} connections carry no more than one: {rates[1]}/s"

    def _tcp(self, peer: Peer, own: Credentials | None, streams: bool, timeout_s: float) -> Link:
        sock = connect(peer.host, peer.tcp_port, str(peer), timeout_s)
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
        return TcpLink(sock, str(peer), self.deadlines, self.poll_s, streams)

    def _grpc(self, peer: Peer, own: Credentials | None, timeout_s: float) -> Link:
        from edge.net.channel import open_channel
        from transport import grpc_link

        # A worker without credentials was started to let everything pass in the clear.
        insecure = own is None
        channel, identity = open_channel(peer.host, peer.port, own, timeout_s, insecure)
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


def _slower_way(figures: LinkFigures) -> float:
    """Bytes/s in the slower direction."""
    return min(figures.send_bytes_per_s, figures.receive_bytes_per_s)


def _why(best: str, preference: Preference) -> str:
    usual, other = _time_text(USUAL, preference.usual_s), _time_text(OTHER, preference.other_s)
    if preference.other:
        return f"{other} for 8 KiB there and back, {usual}: clearly slower in each of {ROUNDS} rounds"
    unclear = ", which is not clearly and repeatedly faster" if preference.other_s < preference.usual_s else ""
    return f"{usual} for 8 KiB there and back, {other}{unclear}"


def _time_text(kind: str, seconds: float) -> str:
    return f"{kind} {seconds * 1e6:.0f} us"

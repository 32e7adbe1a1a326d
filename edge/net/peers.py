"""Handshake between the ranks of a group: the lower rank dials, the higher one accepts, and both know the secret.

A rank is reached in two ways: its own TCP port, and a gRPC stream through its daemon, which relays to the rank's door,
a Unix socket. The dialler (edge/net/dialling.py) tries both. So a rank behind a firewall that lets only the daemon's
port through is reached all the same.

On the Unix socket the daemon first says, in a CONTROL frame, whom it admitted: the name in the certificate, nothing in
the clear. Then, on either, the first frame both ways is HELLO. Then the dialler measures (transport/measure.py), and at
last says USE, or closes.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge import log
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import answer
from transport.striped_link import MOST_STRIPES, StripedLink
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # loaded only where there are credentials: it takes cryptography with it
    from transport.security import Credentials

Fetch = Callable[[], "Credentials"]  # asked at every connection: certificates and revocations change meanwhile
SECRET_BYTES = 16
HEARTBEAT_S = 0.5  # between two words of an engine process that it runs
HELLO = struct.Struct(f"<{SECRET_BYTES}sHH")  # secret, from rank, to rank
STRIPE = struct.Struct("<8sBB")  # behind these, over one of several connections of a link: its name, which, how many
USE = b"use"
_MOST_NAME = 256  # bytes of whom the daemon admitted
_HANDSHAKES = 64  # at a time; a stranger's connections wait in the kernel beyond that
_WAYS_WAIT = 4  # connect timeouts a dialler may take with the other way before it says USE
_LOOK_S = 0.5  # how often an accepting thread looks whether it should end


@dataclass(frozen=True)
class Peer:
    """Addresses of a rank."""

    rank: int
    name: str
    host: str
    port: int  # of its daemon
    tcp_port: int  # of the rank itself; 0 if it takes no TCP links
    session: str
    addresses: tuple[str, ...] = ()  # that its device told, to try beside `host`; an older one tells none

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


class Listener:
    """Listener of a rank: a TCP port and a Unix socket. Every connection must first send the secret."""

    def __init__(
        self,
        host: str,
        door: Path,
        rank: int,
        secret: bytes,
        deadlines: Deadlines,
        credentials: Fetch | None,
        poll_s: float,
        streams: bool = False,
    ) -> None:
        """Listens at once; OSError if that is not possible. `credentials`: TLS on the TCP port.

        streams: what links are for (`transport.tcp_link.tune`).
        """
        self.rank = rank
        self._secret = secret
        self._deadlines = deadlines
        self._credentials = credentials
        self._poll_s = poll_s
        self._streams = streams
        self._links: dict[int, tuple[Link, str]] = {}  # and the name of who dialled, where that is known
        self._stripes: dict[tuple[int, bytes], dict[int, tuple[TcpLink, str]]] = {}  # by rank and name of a link
        self._arrived = threading.Condition()
        self._again: int | None = None  # the rank that may dial again; None: all below, once
        self._taking = True  # whether anybody is expected; else connections wait in the kernel
        self._closed = False
        v6 = ":" in host
        family = socket.AF_INET6 if v6 else socket.AF_INET
        dual_stack = v6 and socket.has_dualstack_ipv6()  # :: is for IPv4 as well, as the daemon has it
        self._tcp = socket.create_server((host, 0), family=family, backlog=_HANDSHAKES, dualstack_ipv6=dual_stack)
        self.tcp_port: int = self._tcp.getsockname()[1]
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(door))
        self._unix.listen(_HANDSHAKES)
        for listener in (self._tcp, self._unix):
            listener.settimeout(_LOOK_S)  # not in the thread, which may find it closed
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="listener").start()

    def wait_for(self, names: Mapping[int, str], timeout_s: float) -> dict[int, Link]:
        """The links of these ranks once all have dialled. LinkTimeout names those that have not; Refused if another
        device than the named one dialled as such a rank, which shows where there are credentials.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: names.keys() <= self._links.keys(), timeout_s)
            missing = sorted(names.keys() - self._links.keys())
            if missing:
                raise LinkTimeout(f"ranks {missing} did not dial rank {self.rank} within {timeout_s:g} s")
            for rank, name in names.items():
                link = self._links[rank][1]
                if self._credentials is not None and link != name:
                    raise Refused(f"rank {rank} was to be {name}, it is {link or 'nobody we know'} who dialled as it")
            self._taking = False
            return {rank: self._links.pop(rank)[0] for rank in names}

    def expect(self, rank: int) -> None:
        """Expect one more link from this rank, whose link is to change."""
        with self._arrived:
            self._again, self._taking = rank, True
            self._arrived.notify_all()

    def pause(self) -> None:
        """Accept no more links until one is expected again, and close those that nobody waited for."""
        with self._arrived:
            self._taking = False
            self._drop()

    def close(self) -> None:
        """Close the listener, and the links that nobody waited for."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
            self._drop()
        self._tcp.close()
        self._unix.close()

    def _drop(self) -> None:
        """Close the links that nobody waited for, and the connections of those that never came whole."""
        dialled = [*self._links.values(), *(stripe for some in self._stripes.values() for stripe in some.values())]
        for link, _ in dialled:
            link.close()
        self._links.clear()
        self._stripes.clear()

    def _accept(self, listener: socket.socket) -> None:
        slots = threading.Semaphore(_HANDSHAKES)  # of its own: strangers on the TCP port must not block the door
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._taking or self._closed)
                if self._closed:
                    return
            try:
                sock, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or out of descriptors: some will come back
                time.sleep(_LOOK_S)
                continue
            peer = f"{address[0]}:{address[1]}" if listener is self._tcp else "a gRPC stream"
            if slots.acquire(timeout=_LOOK_S):
                args = (sock, listener is self._unix, peer, slots)
                threading.Thread(target=self._welcome, args=args, daemon=True, name="welcome").start()
            else:
                sock.close()

    def _welcome(self, sock: socket.socket, relayed: bool, peer: str, slots: threading.Semaphore) -> None:
        """Handle one connection, from its first byte until it is in use or refused."""
        try:
            name = ""
            if self._credentials is not None and not relayed:
                sock, name = self._secured(sock, peer, self._credentials())
            connection = TcpLink(sock, peer, self._deadlines, self._poll_s, streams=True)
            link: Link = connection
            try:
                if relayed:
                    name = bytes(link.receive(self._deadlines.connect_timeout_s, _MOST_NAME).payload).decode()
                rank, stripe = self._greet(link)
                if stripe:
                    striped = self._striped(rank, connection, name, stripe)
                    if striped is None:  # the last of its connections goes on
                        return
                    link = striped
                elif not self._streams:
                    connection.fix_send_buffer()
                answer(link)
                if bytes(link.receive(self._deadlines.connect_timeout_s * _WAYS_WAIT).payload) != USE:
                    raise ProtocolError(f"{link.peer} neither uses nor closes its link")
                with self._arrived:
                    if self._closed:
                        raise Refused(f"{link.peer} came too late")
                    self._check_free(rank, link)
                    self._links[rank] = link, name
                    self._arrived.notify_all()
            except BaseException:
                link.close()
                raise
        except LinkClosed:
            pass  # the dialler found a better way
        except Exception as error:  # a stranger, or a damaged connection: nobody waits for it, and others still come
            log.info("connection-refused", peer=peer, error=type(error).__name__, why=error)
        finally:
            slots.release()

    def _secured(self, sock: socket.socket, peer: str, credentials: Credentials) -> tuple[socket.socket, str]:
        from transport import security

        timeout_s = self._deadlines.connect_timeout_s
        context = security.server_context(credentials)
        tls = security.handshake(sock, context, server_side=True, peer=peer, timeout_s=timeout_s)
        try:
            identity = security.admit(tls.getpeercert(binary_form=True), credentials, security.MEMBERS)
        except BaseException:
            tls.close()
            raise
        return tls, identity.name

    def _striped(self, rank: int, link: TcpLink, name: str, stripe: bytes) -> StripedLink | None:
        """Keep one of several connections of a link; the link, once all of them are there."""
        stripe_id, number, n = STRIPE.unpack(stripe)
        if not number < n <= MOST_STRIPES:
            raise ProtocolError(f"{link.peer} dials connection {number} of {n}, and a link has at most {MOST_STRIPES}")
        with self._arrived:
            if self._closed:
                raise Refused(f"{link.peer} came too late")
            there = self._stripes.setdefault((rank, stripe_id), {})
            if number in there or {other for _, other in there.values()} - {name}:
                raise ProtocolError(f"{link.peer} dials connection {number} of a link that has it, or is another's")
            there[number] = link, name
            if len(there) < n:
                return None
            del self._stripes[rank, stripe_id]
            return StripedLink([there[i][0] for i in range(n)], self._deadlines)

    def _greet(self, link: Link) -> tuple[int, bytes]:
        """(rank of who dialled, what it says of this connection where it is one of several of a link)."""
        frame = link.receive(self._deadlines.connect_timeout_s, HELLO.size + STRIPE.size)
        if frame.kind is not Kind.HELLO or len(frame.payload) not in (HELLO.size, HELLO.size + STRIPE.size):
            raise ProtocolError(f"{link.peer} did not begin with HELLO")
        secret, source, target = HELLO.unpack_from(frame.payload)
        if not hmac.compare_digest(secret, self._secret):
            link.refuse("the secret is not this group's")
            raise Refused(f"{link.peer} does not know the group's secret")
        if target != self.rank:
            link.refuse(f"this is rank {self.rank}, not {target}")
            raise Refused(f"{link.peer} looks for rank {target}")
        if source >= self.rank:
            link.refuse(f"rank {source} is dialled by rank {self.rank}, not the other way round")
            raise Refused(f"{link.peer} says it is rank {source}")
        link.peer = f"rank {source}"
        with self._arrived:
            self._check_free(source, link)
        link.send(frame.payload, Kind.HELLO)
        return int(source), bytes(frame.payload[HELLO.size :])

    def _check_free(self, rank: int, link: Link) -> None:
        """Refuse a rank that dials twice, or is not expected."""
        if rank in self._links or not self._taking or self._again not in (None, rank):
            link.refuse(f"rank {rank} has a link already")
            raise Refused(f"{link.peer} dialled again, as somebody who has a link already")

"""Handshake between the ranks of a group: the lower rank dials, the higher rank accepts, and both know the secret.

A rank listens on its own TCP port and on a Unix socket. The daemon relays gRPC streams to the Unix socket. A dialler
(edge/net/dialling.py) therefore reaches a rank even if a firewall opens only the daemon's port.

On the Unix socket, the daemon first sends a CONTROL frame with the name in the dialler's certificate; it is empty
without certificates. On both sockets, the first frame in either direction is HELLO. Then the dialler measures the link
(transport/measure.py). The link is in use when the measurement ends.
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
from transport.tcp_link import TcpLink

if TYPE_CHECKING:  # cryptography is loaded only if there are credentials
    from transport.security import Credentials

Fetch = Callable[[], "Credentials"]  # called for every connection, because certificates and revocations change
SECRET_BYTES = 16
HEARTBEAT_S = 0.5  # interval between two heartbeats of an engine process
HELLO = struct.Struct(f"<{SECRET_BYTES}sHH")  # secret, from rank, to rank
_MOST_NAME = 256  # bytes of the name that the daemon sends
_HANDSHAKES = 64  # limit of simultaneous handshakes; further connections wait in the kernel
_LOOK_S = 0.5  # interval in which an accepting thread checks whether it should end


@dataclass(frozen=True)
class Peer:
    """Addresses of a rank."""

    rank: int
    name: str
    host: str
    port: int  # port of its daemon
    tcp_port: int  # port of the rank itself; 0 if it takes no TCP links
    session: str
    addresses: tuple[str, ...] = ()  # other addresses of its device

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


class Listener:
    """Listener of a rank on a TCP port and a Unix socket. Every connection must first send the secret."""

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
        """Start listening.

        credentials: for TLS on the TCP port
        streams: purpose of the links (`transport.tcp_link.TcpLink`)

        Raises OSError if listening is not possible.
        """
        self.rank = rank
        self._secret = secret
        self._deadlines = deadlines
        self._credentials = credentials
        self._poll_s = poll_s
        self._streams = streams
        self._links: dict[int, tuple[Link, str]] = {}  # links by rank, with the dialler's name if it is known
        self._arrived = threading.Condition()
        self._closed = False
        v6 = ":" in host
        family = socket.AF_INET6 if v6 else socket.AF_INET
        dual_stack = v6 and socket.has_dualstack_ipv6()  # :: includes IPv4, as in the daemon
        self._tcp = socket.create_server((host, 0), family=family, backlog=_HANDSHAKES, dualstack_ipv6=dual_stack)
        self.tcp_port: int = self._tcp.getsockname()[1]
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(door))
        self._unix.listen(_HANDSHAKES)
        for listener in (self._tcp, self._unix):
            listener.settimeout(_LOOK_S)  # set here, because the thread may find the socket closed
            threading.Thread(target=self._accept, args=(listener,), daemon=True, name="listener").start()

    def wait_for(self, names: Mapping[int, str], timeout_s: float) -> dict[int, Link]:
        """Return the links of these ranks after all of them have dialled.

        names: expected device name by rank

        Raises LinkTimeout with the missing ranks. Raises Refused if a certificate shows that another device dialled.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: names.keys() <= self._links.keys(), timeout_s)
            missing = sorted(names.keys() - self._links.keys())
            if missing:
                raise LinkTimeout(f"ranks {missing} did not dial rank {self.rank} within {timeout_s:g} s")
            for rank, name in names.items():
                dialler = self._links[rank][1]
                if self._credentials is not None and dialler != name:
                    raise Refused(
                        f"rank {rank} should be {name}, but {dialler or 'an unknown device'} dialled as that rank"
                    )
            return {rank: self._links.pop(rank)[0] for rank in names}

    def close(self) -> None:
        """Close the listener, and the links that `wait_for` did not return."""
        with self._arrived:
            self._closed = True
            for link, _ in self._links.values():
                link.close()
            self._links.clear()
        self._tcp.close()
        self._unix.close()

    def _accept(self, listener: socket.socket) -> None:
        # Each socket has its own slots, so that strangers on the TCP port do not block the Unix socket.
        slots = threading.Semaphore(_HANDSHAKES)
        while not self._closed:
            try:
                sock, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # the socket was closed, or the process is out of descriptors for a while
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
            link = TcpLink(sock, peer, self._deadlines, self._poll_s, self._streams)
            try:
                if relayed:
                    name = bytes(link.receive(self._deadlines.connect_timeout_s, _MOST_NAME).payload).decode()
                rank = self._greet(link)
                answer(link)
                with self._arrived:
                    if self._closed:
                        raise Refused(f"{link.peer} dialled too late")
                    self._check_free(rank, link)
                    self._links[rank] = link, name
                    self._arrived.notify_all()
            except BaseException:
                link.close()
                raise
        except LinkClosed:
            pass  # the dialler reached this rank at another address
        except Exception as error:  # a stranger or a damaged connection, which must not affect other connections
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

    def _greet(self, link: Link) -> int:
        """Check and return the HELLO of a dialler. Return the dialler's rank."""
        frame = link.receive(self._deadlines.connect_timeout_s, HELLO.size)
        if frame.kind is not Kind.HELLO or len(frame.payload) != HELLO.size:
            raise ProtocolError(f"{link.peer} did not begin with HELLO")
        secret, source, target = HELLO.unpack_from(frame.payload)
        if not hmac.compare_digest(secret, self._secret):
            link.refuse("the secret is not this group's")
            raise Refused(f"{link.peer} does not know the group's secret")
        if target != self.rank:
            link.refuse(f"this is rank {self.rank}, not {target}")
            raise Refused(f"{link.peer} dialled for rank {target}")
        if source >= self.rank:
            link.refuse(f"rank {source} is dialled by rank {self.rank}, not the other way round")
            raise Refused(f"{link.peer} claims to be rank {source}")
        link.peer = f"rank {source}"
        with self._arrived:
            self._check_free(source, link)
        link.send(frame.payload, Kind.HELLO)
        return int(source)

    def _check_free(self, rank: int, link: Link) -> None:
        """Refuse a rank that dials twice."""
        if rank in self._links:
            link.refuse(f"rank {rank} has a link already")
            raise Refused(f"{link.peer} dialled again as a rank that already has a link")

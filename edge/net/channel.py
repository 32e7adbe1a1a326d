"""gRPC channels to workers: encrypted and pinned to one device, or unencrypted if that is allowed."""

from __future__ import annotations

import ipaddress
import socket
import time

import grpc

from devices.names import join_address, parse_address
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused
from transport.grpc_link import CHANNEL_OPTIONS
from transport.security import Credentials, Identity, identify, secure_channel

_LEAST_S = 0.1
_CROWDED_S = 0.5  # time for a worker to close unidentified connections: see transport/connection_limit.py
START_WORKER = "; start edge worker there"
ANY_CALL = "/grpc.health.v1.Health/Check"


def open_channel(
    host: str, port: int, credentials: Credentials | None, timeout_s: float, insecure: bool = False
) -> tuple[grpc.Channel, Identity | None]:
    """Return a connected channel, and the identity of the worker (None without encryption).

    `timeout_s` limits the whole operation. Unencrypted channels are allowed only to this machine, or if `insecure` is
    set. Raises Refused, LinkTimeout or LinkClosed.
    """
    target = join_address(host, port)
    deadline = time.monotonic() + timeout_s
    reached = _knock(host, port, timeout_s)
    # The connected address is used instead of the name, because a later lookup could lead to another machine.
    here = is_loopback(reached)
    if credentials is None and not insecure and not here:
        raise Refused(
            f"{target} is another machine, and this one has no credentials: make a cluster with `edge cluster init` and"
            " invite the worker, or say --insecure if everybody on the network may see and use it"
        )
    numeric = join_address(reached, port)
    if credentials is not None:
        try:
            identity = _identified(reached, port, credentials, deadline, again=not here)
        except (ProtocolError, LinkClosed) as error:
            # A gRPC server without encryption answers a TLS greeting with nonsense, or closes the connection.
            if not here and not insecure:
                raise Refused(f"{error}; if it is a worker with --insecure, say --insecure here too") from error
            # Anyone in the network can end a connection to a worker that does use TLS.
            if not here and isinstance(error, LinkClosed):
                raise
        else:
            try:
                secured = secure_channel(numeric, credentials, identity, CHANNEL_OPTIONS)
                return _connected(secured, target, deadline, timeout_s), identity
            except LinkClosed:
                # Between both connections, another program of the owner may have made it a member.
                again = identify(reached, port, credentials, _left(deadline))
                if again == identity:
                    raise
            secured = secure_channel(numeric, credentials, again, CHANNEL_OPTIONS)
            return _connected(secured, target, deadline, timeout_s), again
    return _connected(grpc.insecure_channel(numeric, CHANNEL_OPTIONS), target, deadline, timeout_s), None


def _identified(host: str, port: int, credentials: Credentials, deadline: float, again: bool) -> Identity:
    """Identify the server. again: try a second time if it closes the connection, as a worker does under load"""
    try:
        return identify(host, port, credentials, _left(deadline))
    except LinkClosed:
        if not again:
            raise
        time.sleep(min(_CROWDED_S, _left(deadline)))
        return identify(host, port, credentials, _left(deadline))


def _knock(host: str, port: int, timeout_s: float) -> str:
    """Connect and disconnect. Return the numeric address that accepted the connection.

    If nothing listens, this fails immediately, while gRPC retries until its deadline. The system also resolves names
    that gRPC's own resolver does not, such as `pi.local`.
    """
    target = join_address(host, port)
    try:
        with socket.create_connection((host, port), timeout_s) as sock:
            return str(sock.getpeername()[0])
    except TimeoutError:
        raise LinkTimeout(f"no connection to {target} within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise LinkClosed(f"nothing listens at {target}{START_WORKER}") from None
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is impossible in DNS
        remedy = "; check the name, or give its address" if isinstance(error, socket.gaierror | UnicodeError) else ""
        raise LinkClosed(f"no connection to {target}: {getattr(error, 'strerror', None) or error}{remedy}") from error


def _connected(channel: grpc.Channel, target: str, deadline: float, timeout_s: float) -> grpc.Channel:
    """Return the channel after a call over it was answered, with any status.

    The first failure counts, because another server listens there.
    """
    # Watching the channel's state instead would delay closing until gRPC's next check, a fifth of a second.
    try:
        channel.unary_unary(ANY_CALL)(b"", timeout=_left(deadline))
    except grpc.RpcError as error:
        code = error.code() if isinstance(error, grpc.Call) else None
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            channel.close()
            raise LinkTimeout(f"{target} took a connection, but no worker answered within {timeout_s:g} s") from None
        if code is grpc.StatusCode.UNAVAILABLE:
            channel.close()
            raise LinkClosed(f"{target} took a connection, but no worker answers there") from None
    except BaseException:
        channel.close()
        raise
    return channel


def _left(deadline: float) -> float:
    """Return the remaining seconds, rounded for messages, and enough for a step that is about to succeed."""
    return max(_LEAST_S, round(deadline - time.monotonic(), 1))


def is_loopback(host: str) -> bool:
    """Return whether all addresses of this host are this machine's own loopback."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(addresses) and all(
        ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses
    )


def check_own(host: str) -> None:
    """Raise OSError if this is not an address of this machine."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind) as sock:
            sock.bind(address)
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"cannot listen on {host}: it is not an address of this machine; use one of its addresses, 0.0.0.0"
            " for all of them, or 127.0.0.1 for this machine only"
        ) from error


def parse_listen(text: str, usual: str) -> tuple[str, int]:
    """Return (host, port) to listen at, from an address or only a port; "" is the `usual` address. Raises
    ValueError."""
    if text.isascii() and text.isdigit():
        text = f"{usual.partition(':')[0]}:{text}"
    return parse_address(text or usual)

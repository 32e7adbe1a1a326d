"""Relay of frames between two links: connects a stream that reaches the daemon with the rank behind it."""

from __future__ import annotations

import threading

from transport.errors import ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.grpc_link import MAX_MESSAGE
from transport.link import CONTROL_BYTES, IDLE_S, Link


def relay(a: Link, b: Link) -> None:
    """Forward frames in both directions until one link ends; then close both."""
    back = threading.Thread(target=_pump, args=(b, a), daemon=True, name="relay")
    back.start()
    _pump(a, b)
    back.join()


def _pump(source: Link, target: Link) -> None:
    try:
        while True:
            kind, payload = source.receive(IDLE_S, MAX_MESSAGE)
            if kind is not Kind.DATA and len(payload) > CONTROL_BYTES:
                raise ProtocolError(
                    f"{source.peer} sent {len(payload)} bytes of {kind.name}, but at most 1 MiB is allowed"
                )
            target.send(payload, kind)
    except Refused as error:
        target.refuse(str(error))
    except TransportError as error:
        target.close(str(error))
        source.close(str(error))

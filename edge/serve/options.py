"""How a server listens, and whom it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devices.errors import TrustError
from edge.net.channel import is_loopback

MAX_BODY_BYTES = 32 << 20  # a prompt of a million tokens has four
PING_S = 10.0  # proxies end what is silent for half a minute


@dataclass(frozen=True)
class ServeOptions:
    """How a server listens, and whom it answers."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()  # a request needs one of them; none: no request needs any
    insecure: bool = False  # other machines are answered without a key
    allow_origins: tuple[str, ...] = ()  # of other pages whose scripts may ask, "https://example.org"; "*": all
    allow_hosts: tuple[str, ...] = ()  # names of this server beside its own
    max_body_bytes: int = MAX_BODY_BYTES
    ping_s: float = PING_S  # between two signs of life in a stream that has nothing to say
    front: Path | None = None  # JSON that `edge pareto --json` wrote


def check(options: ServeOptions) -> None:
    """TrustError where other machines would be answered without a key, or a key is none."""
    if any(not key.strip() or not key.isascii() or not key.isprintable() for key in options.api_keys):
        raise TrustError(
            "a key of the API is empty, or has characters that no HTTP header can have; use letters and digits"
        )
    if not (options.api_keys or options.insecure or is_loopback(options.host)):
        raise TrustError(
            f"{options.host} is reached by other machines, and there is no key; "
            "give one with --api-key or EDGE_API_KEY, or --insecure to answer everybody"
        )

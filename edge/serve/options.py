"""Options of a server."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from devices.errors import TrustError
from edge.net.channel import is_loopback

MAX_BODY_BYTES = 32 << 20  # a prompt of a million tokens has 4 MB
MAX_BODIES_BYTES = 64 << 20  # total of all requests; parsing a request takes several times its size
PING_S = 10.0  # proxies close connections that are silent for half a minute


DRAIN_S = 30.0  # what Kubernetes waits by default


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server: its address, its keys, and its models' lifetimes."""

    host: str = "127.0.0.1"
    port: int = 8080
    # Accepted API keys, in addition to admin_keys; if both are empty, requests need no key.
    api_keys: tuple[str, ...] = ()
    insecure: bool = False  # allow requests from other machines without a key
    # Other origins whose pages may send requests, such as "https://example.org"; "*": all.
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()  # additional host names of this server
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES
    ping_s: float = PING_S  # interval of pings in a silent stream
    tls_cert: Path | None = None  # PEM file of the certificate chain
    tls_key: Path | None = None  # PEM file of its unencrypted key; set both or none
    front: Path | None = None  # JSON file of `edge pareto --json`
    drain_s: float = DRAIN_S  # time for running answers to end after SIGTERM
    idle_unload_s: float = math.inf  # idle seconds after which a model is unloaded
    pinned: tuple[str, ...] = ()  # models that are loaded at the start and never unloaded
    memory: int | None = None  # memory budget of all models in bytes; None: each as configured
    shared_prefixes: bool = False  # share the prefix cache between keys, although timing may reveal other keys' prompts
    admin_keys: tuple[str, ...] = ()  # keys that may change settings of all keys; if empty, a single key may
    weights: Mapping[str, float] = field(default_factory=dict)  # shares of keys in fair queuing; others have 1
    grpc: tuple[str, int] | None = None  # host and port of networks over gRPC; None: only HTTP
    devices: tuple[str, ...] = ()  # addresses allowed in requested plans, in addition to the plans in `front`

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys without duplicates."""
        return tuple(dict.fromkeys((*self.api_keys, *self.admin_keys)))

    @property
    def administrators(self) -> tuple[str, ...]:
        """Keys of administrators: `admin_keys`, or else the only key, if there is just one."""
        return self.admin_keys or (self.keys if len(self.keys) == 1 else ())


def check(options: ServeOptions) -> None:
    """Raise TrustError if other machines could connect without a key, or if a key is invalid.

    Raises the errors of `tls_context`, too.
    """
    tls_context(options)
    if any(not key.strip() or not key.isascii() or not key.isprintable() for key in options.keys):
        raise TrustError(
            "an API key is empty or contains characters that HTTP headers cannot have; use letters and digits"
        )
    if not (options.keys or options.insecure or is_loopback(options.host)):
        raise TrustError(
            f"{options.host} is reachable from other machines, but there is no key; "
            "set one with --api-key or EDGE_API_KEY, or allow everybody with --insecure"
        )


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """Return a TLS context with the certificate and its key, or None without them.

    Raises TrustError if the two cannot be used together.
    """
    cert, key = options.tls_cert, options.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise TrustError("TLS needs a certificate and its key: set both --tls-cert and --tls-key")
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise TrustError(f"{path} cannot be read: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _EncryptedKey:
        raise TrustError(f"{key} is encrypted; use a key without a password that only you can read") from None
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise TrustError(f"{cert} and {key} are not a PEM certificate with its key: {why}") from error
    return context


class _EncryptedKey(Exception):
    """The key needs a password."""


def _no_password() -> str:
    raise _EncryptedKey

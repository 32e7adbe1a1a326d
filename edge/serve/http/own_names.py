"""Names of this server in `Host` headers, and the page for a browser that used a foreign name."""

from __future__ import annotations

import html
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from edge.net.channel import is_loopback
from edge.serve.options import ServeOptions

# Containers and virtual machines reach their host by these names. No public name can end in `.internal`.
_OF_CONTAINERS = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
# Top-level parts of names that public DNS servers do not serve.
_PRIVATE = ("home.arpa", "internal", "lan", "local", "svc")
# No characters that are special in a shell.
_PLAIN = re.compile(r"(https?://)?[a-z0-9_][a-z0-9_.-]{0,252}(:[0-9]{1,5})?")


class OwnNames:
    """Names of this server.

    A foreign DNS name that resolves to this server is refused, to protect it against DNS rebinding. A server that other
    machines reach accepts all private names as well, such as its container's name: machines of that network could forge
    these names but reach the server anyway.
    """

    def __init__(self, options: ServeOptions) -> None:
        machine = socket.gethostname().lower().rstrip(".")
        short = machine.partition(".")[0]
        names = (
            "localhost",
            options.host,
            *(machine, short, f"{short}.local"),
            *_full_names(short),
            *_OF_CONTAINERS,
            *options.allow_hosts,
            *_certificate_names(options.tls_cert),
        )
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._is_reached = not is_loopback(options.host)

    def __contains__(self, host: object) -> bool:
        """Return True if a Host header names this server. An IP address always does."""
        name = name_of(str(host))
        try:
            ipaddress.ip_address(name)
        except ValueError:
            parent = name.partition(".")[2]
            own = name in self._names or f"*.{parent}" in self._names or name.endswith(".localhost")
            return bool(name) and (own or (self._is_reached and is_private(name)))
        return True


def is_private(name: str) -> bool:
    """Return True if public DNS servers cannot resolve a name."""
    return "." not in name or name.endswith(tuple(f".{end}" for end in _PRIVATE))


def name_of(host: str) -> str:
    """Return the name in a Host header without port and trailing dot, or "" if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _full_names(short: str) -> Iterator[str]:
    """Yield the full names of this machine in /etc/hosts and /etc/resolv.conf, without asking a DNS server."""
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/etc/hosts").read_text(encoding="utf-8").splitlines():
            names = line.partition("#")[0].lower().split()[1:]
            yield from (name for name in names if name.partition(".")[0] == short)
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/etc/resolv.conf").read_text(encoding="utf-8").splitlines():
            kind, *domains = line.split() or [""]
            if kind in ("search", "domain"):
                yield from (f"{short}.{domain}" for domain in domains if domain.strip("."))


def _certificate_names(certificate: Path | None) -> Iterable[str]:
    """Return the DNS names in the server's certificate, which may begin with a wildcard."""
    if certificate is None:
        return ()
    from cryptography import x509

    try:
        first = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
        names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return ()
    return names.get_values_for_type(x509.DNSName)


def refusal_page(message: str, option: str, value: str) -> str:
    """Return a page for a browser that is refused, with the option that would allow it.

    value: value of the option from the request. It is shown only if it is safe to paste into a command line.
    """
    command = f"edge serve ... {option} {value if _PLAIN.fullmatch(value.lower()) else 'NAME'}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Not answered</title>'
        f"<h1>This server does not answer here</h1><p>{html.escape(message)}</p>"
        f"<p>If that is your server, start it with</p><pre>{html.escape(command)}</pre></html>"
    )

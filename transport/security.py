"""Mutual TLS 1.3 between the members of one cluster, and identification of the peer.

TLS ensures that the peer has the key of a certificate that our cluster signed and that is in date. `admit` checks that
it is not revoked and has a suitable role. Every connection needs both. Host names are not checked: devices change
addresses, so certificates name devices.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import NameOID

from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError

if TYPE_CHECKING:
    import grpc

OWNER, WORKER, INVITED = "owner", "worker", "invited"
ANYONE = frozenset({OWNER, WORKER, INVITED})
MEMBERS = frozenset({OWNER, WORKER})

# Names of OpenSSL's alerts with which a peer rejects our certificate, and their meanings.
_ALERTS = {
    "UNKNOWN_CA": "it belongs to another cluster",
    "CERTIFICATE_EXPIRED": "this device's certificate expired, by its clock",
    "CERTIFICATE_REVOKED": "this device's certificate was revoked",
    "CERTIFICATE_REQUIRED": "this device showed no certificate",
    "BAD_CERTIFICATE": "it does not accept this device's certificate",
    "CERTIFICATE_UNKNOWN": "it does not accept this device's certificate",
    "UNSUPPORTED_CERTIFICATE": "it does not accept this device's certificate",
    "DECRYPT_ERROR": "it belongs to another cluster",
    "ACCESS_DENIED": "it does not accept this device's certificate",
}
# The warning is for serials below 1, if warnings are errors; such serials are refused anyway.
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, CryptographyDeprecationWarning)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")
_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID


@dataclass(frozen=True)
class Credentials:
    """TLS credentials of this device and the authority it trusts, in PEM. The key is not encrypted."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    revoked: frozenset[int] = frozenset()  # serials of revoked certificates


@dataclass(frozen=True)
class Identity:
    """Holder of a certificate. `expires` is in Unix seconds."""

    name: str
    role: str
    serial: int
    expires: float

    @property
    def pin(self) -> str:
        """DNS name that only this certificate has."""
        return f"serial-{self.serial:x}.edge"


def peer_identity(certificate: bytes) -> Identity:
    """Return the holder of a certificate (DER or PEM), without further checks. Raises Refused if it has none."""
    return _identity(_certificate(certificate))


def admit(
    certificate: bytes | None, credentials: Credentials, roles: Collection[str], now: float | None = None
) -> Identity:
    """Check a certificate (DER or PEM) and return its holder.

    It must be signed by our cluster, in date, not revoked, and of one of `roles`.
    now: Unix seconds, by default the clock's.

    Raises Refused, which names the peer and the reason.
    """
    if not certificate:
        raise Refused("the peer showed no certificate; it must join this cluster first")
    shown, now = _certificate(certificate), time.time() if now is None else now
    authority = x509.load_pem_x509_certificate(credentials.authority)
    with _reading():
        try:
            shown.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError):
            raise Refused("the peer's certificate is of another cluster") from None
    peer = _identity(shown)
    if peer.serial in credentials.revoked:
        raise Refused(f"{peer.name} was revoked; the cluster's owner can invite it again")
    if not shown.not_valid_before_utc.timestamp() <= now < peer.expires:
        raise _not_in_date(peer.name)
    if peer.role not in roles:
        raise Refused(f"{peer.name} has the role {peer.role}, and this is for {' or '.join(sorted(roles))}")
    return peer


def admit_caller(
    auth_context: Mapping[str, Iterable[bytes]], credentials: Credentials, roles: Collection[str]
) -> Identity:
    """Check the certificate of a gRPC caller with `admit`. auth_context: that of its ServicerContext."""
    return admit(next(iter(auth_context.get("x509_pem_cert", ())), None), credentials, roles)


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the TLS context of a socket that dials."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the TLS context of sockets that accept connections. A peer must show a certificate."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.num_tickets = 0  # a resumed session would skip the check of the certificate's dates
    return context


def handshake(
    sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, peer: str, timeout_s: float
) -> ssl.SSLSocket:
    """Return TLS over a connected socket. It does not block, and owns the socket even if the handshake fails.

    The caller must check the peer with `admit`. A dialler learns only at its first read that its own certificate was
    rejected; pass such an ssl.SSLError to `tls_error`.

    timeout_s: limit of the whole handshake.

    Raises LinkTimeout, LinkClosed, ProtocolError, or Refused if one side rejects the other's certificate.
    """
    deadline = time.monotonic() + timeout_s
    sock.setblocking(False)
    try:
        tls = context.wrap_socket(
            sock, server_side=server_side, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
    except OSError as error:
        sock.close()
        raise tls_error(error, peer) from error
    try:
        _drive(tls, tls.do_handshake, deadline, LinkTimeout(f"no TLS handshake with {peer} within {timeout_s:g} s"))
    except OSError as error:
        tls.close()
        raise tls_error(error, peer) from error
    except BaseException:
        tls.close()
        raise
    return tls


def tls_error(error: OSError, peer: str) -> TransportError:
    """Translate an error of a TLS socket into one of our errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
            return _not_in_date(peer)
        return Refused(f"the certificate of {peer} is of another cluster ({error.verify_message})")
    if not isinstance(error, ssl.SSLError):
        return LinkClosed(f"{peer} went away: {error.strerror or error}")
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return LinkClosed(f"{peer} closed the connection")
    reason = error.reason or str(error)
    if "PEER_DID_NOT_RETURN" in reason:
        return Refused(f"{peer} showed no certificate; it must join this cluster first")
    if any(word in reason for word in _NO_TLS):
        return ProtocolError(f"{peer} does not speak TLS; is it a worker outside of any cluster, or another program?")
    if "ALERT" in reason:
        for word, meaning in _ALERTS.items():
            if reason.endswith(word):
                return Refused(f"{peer} refused this device: {meaning}")
    return ProtocolError(f"TLS with {peer} failed: {reason}")


def _not_in_date(peer: str) -> Refused:
    return Refused(
        f"the certificate of {peer} is not in date, by this device's clock; set the clock (timedatectl set-ntp true),"
        " or, if it is right, revoke and invite that device again"
    )


def identify(host: str, port: int, credentials: Credentials, timeout_s: float) -> Identity:
    """Return the member or invited device that serves gRPC at this address and accepts our certificate.

    timeout_s: limit of the connection, and again of the handshake.

    Raises Refused, LinkTimeout, LinkClosed or ProtocolError.
    """
    peer = f"{host}:{port}"
    context = client_context(credentials)
    context.set_alpn_protocols(["h2"])
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except TimeoutError as error:
        raise LinkTimeout(f"no connection to {peer} within {timeout_s:g} s") from error
    except OSError as error:
        raise LinkClosed(f"no connection to {peer}: {error.strerror or error}") from error
    deadline = time.monotonic() + timeout_s
    with handshake(sock, context, server_side=False, peer=peer, timeout_s=timeout_s) as tls:
        holder = admit(tls.getpeercert(binary_form=True), credentials, ANYONE)
        late = LinkTimeout(f"{holder.name} at {peer} shook hands, but sent nothing within {timeout_s:g} s")
        try:
            # An HTTP/2 server speaks first, unless it rejects our certificate. Then an alert comes or, from gRPC, only
            # the end of the stream.
            first = _drive(tls, lambda: tls.recv(1), deadline, late)
        except (ssl.SSLEOFError, ConnectionError):
            first = b""
        except OSError as error:
            raise tls_error(error, f"{holder.name} at {peer}") from error
        if not first:
            raise Refused(
                f"{holder.name} at {peer} refused this device: it hung up when it saw this device's certificate "
                "(expired by its clock, or of another cluster?)"
            )
    return holder


def grpc_server_credentials(fetch: Callable[[], Credentials]) -> grpc.ServerCredentials:
    """Return credentials of a gRPC port for members and invited devices. Check each call with `admit_caller`, too.

    fetch: called at every new connection, so that a certificate can be replaced while the server runs.
    """
    import grpc

    last = fetch()

    def configuration(current: Credentials) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(current.key, current.certificate)], current.authority)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        fetched = fetch()
        if fetched == last:
            return None
        last = fetched
        return configuration(fetched)

    return grpc.dynamic_ssl_server_credentials(configuration(last), renewed, require_client_authentication=True)


def secure_channel(
    target: str, credentials: Credentials, identity: Identity, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Return a channel that connects only to the holder of exactly this certificate; see `identify`."""
    import grpc

    own = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    # Without a proxy, because a proxy in the environment is for the web and not for devices in the local network.
    pinned = [("grpc.ssl_target_name_override", identity.pin), ("grpc.enable_http_proxy", 0)]
    return grpc.secure_channel(target, own, [*pinned, *options])


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
    with _file_of(credentials.key + credentials.certificate) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Yield the path of a private file that exists during the block, because OpenSSL reads keys only from files."""
    if sys.platform == "linux":
        handle = os.memfd_create("edge")  # in memory, so that even a crash leaves nothing behind
        try:
            with os.fdopen(os.dup(handle), "wb") as memory:
                memory.write(content)
            yield f"/proc/self/fd/{handle}"
        finally:
            os.close(handle)
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name


def _drive(tls: ssl.SSLSocket, step: Callable[[], Any], deadline: float, late: LinkTimeout) -> Any:
    """Call `step` until the socket can complete it; return its result. Raise `late` at the deadline."""
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            events = select.POLLIN
        except ssl.SSLWantWriteError:
            events = select.POLLOUT
        poller = select.poll()
        poller.register(tls, events)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise late


def _certificate(content: bytes) -> x509.Certificate:
    with _reading():
        if content.startswith(b"-----BEGIN"):
            return x509.load_pem_x509_certificate(content)
        return x509.load_der_x509_certificate(content)


def _identity(certificate: x509.Certificate) -> Identity:
    with _reading():
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        (role,) = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        if role.value not in ANYONE or certificate.serial_number < 1:
            raise ValueError(f"its role is {role.value!r:.80} and its serial number {certificate.serial_number}")
        expires = certificate.not_valid_after_utc.timestamp()
        return Identity(str(name.value), str(role.value), certificate.serial_number, expires)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise Refused(f"the peer's certificate is not a device's: {error}") from error

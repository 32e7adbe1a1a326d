"""Connecting to workers: authentication, enrolment of invited devices, and distribution of the revocation list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from devices.errors import TrustError
from devices.names import join_address, parse_address
from devices.paths import authority_folder, credentials_folder
from devices.trust import credentials as memberships
from devices.trust.authority import Authority, is_owned
from edge.cluster.client import Remote
from edge.errors import WorkerError
from edge.net import credentials as trust
from edge.net.channel import open_channel
from transport import edge_pb2 as pb
from transport.errors import Refused, TransportError
from transport.security import INVITED, OWNER, Credentials, Identity, peer_identity

CONNECT_TIMEOUT_S = 5.0
LOSS_TIMEOUT_S = 2.0  # used while a request waits after a loss; the supervisor retries slower workers later


@contextmanager
def _own_files() -> Iterator[None]:
    """Turn an OSError about this device's own cluster files into a TrustError."""
    try:
        yield
    except OSError as error:
        raise TrustError(
            f"no worker can be reached, because this device's cluster credentials cannot be used"
            f" ({error}): let this user read and write {credentials_folder()} and {authority_folder()}"
        ) from error


@_own_files()
def reach(address: str, *, insecure: bool = False, timeout_s: float = CONNECT_TIMEOUT_S) -> Remote:
    """Connect to a worker at HOST or HOST:PORT.

    An invited device is enrolled. Every member gets the current revocation list. `timeout_s` bounds the connection
    attempt and each further call.

    Raises TransportError, TrustError or WorkerError if the worker cannot be reached or used, and ValueError if
    `address` is not an address.
    """
    host, port = parse_address(address)
    authority = _authority()
    own = trust.credentials() if authority is not None else None
    try:
        worker = _connected(host, port, own, insecure, timeout_s)
    except Refused:
        if own is None:
            _refuse_a_worker(join_address(host, port))
        elif authority is not None:
            with suppress(TransportError, WorkerError):
                _tell_revoked(host, port, own, authority, timeout_s)
        raise
    try:
        if authority is not None and worker.identity is not None and worker.identity.role == INVITED:
            failed = _enroll(worker, authority, timeout_s)
            worker.close()
            worker = _connected(host, port, own, insecure, timeout_s)
            if worker.identity is None or worker.identity.role == INVITED:
                raise failed or Refused(f"{worker.name} still shows its invitation, after it was made a member")
        if authority is not None and worker.identity is not None:
            _update(worker, worker.identity, authority, timeout_s)
    except BaseException:
        worker.close()
        raise
    return worker


def _tell_revoked(host: str, port: int, own: Credentials, authority: Authority, timeout_s: float) -> None:
    """Send the revocation list to a revoked device, so that its log names the reason."""
    known = replace(own, revoked=frozenset())
    with _connected(host, port, known, False, timeout_s) as worker:
        if worker.identity is not None and worker.identity.serial in own.revoked:
            worker.call("UpdateRevoked", pb.RevokedList(crl_pem=authority.crl()), timeout_s)


def _connected(host: str, port: int, own: Credentials | None, insecure: bool, timeout_s: float) -> Remote:
    channel, identity = open_channel(host, port, own, timeout_s, insecure)
    return Remote(channel, host, port, identity)


@_own_files()
def credentials() -> Credentials | None:
    """Return this machine's credentials if it owns a cluster, else None."""
    return None if _authority() is None else trust.credentials()


def _authority() -> Authority | None:
    """Return the authority of the cluster that this machine owns, or None if it owns none."""
    membership = memberships.load(credentials_folder())
    if membership is None and not is_owned(authority_folder()):
        return None
    if membership is not None and membership.holder.role != OWNER:
        return None
    # `open` repairs files of the owner that are out of date or missing.
    return Authority.open(authority_folder(), credentials_folder())


def _refuse_a_worker(target: str) -> None:
    """Raise Refused if this machine is a member of a cluster of another owner. A cluster of its own would not help."""
    membership = memberships.load(credentials_folder())
    if membership is not None:
        raise Refused(
            f"{target} is another machine, and this one is the {membership.holder.role} {membership.holder.name}: only"
            " the cluster's owner gives orders; run this on the owner's machine"
        )


def _enroll(worker: Remote, authority: Authority, timeout_s: float) -> WorkerError | None:
    """Enrol an invited device. Return the device's error if it refuses, because another owner may have been faster."""
    assert worker.identity is not None
    try:
        request: pb.SigningRequest = worker.call("Enroll", pb.EnrollRequest(), timeout_s)
        if peer_identity(request.invitation_pem).serial != worker.identity.serial:
            raise Refused(f"{worker.name} sent another invitation than the one in its connection")
        try:
            certificate = authority.enroll(request.invitation_pem, request.csr_pem)
        except TrustError as error:
            with suppress(TransportError, WorkerError):  # the device's own log then names the reason, too
                worker.call("Install", pb.Certificate(refused=str(error)), timeout_s)
            raise
        worker.call("Install", pb.Certificate(certificate_pem=certificate), timeout_s)
    except TrustError as error:
        raise Refused(str(error)) from error
    except WorkerError as error:
        return error
    return None


def _update(worker: Remote, identity: Identity, authority: Authority, timeout_s: float) -> None:
    """Send the revocation list and merge the worker's newer list. This machine's files may come from an old backup."""
    said: pb.Installed = worker.call("UpdateRevoked", pb.RevokedList(crl_pem=authority.crl()), timeout_s)
    if not said.crl_pem:
        return
    try:
        revoked = authority.learn(said.crl_pem)
    except TrustError as error:
        raise Refused(f"{worker.name} has a revocation list that cannot be used: {error}") from error
    if identity.serial in revoked:
        raise Refused(f"{worker.name} was revoked; the cluster's owner can invite it again")
    worker.call("UpdateRevoked", pb.RevokedList(crl_pem=authority.crl()), timeout_s)

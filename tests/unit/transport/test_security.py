"""Test mutual TLS over real sockets and a real gRPC server: who is accepted or refused, and the errors on each side."""

import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from devices.trust import certificates
from devices.trust.credentials import Membership
from tests.support.trust import YEAR_S, Cluster, shown
from transport import security
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.security import ANYONE, MEMBERS, Credentials, Identity

NOW = time.time()  # TLS itself looks at the clock
WAIT_S = 20.0  # never reached


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"), NOW)


@pytest.fixture(scope="module")
def owner(cluster: Cluster) -> Credentials:
    return shown(cluster.owner)


@pytest.fixture(scope="module")
def pi(cluster: Cluster) -> Membership:
    return cluster.joined("pi")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """Credentials of another cluster."""
    return shown(Cluster(tmp_path_factory.mktemp("other"), NOW).joined("pi"))


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> tuple[Credentials, Credentials]:
    """(owner, worker) of a cluster made eleven years ago; only the owner's certificate was renewed."""
    cluster = Cluster(tmp_path_factory.mktemp("old"), NOW - 11 * YEAR_S)
    worker = cluster.joined("pi")
    key = certificates.new_key()
    certificate = cluster.authority._sign("desk", "owner", key.public_key(), NOW, NOW + YEAR_S)
    own = Credentials(cluster.authority.pem, certificates.to_pem(certificate), certificates.key_to_pem(key))
    return own, shown(worker)


# Reading and judging certificates.


def test_an_identity_is_what_the_owner_signed(pi: Membership) -> None:
    der = certificates.to_der(certificates.from_pem(pi.certificate))
    for form in (der, pi.certificate):
        result = security.peer_identity(form)
        assert vars(result).items() <= vars(pi.holder).items()
        assert result.pin == f"serial-{pi.holder.serial:x}.edge"
    assert "PRIVATE" not in repr(shown(pi))


@pytest.mark.parametrize("content", [b"nonsense", b"-----BEGIN CERTIFICATE-----\n", b"\x30\x82", b"\0" * 5000])
def test_what_is_no_certificate_is_refused(owner: Credentials, content: bytes) -> None:
    with pytest.raises(Refused, match="not a device's"):
        security.peer_identity(content)
    with pytest.raises(Refused, match="not a device's"):
        security.admit(content, owner, ANYONE)


def test_the_clusters_own_certificate_is_no_device(owner: Credentials) -> None:
    with pytest.raises(Refused, match="not a device's"):
        security.admit(owner.authority, owner, ANYONE)


def test_admit_names_who_and_why(cluster: Cluster, owner: Credentials, pi: Membership, stranger: Credentials) -> None:
    assert security.admit(pi.certificate, owner, MEMBERS).name == "pi"
    invited = cluster.invited("new")
    assert security.admit(invited.certificate, owner, {"invited"}).name == "new"
    gone = replace(owner, revoked=frozenset({pi.holder.serial}))
    for certificate, credentials, roles, now, why in (
        (None, owner, ANYONE, None, "showed no certificate"),
        (b"", owner, ANYONE, None, "showed no certificate"),
        (stranger.certificate, owner, ANYONE, None, "another cluster"),
        (pi.certificate, gone, ANYONE, None, "pi was revoked"),
        (pi.certificate, owner, {"owner"}, None, "pi has the role worker, and this is for owner"),
        (invited.certificate, owner, MEMBERS, None, "new has the role invited, and this is for owner or worker"),
        (pi.certificate, owner, ANYONE, pi.holder.expires, "pi is not in date"),
        (pi.certificate, owner, ANYONE, NOW - 2 * 86_400, "pi is not in date"),
    ):
        with pytest.raises(Refused, match=why):
            security.admit(certificate, credentials, roles, now)


def test_no_key_stays_behind(pi: Membership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/dev/fd"))
    for platform in ("linux", "darwin") if hasattr(os, "memfd_create") else ("darwin",):
        monkeypatch.setattr("sys.platform", platform)
        security.server_context(shown(pi))
        with pytest.raises(ssl.SSLError):
            security.client_context(replace(shown(pi), key=b""))
    assert len(os.listdir("/dev/fd")) == before
    assert list(tmp_path.iterdir()) == []


# TLS over TCP.

Outcome = ssl.SSLSocket | TransportError


def dialled() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on this machine: (who dialled, who was dialled)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def shake(client: ssl.SSLContext, server: ssl.SSLContext, timeout_s: float = WAIT_S) -> tuple[Outcome, Outcome]:
    """Return what a handshake gives the two sides: a socket or an error. The client also tries to read, once."""
    dialler, answerer = dialled()

    def run(sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> Outcome:
        peer = "client" if server_side else "server"
        try:
            tls = security.handshake(sock, context, server_side=server_side, peer=peer, timeout_s=timeout_s)
            tls.settimeout(timeout_s)
            if server_side:
                tls.sendall(b"!")
                return tls
            try:
                assert tls.recv(1) == b"!"
            except OSError as error:
                tls.close()
                return security.tls_error(error, peer)
        except TransportError as error:
            return error
        return tls

    with futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(run, dialler, client, False), pool.submit(run, answerer, server, True)
        return first.result(), second.result()


def refusals(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[str, str]:
    """Return what the two sides say when there is no connection."""
    outcomes = shake(client, server)
    for outcome in outcomes:
        if isinstance(outcome, ssl.SSLSocket):
            outcome.close()
    return str(outcomes[0]), str(outcomes[1])


def test_members_of_one_cluster_shake_hands(owner: Credentials, pi: Membership) -> None:
    client, server = shake(security.client_context(owner), security.server_context(shown(pi)))
    assert isinstance(client, ssl.SSLSocket)
    assert isinstance(server, ssl.SSLSocket)
    with client, server:
        assert (client.version(), server.version()) == ("TLSv1.3", "TLSv1.3")
        assert security.admit(client.getpeercert(True), owner, {"worker"}).name == "pi"
        assert security.admit(server.getpeercert(True), shown(pi), {"owner"}).name == "desk"


def test_another_cluster_is_refused_both_ways(owner: Credentials, stranger: Credentials) -> None:
    reported = refusals(security.client_context(stranger), security.server_context(owner))
    assert "certificate of server is of another cluster" in reported[0]
    assert "client refused this device: it belongs to another cluster" in reported[1]
    trusting = security.client_context(stranger)  # whoever dials need not care whom it reaches
    trusting.verify_mode = ssl.CERT_NONE
    reported = refusals(trusting, security.server_context(owner))
    assert "server refused this device: it belongs to another cluster" in reported[0]
    assert "certificate of client is of another cluster" in reported[1]


def test_no_certificate_is_refused(owner: Credentials) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=owner.authority.decode())
    reported = refusals(bare, security.server_context(owner))
    assert "server refused this device: this device showed no certificate" in reported[0]
    assert "client showed no certificate" in reported[1]


def test_an_expired_certificate_is_refused_both_ways(expired: tuple[Credentials, Credentials]) -> None:
    own, worker = expired
    reported = refusals(security.client_context(own), security.server_context(worker))
    assert "certificate of server is not in date" in reported[0]
    assert "client refused this device: this device's certificate expired" in reported[1]
    reported = refusals(security.client_context(worker), security.server_context(own))
    assert "server refused this device: this device's certificate expired" in reported[0]
    assert "certificate of client is not in date" in reported[1]


def test_older_tls_is_refused(owner: Credentials, pi: Membership) -> None:
    old = security.client_context(owner)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    for outcome in shake(old, security.server_context(shown(pi))):
        assert isinstance(outcome, ProtocolError)


def test_no_session_is_resumed(owner: Credentials, pi: Membership) -> None:
    client, server = shake(security.client_context(owner), security.server_context(shown(pi)))
    assert isinstance(client, ssl.SSLSocket)
    assert isinstance(server, ssl.SSLSocket)
    with client, server:
        assert client.session is None or not client.session.has_ticket


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError), (b"\0" * 64, ProtocolError), (b"", LinkClosed)],
)
def test_a_peer_that_speaks_no_tls(owner: Credentials, sent: bytes, expected: type[TransportError]) -> None:
    dialler, other = dialled()
    other.sendall(sent)
    other.shutdown(socket.SHUT_WR)
    with other, pytest.raises(expected, match="server"):
        security.handshake(dialler, security.client_context(owner), server_side=False, peer="server", timeout_s=WAIT_S)
    assert dialler.fileno() == -1


def test_a_silent_peer_is_given_up_in_time(owner: Credentials) -> None:
    dialler, other = dialled()
    with other, pytest.raises(LinkTimeout, match=re.escape("server within 0.05 s")):
        security.handshake(dialler, security.client_context(owner), server_side=False, peer="server", timeout_s=0.05)


def test_a_peer_that_drips_is_given_up_in_time(owner: Credentials) -> None:
    """A byte now and then does not extend the wait."""
    dialler, other = dialled()
    done = threading.Event()

    def drip() -> None:
        for byte in b"\x16\x03\x03\x40\x00" + b"\x02" * 1000:
            if done.wait(0.01):
                return
            other.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(LinkTimeout):
            security.handshake(dialler, security.client_context(owner), server_side=False, peer="server", timeout_s=0.1)
    finally:
        done.set()
        thread.join()
        other.close()


# gRPC.


class Server:
    """A gRPC port that answers `/test/who` with the caller's name, if its role is owner."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(self._who)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"who": handler}),))
        secure = security.grpc_server_credentials(lambda: self.credentials)
        self.port = self._server.add_secure_port("127.0.0.1:0", secure)
        self._server.start()

    def _who(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return security.admit_caller(context.auth_context(), self.credentials, {"owner"}).name.encode()
        except Refused as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            raise

    def identify(self, credentials: Credentials) -> Identity:
        return security.identify("127.0.0.1", self.port, credentials, WAIT_S)

    def channel(self, credentials: Credentials, identity: Identity) -> grpc.Channel:
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        return security.secure_channel(f"127.0.0.1:{self.port}", credentials, identity, options)

    def ask(self, credentials: Credentials, identity: Identity) -> str:
        """The caller's name, or the status and its words."""
        with self.channel(credentials, identity) as channel:
            return said(channel)

    def close(self) -> None:
        self._server.stop(None).wait()


def said(channel: grpc.Channel) -> str:
    try:
        return bytes(channel.unary_unary("/test/who")(b"", timeout=WAIT_S)).decode()
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


Serve = Callable[[Credentials], Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(credentials: Credentials) -> Server:
        servers.append(Server(credentials))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_the_owner_finds_out_who_serves_and_calls_it(
    serve: Serve, owner: Credentials, pi: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nothing of the cluster goes through a web proxy
    server = serve(shown(pi))
    identity = server.identify(owner)
    assert (identity.name, identity.role, identity.serial) == ("pi", "worker", pi.holder.serial)
    assert server.ask(owner, identity) == "desk"


def test_a_channel_takes_no_other_member_for_the_one_it_is_for(
    cluster: Cluster, serve: Serve, owner: Credentials, pi: Membership
) -> None:
    server = serve(shown(pi))
    tv = security.peer_identity(cluster.joined("tv").certificate)
    assert server.ask(owner, tv).startswith("UNAVAILABLE")


def test_grpc_refuses_a_wrong_role_in_words(cluster: Cluster, serve: Serve, pi: Membership) -> None:
    server = serve(shown(pi))
    radio = shown(cluster.joined("radio"))
    reported = server.ask(radio, server.identify(radio))
    assert reported == "PERMISSION_DENIED: radio has the role worker, and this is for owner"


def test_grpc_refuses_the_revoked_from_the_next_call_on(cluster: Cluster, serve: Serve, pi: Membership) -> None:
    server = serve(shown(pi))
    tablet = shown(cluster.joined("tablet"))
    identity = server.identify(tablet)
    with server.channel(tablet, identity) as channel:
        assert "has the role worker" in said(channel)
        serial = security.peer_identity(tablet.certificate).serial
        server.credentials = replace(server.credentials, revoked=frozenset({serial}))
        assert said(channel) == "PERMISSION_DENIED: tablet was revoked; the cluster's owner can invite it again"


def test_identify_refuses_a_revoked_server(serve: Serve, owner: Credentials, pi: Membership) -> None:
    server = serve(shown(pi))
    with pytest.raises(Refused, match="pi was revoked"):
        server.identify(replace(owner, revoked=frozenset({pi.holder.serial})))


def test_grpc_refuses_another_cluster_both_ways(
    serve: Serve, owner: Credentials, pi: Membership, stranger: Credentials
) -> None:
    server = serve(shown(pi))
    with pytest.raises(Refused, match="another cluster"):
        server.identify(stranger)  # does not believe the server
    liar = replace(stranger, authority=owner.authority)  # believes it, and is not believed
    with pytest.raises(Refused, match=rf"pi at 127.0.0.1:{server.port} refused this device"):
        server.identify(liar)
    identity = server.identify(owner)
    assert server.ask(stranger, identity).startswith("UNAVAILABLE")
    assert server.ask(liar, identity).startswith("UNAVAILABLE")


def test_grpc_refuses_the_expired_both_ways(serve: Serve, expired: tuple[Credentials, Credentials]) -> None:
    own, worker = expired
    with pytest.raises(Refused, match="not in date"):
        serve(worker).identify(own)
    with pytest.raises(Refused, match="refused this device"):
        serve(own).identify(worker)


def test_grpc_refuses_who_shows_nothing(serve: Serve, owner: Credentials, pi: Membership) -> None:
    server = serve(shown(pi))
    identity = server.identify(owner)
    pinned = [("grpc.ssl_target_name_override", identity.pin)]
    bare = grpc.ssl_channel_credentials(owner.authority)
    with grpc.secure_channel(f"127.0.0.1:{server.port}", bare, pinned) as channel:
        assert said(channel).startswith("UNAVAILABLE")
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert said(channel).startswith("UNAVAILABLE")


def test_a_certificate_is_swapped_while_the_server_runs(cluster: Cluster, serve: Serve, owner: Credentials) -> None:
    """Enrolling does so: the next connection sees the new certificate, and one pinned to the old is not made."""
    server = serve(shown(cluster.invited("lamp")))
    before = server.identify(owner)
    assert (before.name, before.role) == ("lamp", "invited")
    with server.channel(owner, before) as open_before:
        assert said(open_before) == "desk"
        server.credentials = shown(cluster.joined("lamp"))
        after = server.identify(owner)
        assert (after.name, after.role) == ("lamp", "worker")
        assert server.ask(owner, after) == "desk"
        assert server.ask(owner, before).startswith("UNAVAILABLE")
        assert said(open_before) == "desk"  # calls in progress do not suffer


def test_nobody_there(owner: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkClosed, match=f"no connection to 127.0.0.1:{port}: Connection refused"):
        security.identify("127.0.0.1", port, owner, WAIT_S)


def test_a_worker_without_tls_is_named_as_such(owner: Credentials) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ProtocolError, match="does not speak TLS"):
            security.identify("127.0.0.1", port, owner, WAIT_S)
    finally:
        server.stop(None).wait()

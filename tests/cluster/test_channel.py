"""Test addresses, and whether the channel to a worker is plain, encrypted or refused."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.names import DEFAULT_PORT, join_address, parse_address
from edge.net import channel
from edge.net.channel import is_loopback, open_channel
from tests.support.fake_worker import deaf_port
from tests.support.trust import Cluster, shown
from transport.errors import LinkClosed, LinkTimeout, Refused, TransportError
from transport.security import Credentials, grpc_server_credentials

SHORT_S = 0.5
LONG_S = 30.0  # of a wait that is not to be waited


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pi", ("pi", 7070)),
        ("pi:7071", ("pi", 7071)),
        ("pi.local:1", ("pi.local", 1)),
        ("192.168.1.7", ("192.168.1.7", 7070)),
        ("192.168.1.7:65535", ("192.168.1.7", 65535)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),  # to listen on: any free port
        ("::1", ("::1", 7070)),
        ("[::1]", ("::1", 7070)),
        ("[::1]:7071", ("::1", 7071)),
        ("fd00::7:7071", ("fd00::7:7071", 7070)),  # an address, not a port: that is what brackets are for
        ("[fd00::7]:7071", ("fd00::7", 7071)),
        ("fe80::1%eth0", ("fe80::1%eth0", 7070)),
        ("[fe80::1%eth0]:7071", ("fe80::1%eth0", 7071)),
        ("küche:7070", ("küche", 7070)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert parse_address(join_address(*expected)) == expected
    assert DEFAULT_PORT == 7070


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":7070",
        "pi:",
        "pi:x",
        "pi:-1",
        "pi:+1",
        "pi:1.5",
        "pi:65536",
        "pi:" + "9" * 5000,
        "pi:\uff17\uff10\uff17\uff10",  # digits, but not ours
        "pi:70 70",
        " pi",
        "pi\n",
        "p i",
        "http://pi:7070",
        "pi/7070",
        "me@pi:7070",
        "[::1",
        "::1]",
        "[::1]7070",
        "[::1]:",
        "[pi]:7070",
        "[]:7070",
        "[[::1]]",
        "::g",
        "a:b:c",
        "nonsense::7",
        "x" * 254,
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="an address is HOST or HOST:PORT") as caught:
        parse_address(text)
    assert len(str(caught.value)) < 150


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        host, port = parse_address(text)
        assert host
        assert 0 <= port <= 65535


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # as an address to listen on, every interface
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1", False),
        ("no-such-host.invalid", False),
        ("x" * 300, False),
        ("a..b", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_name_with_an_address_elsewhere_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in ("127.0.0.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: both)
    assert not is_loopback("both")


# --- channels ---


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, time.time())


@pytest.fixture
def serve() -> Iterator[Callable[[Credentials | None], int]]:
    """`serve(credentials)`: the port of a gRPC server on loopback that answers no method."""
    servers = []

    def start(credentials: Credentials | None) -> int:
        server = grpc.server(ThreadPoolExecutor(2))
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", grpc_server_credentials(lambda: credentials))
        server.start()
        servers.append(server)
        return int(port)

    yield start
    for server in servers:
        server.stop(None).wait()


@contextlib.contextmanager
def listening(answer: bytes | None = None) -> Iterator[int]:
    """The port of a program that is no worker: silent, or every caller gets `answer` and the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                with sock, contextlib.suppress(OSError):
                    if answer is None:
                        saved.append(sock.dup())
                    else:
                        sock.sendall(answer)

        saved: list[socket.socket] = []
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in saved:
                sock.close()


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take loopback for another machine's address."""
    monkeypatch.setattr(channel, "is_loopback", lambda _: False)


def test_to_this_machine_in_the_clear(serve: Callable[[Credentials | None], int], cluster: Cluster) -> None:
    port = serve(None)
    for credentials in (None, shown(cluster.owner)):
        opened, identity = open_channel("127.0.0.1", port, credentials, LONG_S)
        opened.close()
        assert identity is None


def test_encrypted_to_a_member(serve: Callable[[Credentials | None], int], cluster: Cluster) -> None:
    port = serve(shown(cluster.joined("pi")))
    for insecure in (False, True):  # where both would do, it is encrypted
        opened, identity = open_channel("127.0.0.1", port, shown(cluster.owner), LONG_S, insecure)
        opened.close()
        assert identity is not None
        assert (identity.name, identity.role) == ("pi", "worker")


def test_without_credentials_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Refused, match=rf"localhost:{port} is another machine.*edge cluster init.*--insecure"):
            open_channel("localhost", port, None, LONG_S)
        server.settimeout(LONG_S)
        with server.accept()[0] as sock:
            assert sock.recv(1) == b""
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("secure", [True, False])
def test_a_name_that_leads_elsewhere_the_next_time(
    serve: Callable[[Credentials | None], int], cluster: Cluster, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """An answer by mDNS may differ each time. 127.0.0.1 is this machine here, 127.0.0.2 the attacker's."""
    port = serve(None)
    attacker = grpc.server(ThreadPoolExecutor(1))
    attacker.add_insecure_port(f"127.0.0.2:{port}")
    attacker.start()
    known, loopback, make = socket.getaddrinfo, channel.is_loopback, grpc.insecure_channel
    clear: list[str] = []
    answers = iter(["127.0.0.1"] + ["127.0.0.2"] * 9)

    def lookup(host: str, *rest: Any, **how: Any) -> Any:
        return known(next(answers) if host == "pi.local" else host, *rest, **how)

    def connected(target: str, *rest: Any) -> Any:
        clear.append(target)
        return make(target, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(grpc, "insecure_channel", connected)
    monkeypatch.setattr(channel, "is_loopback", lambda host: host != "127.0.0.2" and loopback(host))
    credentials = shown(cluster.owner) if secure else None
    opened, _ = open_channel("pi.local", port, credentials, LONG_S)
    opened.close()
    with pytest.raises(Refused, match="does not speak TLS" if secure else "is another machine"):
        open_channel("pi.local", port, credentials, LONG_S)
    assert clear == [f"127.0.0.1:{port}"]
    attacker.stop(None).wait()


def test_a_connection_that_somebody_ends_does_not_become_one_in_the_clear(
    serve: Callable[[Credentials | None], int], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = serve(None)

    def ended(*_: object) -> None:
        raise LinkClosed("pi went away")

    monkeypatch.setattr(channel, "identify", ended)
    opened, _ = open_channel("127.0.0.1", port, shown(cluster.owner), LONG_S)  # nobody is between this machine and it
    opened.close()
    elsewhere(monkeypatch)
    with pytest.raises(LinkClosed, match="pi went away"):
        open_channel("127.0.0.1", port, shown(cluster.owner), LONG_S, insecure=True)


def test_in_the_clear_to_another_machine_only_if_asked(
    serve: Callable[[Credentials | None], int], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch)
    port = serve(None)
    with pytest.raises(Refused, match=r"does not speak TLS.*say --insecure here too|closed.*say --insecure here too"):
        open_channel("127.0.0.1", port, shown(cluster.owner), LONG_S)
    for credentials in (None, shown(cluster.owner)):
        opened, identity = open_channel("127.0.0.1", port, credentials, LONG_S, insecure=True)
        opened.close()
        assert identity is None


def test_a_name_that_only_the_system_knows(
    serve: Callable[[Credentials | None], int], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own resolver asks no mDNS."""
    ports = [serve(shown(cluster.joined("pi"))), serve(None)]
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest: known("127.0.0.1" if host == "pi.local" else host, *rest)
    )
    for port in ports:
        opened, identity = open_channel("pi.local", port, shown(cluster.owner), LONG_S)
        opened.close()
        assert (identity is None) is (port == ports[1])


def test_insecure_does_not_open_up_to_another_cluster(
    serve: Callable[[Credentials | None], int], cluster: Cluster, tmp_path: Path
) -> None:
    port = serve(shown(Cluster(tmp_path / "other", time.time()).joined("pi")))
    with pytest.raises(Refused, match="of another cluster"):
        open_channel("127.0.0.1", port, shown(cluster.owner), LONG_S, insecure=True)


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("secure", [False, True])
def test_where_nothing_listens_the_answer_comes_at_once(
    secure: bool, insecure: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secure and not insecure:
        elsewhere(monkeypatch)
    says = "^nothing listens at 127.0.0.1:{}; start edge worker there$"
    with deaf_port() as port, pytest.raises(LinkClosed, match=says.format(port)):
        open_channel("127.0.0.1", port, shown(cluster.owner) if secure else None, LONG_S, insecure)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_host_that_does_not_exist(host: str, cluster: Cluster) -> None:
    with pytest.raises(LinkClosed, match=f"^no connection to {re.escape(host)}:7070: .+; check the name, or"):
        open_channel(host, 7070, shown(cluster.owner), LONG_S)


def test_a_machine_that_does_not_answer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_: object, timeout_s: float) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", hang)
    with pytest.raises(LinkTimeout, match=r"^no connection to 10\.0\.0\.1:7070 within 0\.5 s$"):
        open_channel("10.0.0.1", 7070, shown(cluster.owner), SHORT_S)


@pytest.mark.parametrize("secure", [False, True])
def test_a_program_that_takes_connections_and_says_nothing(secure: bool, cluster: Cluster) -> None:
    with listening() as port:
        began = time.monotonic()
        with pytest.raises(LinkTimeout, match=r"within 0\.5 s"):
            open_channel("127.0.0.1", port, shown(cluster.owner) if secure else None, SHORT_S)
        assert time.monotonic() - began > SHORT_S / 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(999)])
def test_a_program_that_says_something_else(answer: bytes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(answer) as port:
        for insecure in (True, False):
            if not insecure:
                elsewhere(monkeypatch)
            with pytest.raises(TransportError) as caught:
                open_channel("127.0.0.1", port, shown(cluster.owner), SHORT_S, insecure)
            assert ("say --insecure here too" in str(caught.value)) is not insecure
            assert f"127.0.0.1:{port}" in str(caught.value)

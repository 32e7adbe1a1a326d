"""Test connections: the server closes those without a request, others are not disturbed; TLS."""

import asyncio
import datetime
import errno
import ipaddress
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from uvicorn.server import ServerState

from devices.errors import TrustError
from edge.serve.app import create_app
from edge.serve.http import bodies, connections
from edge.serve.http.listeners import listeners
from edge.serve.http.own_names import OwnNames
from edge.serve.options import ServeOptions, check
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

WAIT_S = 60.0
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions())) as address:
        yield address


def connect(url: str, sends: bytes = b"") -> socket.socket:
    at = urlsplit(url)
    first = socket.create_connection((at.hostname, at.port), WAIT_S)
    first.sendall(sends)
    return first


def is_closed(item: socket.socket) -> bool:
    """Waits for whatever comes."""
    try:
        return item.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sends", [b"", b"GET /health HTTP/1.1\r\nHost: local"], ids=["nothing", "half"])
def test_who_makes_no_request_is_not_waited_for(url: str, sends: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.Client(base_url=url) as other:
        assert other.get("/health").status_code == 200
        monkeypatch.setattr(connections, "HEADERS_S", 0.2)
        with connect(url, sends) as slow:
            assert is_closed(slow)
        assert other.get("/health").status_code == 200


def test_headers_that_come_slowly_after_an_answer_are_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 1.0)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(url, request) as slow:
        answer = slow.makefile("rb")
        while line := answer.readline().strip():
            if line.lower().startswith(b"content-length"):
                n_bytes = int(line.split(b":")[1])
        assert answer.read(n_bytes).startswith(b'{"status":"ok",')
        slow.sendall(request[:20])  # the usual limit between two requests does not hold any more
        assert is_closed(slow)


def test_headers_without_end_are_not_kept(url: str) -> None:
    with connect(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: ") as long, pytest.raises(ConnectionError):
        long.sendall(b"x" * (64 << 20))


def test_a_body_that_comes_slowly_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    with connect(url, head) as slow:
        response = slow.makefile("rb").read()  # until it is closed
    assert response.startswith(b"HTTP/1.1 408 ")
    assert httpx.post(f"{url}/v1/chat/completions", json=ASK).status_code == 200


def test_of_too_many_that_make_no_request_the_oldest_go(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_IDLE", 3)
    monkeypatch.setattr(connections, "GRACE_S", 0.0)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with connect(url, head) as asks:
        assert httpx.get(f"{url}/health").status_code == 200  # the head was read before: this one is not idle
        slow = [connect(url, b"GET /") for _ in range(8)]
        try:
            assert httpx.get(f"{url}/health").status_code == 200  # after all of them were accepted
            assert all(map(is_closed, slow[:6]))
            assert select.select([asks, *slow[6:]], [], [], 0)[0] == []
        finally:
            for item in slow:
                item.close()


def test_of_many_that_come_at_once_none_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_IDLE", 1)
    monkeypatch.setattr(connections, "GRACE_S", WAIT_S)
    many = [connect(url) for _ in range(4)]
    try:
        for item in many:
            item.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [entry.recv(12) for entry in many] == [b"HTTP/1.1 200"] * 4
    finally:
        for item in many:
            item.close()


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    folder, key = tmp_path_factory.mktemp("pem"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "edge")])
    day, today = datetime.timedelta(days=1), datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName("box.local"), x509.DNSName("*.home.example")]
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *names])
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), today - day, today + day)
    cert = built.add_extension(addresses, critical=False).sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    for file, encryption in (
        ("key.pem", serialization.NoEncryption()),
        ("secret.pem", serialization.BestAvailableEncryption(b"sesame")),
    ):
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        (folder / file).write_bytes(key.private_bytes(*form))
    return folder / "cert.pem", folder / "key.pem"


def test_names_in_the_certificate_are_the_servers(pem: tuple[Path, Path]) -> None:
    names = OwnNames(ServeOptions(tls_cert=pem[0], tls_key=pem[1]))
    assert all(host in names for host in ("box.local:8080", "a.home.example", "BOX.local."))
    assert not any(host in names for host in ("home.example", "a.b.home.example", "other.local"))


@pytest.mark.parametrize("host", ["::", "localhost"])
def test_both_families_are_listened_on_at_one_port(host: str) -> None:
    with ExitStack() as opened:
        sockets = [opened.enter_context(listener) for listener in listeners(host, 0)]
        port = sockets[0].getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port), WAIT_S):
                pass
        assert {listener.getsockname()[1] for listener in sockets} == {port}


def test_taken_port_of_one_family_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    create, ports, others = socket.create_server, [], []

    def once_taken(address: tuple[str, int], **options: Any) -> socket.socket:
        if address[1] and not others:  # the second family, at the port of the first
            others.append(create(address, **options))
        listener = create(address, **options)
        ports.append(listener.getsockname()[1])
        return listener

    monkeypatch.setattr(socket, "create_server", once_taken)
    with ExitStack() as opened:
        sockets = [opened.enter_context(listener) for listener in listeners("localhost", 0)]
        assert len(sockets) == 2
        assert [listener.getsockname()[1] for listener in sockets] == ports[-2:] == [ports[-1]] * 2
        opened.enter_context(others[0])


@pytest.mark.parametrize("missing", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("host", ["::", "localhost"])
def test_missing_family_is_left_out(host: str, missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def without(address: tuple[str, int], **options: Any) -> socket.socket:
        if options["family"] == missing:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", without)
    [only] = listeners(host, 0)
    with only:
        assert only.family != missing


def test_port_that_another_program_has_in_one_family_is_an_error() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"localhost:{port}: Address already in use; give"):
            listeners("localhost", port)
    for listener in listeners("localhost", port):  # nothing of the first try is left
        listener.close()


def test_tls(pem: tuple[Path, Path]) -> None:
    options = ServeOptions(tls_cert=pem[0], tls_key=pem[1])
    with serving(create_app(ScriptedModels(), options), options=options) as address:
        assert address.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(pem[0]))
        with httpx.Client(base_url=address, verify=trusted) as client:
            assert client.post("/v1/chat/completions", json={**ASK, "stream": True}).text.endswith("[DONE]\r\n\r\n")
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{address}/health")
        with connect(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as plain:
            assert is_closed(plain)


@pytest.mark.parametrize("is_read", [True, False], ids=["slowly", "not at all"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_response_is_cut_off_only_where_its_client_takes_nothing(
    tls: bool, is_read: bool, pem: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 3600.0)  # the test says when it has passed
    here, there = None, None
    if tls:
        here, there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context(cafile=pem[0])
        here.load_cert_chain(*pem)
    body, protocols = bytes(32 << 20), list[Any]()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    def protocol() -> asyncio.Protocol:
        config = uvicorn.Config(app, lifespan="off", log_level="error", timeout_keep_alive=3600)
        protocols.append(connections.bounded_connections()(config, ServerState(), {}))  # type: ignore[call-arg]
        return protocols[-1]

    async def run() -> int:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(protocol, "127.0.0.1", 0, ssl=here) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=there)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = len(await reader.readuntil(b"\r\n\r\n"))
            connection = protocols[0]
            while not connection.cycle.response_complete:
                await asyncio.sleep(0)
            n_read, unsent = 0, connection._unsent()
            assert unsent > 0, head
            if is_read:
                n_read = len(await reader.readexactly(16 << 20))
                assert connection._unsent() < unsent
            connection._time_out()
            assert connection.transport.is_closing() is not is_read
            with suppress(ConnectionError):
                while part := await reader.read(1 << 20):
                    n_read += len(part)
                    if n_read == len(body):
                        break
            writer.close()
            return n_read

    n_read = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert (n_read == len(body)) is is_read


def test_what_tls_cannot_use_is_said_in_one_line(pem: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = pem
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    for options, why in (
        (ServeOptions(tls_cert=cert), "both"),
        (ServeOptions(tls_key=key), "both"),
        (ServeOptions(tls_cert=cert, tls_key=tmp_path / "missing.pem"), "missing.pem cannot be read"),
        (ServeOptions(tls_cert=tmp_path, tls_key=key), "cannot be read"),
        (ServeOptions(tls_cert=cert, tls_key=other), "not a PEM certificate with its key"),
        (ServeOptions(tls_cert=other, tls_key=key), "not a PEM certificate with its key"),
        (ServeOptions(tls_cert=cert, tls_key=key.with_name("secret.pem")), "is encrypted"),
    ):
        with pytest.raises(TrustError, match=why) as refused:
            check(options)
        assert "\n" not in str(refused.value)


def test_small_parts_of_a_response_do_not_wait_for_acknowledgements() -> None:
    """`serving` and `listeners` make sockets for which asyncio leaves Nagle's algorithm on."""
    delays: list[bool] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        its_socket = protocols[0].transport.get_extra_info("socket")
        delays.append(not its_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    protocols: list[Any] = []

    def protocol() -> asyncio.Protocol:
        config = uvicorn.Config(app, lifespan="off", log_level="error")
        protocols.append(connections.bounded_connections()(config, ServerState(), {}))  # type: ignore[call-arg]
        return protocols[-1]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(protocol, sock=socket.create_server(("127.0.0.1", 0))) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

    asyncio.run(run())
    assert delays == [False]

"""Trust between two hosts with a network between them: who gets in, who does not, what a listener on the cable sees.

Host `one` is the owner's, host `two` the workers'. Each device has files of its own. Needs root
(tests/support/namespaces.py).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.processes.forking import ForkedProcess
from devices.trust import certificates, credentials
from devices.trust.authority import Authority
from edge.version import version
from tests.support.helpers import begin, run_edge, until
from tests.support.namespaces import Host, two_hosts
from tests.support.trust import Cluster, membership_in
from transport.security import peer_identity

HOUR_S = 3600
END_S = 60  # only against a hang
ALL_CALLS = (
    *("Describe", "Session", "Link", "Offer", "Upload", "Enroll", "Install", "UpdateRevoked"),
    *("Check", "Watch", "Reflection"),  # of gRPC's own services
)


class RunningWorker:
    """A worker that listens."""

    def __init__(self, process: "ForkedProcess | subprocess.Popen[bytes]", log: Path, host: Host) -> None:
        self.process, self._log = process, log
        self.port = int(self.says(r" listening .*address=\S+:([0-9]+) ")[1])
        self.address = f"{host.address}:{self.port}"

    def says(self, pattern: str) -> "re.Match[str]":
        """Wait until its log has a regular expression."""

        def look() -> "re.Match[str] | None":
            return re.search(pattern, self._log.read_text()) if self._log.exists() else None

        until(lambda: look() is not None or self.process.poll() is not None, f"the worker says {pattern}")
        result = look()
        assert result, self._log.read_text()
        return result

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(END_S) == 0


class Device:
    """A machine on one of the hosts, with files of its own."""

    def __init__(self, host: Host, folder: Path) -> None:
        folder.mkdir()
        self.host, self.folder = host, folder
        self.env = {f"XDG_{kind.upper()}_HOME": str(folder / kind) for kind in ("config", "cache", "state")}
        self.env["GRPC_VERBOSITY"] = "NONE"
        self.authority_folder = folder / "config" / "edge" / "authority"
        self.credentials = folder / "config" / "edge" / "credentials"
        self.running: list[RunningWorker] = []

    def edge(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """A command, to its end."""
        return run_edge(*args, env=self.env, on=self.host)

    def says(self, *args: str) -> str:
        """Return the output of a command, which must succeed."""
        done = self.edge(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def program(self, code: str, *args: str) -> Any:
        """The JSON that a Python program prints."""
        done = self.host.run([sys.executable, "-c", code, *args], self.env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def worker(self, *options: str) -> RunningWorker:
        """A worker of this device, until the test ends."""
        path = self.folder / f"log-{len(self.running)}"
        with path.open("wb") as log, open(os.devnull) as nothing:
            process = begin(("worker", *options), {**os.environ, **self.env}, (nothing, nothing, log), on=self.host)
        self.running.append(RunningWorker(process, path, self.host))
        return self.running[-1]

    def asks(self, *args: str) -> tuple[int, list[dict[str, Any]]]:
        """`edge devices --no-discover --json`: exit code and devices."""
        done = self.edge("devices", "--no-discover", "--json", *args)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)["devices"]

    def authority(self) -> Authority:
        """The cluster it owns."""
        return Authority.open(self.authority_folder, self.credentials)

    def close(self) -> None:
        """End what runs."""
        for item in self.running:
            item.process.kill()
            item.process.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def device(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Callable[[str], Device]]:
    """`device(name)` makes one on the workers' host."""
    built = []

    def make(name: str) -> Device:
        built.append(Device(hosts[1], tmp_path / name))
        return built[-1]

    yield make
    for item in built:
        item.close()


@pytest.fixture
def desk(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Device]:
    """The owner's machine, which owns nothing yet."""
    first = Device(hosts[0], tmp_path / "desk")
    yield first
    first.close()


@pytest.fixture
def owner(desk: Device) -> Device:
    """The owner's machine, with a cluster."""
    Authority.create(desk.authority_folder, "desk", desk.credentials)
    return desk


@pytest.fixture
def joined(owner: Device, device: Callable[[str], Device]) -> Callable[[str], Device]:
    """`joined(name)`: a device that is a member already."""

    def make(name: str) -> Device:
        first = device(name)
        join(owner.authority(), first.credentials, name)
        return first

    return make


def join(authority: Authority, folder: Path, name: str) -> None:
    """Make a member, its credentials in `folder`, without a network."""
    credentials.store_token(folder, authority.invite(name, HOUR_S))
    csr = credentials.pending_csr(folder, name)
    credentials.install(folder, authority.enroll(membership_in(folder).certificate, csr))


def started(*workers: tuple[Device, tuple[str, ...]]) -> list[RunningWorker]:
    """Workers that start at the same time."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(lambda item: item[0].worker(*item[1]), workers))


def refusal(done: "subprocess.CompletedProcess[str]", code: int = 7) -> str:
    """The one line of a command that failed."""
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    assert re.fullmatch(r"edge [^\n]+\n", done.stderr), done.stderr
    return done.stderr


# --- without a cluster ---


def test_a_worker_without_credentials_is_not_exposed_by_accident(desk: Device, device: Callable[[str], Device]) -> None:
    pi = device("pi")
    words = refusal(pi.edge("worker", "--listen", "0.0.0.0:7070"))
    assert "this device has no credentials" in words
    assert "--join TOKEN" in words
    assert "--insecure" in words

    alone = pi.worker()  # on loopback, without being asked
    assert 'address=127.0.0.1:7070 security="in the clear"' in alone.says("listening.*")[0]
    assert pi.asks("127.0.0.1")[0] == 0
    code, (result,) = desk.asks(alone.address, "--insecure")
    assert (code, result["error"]) == (7, f"nothing listens at {alone.address}; start edge worker there")


def test_in_the_clear_only_if_both_sides_say_so(desk: Device, device: Callable[[str], Device]) -> None:
    worker = device("pi").worker("--listen", "0.0.0.0:0", "--insecure", "--name", "pi")
    assert "everyone who reaches this port can use this device" in worker.says("WARNING insecure .*")[0]

    code, (result,) = desk.asks(worker.address)
    assert (code, result["answers"]) == (7, False)
    assert "is another machine, and this one has no credentials" in result["error"]
    assert "--insecure" in refusal(desk.edge("link", worker.address, worker.address))
    code, (result,) = desk.asks(worker.address, "--insecure")
    assert (code, result["name"], result["secure"]) == (0, "pi", False)

    # The same for the owner of a cluster: credentials do not make it trust what has none.
    Authority.create(desk.authority_folder, "desk", desk.credentials)
    code, (result,) = desk.asks(worker.address)
    assert code == 7
    assert "if it is a worker with --insecure, say --insecure here too" in result["error"]
    code, (result,) = desk.asks(worker.address, "--insecure")
    assert (code, result["name"], result["secure"]) == (0, "pi", False)


# --- joining and leaving ---


def test_from_init_to_revoke(desk: Device, device: Callable[[str], Device]) -> None:
    desk.says("cluster", "init", "--name", "desk")
    token = desk.says("cluster", "invite", "pi").strip()
    pi = device("pi")
    worker = pi.worker("--join", token, "--no-announce")
    address = worker.address
    assert address.endswith(":7070")
    assert "name=pi address=0.0.0.0:7070 security=mutual-tls" in worker.says("listening.*")[0]
    code, (result,) = desk.asks(address)
    assert (code, result["name"], result["secure"], result["error"]) == (0, "pi", True, None)
    worker.says("INFO joined name=pi")
    assert membership_in(pi.credentials).holder.role == "worker"
    assert "pi    worker, joined" in desk.says("cluster", "list")

    worker.stop()
    worker = pi.worker("--no-announce")  # the token is not needed again
    assert re.match(r"pi +\S+:7070 .* joined\n", desk.says("devices", "--no-discover", address).split("\n", 1)[1])
    worker.stop()
    worker = pi.worker("--join", token, "--no-announce")  # and does no harm
    assert desk.asks(address)[0] == 0

    desk.says("cluster", "revoke", "pi")
    for command in (["devices", "--no-discover", address], ["link", address, address]):
        done = desk.edge(*command)
        assert done.returncode == 7
        assert "pi was revoked; the cluster's owner can invite it again" in done.stdout + done.stderr
    worker.says("WARNING revoked name=pi why=.*`edge cluster invite pi` there lets it join again")

    # Invited again, under the same name, it is a member again.
    worker.stop()
    pi.worker("--join", desk.says("cluster", "invite", "pi").strip(), "--no-announce")
    code, (result,) = desk.asks(address)
    assert (code, result["name"], result["secure"]) == (0, "pi", True)


def test_a_worker_gives_no_orders(owner: Device, joined: Callable[[str], Device]) -> None:
    worker = joined("pi").worker()
    other = joined("mallory")
    code, (result,) = other.asks(worker.address)
    assert code == 7
    assert "this one is the worker mallory: only the cluster's owner gives orders" in result["error"]


def test_a_token_lets_in_one_device(owner: Device, device: Callable[[str], Device]) -> None:
    token = owner.says("cluster", "invite", "pi").strip()
    options = ("--join", token, "--listen", "0.0.0.0:0", "--no-announce")
    first, second = started((device("first"), options), (device("second"), options))
    assert owner.asks(first.address)[0] == 0
    code, (result,) = owner.asks(second.address)
    assert code == 7
    assert "this invitation was used already: pi joined on 2" in result["error"]
    second.says("WARNING refused name=pi why=.*this invitation was used already")
    assert "run `edge cluster revoke pi` now" in result["error"]
    assert owner.asks(first.address)[0] == 0  # the rightful one is still in


def test_two_first_contacts_at_the_same_time(owner: Device, device: Callable[[str], Device]) -> None:
    """Both find the device invited; one is second, and must find it joined."""
    worker = device("pi").worker("--join", owner.says("cluster", "invite", "pi").strip(), "--listen", "0.0.0.0:0")
    with ThreadPoolExecutor(3) as pool:
        for code, result in pool.map(lambda _: owner.asks(worker.address), range(3)):
            assert [item["error"] for item in result] == [None]
            assert (code, result[0]["name"]) == (0, "pi")


def test_an_old_token(owner: Device, device: Callable[[str], Device]) -> None:
    token = owner.authority().invite("pi", HOUR_S, now=time.time() - 2 * HOUR_S)
    words = refusal(device("pi").edge("worker", "--join", token), 3)
    assert "the invitation of pi expired 60 min ago" in words
    assert "`edge cluster invite pi`" in words


def test_a_device_that_joined_and_was_asked_too_late(owner: Device, device: Callable[[str], Device]) -> None:
    earlier = time.time() - 2 * HOUR_S
    pi = device("pi")
    credentials.store_token(pi.credentials, owner.authority().invite("pi", HOUR_S, now=earlier), now=earlier)
    worker = pi.worker("--listen", "0.0.0.0:0", "--no-announce")
    code, (result,) = owner.asks(worker.address)
    assert code == 7
    assert "not in date, by this device's clock" in result["error"]


def test_a_device_whose_cable_was_pulled(owner: Device, joined: Callable[[str], Device]) -> None:
    worker = joined("pi").worker("--listen", "0.0.0.0:0", "--no-announce")
    assert owner.asks(worker.address)[0] == 0
    owner.host.unplug()
    try:
        done = owner.edge("devices", "--no-discover", worker.address, "--timeout", "1")
    finally:
        owner.host.plug()
    assert (done.returncode, done.stderr) == (7, "")
    assert re.search(r" lost\n", done.stdout)  # it was there before
    assert re.search(rf"no connection to {worker.address}(: | within 1 s)", done.stdout)
    assert owner.asks(worker.address)[0] == 0


# --- who may call what ---

CALLER = """
import json, sys, threading
import grpc
from transport import edge_pb2 as pb, rpc

def streamed(request):  # and the stream stays open until the answer has come
    yield request
    came.wait(60)

address, folder, name = sys.argv[1:4]
def read(what):
    try:
        with open(f"{folder}/{what}.pem", "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
if name:
    own = grpc.ssl_channel_credentials(read("ca"), read("key"), read("certificate"))
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0)]
    channel = grpc.secure_channel(address, own, options)
else:
    channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
requests = {
    "Describe": pb.DescribeRequest(),
    "Session": pb.Command(open=pb.Open(world_size=1, secret=bytes(16))),
    "Link": b"EDGE",
    "Offer": pb.SliceOffer(slice="0" * 64, n_bytes=1000),
    "Upload": b"x" * 1000,
    "Enroll": pb.EnrollRequest(),
    "Install": pb.Certificate(certificate_pem=b"none"),
    "UpdateRevoked": pb.RevokedList(crl_pem=b"none"),
}
about = {rpc.SLICE_KEY: "0" * 64, rpc.SLICE_BYTES_KEY: "1000", rpc.OFFSET_KEY: "0", "edge-session": "none"}
said = {}
for method, request in requests.items():
    try:
        came = threading.Event()
        stub, metadata = rpc.stub(channel, method), tuple(about.items())
        if method == "Upload":
            request = iter([request])
        elif method in ("Session", "Link"):
            request = streamed(request)
        answer = stub(request, timeout=5, metadata=metadata)
        streams = method in ("Session", "Link", "Offer")
        said[method] = type(next(answer) if streams else answer).__name__
    except StopIteration:
        said[method] = "nothing"
    except grpc.RpcError as error:
        said[method] = f"{error.code().name}: {error.details()}"
    came.set()
reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
for method, call in (
    ("Check", lambda: iter([channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)])),
    ("Watch", lambda: channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=5)),
    ("Reflection", lambda: channel.stream_stream(reflection)(streamed(bytes([58, 0])), timeout=5)),
):
    try:
        came = threading.Event()
        said[method] = type(next(call())).__name__
    except grpc.RpcError as error:
        said[method] = f"{error.code().name}: {error.details()}"
    came.set()
print(json.dumps(said))
"""


class Caller:
    """A program on the owner's host that has the files of some certificate, or none, and calls everything there is."""

    def __init__(self, at: Device, folder: Path, worker: RunningWorker, total: Device) -> None:
        self._at, self._folder, self._worker, self._of = at, folder, worker, total
        folder.mkdir()

    def calls(self, shown: tuple[bytes, bytes] | None = None, tls: bool = True) -> dict[str, str]:
        """Return the outcome of every call with this (certificate, key)."""
        server = membership_in(self._of.credentials)
        (self._folder / "ca.pem").write_bytes(server.authority)
        for name, content in zip(("certificate", "key"), shown or (None, None), strict=True):
            (self._folder / f"{name}.pem").unlink(missing_ok=True)
            if content is not None:
                (self._folder / f"{name}.pem").write_bytes(content)
        pin = peer_identity(server.certificate).pin if tls else ""
        said: dict[str, str] = self._at.program(CALLER, self._worker.address, str(self._folder), pin)
        assert tuple(said) == ALL_CALLS
        return said


def files_of(folder: Path) -> tuple[bytes, bytes]:
    """The (certificate, key) of a membership."""
    result = membership_in(folder)
    return result.certificate, result.key


def test_strangers_can_call_nothing(owner: Device, joined: Callable[[str], Device], tmp_path: Path) -> None:
    pi = joined("pi")
    worker = pi.worker("--listen", "0.0.0.0:0", "--no-announce")
    caller = Caller(owner, tmp_path / "caller", worker, pi)

    other = Cluster(tmp_path / "other", time.time())
    other.joined("pi")
    key = certificates.new_key()
    self_made = certificates.to_pem(certificates.make_authority(key, time.time()))
    # One that says what ours say, signed with another key.
    forged = certificates.make_certificate(
        certificates.from_pem(membership_in(owner.credentials).authority),
        key,
        "desk",
        "owner",
        key.public_key(),
        time.time(),
        time.time() + HOUR_S,
    )
    own_key = certificates.key_to_pem(key)
    for who, shown, tls in (
        ("plain", None, False),
        ("no certificate", None, True),
        ("a self-made certificate", (self_made, own_key), True),
        ("a forged certificate", (certificates.to_pem(forged), own_key), True),
        ("another cluster's owner", files_of(other.at("desk")), True),
        ("another cluster's member", files_of(other.at("pi")), True),
    ):
        said = caller.calls(shown, tls)
        assert all(answer.startswith("UNAVAILABLE: ") for answer in said.values()), (who, said)

    # So that the above can fail: with the owner's own certificate all calls arrive.
    said = caller.calls(files_of(owner.credentials))
    assert (said["Describe"], said["Session"], said["Offer"]) == ("Description", "Event", "SliceState")
    assert said["Link"] == "PERMISSION_DENIED: this worker has no such session: it has ended or never existed"
    for call in ("Upload", "Enroll", "Install", "UpdateRevoked"):
        assert said[call].startswith("FAILED_PRECONDITION: "), said[call]
    assert said["Check"] == said["Watch"] == said["Reflection"] == "bytes"


def test_a_role_may_call_only_what_is_its_own(owner: Device, joined: Callable[[str], Device], tmp_path: Path) -> None:
    pi, mallory = joined("pi"), joined("mallory")
    worker = pi.worker("--listen", "0.0.0.0:0", "--no-announce")
    caller = Caller(owner, tmp_path / "caller", worker, pi)

    said = caller.calls(files_of(mallory.credentials))
    assert said.pop("Check") == "bytes"
    assert said.pop("Link") == "PERMISSION_DENIED: this worker has no such session: it has ended or never existed"
    refused = "PERMISSION_DENIED: mallory has the role worker, and this is for owner"
    assert said == dict.fromkeys(said, refused)

    credentials.store_token(tmp_path / "eve", owner.authority().invite("eve", HOUR_S))
    said = caller.calls(files_of(tmp_path / "eve"))
    assert said.pop("Check") == "bytes"
    assert said.pop("Link") == "PERMISSION_DENIED: eve has the role invited, and this is for owner or worker"
    assert said == dict.fromkeys(said, "PERMISSION_DENIED: eve has the role invited, and this is for owner")


def test_the_revoked_are_refused_once_the_list_arrived(
    owner: Device, joined: Callable[[str], Device], tmp_path: Path
) -> None:
    pi, mallory = joined("pi"), joined("mallory")
    worker = pi.worker("--listen", "0.0.0.0:0", "--no-announce")
    caller = Caller(owner, tmp_path / "caller", worker, pi)
    owner.says("cluster", "revoke", "mallory")
    assert "no such session" in caller.calls(files_of(mallory.credentials))["Link"]  # pi has not heard of it yet
    assert owner.asks(worker.address)[0] == 0
    refused = "PERMISSION_DENIED: mallory was revoked; the cluster's owner can invite it again"
    said = caller.calls(files_of(mallory.credentials))
    assert said == dict.fromkeys(ALL_CALLS, refused)
    # It holds after a restart, too.
    worker.stop()
    worker = pi.worker("--listen", f"0.0.0.0:{worker.port}")
    assert caller.calls(files_of(mallory.credentials)) == said


def test_an_owner_out_of_a_backup_learns_who_was_revoked(owner: Device, joined: Callable[[str], Device]) -> None:
    """Also where the owner has revoked another since, and also from the revoked one itself."""
    pi, mallory, tv = joined("pi"), joined("mallory"), joined("tv")
    options = ("--listen", "0.0.0.0:0", "--no-announce")
    near, far = started((pi, options), (mallory, options))
    config, backup = owner.folder / "config", owner.folder / "backup"
    shutil.copytree(config, backup)
    owner.says("cluster", "revoke", "mallory")
    assert owner.asks(near.address)[0] == 0
    gone = {
        membership_in(mallory.credentials).holder.serial,
        peer_identity(membership_in(mallory.credentials).invitation or b"").serial,
    }

    for more in (False, True):
        shutil.rmtree(config)
        shutil.copytree(backup, config)
        assert not gone & membership_in(owner.credentials).revoked
        if more:
            owner.says("cluster", "revoke", "tv")
            gone.add(membership_in(tv.credentials).holder.serial)
        code, (result,) = owner.asks(near.address)
        assert (code, result["name"], result["error"]) == (0, "pi", None)
        assert membership_in(owner.credentials).revoked == membership_in(pi.credentials).revoked >= gone
        assert membership_in(owner.credentials).crl == membership_in(pi.credentials).crl
        code, (result,) = owner.asks(far.address)
        assert (code, result["error"]) == (7, "mallory was revoked; the cluster's owner can invite it again")

    # What was revoked and has the list itself tells of it, and is not used.
    shutil.copy(pi.credentials / "revoked.pem", mallory.credentials)
    shutil.rmtree(config)
    shutil.copytree(backup, config)
    code, (result,) = owner.asks(far.address)
    assert (code, result["error"]) == (7, "mallory was revoked; the cluster's owner can invite it again")
    assert "mallory  worker, revoked" in owner.says("cluster", "list")


def test_a_list_that_a_worker_has_is_not_written_again(owner: Device, joined: Callable[[str], Device]) -> None:
    pi = joined("pi")
    worker = pi.worker("--listen", "0.0.0.0:0", "--no-announce")
    assert owner.asks(worker.address)[0] == 0
    files = [*pi.credentials.glob("*.pem"), *owner.credentials.glob("*.pem"), owner.authority_folder / "members.json"]
    before = {file: file.stat().st_ino for file in files}
    assert owner.asks(worker.address)[0] == 0
    assert {file: file.stat().st_ino for file in files} == before


DOOR = """
import json, sys
from edge.net import credentials
from edge.cluster.connect import reach
from edge.net.dialling import Dialler
from edge.cluster.session import RemoteSession
from pathlib import Path
from transport.errors import TransportError
from transport.link import Deadlines

address, *others = sys.argv[1:]
secret, said = bytes(range(16)), {}
with reach(address) as worker:
    worker.describe()
    for transport in ("tcp", "grpc"):
        with RemoteSession(worker, 1, 2, secret) as session:  # one for each: a rank has one link to be had
            for who in ("plain", *others):
                own = None if who == "plain" else credentials.credentials(Path(who))
                for known in (True,) if who == "plain" else (True, False):
                    try:
                        how = own and (lambda own=own: own), 0, transport
                        dialler = Dialler(0, secret if known else bytes(16), Deadlines(3, 3, 3), *how)
                        dialler.dial(session.peer).link.close()
                        came = "in"
                    except TransportError as error:
                        came = f"{type(error).__name__}: {error}"
                    said[f"{transport} {Path(who).parent.name} {known}"] = came
            session.unload()
print(json.dumps(said))
"""


def test_data_links_are_for_members_who_know_the_secret(
    owner: Device, joined: Callable[[str], Device], tmp_path: Path
) -> None:
    """The rank's own TCP port, and the way through the daemon; with the group's secret and with another."""
    pi, mallory, zoe = joined("pi"), joined("mallory"), joined("zoe")
    other = Cluster(tmp_path / "other", time.time())
    (tmp_path / "stranger").mkdir()
    other.joined("x")
    os.rename(other.at("x"), tmp_path / "stranger" / "credentials")
    invited = tmp_path / "invited" / "credentials"
    credentials.store_token(invited, owner.authority().invite("eve", HOUR_S))
    for item in (mallory, zoe):
        os.rename(item.credentials, item.folder / "credentials")
    owner.says("cluster", "revoke", "mallory")
    worker = pi.worker("--listen", "0.0.0.0:0", "--no-announce")
    folders = [tmp_path / name / "credentials" for name in ("stranger", "invited", "mallory", "zoe")]
    said = owner.program(DOOR, worker.address, *map(str, folders))
    assert {key for key, came in said.items() if came == "in"} == {"tcp zoe True", "grpc zoe True"}, said
    for way in ("tcp", "grpc"):
        assert "secret" in said[f"{way} zoe False"]
    assert "mallory was revoked" in said["grpc mallory True"]  # not only that the stream ended
    assert "eve has the role invited" in said["grpc invited True"]
    for words in (
        "mallory was revoked",
        "eve has the role invited",
        "belongs to another cluster",
        "does not speak TLS",
    ):
        worker.says(words)


# --- two workers of one cluster ---


def test_a_link_between_two_workers(owner: Device, joined: Callable[[str], Device]) -> None:
    options = ("--listen", "0.0.0.0:0", "--no-announce", "--threads", "1")
    first, second = started((joined("first"), options), (joined("second"), options))
    for transport in ("tcp", "grpc"):
        args = ["--transport", transport, "--seconds", "0.2", "--json"]
        said = json.loads(owner.says("link", first.address, second.address, *args))
        assert (said["a"], said["b"], said["kind"]) == ("first", "second", transport)
        assert (said["a_address"], said["b_address"]) == (first.address, second.address)
        assert 0 < said["latency_median_s"] < 1
        assert min(said["bandwidth_ab_gbps"], said["bandwidth_ba_gbps"]) > 0
        said = json.loads(owner.says("link", "local", second.address, *args))
        assert (said["a"], said["b"], said["kind"]) == ("desk", "second", transport)  # as its certificate has it


CAPTURE = """
import select, socket, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
sock.bind(("eth0", 0))
print("ready", flush=True)
poller = select.poll()
poller.register(sock, select.POLLIN)
poller.register(sys.stdin, select.POLLIN | select.POLLHUP)
with open(sys.argv[1], "wb") as file:
    ended = False
    while True:
        ready = dict(poller.poll(0 if ended else None))
        if sock.fileno() in ready:
            file.write(sock.recv(1 << 17))
        elif ended:
            break
        elif ready:
            ended = True
            poller.unregister(sys.stdin)
"""
TRAFFIC = """
import json, sys
from edge.cluster.connect import reach
from edge.cluster.session import answers, connect_all
from edge.cluster.session import RemoteSession
from hashlib import sha256
from transport import edge_pb2 as pb, rpc

near, far, secret, pattern = sys.argv[1:5]
insecure = sys.argv[5:] == ["insecure"]
content = pattern.encode() * 4000
about = {rpc.SLICE_KEY: sha256(content).hexdigest(), rpc.SLICE_BYTES_KEY: str(len(content)), rpc.OFFSET_KEY: "0"}
said = {}
with reach(near, insecure=insecure) as a, reach(far, insecure=insecure) as b:
    a.describe(), b.describe()
    rpc.stub(b.channel, "Upload")(iter([content]), metadata=tuple(about.items()))
    for seed, transport in enumerate(("tcp", "grpc")):
        group = bytes.fromhex(secret)[:-1] + bytes([seed])
        with RemoteSession(a, 0, 2, group) as first, RemoteSession(b, 1, 2, group) as second:
            (state,), _ = connect_all([first, second], transport)
            for session in (first, second):
                session.tell(pb.Command(allreduce=pb.Allreduce(
                    n_floats=1024, algorithm="mesh", wire="f32", repeats=20, seed=seed)))
            digests = {event.allreduced.digest for event in answers([first, second])}
            said[state.kind] = len(digests)
print(json.dumps([a.secure, b.secure, said]))
"""
SECRET = bytes(range(0xA0, 0xB0))
PATTERN = "what nobody but the two of them may read; "


@contextmanager
def captured(host: Host, file: Path) -> Iterator[None]:
    """Keep every byte that passes a host's end of the cable during the block."""
    process = host.start([sys.executable, "-c", CAPTURE, str(file)])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield
    finally:
        process.communicate(timeout=END_S)  # closes its standard input
    assert process.returncode == 0


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "encrypted"])
def test_what_a_listener_on_the_cable_sees(
    owner: Device, joined: Callable[[str], Device], tmp_path: Path, secure: bool
) -> None:
    """The owner's machine is a worker too here, so that the links between the two workers pass the cable."""
    options = ("--listen", "0.0.0.0:0", "--threads", "1", "--no-announce", *(() if secure else ("--insecure",)))
    near, far = started((owner, options), (joined("pi"), options))
    with captured(owner.host, tmp_path / "captured"):
        args = [near.address, far.address, SECRET.hex(), PATTERN, *([] if secure else ["insecure"])]
        assert owner.program(TRAFFIC, *args) == [secure, secure, {"tcp": 1, "grpc": 1}]
    seen = (tmp_path / "captured").read_bytes()
    assert len(seen) > len(PATTERN) * 4000  # all of it did pass
    readable = {"a slice": PATTERN.encode() * 2, "what the worker is": version("llama-cpp-python").encode()}
    for seed, transport in enumerate(("tcp", "grpc")):
        readable[f"the secret of the group over {transport}"] = SECRET[:-1] + bytes([seed])
        for rank in (0, 1):  # each sends its own tensor to the other
            tensor = np.random.default_rng([seed, rank]).standard_normal(1024, np.float32).tobytes()
            readable[f"a tensor of rank {rank} over {transport}"] = tensor[:64]
    assert {what for what, content in readable.items() if content in seen} == (set() if secure else readable.keys())
    if secure:  # not even who they are
        assert b"desk" not in seen
        assert b"edge cluster" not in seen


# --- found by name ---


def test_workers_are_found_while_they_are_there(
    owner: Device, joined: Callable[[str], Device], device: Callable[[str], Device]
) -> None:
    everywhere = ("--listen", "0.0.0.0:0")
    pi, cellar, barn, shed = started(
        (joined("pi"), everywhere),
        (joined("cellar"), (*everywhere, "--no-announce")),
        (device("barn"), (*everywhere, "--insecure", "--name", "barn", "--announce")),
        (device("shed"), (*everywhere, "--insecure", "--name", "shed")),
    )
    for item in (pi, barn):
        item.says("INFO announced")

    def devices_json(*args: str) -> dict[str, dict[str, Any]]:
        done = owner.edge("devices", "--json", "--timeout", "2", *args)
        assert (done.returncode, done.stderr) == (0, "")
        return {entry["name"]: entry for entry in json.loads(done.stdout)["devices"]}

    listed: dict[str, dict[str, Any]] = {}

    def both() -> bool:
        listed.clear()
        listed.update(devices_json())
        return {"pi", "barn"} <= listed.keys()

    until(both, "both that announce themselves are found")
    assert listed.keys() == {"pi", "barn", "cellar"}
    assert (listed["cellar"]["address"], listed["cellar"]["state"]) == (None, "lost")  # a member that nobody sees
    assert (listed["pi"]["address"], listed["pi"]["secure"], listed["pi"]["error"]) == (pi.address, True, None)
    assert listed["barn"]["answers"] is False
    assert "say --insecure here too" in listed["barn"]["error"]
    assert devices_json("--insecure")["barn"]["secure"] is False

    pi.stop()
    assert devices_json()["pi"]["state"] == "lost"
    # Nobody looks if told not to, and whoever is not announced is there all the same.
    done = owner.edge(
        "devices", "--json", "--timeout", "3600", "--no-discover", cellar.address, shed.address, "--insecure"
    )
    assert [entry["name"] for entry in json.loads(done.stdout)["devices"]] == ["cellar", "shed"]

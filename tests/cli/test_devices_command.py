"""Test `edge devices` on this machine: its table, its time limit, and wrong answers of workers."""

import dataclasses
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edge.cluster.roster
import edge.net.channel
from apps import cli
from apps.options import address, worker_addresses
from devices import discovery
from devices.discovery import Discovered
from devices.errors import DiscoveryError
from devices.profile import DeviceProfile, describe
from devices.remembered import Remembered
from edge.cluster.client import Remote
from edge.cluster.roster import mark_slow
from edge.profiling.cluster import Cluster
from tests.support.fake_worker import FakeWorker, deaf_port, description, fake_worker
from tests.support.helpers import assert_one_line_error, run_edge
from tests.support.on_terminal import on_terminal
from tests.support.workers import Worker, sessions, worker
from transport import edge_pb2 as pb
from transport import frame

DEVICE_KEYS = {
    "name",
    "address",
    "answers",
    "state",
    "secure",
    "profile",
    "sessions",
    "slices_bytes",
    "slices_limit_bytes",
    "error",
}
SESSION_KEYS = {"rank", "world_size", "slice", "memory_bytes"}

Answer = tuple[int, str, str]  # exit code, standard output, standard error
Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """Two workers in the clear, on loopback."""
    folder = tmp_path_factory.mktemp("workers")
    with (
        worker(folder / "one", "--name", "one", "--memory", "1GiB") as first,
        worker(folder / "two", "--name", "two") as other,
    ):
        yield first, other


@pytest.fixture
def fake() -> Iterator[FakeWorker]:
    with fake_worker() as first:
        yield first


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge devices --no-discover` in this process, of somebody without credentials."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*args: str, discover: bool = False) -> Answer:
        capsys.readouterr()
        code = cli.main(["devices", *args, *([] if discover else ["--no-discover"])])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """Two addresses where nothing listens."""
    with deaf_port() as first, deaf_port() as other:
        yield [f"127.0.0.1:{port}" for port in (first, other)]


def port(address: str) -> int:
    """Return the port of HOST:PORT."""
    return int(address.rpartition(":")[2])


def answered(provided: Answer) -> list[dict[str, object]]:
    """The devices of a JSON answer."""
    result: list[dict[str, object]] = json.loads(provided[1])["devices"]
    return result


def test_the_table(devices: Run, two: tuple[Worker, Worker]) -> None:
    code, out, err = devices(two[0].address, two[1].address)
    assert (code, err) == (0, "")
    header, first, other = out.splitlines()
    assert header.split() == ["name", "address", "what", "threads", "memory", "state"]
    assert re.match(rf"one +{two[0].address} +\S.* Linux .* free, limit 1\.00 GiB +in the clear$", first)
    assert re.match(rf"two +{two[1].address} +\S.* free +in the clear$", other)


def test_the_json(devices: Run, two: tuple[Worker, Worker], silent: list[str]) -> None:
    with two[0].remote() as remote, sessions([remote], 1):
        code, out, err = devices(two[0].address, silent[0], "--json")
    assert (code, err) == (7, "")
    assert len(out.splitlines()) == 1
    said = json.loads(out)
    assert said.keys() == {"devices", "links", "links_failed"}
    assert (said["links"], said["links_failed"]) == ([], [])
    there, absent = said["devices"]
    assert there.keys() == absent.keys() == DEVICE_KEYS
    assert (there["name"], there["address"], there["answers"]) == ("one", two[0].address, True)
    assert (there["secure"], there["error"]) == (False, None)
    assert there["profile"].keys() == {field.name for field in dataclasses.fields(DeviceProfile)}
    assert there["profile"]["memory_limit_bytes"] == 1 << 30
    (session,) = there["sessions"]
    process = dict.fromkeys(("share_bytes", "least_bytes", "most_bytes"), 96 << 20)
    assert session == {"rank": 0, "world_size": 1, "slice": "", "memory_bytes": 0, "use": 0.0, **process}
    assert there["slices_bytes"] == 0
    assert there["slices_limit_bytes"] == 20 << 30
    assert absent["error"] == f"nothing listens at {absent['address']}; start edge worker there"
    assert absent["answers"] is False
    assert {key for key, value in absent.items() if value is None} == DEVICE_KEYS - {"address", "answers", "error"}


def test_a_busy_worker_says_so(devices: Run, two: tuple[Worker, Worker]) -> None:
    with two[0].remote() as remote, sessions([remote, remote], 2):
        assert "  2 sessions, in the clear" in devices(two[0].address)[1]


def test_two_of_three_do_not_answer(devices: Run, two: tuple[Worker, Worker], silent: list[str]) -> None:
    code, out, err = devices(silent[0], two[0].address, silent[1], "--timeout", "60")
    assert (code, err) == (7, "")
    assert "within 60 s" not in out  # nobody waited for the timeout
    lines = out.splitlines()
    assert re.match(rf"- +{silent[0]} +- +- +- +no answer$", lines[1])
    assert re.match(rf"one +{two[0].address} ", lines[2])
    # Why stands below the table, whose columns it would tear apart.
    assert lines[4:] == [f"nothing listens at {address}; start edge worker there" for address in silent]


def test_ipv6(devices: Run, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address")
    with worker(tmp_path / "six", "--name", "six", listen="[::1]:0") as six:
        assert six.address.startswith("[::1]:")
        code, out, _ = devices(six.address, "--links")
        assert (code, out.splitlines()[1].split()[:2]) == (0, ["six", six.address])


def test_an_address_given_twice_is_asked_once(devices: Run, two: tuple[Worker, Worker]) -> None:
    assert len(answered(devices(two[0].address, two[0].address, "--json"))) == 1


@pytest.mark.parametrize("address", ["", "a:b", "nonsense::7", "pi:65536", "http://pi:7070", "[pi]"])
def test_what_is_no_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["devices", address])
    assert caught.value.code == 2


def test_wrong_usage_is_one_line() -> None:
    assert_one_line_error(run_edge("devices", "pi:x"), 2, "HOST:PORT", "'pi:x'", "edge devices --help")
    assert_one_line_error(run_edge("devices", "--timeout", "0"), 2, "--timeout", "0.1 to 3600")


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_a_timeout_that_is_none(timeout: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["devices", f"--timeout={timeout}"])
    assert caught.value.code == 2


@pytest.mark.parametrize("timeout", ["0.2", "2"])
def test_the_timeout_is_how_long_a_silent_one_is_waited_for(devices: Run, timeout: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        began = time.monotonic()
        code, out, _ = devices(address, "--timeout", timeout)
        assert time.monotonic() - began >= 0.95 * float(timeout)
    assert code == 7
    assert re.match(rf"- +{address} .*no answer$", out.splitlines()[1])
    assert f"within {timeout} s" in out


def test_links(devices: Run, two: tuple[Worker, Worker]) -> None:
    code, out, _ = devices(two[0].address, two[1].address, "--links")
    assert code == 0
    assert re.search(r"\n\none to two\n  link +(tcp|grpc) [0-9]+ us for 8 KiB there and back", out)
    (link,) = json.loads(devices(two[0].address, two[1].address, "--links", "--json")[1])["links"]
    assert (link["a"], link["b"]) == ("one", "two")
    assert (link["a_address"], link["b_address"]) == (two[0].address, two[1].address)


def test_a_link_that_fails_leaves_the_others(devices: Run, two: tuple[Worker, Worker], fake: FakeWorker) -> None:
    fake.failing = "open"
    code, out, _ = devices(two[0].address, fake.address, two[1].address, "--links", "--json")
    assert code == 7
    said = json.loads(out)
    assert [(link["a"], link["b"]) for link in said["links"]] == [("one", "two")]
    assert [(link["a"], link["b"]) for link in said["links_failed"]] == [("one", "fake"), ("fake", "two")]
    assert all(
        link.keys() == {"a", "b", "error"} and link["error"] == "fake: not today" for link in said["links_failed"]
    )
    code, out, _ = devices(fake.address, two[1].address, "--links")
    assert code == 7
    assert re.search(r"^fake to two: fake: not today$", out, re.MULTILINE)


def test_insecure_allows_another_machine_in_the_clear(
    devices: Run, two: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge.net.channel, "is_loopback", lambda _: False)  # take this machine for another
    code, out, _ = devices(two[0].address)
    assert code == 7
    assert re.match(r"- .* cannot be used$", out.splitlines()[1])
    assert "is another machine, and this one has no credentials" in out
    code, out, _ = devices(two[0].address, "--insecure")
    assert code == 0
    assert re.search(r"  (\d+ sessions?, )?in the clear$", out.splitlines()[1])  # one of a test before may still end


def test_a_token_on_loopback_is_said_to_be_unused_in_all_places(tmp_path: Path) -> None:
    env = {f"XDG_{name}_HOME": str(tmp_path / "owner") for name in ("CONFIG", "CACHE", "STATE")}
    assert run_edge("cluster", "init", "--name", "desk", env=env).returncode == 0
    token = run_edge("cluster", "invite", "pi", env=env).stdout.strip()
    with worker(tmp_path / "pi", "--join", token) as first:
        assert re.search('INFO listening name=pi .* security="in the clear"', first.log())
        assert re.search('INFO in-the-clear name=pi role=invited why="it listens only to this machine', first.log())
        seen = run_edge("devices", "--no-discover", first.address, env=env)
        assert re.match(r"pi .*  in the clear$", seen.stdout.splitlines()[1]), seen.stdout + seen.stderr
    listed = run_edge("cluster", "list", env=env).stdout
    assert re.search(r"pi +worker, invited, expires", listed)  # it has not joined


# --- who was found ---


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[Discovered]:
    """Devices that a search of the network yields: those that a test puts in here, and no others."""
    results: list[Discovered] = []

    def browse(seconds: float) -> list[Discovered]:
        assert seconds == 0.7
        return results

    monkeypatch.setattr(discovery, "browse", browse)
    return results


def test_who_announces_itself_is_asked(
    devices: Run, two: tuple[Worker, Worker], announced: list[Discovered], silent: list[str]
) -> None:
    announced += [
        Discovered("attic", ("127.0.0.1",), two[0].port, {}),
        Discovered("gone", ("127.0.0.1",), port(silent[0]), {}),
    ]
    code, out, _ = devices("--timeout", "0.7", discover=True)
    assert code == 0  # nobody asked for the one that is gone
    assert re.search(r"^one .*in the clear$", out, re.MULTILINE)  # its own name, not the announced one
    assert re.search(r"^gone .*no answer$", out, re.MULTILINE)
    assert re.search(r"^gone: nothing listens at ", out, re.MULTILINE)


def test_found_and_given_is_asked_once(
    devices: Run, two: tuple[Worker, Worker], announced: list[Discovered], silent: list[str]
) -> None:
    announced += [
        Discovered("attic", ("127.0.0.1",), two[0].port, {}),
        Discovered("gone", ("127.0.0.1",), port(silent[0]), {}),
    ]
    addresses = (two[0].address, silent[0])
    provided = devices("--timeout", "0.7", "--json", *addresses, discover=True)
    assert provided[0] == 7
    assert [(item["name"], item["address"]) for item in answered(provided)] == [
        ("one", addresses[0]),
        ("gone", addresses[1]),
    ]


def test_connections_to_all_workers_end(
    devices: Run, two: tuple[Worker, Worker], announced: list[Discovered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To those that were found and to those that were named."""
    closed: list[str] = []
    close = Remote.close
    monkeypatch.setattr(Remote, "close", lambda self: (closed.append(self.name), close(self)))
    announced.append(Discovered("one", ("127.0.0.1",), two[0].port, {}))
    assert devices("--timeout", "0.7", two[1].address, discover=True)[0] == 0
    assert sorted(closed) == ["one", "two"]


def test_nobody_is_there(devices: Run, announced: list[Discovered]) -> None:
    code, out, _ = devices("--timeout", "0.7", discover=True)
    assert (code, announced) == (0, [])
    assert re.fullmatch(r"no workers found; start one with `edge worker`.*edge devices HOST:PORT\n", out)
    assert answered(devices("--timeout", "0.7", "--json", discover=True)) == []


def test_a_network_that_cannot_be_searched_is_no_end(
    devices: Run, two: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def browse(_: float) -> list[Discovered]:
        raise DiscoveryError("multicast works on no interface")

    monkeypatch.setattr(discovery, "browse", browse)
    code, out, err = devices(two[0].address, discover=True)
    assert (code, err) == (0, "edge devices: multicast works on no interface\n")
    assert out.splitlines()[1].startswith("one ")


def test_without_discovery_nobody_looks(devices: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "browse", lambda _: pytest.fail("looked"))
    assert "no workers found" in devices()[1]


# --- strange answers ---

GARBAGE: dict[str, dict[str, Any]] = {
    "no name": {"name": None},
    "terminal codes": {"name": "\x1b[2Jfake"},
    "a name without end": {"cpu": "x" * 100_000},
    "negative numbers": {"threads": -1},
    "no number": {"cpu_quota": math.nan},
}


@pytest.mark.parametrize("changes", [None, *GARBAGE.values()], ids=["nothing", *GARBAGE])
def test_a_profile_that_is_none(devices: Run, fake: FakeWorker, changes: dict[str, Any] | None) -> None:
    values = describe("fake", threads=1).to_json()
    fake.description = description(profile=None if changes is None else pb.DeviceProfile(**values | changes))
    code, out, err = devices(fake.address)
    assert (code, err) == (7, "")
    _, row, note = out.splitlines()
    assert re.match(rf"- +{fake.address} .*cannot be used$", row)
    assert "sent a description that this version cannot read" in note
    assert len(note) < 400
    assert out.replace("\n", "").isprintable()


def test_another_version(devices: Run, fake: FakeWorker) -> None:
    fake.description = description(protocol=frame.VERSION + 1)
    code, out, _ = devices(fake.address)
    assert code == 7
    assert f"speaks version {frame.VERSION + 1} of the protocol" in out.splitlines()[2]
    assert "update both" in out.splitlines()[2]


def test_names_outside_the_profile_do_not_count(devices: Run, fake: FakeWorker) -> None:
    fake.description = description(name="\x1b[2J\nevil")
    assert devices(fake.address)[1].splitlines()[1].startswith("fake ")


def test_words_of_an_error_are_made_harmless(devices: Run, fake: FakeWorker) -> None:
    fake.error = "\x1b[2Jone\ntwo\r" + "x" * 5000
    code, out, _ = devices(fake.address)
    assert code == 7
    assert len(out.splitlines()) == 3
    assert len(out) < 3000
    assert out.replace("\n", "").isprintable()


def test_one_that_never_answers(devices: Run, fake: FakeWorker, two: tuple[Worker, Worker]) -> None:
    fake.mute = "Describe"
    code, out, _ = devices(fake.address, two[0].address, "--timeout", "1")
    assert code == 7
    assert re.match(rf"- +{fake.address} .*no answer$", out.splitlines()[1])
    assert out.splitlines()[2].startswith("one ")
    assert out.splitlines()[3].endswith("gave no answer in time")


def test_our_own_damaged_credentials_are_nobody_elses_fault(tmp_path: Path, two: tuple[Worker, Worker]) -> None:
    folder = tmp_path / "edge" / "credentials"
    folder.mkdir(parents=True)
    (folder / "device.pem").write_text("nonsense")
    done = run_edge("devices", "--no-discover", two[0].address, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert_one_line_error(done, 3, str(folder), "damaged")


# --- on a terminal ---


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_on_a_terminal(two: tuple[Worker, Worker], silent: list[str], tmp_path: Path, width: int) -> None:
    absent = silent[0]
    args = ("devices", "--no-discover", two[0].address, absent)
    code, lines = on_terminal(*args, width=width, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert code == 7
    table = [line for line in lines if line[:1] in "┏┃┡│└"]
    assert {len(line) for line in table} == {len(table[0])}
    assert len(table[0]) <= width
    assert lines[len(table) :] == [f"nothing listens at {absent}; start edge worker there"]
    assert "…" not in "".join(table)
    # Names and addresses stand whole, whatever must be broken.
    assert any(line.startswith("│ one ") and two[0].address in line for line in table)
    assert any(line.startswith("│ - ") and absent in line for line in table)


# --- who comes and goes ---


def test_who_leaves_and_who_is_lost(devices: Run, fake: FakeWorker, silent: list[str]) -> None:
    fake.description = description(leaving=True)
    assert re.search(rf"^fake +{fake.address} .*leaving, in the clear$", devices(fake.address)[1], re.MULTILINE)
    (leaving,) = answered(devices(fake.address, "--json"))
    assert (leaving["state"], leaving["answers"]) == ("leaving", True)
    Remembered("seen-workers").put(silent[0], "nas")
    lost, unknown = answered(devices(*silent, "--json"))
    assert (lost["state"], lost["name"], lost["answers"]) == ("lost", "nas", False)
    assert (unknown["state"], unknown["name"]) == (None, None)
    out = devices(*silent)[1]
    assert re.search(rf"^nas +{silent[0]} .*lost$", out, re.MULTILINE)
    assert re.search(rf"^- +{silent[1]} .*no answer$", out, re.MULTILINE)


def test_a_worker_that_answers_with_an_error_is_not_lost(devices: Run, fake: FakeWorker) -> None:
    """It answered before, and only a worker that is silent now counts as lost."""
    assert devices(fake.address)[0] == 0
    fake.error = "not today"
    (refusing,) = answered(devices(fake.address, "--json"))
    assert (refusing["state"], refusing["name"], refusing["answers"]) == (None, None, False)
    assert "not today" in str(refusing["error"])


def test_who_became_slow(devices: Run, two: tuple[Worker, Worker]) -> None:
    mark_slow(two[0].address, 2.5)
    slow, joined = answered(devices(two[0].address, two[1].address, "--json"))
    assert (slow["state"], joined["state"]) == ("slow", "joined")
    mark_slow(two[0].address, 0.5)
    assert answered(devices(two[0].address, "--json"))[0]["state"] == "joined"


# --- names ---


def test_a_name_is_as_good_as_an_address(devices: Run, two: tuple[Worker, Worker]) -> None:
    devices(two[0].address, two[1].address)  # remembers their names
    by_name = answered(devices("one,two", "--json"))
    assert [device["address"] for device in by_name] == [two[0].address, two[1].address]
    assert address("one") == two[0].address
    assert worker_addresses("local,two") == (two[1].address,)
    assert Cluster(["two"]).addresses == (two[1].address,)
    assert address("one:7070") == "one:7070"  # HOST:PORT is always an address
    assert address("stranger") == "stranger:7070"


def test_the_newest_address_of_a_name_counts(devices: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices()[0] == 0  # sets the folder
    for where in ("10.0.0.1:7070", "10.0.0.2:7070"):
        Remembered("seen-workers").put(where, "pi")
    assert address("pi") == "10.0.0.2:7070"


def test_members_that_do_not_answer_are_lost(devices: Run, silent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "browse", lambda timeout_s: [])
    monkeypatch.setattr(edge.cluster.roster, "joined_members", lambda: ["nas", "pi"])
    devices()
    Remembered("seen-workers").put(silent[0], "nas")
    code, out, _ = devices(discover=True)
    assert code == 0
    assert re.search(rf"^nas +{silent[0]} .*lost$", out, re.MULTILINE)
    assert re.search(r"^pi +- .*lost$", out, re.MULTILINE)
    nas, pi = answered(devices("--json", discover=True))
    assert (nas["state"], nas["address"], pi["state"], pi["address"]) == ("lost", silent[0], "lost", None)
    assert answered(devices("--json")) == []

"""Test `edge link` on this machine: its measurements, its output, and wrong answers of workers."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import edge.cluster.connect
import edge.cluster.session
import edge.net.channel
from apps import cli
from edge.cluster.diagnose import measure_link
from tests.support.fake_worker import FakeWorker, deaf_port, fake_worker
from tests.support.helpers import assert_one_line_error, run_edge, until
from tests.support.on_terminal import on_terminal
from tests.support.workers import Worker, worker
from transport import edge_pb2 as pb
from transport.errors import Refused

KEYS = {
    "a",
    "b",
    "a_address",
    "b_address",
    "kind",
    "latency_best_s",
    "latency_median_s",
    "latency_p99_s",
    "bandwidth_ab_gbps",
    "bandwidth_ba_gbps",
    "why",
    "allreduce_8k_s",
    "allreduce",
    "hints",
}
ALGORITHMS = {"star", "mesh", "split"}

Answer = tuple[int, str, str]  # exit code, standard output, standard error
Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """Two workers in the clear, on loopback."""
    folder = tmp_path_factory.mktemp("workers")
    with worker(folder / "one", "--name", "one") as first, worker(folder / "two", "--name", "two") as other:
        yield first, other


@pytest.fixture
def fakes() -> Iterator[tuple[FakeWorker, FakeWorker]]:
    with fake_worker() as first, fake_worker() as other:
        yield first, other


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge link` in this process, of somebody without credentials."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(a: Worker | FakeWorker | str, b: Worker | FakeWorker | str, *args: str) -> Answer:
        capsys.readouterr()
        addresses = [item if isinstance(item, str) else item.address for item in (a, b)]
        code = cli.main(["link", *addresses, *args])
        return code, *capsys.readouterr()

    return run


def assert_failed(provided: Answer, code: int, *words: str) -> None:
    """One line on standard error that holds all `words`, and nothing else."""
    assert provided[0] == code
    assert provided[1] == ""
    assert re.fullmatch(r"edge link: [^\n]+\n", provided[2])
    assert provided[2].replace("\n", "").isprintable()
    for word in words:
        assert word in provided[2]


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_the_table(link: Run, two: tuple[Worker, Worker], transport: str) -> None:
    code, out, err = link(*two, "--transport", transport, "--seconds", "0.2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "one to two"
    time_, rate = r"[0-9.]+ (us|ms)", r"[0-9.]+ [GM]bit/s"
    kind = "(tcp|grpc)" if transport == "auto" else transport
    for line, pattern in zip(
        lines[1:5],
        [
            rf"  link +{kind} [0-9]+ us for 8 KiB there and back(, .*)?",
            rf"  one way +{time_} median, {time_} p99, {time_} best",
            rf"  bandwidth +{rate} there, {rate} back",
            rf"  allreduce of 8 KiB +{time_} measured, by mesh",
        ],
        strict=True,
    ):
        assert re.fullmatch(pattern, line)
    for line, size in zip(lines[5:], ["4 B", "8.00 KiB", "256 KiB", "4.00 MiB"], strict=True):
        assert re.fullmatch(rf"  allreduce of {size} +\w+: {time_} predicted, \w+ {time_}", line)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_the_json(link: Run, two: tuple[Worker, Worker], transport: str) -> None:
    code, out, err = link(*two, "--transport", transport, "--seconds", "0.2", "--json")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1
    said = json.loads(out)
    assert said.keys() == KEYS
    assert (said["a"], said["b"], said["kind"]) == ("one", "two", transport)
    assert (said["a_address"], said["b_address"]) == (two[0].address, two[1].address)
    assert 0 < said["latency_best_s"] <= said["latency_median_s"] <= said["latency_p99_s"] < 10
    assert said["bandwidth_ab_gbps"] > 0
    assert said["bandwidth_ba_gbps"] > 0
    assert 0 < said["allreduce_8k_s"] < 10
    assert list(said["allreduce"]) == ["4", "8192", "262144", "4194304"]
    assert set(said["allreduce"].values()) <= ALGORITHMS
    assert said["why"].startswith(f"{transport} ")
    assert said["hints"] == []  # on loopback there is nothing to say


def test_a_worker_with_itself(link: Run, two: tuple[Worker, Worker]) -> None:
    code, out, _ = link(two[0], two[0], "--seconds", "0.1")
    assert code == 0
    assert out.startswith("one to one\n")


def test_two_of_one_name_have_their_addresses(link: Run, fakes: tuple[FakeWorker, FakeWorker]) -> None:
    code, out, _ = link(*fakes)
    assert (code, out.splitlines()[0]) == (0, f"fake at {fakes[0].address} to fake at {fakes[1].address}")
    with pytest.raises(Refused, match=r"^pi at 10\.0\.0\.1:7070 encrypts and pi at 10\.0\.0\.2:7070 does not"):
        measure_link(remote("pi", "10.0.0.1", True), remote("pi", "10.0.0.2", False))


def test_nothing_is_left_on_the_workers(link: Run, two: tuple[Worker, Worker]) -> None:
    assert link(*two, "--seconds", "0.1")[0] == 0
    for item in two:
        with item.remote() as remote_:
            until(lambda remote_=remote_: not remote_.describe()[1].sessions, "the sessions have ended")  # type: ignore[misc]
        until(lambda entry=item: not entry.children(), "the engine processes have ended")  # type: ignore[misc]


def test_what_the_options_tell_the_workers(link: Run, fakes: tuple[FakeWorker, FakeWorker]) -> None:
    assert link(*fakes, "--seconds", "7.5", "--transport", "grpc")[0] == 0
    assert link(*fakes)[0] == 0
    commands = fakes[0].commands
    assert [command.measure.seconds for command in commands if command.WhichOneof("command") == "measure"] == [7.5, 1.0]
    assert [command.connect.transport for command in commands if command.WhichOneof("command") == "connect"] == [
        "grpc",
        "auto",
    ]
    secrets = {command.open.secret for command in commands if command.WhichOneof("command") == "open"}
    assert len(secrets) == 2  # another one each time


@pytest.mark.parametrize(
    "args",
    [
        ["pi"],
        ["pi", "pi:x"],
        ["pi", "[::1"],
        ["pi", "two", "three"],
        ["pi", "two", "--seconds", "0"],
        ["pi", "two", "--seconds", "61"],
        ["pi", "two", "--seconds", "nan"],
        ["pi", "two", "--timeout", "-1"],
        ["pi", "two", "--transport", "pigeon"],
    ],
)
def test_wrong_usage(args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["link", *args])
    assert caught.value.code == 2


def test_nobody_there_is_known_at_once(two: tuple[Worker, Worker], tmp_path: Path) -> None:
    with deaf_port() as port:
        absent = f"127.0.0.1:{port}"
        for addresses in ((absent, two[0].address), (two[0].address, absent)):
            done = run_edge("link", *addresses, "--timeout", "3600", env={"XDG_CONFIG_HOME": str(tmp_path)})
            assert_one_line_error(done, 7, f"nothing listens at {absent}")


def test_the_timeout_is_how_long_a_silent_one_is_waited_for(link: Run, fakes: tuple[FakeWorker, FakeWorker]) -> None:
    fakes[1].mute = "Describe"
    began = time.monotonic()
    assert_failed(link(*fakes, "--timeout", "0.5"), 7, fakes[1].address, "gave no answer in time")
    assert time.monotonic() - began >= 0.5


def test_insecure_allows_another_machine_in_the_clear(
    link: Run, fakes: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge.net.channel, "is_loopback", lambda _: False)  # take this machine for another
    assert_failed(link(*fakes), 7, "is another machine, and this one has no credentials", "say --insecure")
    assert link(*fakes, "--insecure")[0] == 0


# --- strange answers ---


@pytest.mark.parametrize("mute", ["open", "connect", "measure", "allreduce"])
def test_a_session_that_says_nothing(
    link: Run, fakes: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch, mute: str
) -> None:
    monkeypatch.setattr(edge.cluster.session, "COMMAND_TIMEOUT_S", 0.3)
    fakes[0].mute = mute
    assert_failed(link(*fakes), 7, f"fake at {fakes[0].address} sent nothing for 0.3 s")


@pytest.mark.parametrize("failing", ["open", "connect", "measure", "allreduce"])
def test_a_command_that_fails(link: Run, fakes: tuple[FakeWorker, FakeWorker], failing: str) -> None:
    fakes[0].failing = failing
    assert_failed(link(*fakes), 7, f"fake at {fakes[0].address}: not today")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round_trip_median_s", math.nan),
        ("round_trip_median_s", 0.0),
        ("round_trip_best_s", -1.0),
        ("round_trip_p99_s", math.inf),
        ("send_bytes_per_s", 0.0),
        ("receive_bytes_per_s", 1e300),
    ],
)
def test_figures_that_cannot_be(link: Run, fakes: tuple[FakeWorker, FakeWorker], field: str, value: float) -> None:
    setattr(fakes[0].measured, field, value)
    assert_failed(link(*fakes, "--json"), 7, f"fake at {fakes[0].address} sent impossible measurements")


def test_answers_of_the_wrong_kind(link: Run, fakes: tuple[FakeWorker, FakeWorker]) -> None:
    fakes[0].measured = pb.Measured()
    assert_failed(link(*fakes), 7, "impossible measurements")


def test_a_sum_that_took_no_time(link: Run, fakes: tuple[FakeWorker, FakeWorker]) -> None:
    fakes[1].allreduced = pb.Allreduced(median_s=math.nan)
    assert_failed(link(*fakes), 7, "impossible measurements")


@pytest.mark.parametrize("n", [0, 2])
def test_links_that_were_not_asked_for(link: Run, fakes: tuple[FakeWorker, FakeWorker], n: int) -> None:
    fakes[0].states = [pb.LinkState(rank=1, why="tcp 20 us")] * n
    code, out, _ = link(*fakes)
    assert code == 0
    assert re.search(r"^  link +tcp", out, re.MULTILINE)


def test_words_are_made_harmless(link: Run, fakes: tuple[FakeWorker, FakeWorker]) -> None:
    evil = "\x1b[2J\nevil\r"
    fakes[0].states = [pb.LinkState(rank=1, why=evil, kind=evil)]
    fakes[0].measured.kind = evil
    fakes[0].measured.hints.append(evil)
    code, out, _ = link(*fakes)
    assert code == 0
    assert out.replace("\n", "").isprintable()
    assert len(out.splitlines()) == 10
    fakes[0].error = "\x1b[2Jone\ntwo\r" + "x" * 5000
    assert_failed(link(*fakes), 7, "one two")


# --- what cannot be linked ---


def remote(name: str, host: str, secure: bool) -> Any:
    """As much of a Remote as is looked at first."""
    return cast(Any, SimpleNamespace(name=name, label=name, host=host, port=7070, secure=secure))


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_one_encrypted_and_one_not_are_no_pair(first: bool, second: bool) -> None:
    a, b = remote("pi", "10.0.0.1", first), remote("two", "10.0.0.2", second)
    encrypts, clear = ("pi", "two") if first else ("two", "pi")
    with pytest.raises(Refused, match=f"^{encrypts} encrypts and {clear} does not"):
        measure_link(a, b)


def test_an_address_that_means_another_machine_elsewhere() -> None:
    with pytest.raises(Refused, match=r"^two was given as 127\.0\.0\.1, which on pi means pi itself"):
        measure_link(remote("pi", "10.0.0.1", False), remote("two", "127.0.0.1", False))


# --- on a terminal ---


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_on_a_terminal(two: tuple[Worker, Worker], tmp_path: Path, width: int) -> None:
    args = ("link", two[0].address, two[1].address, "--seconds", "0.1", "--transport", "tcp")
    code, (title, *table) = on_terminal(*args, width=width, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert (code, title) == (0, "one to two")
    assert {len(line) for line in table} == {len(table[0])}
    assert len(table[0]) <= width
    assert len(table) == 10  # eight rows and the frame: nothing is broken into lines

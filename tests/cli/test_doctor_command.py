"""`edge doctor` on this machine and on real workers: what it prints, its exit codes, and what each option changes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import edge.net.channel
from edge.profiling.doctor import examine, machine, workers
from edge.profiling.doctor.findings import OK, Check, Verdict
from edge.profiling.doctor.install import REBUILD
from tests.support.commands import main
from tests.support.deployments import ONE_THREAD, own_folders
from tests.support.fake_worker import FakeWorker, deaf_port, fake_worker
from tests.support.workers import Worker, worker

LOCAL_CHECKS = [
    "python", "packages", "onnx", "quantize", "llama.cpp", "instructions", "amx", "gpu", "answer", "memory", "cache",
    "state", "config", "cores", "load", "clocks", "heat", "files", "port", "trust", "clock",
]  # fmt: skip
WORKER_CHECKS = ["reach", "versions", "trust", "memory", "sessions", "heat", "battery", "clock"]

Answer = tuple[int, str, str]  # exit code, standard output, standard error
Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("workers")
    with (
        worker(folder / "one", "--name", "one", *ONE_THREAD) as first,
        worker(folder / "two", "--name", "two", *ONE_THREAD) as other,
    ):
        yield first, other


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge doctor` in this process, of somebody without credentials."""
    own_folders(monkeypatch, tmp_path)

    def run(*args: str | Path) -> Answer:
        capsys.readouterr()
        code = main("doctor", *args)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """This device has one check, which is well: what is asked is about workers."""
    checks: dict[str, Check] = {"files": lambda: Verdict(OK, "4096 files may be open")}
    monkeypatch.setattr(examine.LocalChecks, "checks", lambda _: checks)


def findings(answer: Answer) -> list[dict[str, Any]]:
    """Those of --json."""
    values: list[dict[str, Any]] = json.loads(answer[1])["findings"]
    return values


def test_this_device_and_two_workers(doctor: Run, two: tuple[Worker, Worker]) -> None:
    answer = doctor("--workers", f"{two[0].address},{two[1].address}", "--json")
    result = json.loads(answer[1])
    assert set(result) == {"problems", "notes", "findings"}
    for finding in result["findings"]:
        assert set(finding) == {"where", "check", "level", "seen", "advice"}
        assert finding["level"] in ("ok", "note", "problem")
        assert bool(finding["advice"]) == (finding["level"] != "ok"), finding
    assert [f["check"] for f in result["findings"] if f["where"] == "local"] == LOCAL_CHECKS
    for name in ("one", "two"):
        assert [f["check"] for f in result["findings"] if f["where"] == name] == WORKER_CHECKS
    links = [f["where"] for f in result["findings"] if f["check"] == "link"]
    assert links == ["local to one", "local to two", "one to two"]
    levels = {(f["where"], f["check"]): f["level"] for f in result["findings"]}
    for name in ("python", "packages", "llama.cpp", "answer", "trust", "clock"):
        assert levels["local", name] == "ok"
    for name in ("one", "two"):
        assert {levels[name, check] for check in ("reach", "versions", "trust", "clock")} == {"ok"}
    counts = [sum(f["level"] == level for f in result["findings"]) for level in ("problem", "note")]
    assert [result["problems"], result["notes"]] == counts
    assert answer[0] == (8 if result["problems"] else 0)
    progress = ("Checking this device: ", "Checking workers: ", "Measuring links: ")
    assert all(line.startswith(progress) for line in answer[2].splitlines()), answer[2]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems show it to root alone")
def test_a_port_that_a_worker_has_is_well(tmp_path: Path) -> None:
    with worker(tmp_path, files=256) as first:  # its limit lets it start as people start it, with its own command line
        port, name = machine.read_port(first.port), psutil.Process(first.process.pid).name()
    assert not port.free
    assert port.is_worker
    assert port.holder == f"process {first.process.pid}, {name}"


@pytest.mark.usefixtures("well")
def test_for_people(doctor: Run, two: tuple[Worker, Worker]) -> None:
    with deaf_port() as port:
        code, out, _ = doctor("--workers", f"127.0.0.1:{port},{two[0].address}")
    assert code == 8
    lines = out.splitlines()
    assert lines[0].split() == ["where", "check", "finding"]
    assert lines[1].split(maxsplit=3) == ["ok", "local", "files", "4096 files may be open"]
    assert lines[2].split(maxsplit=3) == [
        "problem", f"127.0.0.1:{port}", "reach", f"nothing listens at 127.0.0.1:{port}",
    ]  # fmt: skip
    assert any(line.split()[:3] == ["ok", "one", "reach"] for line in lines)  # the others are checked all the same
    assert f"problem: reach of 127.0.0.1:{port}: start edge worker there; check its address, and that its" in out
    assert lines[-1].startswith("1 problem, ")


@pytest.mark.usefixtures("well")
def test_without_problems(doctor: Run) -> None:
    code, out, _ = doctor()
    assert code == 0
    assert out.splitlines()[-1] == "0 problems, 0 notes"
    assert json.loads(doctor("--json")[1])["problems"] == 0


@pytest.mark.usefixtures("well")
def test_the_workers_of_a_cluster_file(doctor: Run, two: tuple[Worker, Worker], tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    device = '[[device]]\nname = "{}"\naddress = "{}"\n'
    file.write_text(device.format("here", "local") + device.format("pi", two[0].address))
    answer = doctor("--cluster", file, "--json")
    assert answer[0] == 0, answer
    assert {f["where"] for f in findings(answer)} == {"local", "one", "local to one"}
    with pytest.raises(SystemExit, match="2"):  # both name the devices
        doctor("--cluster", file, "--workers", two[0].address)
    assert doctor("--cluster", tmp_path / "none.toml")[0] == 3


@pytest.mark.usefixtures("well")
def test_insecure_allows_another_machine_in_the_clear(
    doctor: Run, two: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (edge.net.channel, workers):
        monkeypatch.setattr(module, "is_loopback", lambda _: False)  # take this machine for another
    how = ("--workers", two[0].address, "--json")
    refused = findings(doctor(*how))
    assert [(f["check"], f["level"]) for f in refused] == [("files", "ok"), ("reach", "problem")]
    assert "is another machine, and this one has no credentials" in refused[1]["seen"]
    levels = {f["check"]: f["level"] for f in findings(doctor(*how, "--insecure")) if f["where"] == "one"}
    assert (levels["reach"], levels["trust"]) == ("ok", "note")


@pytest.fixture
def fake() -> Iterator[FakeWorker]:
    with fake_worker() as first:
        yield first


@pytest.mark.usefixtures("well")
def test_a_worker_that_never_answers_is_given_up(
    doctor: Run, fake: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.mute = "Describe"
    monkeypatch.setattr(workers, "WORKER_TIMEOUT_S", 0.5)
    answer = doctor("--workers", fake.address, "--json")
    assert answer[0] == 8
    (_, reach) = findings(answer)
    assert (reach["check"], reach["level"]) == ("reach", "problem")
    assert "gave no answer in time" in reach["seen"]


@pytest.mark.usefixtures("well")
def test_a_link_that_is_never_measured_is_given_up(
    doctor: Run, fake: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.mute = "open"
    monkeypatch.setattr(workers, "LINK_TIMEOUT_S", 0.5)
    link = findings(doctor("--workers", fake.address, "--json"))[-1]
    assert (link["where"], link["check"], link["level"]) == ("local to fake", "link", "problem")
    assert link["seen"] == "no answer within 0.5 s"


@pytest.mark.usefixtures("well")
def test_a_link_that_fails_says_why(doctor: Run, fake: FakeWorker) -> None:
    fake.failing = "open"
    link = findings(doctor("--workers", fake.address, "--json"))[-1]
    assert (link["check"], link["level"]) == ("link", "problem")
    assert "not today" in link["seen"]
    assert f"edge link local {fake.address}" in link["advice"]


def test_a_build_that_ends_the_process_is_said_and_all_else_is_checked(
    doctor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(examine.native, "module_command", lambda *_: [sys.executable, "-c", program])  # type: ignore[attr-defined]
    answer = doctor("--json")
    assert answer[0] == 8
    by_check = {f["check"]: f for f in findings(answer)}
    assert list(by_check) == LOCAL_CHECKS
    assert by_check["llama.cpp"]["level"] == "problem"
    assert "SIGILL" in by_check["llama.cpp"]["seen"]
    assert by_check["llama.cpp"]["advice"] == REBUILD

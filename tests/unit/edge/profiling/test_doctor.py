"""Test the verdicts of `edge doctor`: good and bad values for each check."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.paths import authority_folder, credentials_folder
from devices.profile import LinkProfile, describe
from devices.trust.authority import Authority
from devices.trust.certificates import Holder
from edge.cluster.client import Remote
from edge.cluster.diagnose import LinkReport
from edge.net.channel import open_channel
from edge.profiling.doctor import examine, machine, trust, workers
from edge.profiling.doctor.findings import NOTE, OK, PROBLEM, Finding, Report, Verdict, run_check
from edge.profiling.doctor.machine import Cores, Folder, Heat, Memory, Port
from edge.profiling.doctor.trust import Trust
from edge.profiling.doctor.workers import WorkerFacts
from edge.version import version
from tests.support.deployments import own_folders
from tests.support.fake_worker import description, fake_worker
from tests.support.helpers import assert_verdict
from transport.errors import LinkClosed, Refused

GIB = 1 << 30
DAY_S = 86_400.0


# --- how checks are run ---


def test_a_check_that_fails_is_a_problem_with_its_words() -> None:
    def check() -> Verdict:
        raise OSError(5, "Input/output error")

    finding = run_check("local", "cache", check, 10.0)
    assert (finding.where, finding.check, finding.level) == ("local", "cache", PROBLEM)
    assert "could not be checked" in finding.seen
    assert "Input/output error" in finding.seen


def test_a_check_that_hangs_is_left_at_its_deadline() -> None:
    never = threading.Event()
    try:
        finding = run_check("local", "cache", lambda: Verdict(OK, str(never.wait(60))), 0.01)
    finally:
        never.set()
    assert (finding.level, finding.seen) == (PROBLEM, "no answer within 0.01 s")


def test_one_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("no such luck")

    checks = {"files": lambda: machine.files(4096), "memory": fails, "port": lambda: machine.port(Port(7070, True))}
    monkeypatch.setattr(examine.LocalChecks, "checks", lambda _: checks)
    report = examine.examine()
    assert [(f.check, f.level) for f in report.findings] == [("files", OK), ("memory", PROBLEM), ("port", OK)]


def test_words_of_other_machines_are_made_harmless() -> None:
    finding = run_check("\x1b[2Jpi", "link", lambda: Verdict(NOTE, "a\nb", "c\x07"), 10.0)
    assert (finding.where, finding.seen, finding.advice) == (" [2Jpi", "a b", "c ")


def test_a_report_counts_and_is_plain_values() -> None:
    both = [Finding("local", "memory", PROBLEM, "none", "buy some"), Finding("local", "gpu", OK, "none", "")]
    assert Report(both).to_json() == {
        "problems": 1,
        "notes": 0,
        "findings": [
            {"where": "local", "check": "memory", "level": "problem", "seen": "none", "advice": "buy some"},
            {"where": "local", "check": "gpu", "level": "ok", "seen": "none", "advice": ""},
        ],
    }


# --- this machine ---


@pytest.mark.parametrize(
    ("memory", "level", "words"),
    [
        (Memory(4 * GIB, 4 * GIB, 8 * GIB, 0, 0), OK, "4.00 GiB free of 8.00 GiB"),
        (Memory(GIB // 2, GIB // 2, 8 * GIB, 0, 0), NOTE, "--memory"),
        (Memory(GIB // 8, GIB // 8, 8 * GIB, 0, 0), PROBLEM, "close programs"),
        (Memory(GIB // 8, 4 * GIB, 8 * GIB, 0, 0), PROBLEM, "a control group limits it, the machine has 4.00 GiB"),
        (Memory(4 * GIB, 4 * GIB, 8 * GIB, 2 * GIB, GIB + 1), NOTE, "1.00 GiB of 2.00 GiB swap"),
        (Memory(4 * GIB, 4 * GIB, 8 * GIB, 2 * GIB, GIB // 2), OK, "512 MiB of 2.00 GiB swap"),
    ],
)
def test_memory(memory: Memory, level: str, words: str) -> None:
    assert_verdict(machine.memory(memory), level, words)


@pytest.mark.parametrize(
    ("folder", "level", "words"),
    [
        (Folder("/cache", "", 50 * GIB), OK, "50.0 GiB free for /cache"),
        (Folder("/cache", "", GIB), NOTE, "edge model list"),
        (Folder("/cache", "", 1 << 20), PROBLEM, "edge model rm"),
        (
            Folder("/cache", "Read-only file system", 50 * GIB),
            PROBLEM,
            "/cache cannot be written: Read-only file system",
        ),
    ],
)
def test_folders(folder: Folder, level: str, words: str) -> None:
    assert_verdict(machine.folder(folder), level, words)


def test_a_folder_that_is_not_there_yet_is_that_above_it(tmp_path: Path) -> None:
    read = machine.read_folder(tmp_path / "a" / "b")
    assert (read.path, read.error) == (str(tmp_path / "a" / "b"), "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert machine.read_folder(tmp_path / "file").error == "Not a directory"


@pytest.mark.parametrize(
    ("cores", "level", "words"),
    [
        (Cores(8, 4, None, 0.0), OK, "8 logical, 4 threads"),
        (Cores(8, 2, 2.0, 0.0), NOTE, "limit it to 2 cores"),
        (Cores(2, 2, 2.0, 0.0), OK, "2 logical"),
    ],
)
def test_cores(cores: Cores, level: str, words: str) -> None:
    assert_verdict(machine.cores(cores), level, words)


def test_load() -> None:
    assert_verdict(machine.load(Cores(8, 4, None, 4.0)), OK, "4.0 threads")
    assert_verdict(machine.load(Cores(8, 4, None, None)), OK, "does not report")
    assert_verdict(machine.load(Cores(8, 4, None, 4.1)), NOTE, "for 8 logical cores", "--threads")


def cpus(folder: Path, governor: str, driver: str, limit: int, most: int, throttled: int = 0) -> Path:
    """Write what Linux shows of one processor."""
    values = {"scaling_governor": governor, "scaling_driver": driver}
    values |= {"scaling_max_freq": str(limit), "cpuinfo_max_freq": str(most)}
    (folder / "cpu0" / "cpufreq").mkdir(parents=True)
    (folder / "cpu0" / "thermal_throttle").mkdir()
    for name, value in values.items():
        (folder / "cpu0" / "cpufreq" / name).write_text(f"{value}\n")
    (folder / "cpu0" / "thermal_throttle" / "core_throttle_count").write_text(f"{throttled}\n")
    return folder


@pytest.mark.parametrize(
    ("governor", "driver", "limit", "level", "words"),
    [
        ("schedutil", "acpi-cpufreq", 4000, OK, "schedutil (acpi-cpufreq)"),
        ("powersave", "intel_pstate", 4000, OK, "powersave (intel_pstate)"),
        ("powersave", "cppc_cpufreq", 4000, NOTE, "lowest clock"),
        ("schedutil", "acpi-cpufreq", 2000, NOTE, "held at 50% of their highest clock"),
    ],
)
def test_clocks(tmp_path: Path, governor: str, driver: str, limit: int, level: str, words: str) -> None:
    assert_verdict(machine.clocks(machine.read_clocks(cpus(tmp_path, governor, driver, limit, 4000))), level, words)


def test_one_core_that_is_held_back_is_enough(tmp_path: Path) -> None:
    folder = cpus(tmp_path, "schedutil", "acpi-cpufreq", 4000, 4000)
    shutil.copytree(folder / "cpu0", folder / "cpu1")
    (folder / "cpu1" / "cpufreq" / "scaling_max_freq").write_text("1000\n")
    assert_verdict(machine.clocks(machine.read_clocks(folder)), NOTE, "held at 25% of their highest clock")


def test_clocks_of_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert machine.read_clocks(tmp_path) is None
    assert_verdict(machine.clocks(None), OK)


@pytest.mark.parametrize(
    ("heat", "level", "words"),
    [
        (Heat("normal", 0, False), OK, "normal"),
        (Heat(None, 0, False), OK, "no sensor"),
        (Heat("hot", 0, False), NOTE, "hot"),
        (Heat("critical", 0, False), PROBLEM, "critical"),
        (Heat("normal", 3, False), NOTE, "slowed down 3 times since the start"),
        (Heat("normal", 0, True), PROBLEM, "too little voltage"),
    ],
)
def test_heat(heat: Heat, level: str, words: str) -> None:
    assert_verdict(machine.heat(heat), level, words)


@pytest.mark.parametrize(
    ("bits", "throttled", "low_voltage"), [("0x0", 7, False), ("0x50001", 7, True), ("0x4", 7, False), ("", 7, False)]
)
def test_heat_as_linux_shows_it(tmp_path: Path, bits: str, throttled: int, low_voltage: bool) -> None:
    pi = tmp_path / "get_throttled"
    pi.write_text(f"{bits}\n")
    read = machine.read_heat(cpus(tmp_path / "cpus", "performance", "x", 1, 1, throttled=7), pi)
    assert (read.throttled, read.low_voltage) == (throttled, low_voltage)
    assert machine.read_heat(tmp_path, pi).throttled == int(bits in ("0x50001", "0x4"))


@pytest.mark.parametrize(("most", "level"), [(1023, NOTE), (1024, OK), (-1, OK)])
def test_files(most: int, level: str) -> None:
    assert_verdict(machine.files(most), level)


@pytest.mark.parametrize(
    ("port", "level", "words"),
    [
        (Port(7070, True), OK, "port 7070 is free"),
        (Port(7070, False, "process 7: edge worker", True), OK, "an edge worker has port 7070"),
        (Port(7070, False, "process 7: nc -l"), NOTE, "taken by process 7: nc -l"),
        (Port(7070, False), NOTE, "a process that this user cannot see"),
    ],
)
def test_port(port: Port, level: str, words: str) -> None:
    assert_verdict(machine.port(port), level, words)


def test_who_has_a_port_is_named() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        number = listening.getsockname()[1]
        used = machine.read_port(number)
    assert not used.free
    assert not used.is_worker
    if sys.platform == "linux":  # others show it to root alone
        assert used.holder.startswith(f"process {os.getpid()}, ")
    assert machine.read_port(number).free


# --- trust and clocks ---

MEMBER = Trust(now=100 * DAY_S, holder=Holder("pi", "worker", serial=1, begins=0.0, expires=3650 * DAY_S))


def member(**changes: Any) -> Trust:
    return replace(MEMBER, holder=replace(MEMBER.holder, **changes))


@pytest.mark.parametrize(
    ("member", "level", "words"),
    [
        (None, OK, "in no cluster"),
        (MEMBER, OK, "pi, worker"),
        (member(role="invited"), NOTE, "edge devices on the owner's machine"),
        (replace(MEMBER, readable=("/c/device.pem",)), PROBLEM, "chmod 600 /c/device.pem"),
    ],
)
def test_trust(member: Trust | None, level: str, words: str) -> None:
    assert_verdict(trust.trust(member), level, words)


@pytest.mark.parametrize(
    ("member", "level", "words"),
    [
        (None, OK, "no certificate"),
        (MEMBER, OK, "within"),
        (member(begins=102 * DAY_S), PROBLEM, "2.0 days before this device's certificate begins"),
        (member(expires=99 * DAY_S), PROBLEM, "ended 1.0 days ago"),
        (member(expires=120 * DAY_S), NOTE, "ends in 20.0 days"),
        (member(expires=100.02 * DAY_S, role="invited"), OK, "within"),
    ],
)
def test_the_clock_and_the_certificate(member: Trust | None, level: str, words: str) -> None:
    assert_verdict(trust.clock(member), level, words)


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"),
    [
        (59.0, OK, "59.0 s ahead of"),
        (-59.0, OK, "59.0 s behind"),
        (61.0, NOTE, "timedatectl"),
        (-2 * DAY_S, PROBLEM, "172,800.0 s behind this device's clock"),
    ],
)
def test_clocks_of_two_devices(ahead_s: float, level: str, words: str) -> None:
    assert_verdict(trust.clocks_apart(ahead_s), level, words)


def test_trust_as_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path)
    assert trust.read_trust() is None
    now = float(int(time.time()))
    Authority.create(authority_folder(), "desk", credentials_folder(), now)
    read = trust.read_trust(now)
    assert read is not None
    assert (read.now, read.holder.name, read.holder.role, read.readable) == (now, "desk", "owner", ())
    assert (read.holder.begins, read.holder.expires) == (now - DAY_S, now + 3650 * DAY_S)
    key = authority_folder() / "ca.key"
    key.chmod(0o640)
    opened = trust.read_trust(now)
    assert opened is not None
    assert opened.readable == (str(key),)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [("credentials/device.pem", "are damaged"), ("authority/ca.key", "is damaged"), ("", "are gone; edge devices")],
)
def test_trust_that_is_damaged(damaged: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path)
    Authority.create(authority_folder(), "desk", credentials_folder())
    if damaged:
        (authority_folder().parent / damaged).write_text("nonsense")
    else:
        (credentials_folder() / "device.pem").unlink()
    for name in ("trust", "clock"):
        verdict = run_check("local", name, examine.LocalChecks().checks()[name], 10.0)
        assert verdict.level == PROBLEM
        assert words in verdict.seen
    assert (credentials_folder() / "device.pem").exists() == bool(damaged)  # nothing was mended


# --- workers and links ---


def facts(**changes: Any) -> WorkerFacts:
    """A worker that is well, but for `changes` of it or of its profile."""
    profile = describe("pi", threads=1, runtime=version("edge-runtime"), llama_cpp=version("llama-cpp-python"))
    profile = replace(
        profile,
        **{
            "memory_available_bytes": 4 * GIB, "memory_total_bytes": 8 * GIB, "memory_limit_bytes": None,
            "temperature_c": 50.0, "battery_percent": None, "plugged": None,
            **{name: value for name, value in changes.items() if name in profile.to_json()},
        },
    )  # fmt: skip
    own = {"secure": True, "local": False, "sessions": 0, "ahead_s": 0.0}
    return WorkerFacts(profile, **{**own, **{name: value for name, value in changes.items() if name in own}})


def test_a_worker_that_is_well() -> None:
    verdicts = workers.worker_verdicts("pi:7070", facts())
    assert list(verdicts) == ["reach", "versions", "trust", "memory", "sessions", "heat", "battery", "clock"]
    assert {verdict.level for verdict in verdicts.values()} == {OK}


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"runtime": "9.9.1"}, "versions", PROBLEM, "pi runs edge 9.9.1, this device"),
        ({"llama_cpp": "0.0.1"}, "versions", PROBLEM, "pi runs llama-cpp-python 0.0.1, this device"),
        ({"secure": False}, "trust", NOTE, "in the clear: everyone"),
        ({"secure": False, "local": True}, "trust", OK, "on this machine"),
        ({"memory_available_bytes": GIB // 2}, "memory", NOTE, "512 MiB for models"),
        ({"memory_limit_bytes": GIB // 8}, "memory", PROBLEM, "128 MiB for models"),
        ({"sessions": 2}, "sessions", NOTE, "2 sessions run there"),
        ({"temperature_c": 85.0}, "heat", NOTE, "85 degrees"),
        ({"temperature_c": None}, "heat", OK, "no sensor"),
        ({"battery_percent": 80.0, "plugged": True}, "battery", OK, "80 %"),
        ({"battery_percent": 10.0, "plugged": None}, "battery", OK, "10 %"),
        ({"battery_percent": 80.0, "plugged": False}, "battery", NOTE, "not plugged in"),
        ({"battery_percent": 19.0, "plugged": False}, "battery", PROBLEM, "19 %, not plugged in"),
        ({"ahead_s": 90.0}, "clock", NOTE, "90.0 s ahead of this device's clock"),
        ({"ahead_s": None}, "clock", OK, "does not report"),
    ],
)
def test_a_worker_that_is_not(changes: dict[str, Any], check: str, level: str, words: str) -> None:
    verdicts = dict(workers.worker_verdicts("pi:7070", facts(**changes)))
    assert_verdict(verdicts.pop(check), level, words)
    assert {verdict.level for verdict in verdicts.values()} == {OK}


def test_why_a_worker_cannot_be_reached() -> None:
    assert_verdict(workers.unreachable(LinkClosed("nothing listens at pi:7070")), PROBLEM, "start edge worker there")
    assert_verdict(workers.unreachable(Refused("pi was revoked")), PROBLEM, "pi was revoked", "edge cluster list")


def test_how_far_a_clock_is_ahead_is_counted_from_the_middle_of_the_call() -> None:
    times = iter([100.0, 102.0])
    with fake_worker() as fake:
        fake.description = description(clock_s=111.0)
        host, _, port = fake.address.partition(":")
        with Remote(open_channel(host, int(port), None, 10.0)[0], host, int(port), None) as remote:
            assert workers.read_worker(remote, 10.0, lambda: next(times)).ahead_s == 10.0
            fake.description = description()
            assert workers.read_worker(remote, 10.0).ahead_s is None


def test_a_link() -> None:
    profile = LinkProfile("desk", "pi", "tcp", 1e-4, 2e-4, 4e-4, 0.9, 0.1)
    report = LinkReport(profile, "local", "pi:7070", "tcp", 1e-4, {}, [])
    assert_verdict(workers.link(report), OK, "0.400 ms there and back, 900 Mbit/s there, 100 back")
    assert_verdict(workers.link(replace(report, hints=["Wi-Fi", "tunnel"])), NOTE, "Wi-Fi; tunnel")

"""Test the description of the machine: its limits, and those of its control group."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from devices import probe
from devices.probe import default_threads
from tests.support import ROOT

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 300 << 20


def test_threads_are_at_least_one_and_at_most_the_cores_allowed() -> None:
    threads = default_threads()
    assert threads >= 1
    if sys.platform == "linux":
        assert threads <= len(os.sched_getaffinity(0))


def test_available_memory_is_what_the_system_says_or_less() -> None:
    assert 0 < probe.available_memory() <= psutil.virtual_memory().total


FREED = """
import numpy as np
from devices import probe
before = probe.own_rss()
held = np.ones(80 << 20, np.uint8)
during = probe.own_rss()
assert during > before + (70 << 20)
del held
assert probe.peak_rss() > during - (1 << 20)  # the kernel counts pages in batches
"""


def test_peak_memory_remembers_what_was_freed() -> None:
    """In a process that does nothing else: what tests before this one held may be freed meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", FREED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_bandwidth_is_a_plausible_number() -> None:
    assert 0.1 < probe.memory_bandwidth_gbps(1, 64_000_000, repeats=2) < 10_000


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A memory control group of version 1, with a limit."""
    if os.geteuid() != 0 or not MEMORY_GROUPS.is_dir():
        pytest.skip("needs root and a version 1 memory controller to set a limit")
    group = MEMORY_GROUPS / f"edge-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield group
    finally:
        group.rmdir()


def test_a_control_groups_limit_counts(limited_group: Path) -> None:
    code = (
        f"import os, pathlib; pathlib.Path({str(limited_group / 'cgroup.procs')!r}).write_text(str(os.getpid()));"
        "from devices.probe import available_memory; print(available_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert 0 < int(done.stdout) <= LIMIT_BYTES


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    limit, use, cache = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    mount = tmp_path / "memory" if version == 1 else tmp_path
    for folder, figures in (
        (mount / "a" / "b", ("max", 100, 0)),
        (mount / "a", (1000, 400, 50)),
        (mount, (9000, 0, 0)),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(str(figures[0]))
        (folder / use).write_text(str(figures[1]))
        (folder / "memory.stat").write_text(f"other 7\n{cache} {figures[2]}\n")
    own = tmp_path / "self"
    own.write_text("5:cpu:/x\n3:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    monkeypatch.setattr(probe, "_CGROUPS", tmp_path)
    monkeypatch.setattr(probe, "_OWN_GROUPS", own)
    assert probe.memory_room() == 1000 - 400 + 50


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("kills", "keeps_to"), [(1000, 700), (700, 1000), ("max", 700), (700, "max")])
def test_a_limit_that_a_group_is_to_keep_to_counts_as_one_that_kills(
    tmp_path: Path, version: int, kills: int | str, keeps_to: int | str
) -> None:
    kills_file, keeps_file, use, cache = (
        ("memory.limit_in_bytes", "memory.soft_limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.high", "memory.current", "inactive_file")
    )
    for name, text in ((kills_file, kills), (keeps_file, keeps_to), (use, 400), ("memory.stat", f"{cache} 50")):
        (tmp_path / name).write_text(f"{text}\n")
    assert probe._room(tmp_path, version) == 700 - 400 + 50


def test_time_that_processes_waited_for_memory_is_in_seconds_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.pressure").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    )
    monkeypatch.setattr(probe, "_own_groups", lambda controller: iter([(tmp_path, 2)]))
    assert probe.memory_stalled_s() == 2.5


def test_above_the_limit_that_it_is_to_keep_to_the_room_of_a_group_is_what_to_give_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("limit_in_bytes", 1000), ("soft_limit_in_bytes", 300), ("usage_in_bytes", 700)):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    (tmp_path / "memory.stat").write_text("total_inactive_file 50\n")
    monkeypatch.setattr(probe, "_own_groups", lambda controller: iter([(tmp_path, 1)]))
    assert probe.memory_room() == 300 - 700 + 50
    assert probe.available_memory() == 0


@pytest.mark.parametrize(("limit", "seconds"), [("1000", 0.0), (str(2**63 - 4096), 2.5)])
def test_in_a_group_of_version_1_with_a_limit_it_is_others_that_wait_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, seconds: float
) -> None:
    pressure = tmp_path / "pressure"
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n")
    for name, text in (("limit_in_bytes", limit), ("soft_limit_in_bytes", limit), ("usage_in_bytes", "700")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    (tmp_path / "memory.stat").write_text("total_inactive_file 50\n")
    monkeypatch.setattr(probe, "_own_groups", lambda controller: iter([(tmp_path, 1)]))
    monkeypatch.setattr(probe, "_PRESSURE", pressure)
    assert probe.memory_stalled_s() == seconds


@pytest.mark.parametrize("version", [1, 2])
def test_a_cpu_quota_counts_in_whole_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    group = tmp_path / "cpu" / "a" if version == 1 else tmp_path / "a"
    group.mkdir(parents=True)
    if version == 1:
        (group / "cpu.cfs_quota_us").write_text("15000\n")
        (group / "cpu.cfs_period_us").write_text("10000\n")
        (group.parent / "cpu.cfs_quota_us").write_text("-1\n")
        (group.parent / "cpu.cfs_period_us").write_text("10000\n")
    else:
        (group / "cpu.max").write_text("15000 10000\n")
        (tmp_path / "cpu.max").write_text("max 100000\n")
    own = tmp_path / "self"
    own.write_text("5:cpu,cpuacct:/a\n" if version == 1 else "0::/a\n")
    monkeypatch.setattr(probe, "_CGROUPS", tmp_path)
    monkeypatch.setattr(probe, "_OWN_GROUPS", own)
    assert probe.quota_group() == group.stat().st_ino
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
    assert default_threads() == 2
    (group / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")).write_text("-1\n" if version == 1 else "max 100000\n")
    assert probe.quota_group() == 0

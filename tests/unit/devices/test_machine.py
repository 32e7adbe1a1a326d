"""Test the properties of a machine: cores, instruction sets, its disk; and how long they are saved."""

import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices import machine, machine_disk
from devices.busy import OthersLoad
from devices.machine import Rate, describe_machine
from devices.machine_cores import cache_bytes, core_kinds, instruction_sets
from devices.machine_disk import disk_read_rate
from devices.profile import DeviceProfile, describe
from devices.remembered import MAX_AGE_S
from tests.support.helpers import ROOT

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux shows")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure for a moment only, and remember it in a folder of the test."""
    monkeypatch.setattr(machine.probe, "_MOST_MEMORY_MB", 64)  # type: ignore[attr-defined]
    monkeypatch.setattr(machine_disk, "_MOST_BYTES", 16 << 20)
    monkeypatch.setattr(machine_disk, "_MOST_READ_S", 0.02)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return describe("here", gpu="CUDA")


# --- cores and instruction sets ---


def cpus(root: Path, cores: list[tuple[str, dict[str, str]]]) -> Path:
    """A folder as Linux shows its hardware: for each logical processor its core's siblings and other files."""
    for i, (siblings, files) in enumerate(cores):
        for name, text in {"topology/thread_siblings_list": siblings, **files}.items():
            path = root / "system" / "cpu" / f"cpu{i}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    (root / "system" / "cpu" / "cpufreq").mkdir(exist_ok=True)  # is there, and is no processor
    return root


def clock(mhz: int) -> dict[str, str]:
    return {"cpufreq/cpuinfo_max_freq": str(mhz * 1000)}


@on_linux
@pytest.mark.parametrize(
    ("cores", "kinds"),
    [
        pytest.param([(str(i), {}) for i in range(4)], (4, 0), id="no figures"),
        pytest.param([(str(i), clock(2400)) for i in range(4)], (4, 0), id="Pi 5"),
        pytest.param([("0-1", clock(4800))] * 2 + [("2-3", clock(4500))] * 2, (2, 0), id="SMT"),
        pytest.param(
            [(str(i), {"cpu_capacity": str(c)}) for i, c in enumerate([325] * 4 + [870] * 3 + [1024])],
            (4, 4),
            id="phone",
        ),
        # The clock says nothing where the scheduler's rating is there: these clocks differ by a quarter only.
        pytest.param(
            [(str(i), {"cpu_capacity": "530", **clock(1800)}) for i in range(4)]
            + [(str(i), {"cpu_capacity": "1024", **clock(2400)}) for i in range(4, 6)],
            (2, 4),
            id="RK3588",
        ),
        pytest.param([("0,2", clock(5000)), ("1", clock(3300)), ("0,2", clock(5000))], (1, 1), id="by clock"),
        pytest.param([("0", clock(2000)), ("", clock(2000))], (1, 0), id="one is offline"),
    ],
)  # fmt: skip
def test_kinds_of_cores(tmp_path: Path, cores: list[tuple[str, dict[str, str]]], kinds: tuple[int, int]) -> None:
    assert core_kinds(cpus(tmp_path, cores)) == kinds


@on_linux
def test_intel_says_which_cores_are_slow(tmp_path: Path) -> None:
    cores = [("0-1", clock(4700)), ("0-1", clock(4700)), ("2", clock(3700)), ("3", clock(3700)), ("4", clock(3700))]
    for name, which in (("cpu_core", "0-1"), ("cpu_atom", "2-4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpus").write_text(f"{which}\n")
    assert core_kinds(cpus(tmp_path, cores)) == (1, 3)


def test_the_largest_cache(tmp_path: Path) -> None:
    least = cache_bytes(tmp_path / "nothing")
    assert least == 16 << 20
    for cpu, index, size in ((0, 0, "32K"), (0, 3, "32768K"), (1, 3, "98304K"), (1, 4, "what?"), (2, 2, "")):
        folder = tmp_path / "system" / "cpu" / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 96 << 20
    (tmp_path / "system" / "cpu" / "cpu1" / "cache" / "index3" / "size").write_text("2048K\n")
    assert cache_bytes(tmp_path) == 32 << 20


def test_this_machine_has_cores(tmp_path: Path) -> None:
    performance, efficiency = core_kinds()
    assert performance >= 1
    assert efficiency >= 0
    assert core_kinds(tmp_path / "nothing")[0] >= 1


@on_linux
def test_instruction_sets(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 fma avx512_vnni f16c avx\nvmx flags\t: sve\nbugs\t: amx_int8\n"
    )
    assert instruction_sets(file) == ("avx", "avx2", "fma", "f16c", "avx512_vnni")
    # What only some cores have cannot be used: a thread may run on any.
    file.write_text("Features\t: fp asimd asimddp i8mm\n\nprocessor\t: 1\nFeatures\t: fp asimd asimddp\n")
    assert instruction_sets(file) == ("neon", "dotprod")
    assert instruction_sets(ROOT / "tests" / "arm64" / "cpuinfo") == ("neon", "fp16", "dotprod")
    file.write_bytes(b"\xff\x00 no colon\n: \nflags")
    assert instruction_sets(file) == ()
    assert instruction_sets(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("readings", "state"),
    [
        ([], None),
        ([(50.0, None, None)], None),  # without limits it says nothing
        ([(50.0, 65261.8, 0.0)], None),  # what a sensor that is not connected has as limits
        ([(50.0, 80.0, 100.0)], "normal"),
        ([(50.0, 80.0, 100.0), (85.0, 80.0, 100.0)], "hot"),
        ([(100.0, 80.0, 100.0), (50.0, 80.0, 100.0)], "critical"),
        ([(90.0, None, 85.0)], "critical"),
    ],
)
def test_thermal_state(
    profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch, readings: list[tuple[float, ...]], state: str | None
) -> None:
    results = {"coretemp": [SimpleNamespace(current=c, high=h, critical=k) for c, h, k in readings]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: results, raising=False)
    monkeypatch.setattr("devices.probe.available_memory", lambda: 0)  # the memory is not measured, which takes a while
    assert describe_machine(profile, folder=Path("/dev/null")).thermal == state


# --- the disk ---


def test_a_disk_is_read_and_nothing_left_on_it() -> None:
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".disk-") as folder:
        rate, how = disk_read_rate(Path(folder))
        assert 1e6 < rate < 1e12
        assert how in ("direct", "uncached", "buffered")
        assert list(Path(folder).iterdir()) == []


def test_a_disk_has_a_rate_where_reading_begins_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine. A rate of 0 would be remembered."""
    monkeypatch.setattr(machine_disk, "_MOST_READ_S", -1.0)
    assert disk_read_rate(ROOT)[0] > 0


def test_where_the_cache_cannot_be_passed_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_disk, "DIRECT", 0)
    monkeypatch.setattr(machine_disk, "_MOST_READ_S", 60.0)  # it ends with the file
    true, offsets = os.preadv, []

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        offsets.append(offset)
        return true(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    rate, how = disk_read_rate(ROOT)
    assert offsets
    assert len(offsets) == len(set(offsets))
    assert rate > 1e6
    assert how == ("uncached" if sys.platform == "darwin" else "buffered")


@on_linux
def test_what_is_no_disk_says_so() -> None:
    with pytest.raises(OSError, match=r"/dev/shm is in memory \(tmpfs\)"):
        disk_read_rate(Path("/dev/shm"))
    with pytest.raises(OSError):  # noqa: PT011 (which one depends on the kernel)
        disk_read_rate(Path("/proc"))


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OSError, match="MiB of room"):
        disk_read_rate(ROOT)


# --- all of it, and what is remembered ---


def cache(tmp_path: Path) -> Path:
    return tmp_path / "state" / "edge" / "machine.json"


def test_what_was_measured_is_known_for_a_day(profile: DeviceProfile, tmp_path: Path) -> None:
    first = describe_machine(profile, folder=ROOT)
    assert first.memory is not None
    assert first.disk is not None
    assert 1e8 < first.memory.bytes_per_s < 1e13
    assert 0 <= first.disk.age_s < 60
    assert first.not_measured == {}
    assert cache(tmp_path).stat().st_mode & 0o777 == 0o600
    again = describe_machine(profile, folder=ROOT)
    assert (again.memory, again.disk) == (first.memory, first.disk)
    fresh = describe_machine(profile, folder=ROOT, fresh=True)
    assert fresh.memory is not None
    assert fresh.memory.measured_at > first.memory.measured_at
    assert describe_machine(profile, folder=ROOT).memory == fresh.memory  # and is what is known from then on


@pytest.mark.parametrize("shift", [-MAX_AGE_S - 1, 3600.0])
def test_stale_figures_and_those_of_the_future_are_taken_anew(
    profile: DeviceProfile, tmp_path: Path, shift: float
) -> None:
    first = describe_machine(profile, folder=ROOT)
    known = json.loads(cache(tmp_path).read_text())
    [key] = [key for key in known if key.endswith("memory")]
    known[key]["measured_at"] += shift
    known[key]["value"]["bytes_per_s"] = 1.0
    cache(tmp_path).write_text(json.dumps(known))
    again = describe_machine(profile, folder=ROOT)
    assert again.memory is not None
    assert again.memory.bytes_per_s > 1e6
    assert again.disk == first.disk


def test_figures_are_of_what_they_depend_on(profile: DeviceProfile, tmp_path: Path) -> None:
    first = describe_machine(profile, folder=ROOT)
    other = replace(profile, memory_total_bytes=profile.memory_total_bytes + 1)
    assert describe_machine(other, folder=ROOT).memory != first.memory
    assert describe_machine(profile, folder=ROOT).memory == first.memory  # both are kept
    moved = describe_machine(profile, folder=tmp_path)
    assert moved.disk != first.disk
    assert moved.disk_folder == str(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"a": 1}', '{"a": {"b": {}}}', "\x00"],
)
def test_a_damaged_cache_is_none(profile: DeviceProfile, tmp_path: Path, content: str) -> None:
    cache(tmp_path).parent.mkdir(parents=True)
    cache(tmp_path).write_text(content)
    result = describe_machine(profile, folder=ROOT)
    assert result.memory is not None
    assert describe_machine(profile, folder=ROOT).memory == result.memory


def test_a_damaged_figure_is_measured_anew(profile: DeviceProfile, tmp_path: Path) -> None:
    first = describe_machine(profile, folder=ROOT)
    known = json.loads(cache(tmp_path).read_text())
    [key] = [key for key in known if key.endswith("memory")]
    known[key]["value"] = {"how": 1}
    cache(tmp_path).write_text(json.dumps(known))
    again = describe_machine(profile, folder=ROOT)
    assert again.memory is not None
    assert again.memory != first.memory
    assert again.disk == first.disk


def test_without_a_place_to_remember_it_is_measured_each_time(
    profile: DeviceProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert describe_machine(profile, folder=ROOT).memory != describe_machine(profile, folder=ROOT).memory


def test_what_cannot_be_measured_says_why(profile: DeviceProfile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = describe_machine(profile, folder=tmp_path / "file" / "below")
    assert result.disk is None
    assert result.memory is not None
    assert result.not_measured == {"disk": "Not a directory"}


def test_little_memory_is_not_measured(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.probe.available_memory", lambda: 0)
    result = describe_machine(profile, folder=ROOT)
    assert result.memory is None
    assert result.disk is not None
    assert re.fullmatch(
        "measuring the memory needs [0-9]+ MB, but less is available; free some memory", result.not_measured["memory"]
    )


# --- as JSON ---

NUMBERS = {"bytes_per_s": 1e9, "how": "2 threads", "measured_at": 1.7e9}


@pytest.mark.parametrize(
    "value",
    [
        3,
        {"bytes_per_s": 1, "how": "direct"},
        {**NUMBERS, "bytes_per_s": 10**400},
        {**NUMBERS, "bytes_per_s": -1},
        {**NUMBERS, "how": "a\nb"},
    ],
)
def test_json_that_is_no_rate(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^(a rate|[a-z_]+ needs)"):
        Rate.from_json(value)


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["how", "bytes_per_s"]), inner),
    max_leaves=9,
)


@given(st.dictionaries(st.sampled_from([*NUMBERS]), values, max_size=3) | values)
def test_any_json_is_a_rate_or_a_clear_error(change: Any) -> None:
    with suppress(ValueError):
        assert Rate.from_json({**NUMBERS, **change} if isinstance(change, dict) else change)


def test_load_of_others_is_all_use_of_cores_but_for_this_process() -> None:
    counts = iter([(10.0, 100.0, 5.0), (10.01, 100.02, 5.0), (12.0, 103.5, 6.5), (14.0, 104.5, 8.5)])
    load = OthersLoad(lambda: next(counts))
    assert load.cores() == 0.0  # 10 ms are too few to tell, and count for the next answer
    assert load.cores() == pytest.approx((3.5 - 1.5) / 2)
    assert load.cores() == 0.0  # never below

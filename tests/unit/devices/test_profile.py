"""Test profiles: what a device states about itself, and what is accepted from another device."""

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from devices import probe, profile
from devices.profile import DeviceProfile, LinkProfile, cpu_name, describe, host_id, temperature
from tests.support import ROOT

PI = "Raspberry Pi 5 Model B Rev 1.0"
PI_CPUINFO = f"processor\t: 0\nBogoMIPS\t: 108.00\nCPU part\t: 0xd0b\n\nRevision\t: c04170\nModel\t\t: {PI}\n"


@pytest.fixture
def described() -> DeviceProfile:
    return describe("kitchen", threads=3, memory_limit_bytes=1 << 30, gpu="GPU 0", runtime="0.1.0", llama_cpp="0.3.36")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the files that name the processor; none is there at first."""
    monkeypatch.setattr(profile, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(profile, "_BOARD", tmp_path / "model")
    return tmp_path


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**values, **changes}


def test_this_machine(described: DeviceProfile) -> None:
    assert (described.name, described.threads, described.gpu) == ("kitchen", 3, "GPU 0")
    assert described.system.startswith(platform.system())
    assert described.machine == platform.machine()
    assert described.cpu
    assert 1 <= described.cores_physical <= described.cores_logical == os.cpu_count()
    assert 0 < described.memory_available_bytes <= described.memory_total_bytes == psutil.virtual_memory().total
    assert described.memory_limit_bytes == 1 << 30
    assert described.python == platform.python_version()


def test_what_is_not_given_is_measured_or_unknown() -> None:
    result = describe("pi")
    assert result.threads >= 1
    assert (result.memory_limit_bytes, result.gpu) == (None, None)
    assert (result.runtime, result.llama_cpp) == ("unknown", "unknown")


def test_devices_of_one_machine_have_one_host_until_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "boot_id"
    starts.write_text("6a1f0f62-5d5e-4c1e-9f5a-000000000001\n")
    monkeypatch.setattr(profile, "_BOOT_ID", starts)
    monkeypatch.setattr(probe, "quota_group", lambda: 0)
    first = host_id()
    assert first == host_id() == describe("pi").host == describe("another").host
    assert first is not None
    assert "6a1f0f62" not in first
    monkeypatch.setattr(probe, "quota_group", lambda: 77)  # within a quota of its own
    assert host_id() not in (first, None)
    monkeypatch.setattr(probe, "quota_group", lambda: 0)
    starts.write_text("6a1f0f62-5d5e-4c1e-9f5a-000000000002\n")
    assert host_id() not in (first, None)
    starts.unlink()
    monkeypatch.setattr(profile, "sysctl", lambda key: "")
    assert host_id() is None


def test_a_profile_survives_json(described: DeviceProfile) -> None:
    for item in (described, describe("pi")):
        assert DeviceProfile.from_json(json.loads(json.dumps(item.to_json()))) == item


def test_a_name_that_could_not_be_read_back_is_made_readable() -> None:
    first = describe("pi\x1b[2J" + "x" * 500, gpu="a\nb")
    assert first.name.startswith("pi?[2Jx")
    assert first.gpu == "a?b"
    assert DeviceProfile.from_json(first.to_json()) == first


def test_newer_versions_may_add_and_leave_out_what_may_be_unknown(described: DeviceProfile) -> None:
    values = changed(described.to_json(), npu="yes", battery_percent=80)
    del values["temperature_c"], values["gpu"]
    result = DeviceProfile.from_json(values)
    assert (result.temperature_c, result.gpu, result.battery_percent) == (None, None, 80.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("name", 7),
        ("name", "x" * 201),
        ("cpu", "a\x1b[2J"),
        ("threads", "4"),
        ("threads", 4.0),
        ("threads", True),
        ("threads", None),
        ("memory_total_bytes", -1),
        ("memory_limit_bytes", 1 << 63),
        ("battery_percent", "full"),
        ("battery_percent", True),
        ("plugged", 1),
        ("temperature_c", math.nan),
        ("temperature_c", math.inf),
        ("temperature_c", 10**400),
        ("gpu", ["GPU 0"]),
    ],
)
def test_a_wrong_value_is_named(described: DeviceProfile, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"device profile: {field} needs"):
        DeviceProfile.from_json(changed(described.to_json(), **{field: value}))


@pytest.mark.parametrize("values", [None, [], "name", 3])
def test_what_is_no_object_is_no_profile(values: Any) -> None:
    with pytest.raises(ValueError, match="device profile needs an object"):
        DeviceProfile.from_json(values)


def test_a_missing_field_is_named(described: DeviceProfile) -> None:
    values = described.to_json()
    del values["cores_logical"]
    with pytest.raises(ValueError, match="cores_logical needs int"):
        DeviceProfile.from_json(values)


def test_the_name_of_a_processor(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "cpuinfo").write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n")
    assert cpu_name() == "AMD EPYC"
    (files / "cpuinfo").write_text("model name\t: ARMv7 Processor rev 3 (v7l)\nHardware\t: BCM2711\n")
    assert cpu_name() == "BCM2711"
    (files / "cpuinfo").write_text(PI_CPUINFO)
    assert cpu_name() == PI
    (files / "cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd0b\n")
    (files / "model").write_bytes(b"NVIDIA Jetson Orin Nano\0")
    assert cpu_name() == "NVIDIA Jetson Orin Nano"


def test_the_name_of_an_arm_core(files: Path) -> None:
    recorded = (ROOT / "tests" / "arm64" / "cpuinfo").read_text()
    (files / "cpuinfo").write_text(recorded)
    assert cpu_name() == "ARM Cortex-A76"
    (files / "cpuinfo").write_text(recorded.replace("0xd0b", "0xfff"))
    assert cpu_name() == "ARM core 0xfff of maker 0x41"


def test_the_name_of_a_processor_that_no_file_names(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert cpu_name() == platform.machine()
    monkeypatch.setattr(platform, "machine", lambda: "")
    assert cpu_name() == "unknown"


def test_the_name_of_a_processor_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysctl(args: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert args == ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.CompletedProcess(args, 0, "Apple M2\n")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", sysctl)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
    assert cpu_name() == "Apple M2"
    assert profile._system() == "macOS 14.5"


def test_the_hottest_believable_sensor_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, list[SimpleNamespace]] = {}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: results, raising=False)
    assert temperature() is None
    results["nvme"] = [SimpleNamespace(current=70.0)]
    assert temperature() is None
    results["cpu_thermal"] = [SimpleNamespace(current=value) for value in (51.25, 62.04, 0.0, 255.0, None)]
    assert temperature() == 62.0
    monkeypatch.delattr(psutil, "sensors_temperatures")
    assert temperature() is None


@pytest.mark.parametrize(("plugged", "expected"), [(True, True), (False, False), (None, None)])
def test_a_battery(monkeypatch: pytest.MonkeyPatch, plugged: bool | None, expected: bool | None) -> None:
    battery = SimpleNamespace(percent=81.26, power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    result = describe("laptop")
    assert (result.battery_percent, result.plugged) == (81.3, expected)


def test_a_link_as_plain_values() -> None:
    link = LinkProfile("a", "b", "tcp", 0.0001, 0.0002, 0.003, 0.9, 0.8)
    values = link.to_json()
    assert json.loads(json.dumps(values)) == values
    assert LinkProfile(**values) == link

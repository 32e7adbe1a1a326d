"""Test the energy meter with folders that look like those of Linux."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from devices.energy import EnergyMeter
from tests.support.clock import Clock

ZONES = {
    "intel-rapl:0": ("package-0", 1_000_000),
    "intel-rapl:0:0": ("core", 900_000),
    "intel-rapl:0:1": ("dram", 200_000),
    "intel-rapl:1": ("psys", 5_000_000),
    "intel-rapl-mmio:0": ("package-0", 1_000_000),
}


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    for zone, (name, energy_uj) in ZONES.items():
        folder = tmp_path / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def count(powercap: Path, zone: str, energy_uj: int) -> None:
    (powercap / zone / "energy_uj").write_text(f"{energy_uj}\n")


def test_packages_and_memory_are_added(powercap: Path) -> None:
    meter = EnergyMeter(powercap)
    for zone, more in (("intel-rapl:0", 2_500_000), ("intel-rapl:0:1", 500_000), ("intel-rapl:1", 9_000_000)):
        count(powercap, zone, ZONES[zone][1] + more)
    assert meter.joules() == pytest.approx(3.0)
    assert meter.joules() == 0


def test_counter_that_begins_again(powercap: Path) -> None:
    count(powercap, "intel-rapl:0", 262_143_328_850 - 1_000_000)
    meter = EnergyMeter(powercap)
    count(powercap, "intel-rapl:0", 500_000)
    assert meter.joules() == pytest.approx(1.5)


def test_machine_without_counters_tells_nothing(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).joules() is None
    assert EnergyMeter(tmp_path / "missing").joules() is None


def test_counter_that_cannot_be_read_tells_nothing(powercap: Path) -> None:
    meter = EnergyMeter(powercap)
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.joules() is None
    count(powercap, "intel-rapl:0", 1)
    assert meter.joules() is None
    count(powercap, "intel-rapl:0", 1_000_001)
    assert meter.joules() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("files", "watts"),
    [
        ({"power_now": 9_000_000, "status": "Discharging"}, 9.0),
        ({"current_now": -500_000, "voltage_now": 12_000_000, "status": "Discharging"}, 6.0),
        ({"power_now": 9_000_000, "status": "Charging"}, None),
        ({"power_now": "", "status": "Discharging"}, None),
        ({"power_now": 9_000_000}, None),
    ],
)
def test_without_counters_a_battery_that_discharges_is_read(
    tmp_path: Path, files: dict[str, int | str], watts: float | None
) -> None:
    battery = tmp_path / "BAT0"
    battery.mkdir()
    for name, value in files.items():
        (battery / name).write_text(f"{value}\n")
    clock = Clock()
    meter = EnergyMeter(tmp_path / "none", tmp_path, clock.monotonic)
    clock.now = 10.0
    assert meter.joules() == (None if watts is None else pytest.approx(10 * watts))
    assert meter.source == "the battery"


def test_counters_of_gpus_are_added(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: 5_000, 1: 7_000}
    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetTotalEnergyConsumption=lambda i: used[i],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter(powercap)
    count(powercap, "intel-rapl:0", 3_000_000)
    used.update({0: 5_500, 1: 8_000})
    assert meter.joules() == pytest.approx(2.0 + 0.5 + 1.0)
    assert meter.source == "the processors, their memory and the GPU"

    def refuse(_: int) -> int:
        raise RuntimeError("not supported")

    nvml.nvmlDeviceGetTotalEnergyConsumption = refuse  # an older GPU
    assert EnergyMeter(powercap).source == "the processors and their memory"

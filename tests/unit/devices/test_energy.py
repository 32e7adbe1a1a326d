"""Test the energy meter with folders that look like those of Linux."""

from pathlib import Path

import pytest

from devices.energy import EnergyMeter

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

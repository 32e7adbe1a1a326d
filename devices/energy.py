"""Energy that the processors and the memory of this machine use, by the counters of Linux (RAPL, folder `powercap`)."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_PARTS = ("package", "dram")  # counters to add; other counters are parts of a package, or of the whole machine


class EnergyMeter:
    """Counts joules from one call to the next."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        """folder: folder of the counters."""
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _name(zone).startswith(_PARTS)]
        self._before = self._counters()

    def joules(self) -> float | None:
        """Return the joules since the last call, or None if this machine does not tell them to this user."""
        counters, before = self._counters(), self._before
        self._before = counters
        if not counters or before is None:
            return None
        used = 0
        for (now, most), (last, _) in zip(counters, before, strict=True):
            used += now - last if now >= last else now - last + most  # a counter begins again at 0 after its most
        return used / 1e6

    def _counters(self) -> list[tuple[int, int]] | None:
        """Return (microjoules, most that the counter shows) of each zone, or None if a counter cannot be read."""
        try:
            return [(_number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")) for zone in self._zones]
        except (OSError, ValueError):  # on most systems only root may read them
            return None


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.read_text())

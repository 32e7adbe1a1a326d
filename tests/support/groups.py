"""A control group whose counters tests and benchmarks read."""

from __future__ import annotations

from pathlib import Path

from devices.lab.control_group import ControlGroup


class CountedGroup(ControlGroup):
    """Says what it counted."""

    def __enter__(self) -> CountedGroup:
        return self

    def throttled(self) -> int:
        """Periods so far in which it wanted more processor time than it got."""
        return _pairs(self._folder("cpu") / "cpu.stat").get("nr_throttled", 0)

    def held_bytes(self) -> int:
        """Memory that all in it hold together now, page cache included."""
        name = "memory.current" if self._new else "memory.usage_in_bytes"
        return int((self._folder("memory") / name).read_text())

    def memory_report(self) -> dict[str, int]:
        """max_usage_bytes: the most it ever held, page cache and what the kernel keeps for it included. failcnt: how
        often it was at its limit and something had to be given back; some kernels do not count that. oom_kills:
        processes killed for want of memory."""
        folder = self._folder("memory")
        most = "memory.peak" if self._new else "memory.max_usage_in_bytes"
        events = _pairs(folder / ("memory.events" if self._new else "memory.oom_control"))
        # Where memory and swap have the same limit, it may be that of both together that counts.
        counters = [folder / f"memory{kind}.failcnt" for kind in ("", ".memsw")]
        failed = [int(counter.read_text()) for counter in counters if counter.exists()]
        return {
            "max_usage_bytes": int((folder / most).read_text()),
            "failcnt": max(failed, default=events.get("max", 0)),
            "oom_kills": events.get("oom_kill", 0),
        }

    def memory_stat(self) -> dict[str, int]:
        """Return uses of its memory: bytes by the kernel's own names."""
        return _pairs(self._folder("memory") / "memory.stat")


def _pairs(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}

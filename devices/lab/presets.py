"""Devices that many people have, as a lab emulates them. Estimates: what they compute is relative to one core here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A kind of device. All figures are estimates, for a machine with cores like those of a 2020s server or laptop."""

    cpu: float  # cores of this machine that compute as much as all its own
    memory_bytes: int
    reason: str  # where the figures come from


GIB = 1 << 30
PRESETS = {
    "pi4": Preset(0.8, 4 * GIB, "estimate: Raspberry Pi 4, 4 Cortex-A72 at 1.5 GHz, each a fifth of a core here"),
    "pi5": Preset(1.6, 8 * GIB, "estimate: Raspberry Pi 5, 4 Cortex-A76 at 2.4 GHz, each two fifths of a core here"),
    "phone": Preset(2.0, 4 * GIB, "estimate: 8 GB, half of it the system's; 4 large cores, each half a core here"),
    "laptop": Preset(4.0, 12 * GIB, "estimate: 16 GB, a quarter of it in use; 4 cores, each as fast as one here"),
}

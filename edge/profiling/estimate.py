"""Estimate of a device's speed from its profile, before anything is measured.

A device reports the rates of its memory and its arithmetic (`devices.processes.rates`). A model's parts take as long as
on a preset with these rates. A device without rates counts as the preset that is most like it.
"""

from __future__ import annotations

from dataclasses import replace

from devices.catalog import CATALOG
from devices.processes.rates import Rates
from devices.profile import DeviceProfile
from edge.browser.profile import RUNTIME_BYTES
from partition.predict.presets import PartSizes, rated_speed
from partition.predict.speeds import MOST_S, Curve, DeviceSpeed

LEAST_RATE = 1e6  # no device is slower than this, in bytes or operations per second
READ = 0.9  # memory bandwidth of llama.cpp in decoding, relative to plain reads
# The first preset with a fitting name of the processor counts; without one, a core counts as a quarter of a laptop.
_BY_CPU = (
    ("Raspberry Pi 5", "pi5"), ("Raspberry Pi", "pi4"), ("Cortex-A76", "pi5"), ("Cortex-A7", "pi4"),
    ("Cortex-A5", "pi4"), ("Cortex-X", "phone-flagship"), ("N100", "mini-pc"), ("N150", "mini-pc"),
    ("Apple", "apple-m4"),
)  # fmt: skip
_LIKE, _LIKE_CORES = "laptop", 4
# The preset with a fitting name of the GPU counts. A GPU without one is not estimated, only measured.
_BY_GPU = (("GTX 1650", "gtx-1650"), ("RTX 3050", "rtx-3050"), ("RTX 3060", "rtx-3060"), ("Orin", "jetson-orin-nano"))


def rates_of(profile: DeviceProfile) -> Rates:
    """Return the rates with which a device computes a model."""
    memory, flops = profile.memory_bytes_per_s or 0.0, profile.flops or 0.0
    if memory > 0 and flops > 0:
        return Rates(max(LEAST_RATE, READ * memory), max(LEAST_RATE, flops))
    name = next((preset for part, preset in _BY_CPU if part in profile.cpu), None)
    preset = CATALOG[name or _LIKE]
    cores = min(profile.threads, profile.cpu_quota or profile.threads)
    part = 1.0 if name else min(1.0, cores / _LIKE_CORES)
    return Rates(part * preset.memory_bytes_per_s, part * preset.flops)


def estimated_speed(profile: DeviceProfile, sizes: PartSizes, device: str, name: str, memory_bytes: int) -> DeviceSpeed:
    """Estimate the speed of a device that is there.

    device: its address in a plan. name: name for people. memory_bytes: memory that a model may use.
    """
    rates = rates_of(profile)
    speed = rated_speed(rates.memory_bytes_per_s, rates.flops, sizes, device, name, memory_bytes)
    trip_s, bytes_per_s = profile.page_round_trip_s or 0.0, profile.page_bytes_per_s or 0.0
    if trip_s > 0 and bytes_per_s > 0:  # the worker of a page sends it the rows of each step, and waits for the result
        row_s = 2 * sizes.row_bytes / bytes_per_s
        step_s = Curve(tuple((n, min(MOST_S, trip_s + n * row_s)) for n in (1, 512)))
        speed = replace(speed, step_s=step_s, runtime_bytes=RUNTIME_BYTES)
    return replace(speed, gpu=_estimated_gpu(profile, sizes, speed))


def _estimated_gpu(profile: DeviceProfile, sizes: PartSizes, speed: DeviceSpeed) -> DeviceSpeed | None:
    """Estimate the speed of a device's GPU, or return None for an unknown one. The survey adds its memory."""
    gpu = profile.gpu or ""
    name = gpu if gpu in CATALOG else next((preset for part, preset in _BY_GPU if part in gpu), None)
    if name is None or not profile.gpu_free_bytes:
        return None
    preset = CATALOG[name]
    return rated_speed(preset.memory_bytes_per_s, preset.flops, sizes, speed.device, speed.name)

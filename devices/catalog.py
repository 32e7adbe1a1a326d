"""Catalog of common devices and networks for what-if plans and the lab, with figures estimated from published ones.

This project measured none of these figures, and no plan for real devices uses them. Two rules turn published results of
`llama-bench` and similar tools into figures. A decoded token reads all weights once: tokens per second times the bytes
of the file is the memory bandwidth. A prompt token costs two operations for each parameter: prompt tokens per second
times twice the parameters is the arithmetic speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Emulation:
    """A device preset of the lab: estimates for a machine with cores like those of a 2020s server or laptop."""

    cpu: float  # number of that machine's cores that compute as fast as the whole device
    memory_bytes: int
    reason: str  # where the figures come from


@dataclass(frozen=True)
class DevicePreset:
    """A kind of device. Every figure is an estimate, and `source` names its origin, by the figure's name."""

    title: str
    memory_bytes: int  # memory that a model may use; the system uses the rest
    memory_bytes_per_s: float  # memory bandwidth in decoding
    flops: float  # operations per second in prefill with quantized weights; a multiply-add is two operations
    disk_bytes_per_s: float  # reading speed with large blocks
    watts: float  # power of the whole device while it computes
    source: Mapping[str, str]
    lab: Emulation | None = None  # None if the lab has no preset for it
    price_usd: float | None = None  # price of a new device at release; None if unknown, or if it is not one product


@dataclass(frozen=True)
class NetworkPreset:
    """A kind of network between devices. Its figures are estimates for both directions."""

    title: str
    latency_s: float  # seconds of a small message, one way
    bytes_per_s: float
    reason: str  # where the figures come from


_PI_TINYLLAMA = (
    "TinyLlama 1.1B at Q8_0 with llama.cpp of March 2024, in Justine Tunney's 'LLaMA Now Goes Faster on CPUs'"
)
_GEERLING = "github.com/geerlingguy/ai-benchmarks"
_NORMIE = "github.com/brand-o/normiebench"
_3B = "Llama 3.2 3B at Q4_K_M (2.02 GB)"
_8B = "Llama 3.1 8B at Q4_K_M (4.92 GB)"
_SATA = "a SATA SSD: its bus ends at 600 MB/s"
_NVME = "an NVMe SSD at PCIe 3.0 x4 ends at 3.9 GB/s; about two thirds, as a small one gives"

CATALOG: dict[str, DevicePreset] = {
    "pi4": DevicePreset(
        "Raspberry Pi 4, 4 GB", 3 * GIB, 3.4e9, 22e9, 45e6, 6.0,
        {
            "memory_bytes": "4 GB; a quarter is left to the system",
            "memory_bytes_per_s": f"3 tokens/s of 1.17 GB, {_PI_TINYLLAMA}; 1.6 of 2.02 GB on a Pi 400, {_GEERLING}",
            "flops": f"10 prompt tokens/s, {_PI_TINYLLAMA}",
            "disk_bytes_per_s": "a microSD card: the Pi 4 runs it at 50 MB/s at most",
            "watts": f"Pi 400 with Llama 3.2 3B, at its peak, {_GEERLING}",
            "price_usd": "the 4 GB board alone, raspberrypi.com, 2019-06-24",
        },
        Emulation(0.8, 4 * GIB, "4 Cortex-A72 at 1.5 GHz, each a fifth of a core here"),
        price_usd=55.0,
    ),
    "pi5": DevicePreset(
        "Raspberry Pi 5, 8 GB", 7 * GIB, 9.9e9, 77e9, 90e6, 12.0,
        {
            "memory_bytes": "8 GB; 1 GiB is left to the system",
            "memory_bytes_per_s": f"4.88 tokens/s of {_3B}, {_GEERLING} issue 7; its bus has 17 GB/s",
            "flops": f"35 prompt tokens/s, {_PI_TINYLLAMA}",
            "disk_bytes_per_s": "a microSD card: the Pi 5 runs it at 104 MB/s at most",
            "watts": f"11.9 W with Llama 3.2 3B, at its peak, {_GEERLING} issue 7",
            "price_usd": "the 8 GB board alone, raspberrypi.com, 2023-09-28",
        },
        Emulation(1.6, 8 * GIB, "4 Cortex-A76 at 2.4 GHz, each two fifths of a core here"),
        price_usd=80.0,
    ),
    "phone": DevicePreset(
        "Mid-range phone of 2024, 8 GB", 4 * GIB, 13e9, 150e9, 700e6, 5.0,
        {
            "memory_bytes": "8 GB; half of it is the system's, as in the lab's preset",
            "memory_bytes_per_s": "half of its bus: 25.6 GB/s, LPDDR5-6400 of 32 bits, such as a Dimensity 7300's",
            "flops": "twice a Pi 5: as many large cores, a newer kind with wider dot products",
            "disk_bytes_per_s": "UFS 2.2 and 3.1 read 0.5 to 2 GB/s; near the lower end",
            "watts": "what a phone can shed for minutes; about 5 W",
        },
        Emulation(2.0, 4 * GIB, "8 GB, half of it the system's; 4 large cores, each half a core here"),
    ),
    "phone-flagship": DevicePreset(
        "Flagship phone of 2024, 12 GB", 7 * GIB, 35e9, 400e9, 2e9, 8.0,
        {
            "memory_bytes": "12 GB; 5 GB are the system's",
            "memory_bytes_per_s": "half of its bus: 76.8 GB/s, LPDDR5X of 64 bits; 6.6 to 18.7 tokens/s of 7B at 4 "
            "bits are reported for a Snapdragon 8 Gen 3, github.com/microsoft/T-MAC issue 32",
            "flops": f"72 prompt tokens/s of {_3B} on an 8-core Arm board, {_GEERLING} issue 54; a seventh less",
            "disk_bytes_per_s": "UFS 4.0 reads 4 GB/s at best; half of it",
            "watts": "what a phone can shed for minutes, with vapour cooling; about 8 W",
        },
    ),
    "laptop": DevicePreset(
        "Thin x86 laptop of 2021, 16 GB", 12 * GIB, 34e9, 410e9, 2e9, 40.0,
        {
            "memory_bytes": "16 GB; a quarter is in use, as in the lab's preset",
            "memory_bytes_per_s": f"6.86 tokens/s of {_8B} on a Core i5-1135G7, {_NORMIE} issue 46",
            "flops": f"25.5 prompt tokens/s of {_8B}, {_NORMIE} issue 46",
            "disk_bytes_per_s": _NVME,
            "watts": "28 W, the processor's own limit, and 12 W for the rest",
        },
        Emulation(4.0, 12 * GIB, "16 GB, a quarter of it in use; 4 cores, each as fast as one here"),
    ),
    "apple-m4": DevicePreset(
        "Mac with a base M4, 16 GB", 11 * GIB, 102e9, 3.6e12, 2.5e9, 30.0,
        {
            "memory_bytes": "16 GB; macOS gives the GPU about two thirds",
            "memory_bytes_per_s": f"20.9 tokens/s of {_8B}, Metal, {_NORMIE} issue 3; its bus has 120 GB/s",
            "flops": f"225 prompt tokens/s of {_8B}, Metal, {_NORMIE} issue 3",
            "disk_bytes_per_s": "the SSD of a base model reads near 3 GB/s",
            "watts": f"M4 Mac mini with Llama 3.2 3B, at its peak, {_GEERLING} issue 2",
            "price_usd": "a Mac mini with 16 GB, apple.com, 2024-10-29",
        },
        price_usd=599.0,
    ),
    "mini-pc": DevicePreset(
        "Mini PC with an Intel N100, 16 GB", 14 * GIB, 16e9, 105e9, 500e6, 25.0,
        {
            "memory_bytes": "16 GB; 2 GB are left to the system",
            "memory_bytes_per_s": f"between 3.01 tokens/s of {_8B}, {_NORMIE} issue 38, and 9.06 of {_3B} on "
            f"its successor N150, {_GEERLING} issue 12",
            "flops": f"6.53 prompt tokens/s of {_8B}, {_NORMIE} issue 38",
            "disk_bytes_per_s": _SATA,
            "watts": f"26.4 W of a mini PC with an N150, at its peak, {_GEERLING} issue 12",
        },
    ),
    "gtx-1650": DevicePreset(
        "Desktop with a GTX 1650, 4 GB", int(3.5 * GIB), 90e9, 2e12, 500e6, 130.0,
        {
            "memory_bytes": "4 GB; half a GiB is the driver's and the screen's",
            "memory_bytes_per_s": "seven tenths of its bus, 128 GB/s; 35.7 tokens/s of a 2B model at Q8_0, "
            "github.com/AlexsJones/llmfit pull request 1030",
            "flops": "two thirds of its 3 TFLOPS of F32; it has no tensor cores",
            "disk_bytes_per_s": _SATA,
            "watts": "75 W, the card's limit, and 55 W for the desktop around it",
        },
    ),
    "rtx-3050": DevicePreset(
        "Desktop with an RTX 3050, 8 GB", 7 * GIB, 154e9, 10.6e12, 500e6, 174.0,
        {
            "memory_bytes": "8 GB; 1 GiB is the driver's and the screen's",
            "memory_bytes_per_s": "an RTX 3060's, by their buses: 224 and 360 GB/s",
            "flops": "an RTX 3060's, by their F32: 9.1 and 12.7 TFLOPS",
            "disk_bytes_per_s": _SATA,
            "watts": "a desktop's with an RTX 3060, less the difference of the cards' limits: 130 and 170 W",
        },
    ),
    "rtx-3060": DevicePreset(
        "Desktop with an RTX 3060, 12 GB", 11 * GIB, 248e9, 14.8e12, 500e6, 214.0,
        {
            "memory_bytes": "12 GB; 1 GiB is the driver's and the screen's",
            "memory_bytes_per_s": f"122.85 tokens/s of {_3B}, {_GEERLING} issue 40; its bus has 360 GB/s",
            "flops": f"6744 prompt tokens/s of TinyLlama 1.1B at Q4_K_M, Vulkan, {_GEERLING} issue 40",
            "disk_bytes_per_s": _SATA,
            "watts": f"a whole desktop with Llama 3.2 3B, at its peak, {_GEERLING} issue 40",
        },
    ),
    "jetson-orin-nano": DevicePreset(
        "Jetson Orin Nano, 8 GB", 5 * GIB, 50e9, 4e12, 1e9, 15.0,
        {
            "memory_bytes": "8 GB shared with the system; about 5.2 GB were free at ericxliu.me",
            "memory_bytes_per_s": "three quarters of 68 GB/s, the maker's data; as on other cards",
            "flops": "four tenths of its 10 TFLOPS of F16, the maker's data",
            "disk_bytes_per_s": "a small NVMe SSD, below its bus",
            "watts": "15 W, its usual power mode",
            "price_usd": "the developer kit with 8 GB, nvidia.com, 2024-12-17",
        },
        price_usd=249.0,
    ),
}  # fmt: skip
EMULATED: Mapping[str, Emulation] = {name: preset.lab for name, preset in CATALOG.items() if preset.lab is not None}
NETWORKS: Mapping[str, NetworkPreset] = {
    "lan": NetworkPreset("Gigabit Ethernet", 0.2e-3, 117e6, "TCP reaches 94 % of the rate; one switch"),
    "wifi": NetworkPreset("a home's Wi-Fi", 2e-3, 12.5e6, "100 Mbit/s, the figures of a link that was not measured"),
    "5g": NetworkPreset("5G, to a device elsewhere", 10e-3, 6.25e6, "50 Mbit/s, because the slower uplink counts"),
    "4g": NetworkPreset("4G, to a device elsewhere", 25e-3, 1.25e6, "10 Mbit/s, because the slower uplink counts"),
    "3g": NetworkPreset("3G, to a device elsewhere", 50e-3, 0.125e6, "1 Mbit/s, because the slower uplink counts"),
}

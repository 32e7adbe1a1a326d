"""Labs of sleeping devices that bench_sleeping.py runs: settings, their profiles, and the lab of a setting."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devices.catalog import CATALOG
from partition.model.file import ModelFile
from partition.predict.part_times import profile_json
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import Curve

# Each device has room for so many times its equal share of the model, beside its process and KV cache: so most of the
# devices are needed.
_SHARE, _BESIDE_BYTES = 1.6, 240 << 20
_SHARE_OF_TWO = 3.2  # where two placements are to have room


@dataclass(frozen=True)
class Setting:
    """A lab of sleeping devices."""

    name: str
    devices: tuple[str | float, ...]  # a preset, or times as slow as a Pi 5 with a measured profile; the owner's first
    link: Mapping[str, float]  # between all; its bandwidth is that of each device, over all links together
    groups: int = 0  # above 0: so many devices each are near each other, with links of `near`
    near: Mapping[str, float] = field(default_factory=dict)
    prompt: int = 0  # above 0: tokens of a prompt, and plans are compared that have a placement for prompts
    stretch: int = 0  # above 0: times as slow as its devices and links its lab is at first


LAN = {"delay_ms": 0.5, "bandwidth_mbps": 1000}
WIFI = {"delay_ms": 2, "bandwidth_mbps": 200}
FAR = {"delay_ms": 10, "bandwidth_mbps": 100}
THIN = {"delay_ms": 3, "bandwidth_mbps": 30}
CABLE = {"delay_ms": 1, "bandwidth_mbps": 1000}


def equal(n: int, device: str | float) -> tuple[str | float, ...]:
    """Return n devices alike."""
    return (device,) * n


SETTINGS = (
    Setting("4 Pi 4, LAN", equal(4, "pi4"), LAN),
    Setting("4 Pi 5, LAN", equal(4, "pi5"), LAN),
    Setting("4 Pi 5, far", equal(4, "pi5"), FAR),
    Setting("4 unequal presets, LAN", ("pi5", "pi4", "mini-pc", "pi4"), LAN),
    Setting("4 unequal presets, thin link", ("phone", "pi4", "pi5", "mini-pc"), THIN),
    Setting("4 measured, LAN", equal(4, 3.0), LAN),
    Setting("4 measured, unequal, Wi-Fi", (2.0, 5.0, 3.0, 1.5), WIFI),
    Setting("4 measured, pairs", equal(4, 4.0), FAR, 2, CABLE),
    Setting("4 presets, slow owner", ("pi4", "mini-pc", "mini-pc", "mini-pc"), LAN),
    Setting("4 measured, slow owner", (30.0, 2.0, 3.0, 2.0), WIFI),
    Setting("4 Pi 5, far, prompts", equal(4, "pi5"), FAR, prompt=128),
    Setting("4 mini PCs, Wi-Fi, prompts", equal(4, "mini-pc"), WIFI, prompt=256),
    Setting("5 unequal, Wi-Fi", ("pi4", "pi5", "pi4", "phone", "pi4"), WIFI),
    Setting("5 measured, LAN", (4.0, 2.0, 6.0, 3.0, 5.0), LAN),
    Setting("6 Pi 4, pairs", equal(6, "pi4"), FAR, 2, CABLE),
    Setting("6 Pi 4, threes", equal(6, "pi4"), WIFI, 3, CABLE),
    Setting("6 measured, thin link", (5.0, 4.0, 3.0, 6.0, 4.0, 5.0), THIN),
    Setting("6 measured, far, prompts", (1.0, 0.8, 1.2, 1.0, 0.8, 1.2), FAR, prompt=128),
    Setting("6 Pi 5, threes, prompts", equal(6, "pi5"), WIFI, 3, CABLE, prompt=128),
    Setting("7 unequal, Wi-Fi", ("pi5", *equal(3, "pi4"), *equal(3, "pi5")), WIFI),
    # Two cores take 2.5 ms for one sum of eight ranks: their 56 messages are sent, switched and added there.
    Setting("8 Pi 4, LAN", equal(8, "pi4"), LAN, stretch=16),
    Setting("8 Pi 4, fours", equal(8, "pi4"), FAR, 4, CABLE),
    Setting("8 measured, unequal, Wi-Fi", (4.0, 8.0, 6.0, 5.0, 7.0, 4.0, 9.0, 6.0), WIFI),
    Setting("10 Pi 4, pairs", equal(10, "pi4"), FAR, 2, CABLE),
    Setting("12 measured, threes", equal(12, 8.0), FAR, 3, CABLE),
    Setting("12 measured, unequal, far", tuple(5.0 + i % 4 for i in range(12)), FAR),
    Setting("14 unequal, Wi-Fi", (*equal(7, "pi4"), *equal(7, "pi5")), WIFI),
    Setting("16 Pi 4, fours", equal(16, "pi4"), FAR, 4, CABLE),
    Setting("16 measured, Wi-Fi", equal(16, 8.0), WIFI),
)
TINY = Setting("two on loopback", ("pi5", 1.0), {})


def profiles_of(setting: Setting, model: Path, stretch: float = 1.0) -> list[dict[str, Any]]:
    """Return the profile of each device: a preset, or one with the uneven figures that a survey measures. stretch: all
    take so many times as long."""
    sizes, noise, profiles = PartSizes.from_file(ModelFile.open(model)), random.Random(setting.name), []
    for device in setting.devices:
        if isinstance(device, str):
            if stretch == 1:
                profiles.append({"preset": device})
            else:
                speed = preset_speed(CATALOG[device], sizes, "profile", "profile")
                profiles.append(profile_json(speed.times(stretch), sizes))
            continue
        speed = preset_speed(CATALOG["pi5"], sizes, "profile", "profile").times(device)
        rows = [(n, seconds * noise.uniform(1.0, 1.1)) for n, seconds in speed.layer_s.points]
        layer = Curve(tuple(rows))
        half = Curve(tuple((n, seconds * noise.uniform(0.52, 0.58)) for n, seconds in rows))
        speed = replace(speed, layer_s=layer, half_layer_s=half, step_s=Curve(((1, noise.uniform(1e-3, 3e-3)),)))
        profiles.append(profile_json(speed.times(stretch), sizes))
    return profiles


def names_of(setting: Setting) -> list[str]:
    """Return the names of the devices, the owner's first."""
    return ["own", *(f"d{i}" for i in range(1, len(setting.devices)))]


def lab_of(setting: Setting, profiles: Sequence[Mapping[str, Any]], stretch: float = 1.0) -> dict[str, Any]:
    """Return the lab, as lab.toml has it. stretch: links take so many times as long."""
    names = names_of(setting)
    most_mbps = max(setting.link.get("bandwidth_mbps", 0.0), setting.near.get("bandwidth_mbps", 0.0)) / stretch
    port = {"bandwidth_mbps": most_mbps} if most_mbps else {}
    devices = [
        {"name": name, "compute": "sleep", "profile": json.dumps(profile), "threads": 1, **port}
        for name, profile in zip(names, profiles, strict=True)
    ]
    if not setting.link:
        return {"device": devices}
    near = [
        {**_stretched(setting.near, stretch), "between": [a, names[j]]}
        for i, a in enumerate(names)
        for j in range(i + 1, len(names))
        if _is_near(setting, i, j)
    ]
    return {"device": devices, "link": [_stretched(setting.link, stretch), *near]}


def _stretched(link: Mapping[str, float], factor: float) -> dict[str, float]:
    return {"delay_ms": link["delay_ms"] * factor, "bandwidth_mbps": link["bandwidth_mbps"] / factor}


def _is_near(setting: Setting, i: int, j: int) -> bool:
    return setting.groups > 0 and i // setting.groups == j // setting.groups


def memory_of(setting: Setting, model: Path) -> int:
    """Return the bytes that a device's rank may have."""
    share = _SHARE_OF_TWO if setting.prompt else _SHARE
    return _BESIDE_BYTES + int(share * model.stat().st_size / len(setting.devices))


def link_kinds(setting: Setting) -> dict[str, Any]:
    """Return the kind of the link between any two devices, and a link of each kind: not all need to be measured."""
    n = range(len(setting.devices))
    kinds = [[int(setting.groups > 0 and not _is_near(setting, i, j)) for j in n] for i in n]
    return {"kinds": kinds, "pairs": [[0, 1], [0, setting.groups]] if setting.groups else [[0, 1]]}

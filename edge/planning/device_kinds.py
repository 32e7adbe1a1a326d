"""Kinds of devices that can be bought for a cluster: the presets, or kinds from a user's TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from devices.catalog import CATALOG, DevicePreset
from devices.cluster_file import MAX_DELAY_MS, MAX_MBPS, MAX_WATTS
from devices.errors import ClusterFileError
from devices.names import MAX_NAME, is_name
from devices.toml_tables import Table, reading_toml, tables

USD = "USD"  # currency of the preset prices
MAX_PRICE = 1e9
MANY = 1 << 20  # upper bound if nothing limits the number of devices of a kind
_KEYS = ("name", "preset", "price", "watts", "memory", "memory_gb_per_s", "gflops", "most", "source")
_FILE_KEYS = ("currency", "delay_ms", "bandwidth_mbps", "device")


@dataclass(frozen=True)
class DeviceKind:
    """Kind of device, its price, and the available number."""

    name: str
    preset: DevicePreset  # performance figures
    price: float | None = None  # None: unknown
    price_source: str = ""
    most: int = MANY


@dataclass(frozen=True)
class DeviceKinds:
    """Kinds of devices, and the network between all devices of a cluster."""

    kinds: tuple[DeviceKind, ...]
    currency: str = USD
    latency_s: float | None = None  # one-way latency between any two devices; None: assumed
    bytes_per_s: float | None = None

    def named(self, names: Sequence[str]) -> DeviceKinds:
        """Return only these kinds. Raises ClusterFileError for an unknown name."""
        by_name = {kind.name: kind for kind in self.kinds}
        for name in names:
            if name not in by_name:
                raise ClusterFileError(f"no kind of device is called {name[:80]!r}; known are {', '.join(by_name)}")
        return replace(self, kinds=tuple(by_name[name] for name in dict.fromkeys(names)))


def preset_kinds() -> DeviceKinds:
    """Return all presets with their known prices."""
    return DeviceKinds(
        tuple(
            DeviceKind(name, preset, preset.price_usd, preset.source.get("price_usd", ""))
            for name, preset in CATALOG.items()
        )
    )


def read_kinds(path: Path) -> DeviceKinds:
    """Read the kinds from a TOML file. Raises ClusterFileError for invalid content, or OSError if it cannot be read."""
    with reading_toml(path, ClusterFileError) as data:
        return _kinds(Table(data, "the file", ClusterFileError))


def _kinds(file: Table) -> DeviceKinds:
    file.check_keys(_FILE_KEYS)
    currency = file.values.get("currency", USD)
    if not isinstance(currency, str) or not currency.isalpha() or len(currency) > 10:
        file.refuse("currency", 'needs its letters, such as "EUR"')
    kinds = tuple(_kind(table, currency) for table in tables(file.values, "device", ClusterFileError))
    if not kinds:
        raise ClusterFileError("there is no device; expected a [[device]] for each kind")
    names = [kind.name for kind in kinds]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ClusterFileError(f"device[{i}].name: another kind is called {name!r}; use another name")
    delay = file.number("delay_ms", 0, MAX_DELAY_MS)
    mbps = file.number("bandwidth_mbps", 0.001, MAX_MBPS)
    return DeviceKinds(
        kinds, currency, None if delay is None else delay / 1e3, None if mbps is None else mbps * 125_000
    )


def _kind(table: Table, currency: str) -> DeviceKind:
    table.check_keys(_KEYS)
    base = table.get("preset")
    if not isinstance(base, str) or base not in CATALOG:
        table.refuse("preset", f"needs the one that it is most like, of {', '.join(CATALOG)}")
    preset, name = CATALOG[base], table.values.get("name", base)
    if not isinstance(name, str) or not is_name(name):
        table.refuse("name", f"needs 1 to {MAX_NAME} letters, digits, '-', '_' or '.', the first a letter or digit")
    source = table.values.get("source", "")
    if not isinstance(source, str) or len(source) > 300 or not source.isprintable():
        table.refuse("source", "needs a text of one line, with the date of the price")
    bandwidth, gflops = table.number("memory_gb_per_s", 0.01, 1e5), table.number("gflops", 0.01, 1e7)
    figures = {
        "memory_bytes": table.size("memory"),
        "memory_bytes_per_s": None if bandwidth is None else bandwidth * 1e9,
        "flops": None if gflops is None else gflops * 1e9,
        "watts": table.number("watts", 0.01, MAX_WATTS),
    }
    stated: dict[str, Any] = {key: value for key, value in figures.items() if value is not None}
    price = table.number("price", 0, MAX_PRICE)
    if price is None and currency == USD and not stated and preset.price_usd is not None:
        price, source = preset.price_usd, preset.source["price_usd"]
    return DeviceKind(name, replace(preset, **stated), price, source, table.whole("most", 1, MANY) or MANY)

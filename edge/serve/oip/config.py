"""Configuration of a served network: its file, and the devices that compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class NetworkConfig:
    """An ONNX network, and how to load it. All values are plain, so that they can be sent as JSON."""

    path: str  # ONNX file
    threads: int | None = None  # None: one per physical core
    workers: tuple[str, ...] = ()  # addresses of the devices in the order of stages, this device included
    plan: Mapping[str, Any] | None = None  # JSON of a plan, used instead of workers
    plan_name: str = "the plan"  # origin of the plan, for messages
    replicas: bool = False  # whether each device has the whole network, instead of a stage
    shares: tuple[float, ...] | None = None  # relative work of each device; None: equal shares
    dims: Mapping[str, int] | None = None  # sizes of open dimensions while the stages are planned
    transport: str = "auto"
    wire: str = "f32"
    insecure: bool = False  # whether workers may be reached without encryption

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NetworkConfig:
        """Return the configuration that `to_json` wrote."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})

"""Options of a worker, and the resource limits of an engine process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from devices.cores import pin_to_cores
from devices.profile import DeviceProfile
from edge.errors import EdgeError
from edge.prefixes.store import DEFAULT_BYTES


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of an engine process, as passed on its command line."""

    threads: int
    affinity: tuple[int, ...] = ()  # cores to compute on; empty: all cores of the daemon
    gpu_layers: int | None = None  # maximum number of layers on the GPU; None: no limit
    gpu_memory: int | None = None  # maximum bytes of GPU memory; None: no limit
    gives_back: int = 0  # part of the granted memory, in bytes, that others may reclaim; 0: none

    def to_text(self) -> str:
        """Return the limits as an option value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ResourceLimits:
        """Return the limits from an option value."""
        values = json.loads(text)
        return cls(**{**values, "affinity": tuple(values["affinity"])})


@dataclass(frozen=True)
class WorkerOptions:
    """Options that a worker starts with."""

    name: str
    host: str  # address to listen on
    threads: int
    memory_limit_bytes: int | None
    models: Path | None  # folder of model files to cut slices from
    credentials: Path | None  # folder of credentials, if mutual TLS is used
    affinity: tuple[int, ...] = ()  # cores for sessions; empty: all cores of the daemon
    gpu_layers: int | None = None  # maximum number of layers that a session may put on the GPU; None: no limit
    gpu_memory: int | None = None  # maximum bytes of GPU memory that a session may use; None: no limit
    least_memory: int | None = None  # lower bound in bytes of a shrinking memory limit; None: the limit is constant
    prefix_bytes: int = DEFAULT_BYTES  # size of the owner's prefix cache; 0: no cache

    def limited(self, profile: DeviceProfile) -> DeviceProfile:
        """Return this device's profile with the GPU memory that sessions may use."""
        if self.gpu_layers == 0 or profile.gpu_free_bytes is None:
            return replace(profile, gpu_total_bytes=None, gpu_free_bytes=None)
        most = profile.gpu_free_bytes if self.gpu_memory is None else self.gpu_memory
        return replace(profile, gpu_free_bytes=min(profile.gpu_free_bytes, most))

    @property
    def limits(self) -> ResourceLimits:
        """Limits of every session."""
        most, least = self.memory_limit_bytes, self.least_memory
        gives_back = most - least if most is not None and least is not None else 0
        return ResourceLimits(self.threads, self.affinity, self.gpu_layers, self.gpu_memory, gives_back)


def compute_on(cores: Sequence[int]) -> None:
    """Restrict this thread, and threads that it starts, to these cores. An empty list allows all cores.

    Raises EdgeError if this process may not use one of the cores.
    """
    if not cores:
        return
    try:
        pin_to_cores(cores)
    except ValueError as error:
        raise EdgeError(str(error)) from None

"""Options of a worker, and what of them limits an engine process: cores, threads, memory it gives back, layers and
bytes of the GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from devices.cores import pin_to_cores
from edge.errors import EdgeError
from edge.prefixes.store import DEFAULT_BYTES


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of an engine process, as its command line has them."""

    threads: int
    affinity: tuple[int, ...] = ()  # cores to compute on; empty: all that the daemon may use
    gpu_layers: int | None = None  # most layers on the GPU; None: no limit
    gpu_memory: int | None = None  # most bytes of its memory; None: no limit
    gives_back: int = 0  # bytes of the memory that it was granted which others may take; 0: none

    def to_text(self) -> str:
        """Return the limits as the value of an option."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ResourceLimits:
        """Return the limits that `to_text` wrote."""
        values = json.loads(text)
        return cls(**{**values, "affinity": tuple(values["affinity"])})


@dataclass(frozen=True)
class WorkerOptions:
    """Options that a worker starts with."""

    name: str
    host: str  # address that it listens on
    threads: int
    memory_limit_bytes: int | None
    models: Path | None  # folder of model files to cut slices from
    credentials: Path | None  # their folder, if mutual TLS is used
    affinity: tuple[int, ...] = ()  # cores that sessions may use; empty: all that the daemon may use
    gpu_layers: int | None = None  # most layers that a session may put on the GPU; None: no limit
    gpu_memory: int | None = None  # most bytes of a GPU's memory that a session may use; None: no limit
    least_memory: int | None = None  # bytes that the limit of memory may shrink to, and back; None: it stays
    prefix_bytes: int = DEFAULT_BYTES  # of the prefix cache for the owner; 0: none

    @property
    def limits(self) -> ResourceLimits:
        """Limits of every session."""
        most, least = self.memory_limit_bytes, self.least_memory
        gives_back = most - least if most is not None and least is not None else 0
        return ResourceLimits(self.threads, self.affinity, self.gpu_layers, self.gpu_memory, gives_back)


def compute_on(cores: Sequence[int]) -> None:
    """Keep this thread, and those it starts, to these of the cores that it may use now; none: to all of them.

    EdgeError if it may not use one of them.
    """
    if not cores:
        return
    try:
        pin_to_cores(cores)
    except ValueError as error:
        raise EdgeError(str(error)) from None

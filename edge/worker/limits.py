"""Resource limits of an engine process: cores, threads, memory it gives back, layers and bytes of the GPU. Passed on
its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from devices.cores import cores_text, parse_cores, pin_to_cores
from edge.errors import EdgeError


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of every session."""

    threads: int
    affinity: tuple[int, ...] = ()  # cores to compute on; empty: all that the daemon may use
    gpu_layers: int | None = None  # most layers on the GPU; None: no limit
    gpu_memory: int | None = None  # most bytes of its memory; None: no limit
    gives_back: int = 0  # bytes of the memory that it was granted which others may take; 0: none

    def options(self) -> list[str]:
        """Return the limits as options of a command line."""
        options = ["--threads", str(self.threads)]
        if self.affinity:
            options += ["--affinity", cores_text(self.affinity)]
        if self.gpu_layers is not None:
            options += ["--gpu-layers", str(self.gpu_layers)]
        if self.gpu_memory is not None:
            options += ["--gpu-memory", str(self.gpu_memory)]
        if self.gives_back:
            options += ["--gives-back", str(self.gives_back)]
        return options

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ResourceLimits:
        """Return the limits of a command line that a parser with `add_arguments` read."""
        return cls(args.threads, args.affinity, args.gpu_layers, args.gpu_memory, args.gives_back)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ResourceLimits.options` writes."""
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--affinity", type=parse_cores, default=())
    parser.add_argument("--gpu-layers", type=int)
    parser.add_argument("--gpu-memory", type=int)
    parser.add_argument("--gives-back", type=int, default=0)


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

"""What of a device an engine process may use, as the daemon writes it on its command line and the process reads it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from devices.cores import cores_text, parse_cores, pin_to_cores
from edge.errors import EdgeError


@dataclass(frozen=True)
class ResourceLimits:
    """The limits that every session has."""

    threads: int
    affinity: tuple[int, ...] = ()  # the cores to compute on; none: all that the daemon may use
    gpu_layers: int | None = None  # the most on the GPU; None: as many as it likes

    def options(self) -> list[str]:
        """For the command line."""
        given = ["--threads", str(self.threads)]
        if self.affinity:
            given += ["--affinity", cores_text(self.affinity)]
        if self.gpu_layers is not None:
            given += ["--gpu-layers", str(self.gpu_layers)]
        return given

    @classmethod
    def of(cls, args: argparse.Namespace) -> ResourceLimits:
        """From a command line whose parser `add_arguments` made."""
        return cls(args.threads, args.affinity, args.gpu_layers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `ResourceLimits.options` writes."""
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--affinity", type=parse_cores, default=())
    parser.add_argument("--gpu-layers", type=int)


def compute_on(cores: Sequence[int]) -> None:
    """Keep this thread, and those it starts, to some of the cores that it may use now; none: all of these.

    EdgeError where it may not use one of them.
    """
    if not cores:
        return
    try:
        pin_to_cores(cores)
    except ValueError as error:
        raise EdgeError(str(error)) from None

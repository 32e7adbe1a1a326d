"""Base class of everything that an engine process can load."""

from __future__ import annotations

from abc import ABC, abstractmethod

from edge.errors import EdgeError
from transport import edge_pb2 as pb
from transport.collective import Group


class LoadedPart(ABC):
    """Loaded part: a whole model, a slice of a model, a projector, or a stage of an ONNX model."""

    @property
    def computed_s(self) -> float:
        """Seconds for which the part has computed so far; 0 if it does not count them."""
        return 0.0

    @property
    def gpu_bytes(self) -> tuple[int, int] | None:
        """Total and free bytes of the GPUs that the part uses, or None if it uses none."""
        return None

    @abstractmethod
    def describe(self) -> pb.Loaded:
        """Return the description of the loaded part, with the memory it takes."""

    @abstractmethod
    def run(self, request: pb.Run, group: Group) -> None:
        """Take part in the steps of rank 0 of the group until rank 0 ends them.

        Raises EdgeError if this part has no work in a group, and errors of links and of the engine.
        """

    def time(self, request: pb.Time) -> pb.Timed:
        """Return the duration of the part's own computation. Raises EdgeError if it cannot be timed alone."""
        raise EdgeError("the loaded part cannot be timed alone")

    def finish(self, timeout_s: float) -> None:  # noqa: B027 - most parts write nothing
        """Wait until background writes are complete, for at most `timeout_s`, because the process is about to end."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


def only_other(group: Group, what: str) -> None:
    """Raise EdgeError if a part that serves one other rank is in a larger group."""
    if group.world_size != 2:
        raise EdgeError(f"{what} needs a group of 2 ranks; {group.world_size} are connected")

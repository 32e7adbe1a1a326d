"""Base of what an engine process has loaded, whatever the kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from edge.errors import EdgeError
from transport import edge_pb2 as pb
from transport.collective import Group


class LoadedPart(ABC):
    """Part that an engine process loads: a whole model, a slice of one, a projector, or a stage of an ONNX model."""

    @abstractmethod
    def describe(self) -> pb.Loaded:
        """Return its kind of description, and the memory it takes."""

    @abstractmethod
    def run(self, request: pb.Run, group: Group) -> None:
        """Take part in the steps of rank 0 of the group, until it ends them. Raise EdgeError if this part has no work
        in a group; errors of links and of the engine."""

    def time(self, request: pb.Time) -> pb.Timed:
        """Return how long it takes by itself. EdgeError if it cannot be timed."""
        raise EdgeError("what is loaded here is not timed by itself")

    def finish(self, timeout_s: float) -> None:  # noqa: B027 - most parts write nothing
        """Wait until background writes are complete, for `timeout_s` at most: the process is about to end."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


def only_other(group: Group, what: str) -> None:
    """Raise EdgeError where what works for one other rank is in a larger group."""
    if group.world_size != 2:
        raise EdgeError(f"{what} for one other rank, {group.world_size} are connected")

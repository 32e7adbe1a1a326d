"""What an engine process asks of the model it holds, whatever the kind."""

from __future__ import annotations

from typing import Protocol

from edge.net.relink import Relink
from transport import edge_pb2 as pb
from transport.collective import Group


class LoadedPart(Protocol):
    """What was loaded: a whole model, a slice of a language model, or a stage of an ONNX model."""

    def describe(self) -> pb.Loaded:
        """What it is, and what it takes."""

    def run(self, asked: pb.Run, group: Group, relink: Relink | None) -> None:
        """Take part in what rank 0 of the group has computed, until it ends that. relink: the links that may change.
        EdgeError where this part has nothing to do in a group; the errors of links and of the engine."""

    def time(self, asked: pb.Time) -> pb.Timed:
        """How long it takes by itself. EdgeError where it cannot be timed."""

    def finish(self, timeout_s: float) -> None:
        """The process is about to end: let what is written in the background be whole, within so long."""

    def close(self) -> None:
        """Free the memory."""

"""What an engine process loads of an ONNX model: a stage of it."""

from __future__ import annotations

from collections.abc import Callable

from edge.net.relink import Relink
from edge.onnx import stage as onnx_stage
from edge.worker.limits import ResourceLimits
from edge.worker.messages import boundaries_of
from transport import edge_pb2 as pb
from transport.collective import Group

_MOST_RUNS = 10_000  # of a timing


class OnnxPart:
    """A loaded stage of an ONNX model, with the stages before and after it on the ranks next to this one."""

    def __init__(self, stage: onnx_stage.LoadedStage, memory_bytes: int) -> None:
        self.stage = stage
        self._memory_bytes = memory_bytes

    def describe(self) -> pb.Loaded:
        """Its memory, provider and threads."""
        engine = self.stage.engine
        return pb.Loaded(
            memory_bytes=self._memory_bytes,
            provider=engine.provider,
            fell_back_from=engine.fell_back_from,
            threads=engine.threads,
        )

    def run(self, _: pb.Run, group: Group, __: Relink | None) -> None:
        """Compute the items that come, until their end. The errors of links and of the engine."""
        before, after = group.rank - 1, (group.rank + 1) % group.world_size
        onnx_stage.follow(self.stage, group.links[before], group.links[after])

    def time(self, asked: pb.Time) -> pb.Timed:
        """How long one run takes. EngineError where the model does not take noise."""
        figure = self.stage.time(min(asked.steps, _MOST_RUNS))
        return pb.Timed(run_s=figure.seconds, busy=[figure.busy])

    def finish(self, _: float) -> None:
        """Nothing is written in the background."""

    def close(self) -> None:
        """Free the stage."""
        self.stage.close()


def load(asked: pb.Load, _: int, lent: ResourceLimits, __: Callable[[float], None]) -> OnnxPart:
    """The stage that was asked for, with no more threads than the device lends. EdgeError names the field of its
    description that cannot be; the errors of `edge.onnx.stage.load`."""
    takes, gives = boundaries_of(asked.stage)
    threads = max(1, min(asked.stage.threads or lent.threads, lent.threads))
    provider = asked.stage.provider if asked.stage.HasField("provider") else None
    return OnnxPart(*onnx_stage.load(asked.path, takes, gives, threads, provider, asked.memory_limit_bytes))

"""Loading in an engine process: a stage of an ONNX model."""

from __future__ import annotations

from collections.abc import Callable

from devices.probe import own_rss
from edge.errors import NotEnoughMemory
from edge.onnx import stage as onnx_stage
from edge.weights.elastic.share import SHARE
from edge.worker.limits import ResourceLimits
from edge.worker.loaded import LoadedPart
from edge.worker.messages import boundaries_from
from transport import edge_pb2 as pb
from transport.collective import Group

_MOST_RUNS = 10_000  # of a timing


class OnnxPart(LoadedPart):
    """A loaded stage of an ONNX model; the stages before and after it are on the neighbouring ranks."""

    def __init__(self, stage: onnx_stage.LoadedStage, memory_bytes: int) -> None:
        self.stage = stage
        self._memory_bytes = memory_bytes

    def describe(self) -> pb.Loaded:
        """Return the memory, execution provider and threads of the stage."""
        engine = self.stage.engine
        return pb.Loaded(
            memory_bytes=self._memory_bytes,
            provider=engine.provider,
            fell_back_from=engine.fell_back_from,
            threads=engine.threads,
        )

    def run(self, _: pb.Run, group: Group) -> None:
        """Compute the items that come, until their end. Raises errors of links and of the engine."""
        before, after = group.rank - 1, (group.rank + 1) % group.world_size
        onnx_stage.follow(self.stage, group.links[before], group.links[after])

    def time(self, request: pb.Time) -> pb.Timed:
        """Return how long one run takes. EngineError if the model does not take noise."""
        figure = self.stage.time(min(request.steps, _MOST_RUNS))
        return pb.Timed(run_s=figure.seconds, busy=[figure.busy])

    def close(self) -> None:
        self.stage.close()


def load(request: pb.Load, _: int, limits: ResourceLimits, __: Callable[[float], None]) -> OnnxPart:
    """Load a stage, with no more threads than the limits allow. EdgeError names the invalid field of its description;
    the errors of `edge.onnx.stage.load`."""
    takes, gives = boundaries_from(request.stage)
    threads = max(1, min(request.stage.threads or limits.threads, limits.threads))
    provider = request.stage.provider if request.stage.HasField("provider") else None
    before, limit = own_rss(), request.memory_limit_bytes
    need = before + onnx_stage.need_bytes(request.path, takes, gives, limit)
    SHARE.request(need, need)
    stage, n_bytes = onnx_stage.load(request.path, takes, gives, threads, provider, limit)
    try:
        SHARE.request(before + n_bytes, before + n_bytes)  # less or more: its values are known only now
    except NotEnoughMemory:
        stage.close()
        raise
    return OnnxPart(stage, n_bytes)

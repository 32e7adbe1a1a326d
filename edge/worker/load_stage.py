"""Load a stage of an ONNX model in an engine process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from devices.probe import own_rss
from edge.errors import NotEnoughMemory
from edge.onnx import stage as onnx_stage
from edge.parallel.engine_kinds import own_kind
from edge.weights.elastic.share import SHARE
from edge.worker.limits import ResourceLimits
from edge.worker.loaded import LoadedPart
from edge.worker.messages import boundaries_from
from transport import edge_pb2 as pb
from transport.collective import Group

_RUNTIME_BYTES = 64 << 20  # memory of ONNX Runtime itself, which a stage needs besides its weights
_MOST_RUNS = 10_000  # maximum number of timed runs


class OnnxPart(LoadedPart):
    """Loaded stage of an ONNX model. The neighbouring ranks have the stages before and after it."""

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
        """Compute the incoming items until their end. Raises errors of links and of the engine."""
        before, after = group.rank - 1, (group.rank + 1) % group.world_size
        onnx_stage.follow(self.stage, group.links[before], group.links[after])

    def time(self, request: pb.Time) -> pb.Timed:
        """Return the duration of one run. Raises EngineError if the model cannot run on random inputs."""
        figure = self.stage.time(min(request.steps, _MOST_RUNS))
        return pb.Timed(run_s=figure.seconds, busy=[figure.busy])

    def close(self) -> None:
        self.stage.close()


def load(request: pb.Load, _: int, limits: ResourceLimits, progress: Callable[[float], None]) -> OnnxPart:
    """Load a stage, with at most the threads that the limits allow.

    Raises EdgeError if a field of the stage's description is invalid, and the errors of `edge.onnx.stage.load`.
    """
    takes, gives = boundaries_from(request.stage)
    threads = max(1, min(request.stage.threads or limits.threads, limits.threads))
    provider = request.stage.provider if request.stage.HasField("provider") else None
    before, limit = own_rss(), request.memory_limit_bytes
    kind, need = own_kind(), before + onnx_stage.need_bytes(request.path, takes, gives)
    pages = kind.pages_networks and 0 < limit < need + _RUNTIME_BYTES
    budget = SHARE.request(before, limit) if pages else SHARE.request(need, need)
    opener = partial(kind.open_network, progress=progress)
    stage, n_bytes = onnx_stage.load(
        request.path, takes, gives, threads, provider, limit, opener, budget=budget if pages else 0
    )
    try:
        # correct the request, because the sizes of values are known only now
        SHARE.request(before + n_bytes, before + n_bytes)
    except NotEnoughMemory:
        stage.close()
        raise
    return OnnxPart(stage, n_bytes)

"""Times of the parts of an ONNX graph on a device. Each part is loaded as its own stage and runs on random inputs.

The whole model is also timed as one stage. The fixed time of a stage is (sum of n parts - whole model) / (n - 1). It
includes passing on tensors, and the lack of optimizations that ONNX Runtime makes across parts.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from devices.files import removed_at_end
from edge.cluster.client import Remote
from edge.cluster.session import EngineSession
from edge.errors import EngineError, NotEnoughMemory, WorkerError
from edge.microbenchmark import BestTime
from edge.onnx.model import CutStage, OnnxSource
from edge.tasks import CancelScope
from edge.worker.messages import stage_message
from partition.plan.onnx_cuts import Cut
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.onnx_split import node_seconds
from partition.plan.plan import Range
from partition.predict.speeds import MOST_S
from partition.slices.recipe import Recipe
from transport import edge_pb2 as pb

MOST_PARTS = 40  # maximum number of timed parts; with more segments, neighbours are timed together
_LEAST_S = 0.2  # minimum time for timing a part
_LONG_S = 2.0  # a run of that length is not repeated
_LEAST_RUNS, _MOST_RUNS = 3, 2000
_COPIES = 3  # copies of a stage's weights in memory while it is loaded


@dataclass(frozen=True)
class StageProbe:
    """Part to time."""

    stage: OnnxStage
    part: CutStage
    recipe: Recipe
    path: Path  # file that the part is cut from


@dataclass(frozen=True)
class StageProbes:
    """Graph cut into parts to time."""

    segments_s: tuple[float, ...]  # estimates of the segments between candidate cuts
    groups: tuple[range, ...]  # segments of each part
    parts: tuple[StageProbe, ...]
    whole: StageProbe | None  # None if there is only one part

    @property
    def steps(self) -> int:
        """Number of times that `timed` calls its callback."""
        return len(self.parts) + (self.whole is not None)


@dataclass(frozen=True)
class SegmentTimes:
    """Segment times of one device."""

    segments_s: tuple[float, ...]  # seconds of each segment, without `stage_s`
    stage_s: float  # fixed seconds of a stage, in addition to its segments
    runtime_bytes: int  # memory of the process without weights
    estimated: tuple[int, ...]  # segments that could not be timed, because they reject random inputs or do not fit
    busy: bool = False  # True: other work kept the device busy, so it may be faster

    @property
    def estimate(self) -> bool:
        """False, because the device was measured."""
        return False

    @property
    def seconds(self) -> float:
        """Seconds of the whole model as one stage."""
        return self.stage_s + sum(self.segments_s)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any, segments: int) -> SegmentTimes | None:
        """Return the times of `segments` segments from values of `to_json`.

        Return None for other values, such as those of another version.
        """
        try:
            times = cls(
                tuple(map(float, values["segments_s"])),
                float(values["stage_s"]),
                int(values["runtime_bytes"]),
                tuple(map(int, values["estimated"])),
                values["busy"] is True,
            )
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        fine = all(0 <= seconds < MOST_S for seconds in (*times.segments_s, times.stage_s)) and times.runtime_bytes >= 0
        known = all(0 <= i < segments for i in times.estimated)
        return times if fine and known and len(times.segments_s) == segments else None


def probes(model: OnnxSource, cuts: Sequence[Cut], provider: str | None, closing: CancelScope) -> StageProbes:
    """Return the parts between ascending cuts. Their source files stay until `closing` is closed.

    Raises PlanError for invalid cuts, or CannotSlice for a part that cannot be sent.
    """
    nodes = model.graph.nodes
    ends = (0, *(cut.position for cut in cuts), len(nodes))
    segments_s = [sum(map(node_seconds, nodes[start:stop])) for start, stop in pairwise(ends)]
    groups = _groups(segments_s)

    def cut(segments: Sequence[range]) -> list[StageProbe]:
        stages = tuple(
            OnnxStage(f"part {i}", Range(ends[group.start], ends[group.stop]), provider=provider)
            for i, group in enumerate(segments)
        )
        plan = OnnxPlan(model.name[:255], model.digest, len(nodes), stages)
        model.check(plan)
        return [
            StageProbe(stage, part, *closing.enter(model.recipe(part)))
            for stage, part in zip(stages, model.parts(plan), strict=True)
        ]

    whole = cut([range(len(segments_s))])[0] if len(groups) > 1 else None
    return StageProbes(tuple(segments_s), tuple(groups), tuple(cut(groups)), whole)


def timed(
    session: EngineSession, worker: Remote | None, parts: StageProbes, room: int, on_part: Callable[[], None]
) -> SegmentTimes:
    """Load and time the parts in turn, in a session on `worker` (None: this device).

    room: memory in bytes.

    Raises EngineError if no part can be timed, WorkerError if an answer is invalid, and the errors of sessions.
    """
    took: list[BestTime | None] = []
    runtime_bytes = 0
    for probe in parts.parts:
        figure, n_bytes = _timed(session, worker, probe)
        took.append(figure)
        runtime_bytes = max(runtime_bytes, n_bytes - probe.part.weight_bytes)
        on_part()
    whole = None
    if parts.whole is not None:
        if _COPIES * parts.whole.part.weight_bytes <= room:
            whole, _ = _timed(session, worker, parts.whole)
        on_part()
    seconds = [None if figure is None else figure.seconds for figure in took]
    whole_s = None if whole is None else whole.seconds
    times = times_of(parts.segments_s, parts.groups, seconds, whole_s, runtime_bytes, session.device)
    return replace(times, busy=any(figure is not None and figure.busy for figure in (*took, whole)))


def times_of(
    estimates_s: Sequence[float],
    groups: Sequence[range],
    seconds: Sequence[float | None],
    whole_s: float | None,
    runtime_bytes: int,
    device: str,
) -> SegmentTimes:
    """Return the times of segments from the times of groups of segments.

    seconds: None for a group without a time.

        stage_s   = (sum of the groups' seconds - whole_s) / (groups - 1), at most the time of the fastest group
        segment_s = (seconds of its group - stage_s), divided within the group in proportion to the estimates

    A group without a time is assumed to exceed its estimate by the same factor as the others. Raises EngineError if no
    group has a time.
    """
    known = [(group, took) for group, took in zip(groups, seconds, strict=True) if took is not None]
    if not known:
        raise EngineError(
            f"{device}: no part of the model fits and runs on random input, so it cannot be measured;"
            " give an input that it takes"
        )
    stage_s = 0.0
    if whole_s is not None and len(known) == len(groups) > 1:
        beyond = (sum(took for _, took in known) - whole_s) / (len(groups) - 1)
        stage_s = max(0.0, min(beyond, *(took for _, took in known)))
    measured_s = sum(took - stage_s for _, took in known)
    ratio = measured_s / (sum(estimates_s[i] for group, _ in known for i in group) or 1.0)
    segments_s: list[float] = []
    for group, took in zip(groups, seconds, strict=True):
        own = [estimates_s[i] for i in group]
        all_s = sum(own)
        group_s = ratio * all_s if took is None else took - stage_s
        segments_s += [group_s * (estimate / all_s if all_s else 1 / len(own)) for estimate in own]
    estimated = tuple(i for group, took in zip(groups, seconds, strict=True) if took is None for i in group)
    return SegmentTimes(tuple(segments_s), stage_s, max(0, runtime_bytes), estimated)


def _groups(segments_s: Sequence[float]) -> list[range]:
    """Return ranges of segments that are timed together: single segments, or MOST_PARTS groups of similar work."""
    n = len(segments_s)
    if n <= MOST_PARTS:
        return [range(i, i + 1) for i in range(n)]
    all_s = sum(segments_s) or 1.0
    before = accumulate(segments_s, initial=0.0)
    place = [int(MOST_PARTS * (start + own / 2) / all_s) for start, own in zip(before, segments_s, strict=False)]
    starts = [i for i in range(n) if i == 0 or place[i] != place[i - 1]]
    return [range(start, stop) for start, stop in pairwise([*starts, n])]


def _timed(session: EngineSession, worker: Remote | None, probe: StageProbe) -> tuple[BestTime | None, int]:
    """Return (time, bytes of memory) of one part, or (None, 0) if it does not fit or rejects random inputs."""
    described = stage_message(probe.stage, probe.part.takes, probe.part.gives)
    with _there(worker, probe) as path:
        load = pb.Load(slice=probe.part.digest, path=path, stages=[1], stage=described)
        try:
            n_bytes = int(session.ask(pb.Command(load=load)).loaded.memory_bytes)
        except WorkerError as error:
            if error.error != NotEnoughMemory.__name__:
                raise
            return None, 0
        try:
            return _seconds(session), n_bytes
        except WorkerError as error:
            if error.error != EngineError.__name__:
                raise
            return None, 0
        finally:
            session.unload()


@contextmanager
def _there(worker: Remote | None, probe: StageProbe) -> Iterator[str]:
    """Yield the path of a part on this device until the end of the block. For a worker, send the part and yield ""."""
    if worker is not None:
        worker.send_slice(probe.recipe, probe.path, probe.part.digest)
        yield ""
        return
    with tempfile.NamedTemporaryFile(prefix="edge-part-", suffix=".onnx") as file, removed_at_end(Path(file.name)):
        file.write(probe.part.content)
        file.flush()
        yield file.name


def _seconds(session: EngineSession) -> BestTime:
    once = _run(session, 1)
    if once.seconds >= _LEAST_S:
        return once.or_better(_run(session, _LEAST_RUNS)) if once.seconds < _LONG_S else once
    return _run(session, max(_LEAST_RUNS, min(_MOST_RUNS, math.ceil(_LEAST_S / once.seconds))))


def _run(session: EngineSession, repeats: int) -> BestTime:
    answered = session.ask(pb.Command(time=pb.Time(steps=repeats))).timed
    if not 0 < answered.run_s < MOST_S or len(answered.busy) != 1:
        raise WorkerError(f"{session.device} returned invalid times; install the same version of edge there")
    return BestTime(answered.run_s, answered.busy[0])

"""Microbenchmarks of a model's layers and its head on a device: slices of weights that are zero, timed and compared.

Timed are n layers, twice as many, n of half width, and one with the head:

    step    = 2 x (n layers) - (2n layers), of one row: what a step takes beside its layers
    layer   = (n layers - step) / n, by rows; half a layer likewise
    head    = (a layer and the head) - step - layer, by rows; of as few layers as a slice can have

n layers are more than caches hold, as decoding is bound by what memory gives; fewer where a budget has no room for
twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edge.cluster.session import EngineSession
from edge.errors import WorkerError
from edge.llm.options import EngineOptions
from edge.microbenchmark import BestTime
from edge.slices.local import OwnSlices
from edge.tasks import CancelScope
from edge.worker.messages import options_message
from partition.errors import CannotSlice, PlanError
from partition.plan.plan import NOTHING, Range, Slice
from partition.plan.tensor import shards
from partition.predict.speeds import Curve, DeviceSpeed
from partition.slices.gguf_slice import blank_recipe, check_tensor, limits
from partition.slices.recipe import Recipe
from quant.gguf.file import GgufFile
from transport import edge_pb2 as pb

DECODE_ROWS = (1, 2, 4, 8)  # of the steps that are timed: kernels take some numbers of rows better than others
FEW_ROWS = (1, 4)  # of those that take only a part of a step
PREFILL_ROWS = 64
DEPTH = 256  # tokens behind a row, where attention is timed
_PIECES = 5  # of each step that is timed, at least
_LEAST_BYTES = 96 << 20  # of layers
_MOST_STEP = 0.3  # of n layers at their fastest: it is noise that makes a step's own part seem more
_MOST_S = 3600.0  # no figure is that large
_OPTIONS = EngineOptions(context=512, batch=512, sequences=max(DECODE_ROWS))
_ROWS = {
    "layers": (*DECODE_ROWS, PREFILL_ROWS),
    "more": (1,),
    "half": (*FEW_ROWS, PREFILL_ROWS),
    "head": FEW_ROWS,
}


@dataclass(frozen=True)
class Probe:
    """A slice to be timed."""

    recipe: Recipe
    digest: str
    path: Path  # of the owner's own copy
    layers: int
    rows: tuple[int, ...]
    depth: int = 0  # above 0: also with so many tokens behind the row
    last: bool = False  # with the head


@dataclass(frozen=True)
class Times:
    """Times of the slices on one device."""

    n: int  # layers of the smaller slices
    steps: Mapping[str, Curve]  # by slice: layers, more (2n), half, head; the second and third may be missing
    behind_s: float  # that n layers take longer with DEPTH tokens behind the row
    runtime_bytes: int  # of the process, beside weights
    disk_bytes_per_s: float | None  # None where it was not asked for, or cannot be measured
    busy: bool = False  # something else kept the device busy: it may take less
    head_layers: int = 1  # of the slice with the head


def probes(
    file: GgufFile, model_digest: str, closing: CancelScope, most_bytes: int | None = None
) -> tuple[dict[str, Probe], int]:
    """The slices to be timed, by name, and n. They stay on this device's disk until `closing` is. most_bytes: of the
    weights of a slice, as far as one layer takes less."""
    can, slices = limits(file), OwnSlices()
    total = can.sizes.layers
    ends = [stop for stop in (*can.begins[1:], total) if can.can_be_stage(0, stop)]  # of slices from the first layer on
    twice = [n for n in ends if 2 * n in ends] or ends[:1]
    n = next((n for n in twice if sum(can.layer_bytes[:n]) >= _LEAST_BYTES), twice[-1])
    if most_bytes is not None:
        fitting = (some for some in twice if some <= n and sum(can.layer_bytes[: 2 * some]) <= most_bytes)
        n = max(fitting, default=ends[0])
    heads, ff = Range(0, can.sizes.heads), Range(0, can.sizes.ff)
    cuts = {"layers": Slice(Range(0, n), heads, ff, NOTHING, first=True)}
    if 2 * n in ends:
        cuts["more"] = Slice(Range(0, 2 * n), heads, ff, NOTHING, first=True)
    cuts["head"] = Slice(Range(0, ends[0]), heads, ff, Range(0, can.sizes.vocab), first=True)
    try:
        check_tensor(file)
        half = shards(can, ("a", "b"), (1.0, 1.0))[0]
        cuts["half"] = Slice(Range(0, n), half.heads, half.ff, NOTHING, first=True)
    except (CannotSlice, PlanError):
        pass  # its layers cannot be shared
    found = {}
    for name, cut in cuts.items():
        recipe = blank_recipe(file, model_digest, cut)
        digest = slices.digest(recipe, file.path, closing.check)
        path = closing.enter(slices.use(recipe, file.path, digest, closing.check))
        depth = DEPTH if name == "layers" else 0
        found[name] = Probe(recipe, digest, path, len(cut.layers), _ROWS[name], depth, last=name == "head")
    return found, n


def timed(
    session: EngineSession,
    found: Mapping[str, Probe],
    n: int,
    on_slice: Callable[[], None],
    *,
    threads: int | None = None,
    disk: bool = False,
    memory: int | None = None,
) -> Times:
    """Load and time the slices, one after the other, in a session whose device has them; those that were busy once more
    at the end. threads: None as the device has it. disk: also how fast it reads. memory: bytes that its process may
    hold; a worker knows its own limit. Errors of sessions, and WorkerError for answers that cannot be."""
    took: dict[str, list[BestTime]] = {}
    runtime_bytes, disk_bytes_per_s = 0, 0.0
    options = replace(_OPTIONS, threads=threads)
    for name, probe in found.items():
        wants_disk = disk and name == "layers"
        took[name], n_bytes, rate = _timed(session, probe, options, wants_disk, memory)
        runtime_bytes, disk_bytes_per_s = max(runtime_bytes, n_bytes), max(disk_bytes_per_s, rate)
        on_slice()
    for name, probe in found.items():  # what was busy then may not be now
        if any(figure.busy for figure in took[name]):
            again, _, _ = _timed(session, probe, options, False, memory)
            took[name] = [one.or_better(other) for one, other in zip(took[name], again, strict=True)]
    steps = {
        name: Curve(tuple(zip(probe.rows, (figure.seconds for figure in took[name]), strict=False)))
        for name, probe in found.items()
    }
    deep = [took[name] for name, probe in found.items() if probe.depth]
    behind_s = max((max(0.0, of[-1].seconds - of[0].seconds) for of in deep), default=0.0)
    busy = any(figure.busy for of in took.values() for figure in of)
    return Times(n, steps, behind_s, runtime_bytes, disk_bytes_per_s or None, busy, found["head"].layers)


def _timed(
    session: EngineSession, probe: Probe, options: EngineOptions, disk: bool, memory: int | None
) -> tuple[list[BestTime], int, float]:
    """One slice: its figures, bytes of the process beside weights, and bytes a second of the disk where that is
    asked."""
    # A slice is to be the last stage, or not: `place` allows one stage more than there are ranks.
    stages = [1] * (session.rank + (1 if probe.last else 2))
    load = pb.Load(slice=probe.digest, path=str(probe.path), stages=stages, options=options_message(options))
    load.memory_limit_bytes = memory or 0
    loaded = session.ask(pb.Command(load=load)).loaded
    command = pb.Time(rows=probe.rows, steps=_PIECES, depth=probe.depth, disk=disk)
    answered = session.ask(pb.Command(time=command)).timed
    session.unload()
    took, busy = answered.step_s, answered.busy
    n = len(probe.rows) + bool(probe.depth)
    if not len(took) == len(busy) == n or not all(0 < one < _MOST_S for one in took):
        raise WorkerError(f"{session.device} answers with times that cannot be; is it of another version?")
    figures = [BestTime(*one) for one in zip(took, busy, strict=True)]
    return figures, loaded.memory_bytes - probe.recipe.n_bytes, answered.disk_bytes_per_s


def device_speed(times: Times, device: str, name: str, memory_bytes: int) -> DeviceSpeed:
    """A device's speed by what its slices take. Differences are never less than 0."""
    base, n = times.steps["layers"], times.n
    one_s = base.at(1)
    more_s = times.steps["more"].at(1) if "more" in times.steps else 2 * one_s
    fastest_s = min(seconds for _, seconds in base.points)  # one row may have had a bad moment
    step_s = min(max(0.0, 2 * one_s - more_s), _MOST_STEP * fastest_s)

    def layers(of: Curve) -> Curve:
        return Curve(tuple((rows, max(0.0, seconds - step_s) / n) for rows, seconds in of.points))

    layer, half = layers(base), times.steps.get("half")
    head = [
        (rows, max(0.0, took - step_s - times.head_layers * layer.at(rows)))
        for rows, took in times.steps["head"].points
    ]
    return DeviceSpeed(
        device=device,
        name=name,
        step_s=Curve(((1, step_s),)),
        layer_s=layer,
        token_s=times.behind_s / n / DEPTH,
        half_layer_s=layer.times(0.5) if half is None else layers(half),
        head_s=Curve(tuple(head)),
        memory_bytes=memory_bytes,
        runtime_bytes=times.runtime_bytes,
        disk_bytes_per_s=times.disk_bytes_per_s,
        busy=times.busy,
    )

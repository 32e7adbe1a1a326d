"""Times of a model's layers and head on a device, from timed slices with made-up weights.

The timed slices have n layers, 2n layers, n layers of half width, a few layers for a long prompt's step, and a few
layers with the head.

    step    = 2 x (n layers) - (2n layers), for one row: the part of a step's time that does not depend on layers
    layer   = (n layers - step) / n, by rows; half layers likewise
    head    = (few layers and the head) - step - layers, by rows
    layer   = (few layers - step) / their number, for as many rows as a step of a long prompt has

The last two slices have as few layers as possible. The slice with the head cannot measure a prompt, because its last
layer computes the FFN only for rows with logits.

The n layers exceed the CPU's caches, because decoding is bound by memory bandwidth. n is smaller if the memory budget
has no room for 2n layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Lock

from edge.cluster.session import EngineSession
from edge.errors import WorkerError
from edge.llm.options import DEFAULT_BATCH, EngineOptions
from edge.microbenchmark import BestTime
from edge.models.local_slices import OwnSlices
from edge.tasks import CancelScope
from edge.worker.messages import options_message
from partition.errors import CannotSlice, PlanError
from partition.model.file import ModelFile
from partition.plan.plan import NOTHING, Range, Slice
from partition.plan.tensor import Limits, shards
from partition.predict.speeds import MOST_S, Curve, DeviceSpeed
from partition.slices.gguf_slice import blank_recipe, check_tensor, limits
from partition.slices.recipe import Recipe
from transport import edge_pb2 as pb

DECODE_ROWS = (1, 2, 4, 8)  # rows of timed steps; kernels suit some numbers of rows better than others
FEW_ROWS = (1, 4)  # rows for slices that measure only a part of a step
PREFILL_ROWS = 64
DEPTH = 256  # tokens in the cache for timing attention
CHUNK_ROWS = (DEFAULT_BATCH - DEPTH, 128)  # rows of a long prompt's step: the first number that is not too slow
_CHUNK_S = 1.0  # time limit for these rows
_SAMPLES = 5  # minimum number of samples for each timed step
_LEAST_BYTES = 96 << 20  # minimum size of the n layers
_LEAST_TASK_S = 0.05  # seconds for one number of rows, even if time is short
_ONE_ROW_PART = 0.1  # part of the time for the first figure
_FIRST_PASSES = 200  # minimum duration of all steps of the first slice, in passes of one row
_MOST_STEP = 0.3  # limit of `step` without the network, relative to the fastest time of n layers; more is noise
_OPTIONS = EngineOptions(context=DEFAULT_BATCH, batch=DEFAULT_BATCH, sequences=max(DECODE_ROWS))
_ROWS = {
    "layers": (*DECODE_ROWS, PREFILL_ROWS),
    "more": (1,),
    "half": (*FEW_ROWS, PREFILL_ROWS),
    "head": FEW_ROWS,
}


@dataclass(frozen=True)
class LayerProbe:
    """Slice to time."""

    recipe: Recipe
    digest: str
    path: Path  # path of this device's copy
    layers: int
    rows: tuple[int, ...]
    depth: int = 0  # if above 0, the first of `rows` is also timed with this many tokens in the cache
    last: bool = False  # True: the slice has the head
    other_bytes: int = 0  # weights that a token of the whole model reads in addition to the slice's


@dataclass(frozen=True)
class LayerTimes:
    """Slice times of one device."""

    n: int  # number of layers in the smaller slices
    # Times by slice: layers, head, chunk, half, more (2n). Only layers are always present.
    steps: Mapping[str, Curve]
    depth_s: float  # additional time of n layers for a row with DEPTH tokens in the cache
    runtime_bytes: int  # memory of the process without weights
    disk_bytes_per_s: float | None  # None if it was not requested or cannot be measured
    busy: bool = False  # True: other work kept the device busy, so it may be faster
    few_layers: int = 1  # layers of the slice with the head, and of the slice for a long prompt's step
    chunk_depth_s: float = 0.0  # additional time of the latter slice with DEPTH tokens in the cache


def cuts_to_time(file: ModelFile, most_bytes: int | None = None) -> tuple[dict[str, Slice], int]:
    """Return the cuts of the slices to time, by name, and n.

    most_bytes: maximum size of a slice's weights, unless a single layer exceeds it.
    """
    can = limits(file)
    total = can.sizes.layers
    # ends of possible slices that begin with the first layer
    ends = [stop for stop in (*can.begins[1:], total) if can.can_be_stage(0, stop)]
    twice = [n for n in ends if 2 * n in ends] or ends[:1]
    n = next((n for n in twice if sum(can.layer_bytes[:n]) >= _LEAST_BYTES), twice[-1])
    if most_bytes is not None:
        fitting = (some for some in twice if some <= n and sum(can.layer_bytes[: 2 * some]) <= most_bytes)
        n = max(fitting, default=ends[0])
    heads, ff = Range(0, can.sizes.heads), Range(0, can.sizes.ff)
    # The most important ones come first, because time may be short.
    cuts = {
        "layers": Slice(Range(0, n), heads, ff, NOTHING, first=True),
        "head": Slice(Range(0, ends[0]), heads, ff, Range(0, can.sizes.vocab), first=True),
        "chunk": Slice(Range(0, ends[0]), heads, ff, NOTHING, first=True),
    }
    try:
        check_tensor(file)
        half = shards(can, ("a", "b"), (1.0, 1.0))[0]
        cuts["half"] = Slice(Range(0, n), half.heads, half.ff, NOTHING, first=True)
    except (CannotSlice, PlanError):
        pass  # the model's layers do not support tensor parallelism
    if 2 * n in ends:
        cuts["more"] = Slice(Range(0, 2 * n), heads, ff, NOTHING, first=True)
    return cuts, n


class Probes(Mapping[str, LayerProbe]):
    """Slices to time, by name. A slice is created on this device's disk when the first device needs it."""

    def __init__(self, file: ModelFile, model_digest: str, cuts: Mapping[str, Slice], closing: CancelScope) -> None:
        """cuts: cuts from `cuts_to_time`. closing: removes the slices when it is closed."""
        self._file, self._digest, self._cuts, self._closing = file, model_digest, cuts, closing
        self._limits, self._created, self._lock = limits(file), dict[str, LayerProbe](), Lock()

    def __getitem__(self, name: str) -> LayerProbe:
        with self._lock:
            if name not in self._created:
                self._created[name] = self._create(name, self._cuts[name])
            return self._created[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cuts)

    def __len__(self) -> int:
        return len(self._cuts)

    def _create(self, name: str, cut: Slice) -> LayerProbe:
        slices, check = OwnSlices(), self._closing.check
        recipe = blank_recipe(self._file, self._digest, cut)
        digest = slices.digest(recipe, self._file.path, check)
        path = self._closing.enter(slices.use(recipe, self._file.path, digest, check))
        depth = DEPTH if name in ("layers", "chunk") else 0
        others = other_bytes(self._limits, cut)
        return LayerProbe(recipe, digest, path, len(cut.layers), _ROWS.get(name, ()), depth, name == "head", others)


def largest_bytes(file: ModelFile) -> int:
    """Return the bytes of the largest slice that is timed."""
    can = limits(file)
    total = sum(can.layer_bytes) + can.vocab_bytes * can.sizes.vocab
    return round(total) - min(other_bytes(can, cut) for cut in cuts_to_time(file)[0].values())


def other_bytes(can: Limits, cut: Slice) -> int:
    """Return the bytes of weights that a token of the whole model reads in addition to those of a slice."""
    return round(sum(can.layer_bytes[len(cut.layers) :]) + can.vocab_bytes * (can.sizes.vocab - len(cut.vocab)))


def timed(
    session: EngineSession,
    slices: Mapping[str, LayerProbe],
    n: int,
    on_slice: Callable[[], None],
    *,
    threads: int | None = None,
    disk: bool = False,
    memory: int | None = None,
    gpu_layers: int | None = None,
    most_s: float = math.inf,
    send: Callable[[LayerProbe], None] = lambda probe: None,
    on_times: Callable[[LayerTimes], None] = lambda times: None,
    clock: Callable[[], float] = time.monotonic,
) -> LayerTimes:
    """Load and time the slices in turn, on the device of a session.

    n: the number of layers from `cuts_to_time`.
    on_slice: called after each slice.
    threads: threads of the device; None: its default.
    disk: also measure the disk's read rate.
    memory: bytes that the process may use; None for a worker, which knows its own limit.
    gpu_layers: number of layers on the GPU; None: as a model is loaded.
    most_s: seconds after which no further slice is timed. Of the first slice at least one row is timed.
    send: brings a slice to the device.
    on_times: called with the times so far.
    Raises the errors of sessions, and WorkerError if an answer is invalid.
    """
    figures: dict[str, list[BestTime]] = {}
    runtime_bytes, disk_bytes_per_s, layer_s = 0, 0.0, 0.0
    options = replace(_OPTIONS, threads=threads, gpu_layers=gpu_layers)
    timed_slices: dict[str, LayerProbe] = {}
    until, is_short = clock() + most_s, False

    def so_far() -> LayerTimes:
        deep_s = {
            name: max(0.0, figures[name][-1].seconds - figures[name][0].seconds)
            for name, probe in timed_slices.items()
            if probe.depth
        }
        return LayerTimes(
            n=n,
            steps={name: _curve(probe, figures[name]) for name, probe in timed_slices.items()},
            depth_s=deep_s.get("layers", 0.0),
            runtime_bytes=runtime_bytes,
            disk_bytes_per_s=disk_bytes_per_s or None,
            busy=any(figure.busy for slice_ in figures.values() for figure in slice_),
            few_layers=timed_slices["head"].layers if "head" in timed_slices else 1,
            chunk_depth_s=deep_s.get("chunk", 0.0),
        )

    for i, name in enumerate(slices):
        if is_short or (i > 0 and clock() >= until):
            on_slice()
            continue
        probe = slices[name]
        if name == "chunk":
            probe = replace(probe, rows=_chunk_rows(probe.layers * layer_s))
        if not probe.rows:
            on_slice()
            continue
        send(probe)
        with _loaded(session, probe, options, memory) as process_bytes:
            runtime_bytes = max(runtime_bytes, process_bytes)
            if i == 0 and most_s < math.inf:  # one row takes little time, and corrects the estimate of everything else
                timed_slices[name] = replace(probe, rows=probe.rows[:1], depth=0)
                most_row_s = max(_LEAST_TASK_S, _ONE_ROW_PART * most_s)
                figures[name], _ = _timed(session, timed_slices[name], most_s=most_row_s)
                on_times(so_far())
                is_short = clock() + _FIRST_PASSES * figures[name][0].seconds > until
            if not is_short:
                tasks = (len(slices) - i) * (len(probe.rows) + bool(probe.depth))
                most_task_s = max(_LEAST_TASK_S, (until - clock()) / tasks)
                figures[name], rate = _timed(session, probe, disk=disk and name == "layers", most_s=most_task_s)
                timed_slices[name], disk_bytes_per_s = probe, max(disk_bytes_per_s, rate)
        if name == "layers":
            layer_s = _curve(probe, figures[name]).at(PREFILL_ROWS) / probe.layers
        on_times(so_far())
        on_slice()
    return so_far()


def _curve(probe: LayerProbe, figures: Sequence[BestTime]) -> Curve:
    return Curve(tuple(zip(probe.rows, (figure.seconds for figure in figures), strict=False)))


def _chunk_rows(seconds: float) -> tuple[int, ...]:
    """Return the rows of a long prompt's step for timing a slice, or () if even the lowest number is too slow.

    seconds: time of the slice's layers for PREFILL_ROWS.
    """
    fitting = (rows for rows in CHUNK_ROWS if rows / PREFILL_ROWS * seconds <= _CHUNK_S)
    return tuple(islice(fitting, 1))


@contextmanager
def _loaded(session: EngineSession, probe: LayerProbe, options: EngineOptions, memory: int | None) -> Iterator[int]:
    """Load one slice for the length of the block. Yield the memory of the process without weights in bytes."""
    # The slice is the last stage or an earlier one. `place` accepts one stage more than there are ranks.
    stages = [1] * (session.rank + (1 if probe.last else 2))
    load = pb.Load(slice=probe.digest, path=str(probe.path), stages=stages, options=options_message(options))
    load.memory_limit_bytes = memory or 0
    loaded = session.ask(pb.Command(load=load)).loaded
    yield loaded.memory_bytes - probe.recipe.n_bytes
    session.unload()


def _timed(
    session: EngineSession, probe: LayerProbe, *, disk: bool = False, most_s: float = 0.0
) -> tuple[list[BestTime], float]:
    """Time the loaded slice. most_s: maximum seconds for each number of rows; 0: the worker's default.

    Return its times, and the disk's read rate (0 if not requested).
    """
    command = pb.Time(rows=probe.rows, steps=_SAMPLES, depth=probe.depth, disk=disk, other_bytes=probe.other_bytes)
    command.most_s = most_s if most_s < math.inf else 0.0
    answered = session.ask(pb.Command(time=command)).timed
    seconds, busy = answered.step_s, answered.busy
    n = len(probe.rows) + bool(probe.depth)
    if not len(seconds) == len(busy) == n or not all(0 < step_s < MOST_S for step_s in seconds):
        raise WorkerError(f"{session.device} returned invalid times; install the same version of edge there")
    figures = [BestTime(*figure) for figure in zip(seconds, busy, strict=True)]
    return figures, answered.disk_bytes_per_s


def device_speed(times: LayerTimes, device: str, name: str, memory_bytes: int, network_s: float = 0.0) -> DeviceSpeed:
    """Calculate a device's speed from its slice times, at least those of layers and head. Negative differences count
    as 0.

    network_s: round trip of a step to the page that computes it; 0 for other devices.
    """
    base, n = times.steps["layers"], times.n
    one_s = base.at(1)
    more_s = times.steps["more"].at(1) if "more" in times.steps else 2 * one_s
    fastest_s = min(seconds for _, seconds in base.points)  # the sample of one row may be slow
    step_s = min(max(0.0, 2 * one_s - more_s), network_s + _MOST_STEP * fastest_s)

    def layers(curve: Curve) -> Curve:
        return Curve(tuple((rows, max(0.0, seconds - step_s) / n) for rows, seconds in curve.points))

    layer, half = layers(base), times.steps.get("half")
    half_layer = layer.times(0.5) if half is None else layers(half)
    longest = base.points[-1][0]
    head = [
        (rows, max(0.0, took - step_s - times.few_layers * layer.at(rows))) for rows, took in times.steps["head"].points
    ]
    token_s = prompt_token_s = times.depth_s / n / DEPTH
    if "chunk" in times.steps:
        [(rows, took)] = times.steps["chunk"].points
        chunk_s = max(0.0, took - step_s) / times.few_layers
        half_part = half_layer.at(longest) / layer.at(longest) if layer.at(longest) else 0.5
        layer = Curve((*layer.points, (rows, chunk_s)))
        half_layer = Curve((*half_layer.points, (rows, half_part * chunk_s)))
        # Rows of one batch read keys and values together, so each costs less than a single row.
        prompt_token_s = min(token_s, times.chunk_depth_s / times.few_layers / rows / DEPTH)
    return DeviceSpeed(
        device=device,
        name=name,
        step_s=Curve(((1, step_s),)),
        layer_s=layer,
        token_s=token_s,
        prompt_token_s=prompt_token_s,
        half_layer_s=half_layer,
        head_s=Curve(tuple(head)),
        memory_bytes=memory_bytes,
        runtime_bytes=times.runtime_bytes,
        disk_bytes_per_s=times.disk_bytes_per_s,
        busy=times.busy,
    )

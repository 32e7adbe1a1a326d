"""Default number of layers on a GPU: as many as its memory holds, unless fewer layers decode clearly faster.

The CPU alone, or both together, can be faster than an integrated or software GPU. This is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from devices.probe import available_memory
from devices.remembered import Remembered, key_of
from edge.errors import EngineError
from edge.llama import ggml, llama
from edge.llama.llama import ContextSizes
from edge.microbenchmark import BestTime, TimedTask, best_of, sample_s
from edge.weights import memory
from edge.weights.memory import LoadRequest
from partition.model.model import ModelShape
from partition.predict.hysteresis import BUSY_GPU_LAYERS, GPU_LAYERS, clearly_better
from partition.predict.residency import SPARE_BYTES, GpuBudget
from quant.text import age_text, bytes_text

_ROWS = 32  # rows of the timed batch; only one row is a token
_CONTEXT = 256  # tokens of the timed cache

Times = Mapping[int, BestTime]
"""Time of a token by number of layers on the GPU. The first entry is used unless another is clearly faster."""


@dataclass(frozen=True)
class GpuLayers:
    """Number of layers on a GPU, counted from the last one. The head counts as the first of them."""

    layers: int
    total: int
    why: str
    budget: GpuBudget | None = None  # budget of GPU memory

    @property
    def native(self) -> int:
        """Number in llama.cpp's form: -1 for all."""
        return -1 if self.layers >= self.total else self.layers

    def describe(self) -> str:
        """Return a one-line description."""
        return f"{self.layers} of {self.total} layers on the GPU ({self.why})"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/cli/chat.md describes."""
        budget = {"budget": self.budget.to_json()} if self.budget else {}
        return {"layers": self.layers, "of": self.total, "why": self.why, **budget}


def for_model(request: LoadRequest, *, requested: int | None, most: int | None, repack: bool) -> GpuLayers | None:
    """Choose the number of a model's layers for this device's GPU, or return None without a GPU.

    requested: number from the user; None: choose the default.
    Raises EngineError if layers are requested without a GPU, the errors of llama.cpp, and those of the request's
    `progress`.
    """
    shape, sizes = request.file.shape, request.sizes
    if not llama.has_gpu():
        if requested:
            raise EngineError(
                f"{requested} layers were requested on a GPU, but this build of llama.cpp finds none; leave"
                " --gpu-layers out, or install llama-cpp-python built for the GPU"
            )
        return None
    if requested is not None:
        return GpuLayers(min(requested, shape.n_layers + 1), shape.n_layers + 1, "as asked for")
    return choose(
        shape,
        sizes,
        request.threads,
        most=most,
        free=ggml.gpu_free_bytes(),
        buffers=partial(_context_buffers, request.file.path, sizes),
        timed=partial(_time_token, request, repack) if request.generates else None,
    )


def choose(
    shape: ModelShape,
    sizes: ContextSizes,
    threads: int,
    *,
    most: int | None,
    free: int | None,
    buffers: Callable[[], int],
    timed: Callable[[int], BestTime] | None,
    available: Callable[[], int] = available_memory,
) -> GpuLayers:
    """Choose the default number of layers. Times are cached, unless the CPU was busy while they were measured.

    most: maximum number of layers on the GPU; None: all.
    free: free bytes of the GPU; None: unknown.
    buffers: returns the bytes that a context needs on the GPU in addition to the cache.
    timed: returns the time of a token with a number of layers on the GPU; None: it cannot be timed.
    available: returns the available bytes of host memory.
    """
    total = shape.n_layers + 1
    sizes_of_layers = layer_sizes(shape, sizes)
    fit, why = _fitting(sizes_of_layers, free, buffers)
    if most is not None and most < fit:
        fit, why = most, f"at most {most} are allowed"
    if fit == 0 or timed is None:
        return GpuLayers(fit, total, why)
    candidates = [fit]
    for fewer in sorted({fit // 2, 0}, reverse=True):
        # skip numbers that would read weights from disk for every token
        if sum(sizes_of_layers[fewer:]) <= available():
            candidates.append(fewer)
    cache, key = Remembered("gpu-layers"), measured_key(shape, sizes, threads, candidates)
    remembered = cache.get(key)
    times, age_s = (_read(remembered[0], candidates), remembered[1]) if remembered else (None, 0.0)
    if times is None:
        times, age_s = {layers: timed(layers) for layers in candidates}, 0.0
        if not _busy(times):
            cache.put(key, {str(layers): figure.seconds for layers, figure in times.items()})
    best = fastest(times)
    if best != fit:
        why = f"{times[fit].seconds / times[best].seconds:.1f} times as fast as with {fit}"
    busy = ", while this device was busy" if _busy(times) else ""
    return GpuLayers(best, total, f"{why}, measured {age_text(age_s)}{busy}")


def fastest(times: Times) -> int:
    """Return the number of layers for the GPU: the first of `times`, or a clearly faster one.

    If a measurement was busy, the times must be far apart.
    """
    first = next(iter(times))
    best = min(times, key=lambda layers: times[layers].seconds)
    by = BUSY_GPU_LAYERS if _busy(times) else GPU_LAYERS
    return best if clearly_better(times[best].seconds, times[first].seconds, by=by) else first


def layer_sizes(shape: ModelShape, sizes: ContextSizes) -> list[int]:
    """Return the bytes that go to a GPU in order: the head, then layers from the last one, with adapters, keys and
    values."""
    *adapters, of_head = sizes.adapter_bytes or (shape.n_layers + 1) * (0,)
    layers = [
        shape.layer_bytes[layer] + n_bytes + shape.kv_layer_bytes(layer, sizes.context, sizes.kv.keys, sizes.kv.values)
        for layer, n_bytes in enumerate(adapters)
    ]
    return [shape.head_bytes + of_head, *reversed(layers)]


def _context_buffers(path: Path, sizes: ContextSizes) -> int:
    """Return the bytes of a context without its cache, as llama.cpp reports in a dry run."""
    parts = memory.context_parts(memory.dry_run(path, sizes)[1])
    return parts["compute buffers"] + parts["output buffer"] + sizes.batch * sizes.adapter_row_bytes


def _time_token(request: LoadRequest, repack: bool, layers: int) -> BestTime:
    """Load the model with this number of layers on the GPU, and return the time of a token. Raises llama.cpp's
    errors."""
    sizes, threads, progress = request.sizes, request.threads, request.progress
    context_tokens = min(sizes.context, _CONTEXT)
    batch = request.new_batch(min(_ROWS, context_tokens))
    batch.outputs[0] = 1
    small = replace(sizes, context=context_tokens, batch=batch.capacity, sequences=1, outputs=1)

    def loading(_: float) -> None:
        if progress is not None:
            progress(0.0)

    with (
        closing(llama.Model(request.file.path, gpu_layers=layers, repack=repack, progress=loading)) as model,
        closing(llama.Context(model, small, threads=threads)) as context,
    ):

        def step() -> None:
            context.kv_clear()
            context.decode(batch, 1)
            context.wait()

        return best_of([TimedTask(step)], sample_s(threads))[0]


def _fitting(layers: list[int], free: int | None, buffers: Callable[[], int]) -> tuple[int, str]:
    """Return (number of layers that fit, reason)."""
    if free is None or sum(layers) + memory.AMPLE_BUFFERS_BYTES <= free:
        return len(layers), "all fit"
    overhead = buffers() + SPARE_BYTES
    left, fit = free - overhead, 0
    for n_bytes in layers:
        left -= n_bytes
        if left < 0:
            break
        fit += 1
    if fit == len(layers):
        return fit, "all fit"
    return fit, f"{fit} fit: all need {bytes_text(sum(layers) + overhead)}, {bytes_text(free)} are free"


def _busy(times: Times) -> bool:
    return any(figure.busy for figure in times.values())


def measured_key(shape: ModelShape, sizes: ContextSizes, threads: int, candidates: list[int]) -> str:
    """Return the cache key of token times for a model of this shape on this device, with these candidates."""
    # Imported here because these modules load slowly.
    from devices.names import host_name
    from devices.profile import describe
    from edge.version import version

    device = describe(
        host_name(),
        threads=threads,
        gpu=", ".join(ggml.gpu_names()),
        runtime=version("edge-runtime"),
        llama_cpp=version("llama-cpp-python"),
    )
    # Models of equal shape have equal times, whatever their names are.
    described = [repr(replace(shape, name="")), sizes.kv.name, sizes.flash_attention, str(candidates)]
    return key_of(described, device)


def _read(value: Any, candidates: list[int]) -> Times | None:
    """Return cached times, or None for other values, such as another version's."""
    try:
        seconds = {layers: float(value[str(layers)]) for layers in candidates}
    except (TypeError, KeyError, ValueError):
        return None
    return {layers: BestTime(s, False) for layers, s in seconds.items()} if min(seconds.values()) > 0 else None

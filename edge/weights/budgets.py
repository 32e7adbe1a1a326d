"""Budgets of memory and GPU memory, as a user sets them or as the machine has them."""

from __future__ import annotations

from dataclasses import dataclass

from devices.probe import available_memory, own_rss
from edge.errors import EngineError
from edge.llama import ggml, llama
from edge.weights.on_gpu import GpuRequest
from partition.model.model import ModelShape
from partition.predict.residency import SPARE_BYTES

PAGED_SHARE = 0.8  # share of the available memory that a model gets if it does not fit


@dataclass(frozen=True)
class Budgets:
    """Budgets of one model."""

    memory: int | None  # bytes of the whole process; None: the weights are mapped, or stream through a GPU
    gpu: GpuRequest | None  # None: nothing, or the layers that llama.cpp places on a GPU
    is_own_choice: bool = False  # True: the user has set no budget. If it is too small, the weights may be mapped


def first_gpu() -> int:
    """Return ggml's handle of the first GPU. Raises EngineError if there is none."""
    gpus = ggml.gpu_devices() if llama.has_gpu() else []
    if not gpus:
        raise EngineError(
            "GPU memory was requested, but this build of llama.cpp finds no GPU; leave --gpu-memory out, or"
            " install llama-cpp-python built for the GPU"
        )
    return gpus[0]


def chosen_budgets(
    shape: ModelShape,
    *,
    memory: int | None,
    gpu_memory: int | None,
    gpu_layers: int | None,
    most_gpu_layers: int | None = None,
) -> Budgets:
    """Return the budgets of a model. memory, gpu_memory and gpu_layers are options of the user; None: not set.

    Without options, a model gets a budget if it is larger than the available memory, or if it has experts and does not
    fit on the GPU as a whole, because then its dense weights belong there first. A model with a budget of memory gets
    the free memory of the first GPU with memory of its own, unless `gpu_layers` is 0.

    most_gpu_layers: limit of a worker on its GPU layers; None: no limit.
    Raises EngineError if a GPU was requested and there is none.
    """
    request = None
    if gpu_memory is not None:
        request = GpuRequest(first_gpu(), budget=gpu_memory)
    elif memory is not None and gpu_layers:
        request = GpuRequest(first_gpu(), layers=gpu_layers)
    best = request
    may_use_gpu = request is None and gpu_layers is None and most_gpu_layers != 0
    # A GPU without memory of its own adds none.
    gpus = ggml.discrete_gpus() if may_use_gpu and llama.has_gpu() else []
    if gpus:
        on_first = max(0, (ggml.gpu_free_bytes(gpus[:1]) or 0) - SPARE_BYTES)
        best = GpuRequest(gpus[0], budget=on_first, is_required=False, most_layers=most_gpu_layers)
    if memory is not None:
        return Budgets(memory, best)
    free = available_memory()
    on_gpu = best.budget or 0 if best is not None else 0
    has_experts_elsewhere = best is not None and shape.n_experts > 0 and shape.weight_bytes > on_gpu
    if shape.weight_bytes <= free + on_gpu and not has_experts_elsewhere:
        return Budgets(None, request)
    return Budgets(own_rss() + round(PAGED_SHARE * free), best, is_own_choice=request is None)

"""Weights of a model under a memory budget that are in GPU memory.

llama.cpp computes a layer where its weights are. So some layers compute on the GPU, and the CPU computes the others,
whose weights are in memory or pass through a window from disk. The experts of a layer may stay with the CPU while the
rest of the layer is on the GPU, because a token uses only a few of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from edge.llama import ggml, llama
from edge.llama.address_space import PAGE, AddressSpace
from edge.llama.buffers import Device, Weight
from edge.llama.ggml import cpu_device
from edge.llama.llama import ContextSizes
from edge.weights.direct_file import DirectFile
from edge.weights.gpu_layers import GpuLayers
from edge.weights.gpu_parts import fixed_parts, too_little
from edge.weights.memory import LoadRequest, dry_run
from edge.weights.roles import HEAD, TABLE
from partition.model.file import ModelFile
from partition.model.model import ModelShape, block_of
from partition.predict.residency import GpuBudget, GpuPlacement, LayerBytes, place_on_gpu
from quant.text import bytes_text

_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps\.")
_PADDING = 4096  # upper bound of a tensor's padding on a GPU, in bytes
_CHUNK = 4 << 20  # bytes of one read and copy


@dataclass(frozen=True)
class GpuRequest:
    """The part of a model that a user wants on a GPU."""

    handle: int  # ggml's handle of the device
    budget: int | None = None  # bytes of its memory; None: as many as `layers` take
    layers: int | None = None  # number of layers, counted from the head backwards; None: as many as fit
    is_required: bool = True  # False: the GPU is left out if its budget holds no layer
    most_layers: int | None = None  # maximum number of layers, counted like `layers`; None: no limit


@dataclass(frozen=True)
class GpuShare:
    """The weights that a GPU gets, before the model is loaded."""

    device: Device
    names: frozenset[str]  # names of the weights
    native_layers: int  # llama.cpp's number of layers on the GPU
    layers: GpuLayers
    buffer_name: str | None  # name of the GPU's buffers in llama.cpp's log
    cache_bytes: int  # bytes of KV cache on the GPU

    def place(self, weights: Mapping[str, Weight], closing: ExitStack) -> list[Weight]:
        """Give the weights memory on the GPU, and return them. Nothing is copied yet.

        closing: frees the memory. Close it after the model.
        Raises NotEnoughMemory if the driver has less memory than it reported.
        """
        placed = [weights[name] for name in sorted(self.names & weights.keys())]
        for together in _in_buffers(self.device, placed):
            buffer, at = self.device.allocate(sum(map(self.device.span, together))), 0
            closing.callback(buffer.close)
            for weight in together:
                weight.place(buffer, at)
                at += self.device.span(weight)
        return placed


def share_of_gpu(request: LoadRequest, gpu: GpuRequest) -> GpuShare | None:
    """Choose the weights for a GPU. None: the budget holds no layer, and the GPU is not required.

    Raises NotEnoughMemory if the budget, or the free memory, of a required GPU holds no layer.
    """
    file, sizes = request.file, request.sizes
    llama.initialise()
    is_gpu = gpu.handle != cpu_device()
    device, free = Device(gpu.handle), ggml.gpu_free_bytes([gpu.handle]) if is_gpu else None
    parts = fixed_parts(file, sizes, dry_run(file.path, sizes, -1 if is_gpu else 0)[1], device.buffer_name)
    layers = layers_of(file, sizes, parts.pop("KV cache"))
    outside = _head(file)
    parts["head"] = sum(file.tensors[name].n_bytes + _PADDING for name in outside)
    total, shape = len(layers) + 1, file.shape
    if gpu.layers is not None:
        n = min(gpu.layers, total)
        dense = tuple(range(total - max(1, n), len(layers)))
        placement, why = GpuPlacement(dense, tuple(i for i in dense if layers[i].experts)), "as asked for"
        outside = outside if n else []
    else:
        budget = min(size for size in (gpu.budget, free) if size is not None)
        used = shape.n_experts_used / shape.n_experts if shape.n_experts else 1.0
        first = 0 if gpu.most_layers is None else max(0, total - max(1, gpu.most_layers))
        placement = place_on_gpu(layers, budget - sum(parts.values()), used, first)
        if not placement.dense and not gpu.is_required:
            return None
        if not placement.dense:
            least = {"a layer": layers[-1].dense + layers[-1].kv}
            raise too_little(shape, parts | least, gpu.budget or budget, free)
        n, why = len(placement.dense) + 1, f"within {bytes_text(budget)}"
    names = {name for name in file.tensors if _is_on_gpu(name, placement)} | set(outside)
    on_cpu = tuple(i for i in placement.dense if layers[i].experts and i not in placement.experts)
    if on_cpu:
        why += f", the experts of {len(on_cpu)} layers in memory"
    cache_bytes = sum(layers[i].kv for i in placement.dense)
    parts |= {"KV cache": cache_bytes, "layers": placement.n_bytes(layers) - cache_bytes}
    chosen = GpuBudget(gpu.budget, parts, (), processor_experts=on_cpu) if gpu.budget is not None else None
    n_blocks = 1 + max((block for name in file.tensors if (block := block_of(name)) is not None), default=-1)
    native = n_blocks - placement.dense[0] + 1 if placement.dense else min(n, 1)
    counted = GpuLayers(n, total, why, chosen)
    if not is_gpu:  # the processor stands for a GPU
        return GpuShare(device, frozenset(names), 0, counted, None, 0)
    return GpuShare(device, frozenset(names), native, counted, device.buffer_name, cache_bytes)


def layers_of(file: ModelFile, sizes: ContextSizes, cache_bytes: int) -> list[LayerBytes]:
    """Return the bytes of each layer on a GPU, including padding.

    cache_bytes: bytes of the KV cache and the recurrent states of all layers.
    """
    shape = file.shape
    dense, experts = [0] * shape.n_layers, [0] * shape.n_layers
    for name, tensor in file.tensors.items():
        block = block_of(name)
        if block is not None and block < shape.n_layers:
            part = experts if _EXPERTS.match(name) else dense
            part[block] += tensor.n_bytes + _PADDING
    kv = _cache_by_layer(shape, sizes, cache_bytes)
    return [LayerBytes(*layer) for layer in zip(dense, experts, kv, strict=True)]


def copy_to_gpu(
    weights: list[Weight],
    sources: Mapping[str, tuple[DirectFile, int]],
    progress: Callable[[float], None] | None,
) -> None:
    """Copy weights from their files to their places, with little memory of the process.

    sources: file and offset of each weight.
    progress: receives the copied fraction.
    Raises WeightsError if a file cannot be read, and EngineError if the GPU stores a weight in a form of its own.
    """
    space = AddressSpace(_CHUNK + 2 * PAGE)
    done, total = 0, max(1, sum(weight.n_bytes for weight in weights))
    try:
        for weight in weights:
            file, offset = sources[weight.name]
            weight.begin_copy()
            for start in range(0, weight.n_bytes, _CHUNK):
                n = min(_CHUNK, weight.n_bytes - start)
                skip = file.read(offset + start, n, space.view(0, space.n_bytes))
                weight.copy_part(space.address + skip, start, n)
                done += n
                if progress is not None:
                    progress(done / total)
    finally:
        space.close()


def _in_buffers(device: Device, weights: list[Weight]) -> list[list[Weight]]:
    """Divide weights among as few buffers as possible, because a driver allocates each in whole pieces."""
    buffers: list[list[Weight]] = []
    left = 0
    for weight in weights:
        span = device.span(weight)
        if span > left:
            buffers.append([])
            left = device.most_bytes
        buffers[-1].append(weight)
        left -= span
    return buffers


def _is_on_gpu(name: str, placement: GpuPlacement) -> bool:
    return block_of(name) in (placement.experts if _EXPERTS.match(name) else placement.dense)


def _head(file: ModelFile) -> list[str]:
    """Return the weights after the last layer. A head that is also the token table stays in memory with the table."""
    outside = [name for name in file.tensors if block_of(name) is None and name != TABLE]
    return outside if HEAD in file.tensors else []


def _cache_by_layer(shape: ModelShape, sizes: ContextSizes, total: int) -> list[int]:
    """Return the bytes of KV cache or recurrent state of each layer."""
    layers = [
        shape.kv_layer_bytes(layer, sizes.context, sizes.kv.keys, sizes.kv.values) for layer in range(shape.n_layers)
    ]
    n_recurrent = layers.count(0)
    states = max(0, total - sum(layers)) // n_recurrent if n_recurrent else 0
    return [n or states for n in layers]

"""Load a model within a budget of GPU memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from devices.probe import available_memory
from edge.llama import ggml, llama
from edge.llama.buffers import CallerBuffer, Device
from edge.llama.ggml import cpu_device
from edge.llama.hooks import NodeHooks
from edge.llama.layer_stream import HostWeight, Layer, LayerStream, copy_layer, place_layer
from edge.weights import memory
from edge.weights.gpu_layers import GpuLayers, measured_key
from edge.weights.gpu_parts import PRODUCTS, fixed_parts, too_little
from edge.weights.mapped import ModelInMemory, check_generates_text
from edge.weights.memory import MIB, LoadRequest
from edge.weights.processor_rows import processor_rows
from partition.model.model import ModelShape, block_of
from partition.predict.residency import SLOTS, GpuBudget, share_out
from quant.gguf.file import GgufFile
from quant.text import bytes_text

_ALIGNED = 64  # bytes; the CPU's kernels read this many together
BUFFERS = "two buffers"
_NO_REUSE = "LLAMA_GRAPH_REUSE_DISABLE"  # environment variable that llama.cpp reads when it creates a context
_PIECE_BYTES = 2 * MIB  # granularity in which drivers allocate memory
MARGIN_BYTES = 16 * MIB  # spare memory for passes whose products take more memory than the first pass


def load_on_gpu(request: LoadRequest, budget: int, handle: int) -> ModelInMemory:
    """Load a model that never takes more than `budget` bytes of a device's memory.

    handle: ggml's handle of the device.
    Raises NotEnoughMemory with the minimum budget and its parts, and the errors of llama.cpp.
    """
    file, sizes, threads = request.file, request.sizes, request.threads
    shape = file.shape
    hooks, progress = request.hooks, request.progress
    llama.initialise()
    is_gpu = handle != cpu_device()
    on_gpu = -1 if is_gpu else 0
    need = memory.check(file.path, shape, sizes)
    device, free = Device(handle), ggml.gpu_free_bytes([handle]) if is_gpu else None
    parts = fixed_parts(file, sizes, memory.dry_run(file.path, sizes, on_gpu)[1], device.buffer_name)
    with ExitStack() as closing:
        own = CallerBuffer(rb"^blk\.")
        closing.callback(own.close)
        buffers = closing.enter_context(ExitStack())  # freed after the model
        model = llama.Model(file.path, gpu_layers=on_gpu, repack=False, own=own, progress=progress)
        closing.callback(model.close)
        check_generates_text(model, file.path)
        layers = _layers(file, own)
        layer_bytes = {n: sum(device.span(part.weight) for part in layer) for n, layer in layers.items()}
        account = _Account(shape, handle, budget, free, parts, layer_bytes)
        streamed = account.choose()
        stream = LayerStream(device, account.largest) if streamed else None
        if stream is not None:
            buffers.callback(stream.close)
            closing.callback(stream.finish)
            stream.stream(layers)  # stream all layers until the driver's memory use is known
            stream.begin(sizes.batch)  # the context reserves memory for passes with the layers on the device
        else:
            _stay_together(layers, account, device, buffers)
        # Other hooks may wait for ranks, which do not take part in the passes below.
        first_hooks = stream.hooks() if stream else hooks
        node_hooks = NodeHooks(first_hooks) if first_hooks else None
        on_node = node_hooks.callback if node_hooks else None
        with _graphs_made_anew() if stream else nullcontext():
            context = llama.Context(model, sizes, threads=threads, on_node=on_node)
        closing.callback(context.close)
        if stream is not None and node_hooks is not None:

            def a_pass(n: int, processor_rows: int = 0) -> None:
                if stream.processor_rows != processor_rows:
                    stream.processor_rows = processor_rows
                    node_hooks.use(stream.hooks())
                if progress is not None:
                    progress(1.0)  # allows a waiting caller to cancel
                batch = request.new_batch(n)
                batch.positions[:] = range(n)
                batch.outputs[n - 1] = 1
                stream.begin(n)
                node_hooks.decode(context, batch, n, 1)
                context.wait()
                context.kv_clear()

            for n in (
                sizes.batch,
                1,
            ):  # a single token uses other kernels, and the driver allocates memory for them, too
                a_pass(n)
            streamed = _settle(stream, layers, account, device, buffers)
            if streamed and is_gpu and stream.is_locked:
                node_hooks.use(stream.hooks())
                key = partial(measured_key, shape, sizes, threads, [*streamed, sizes.batch])
                stream.processor_rows = processor_rows(sizes.batch, a_pass, key)
            node_hooks.use((*stream.hooks(), *hooks))
        parts["layers"] = sum(n for layer, n in layer_bytes.items() if layer not in streamed)
        if stream is not None:
            account.count_products()
        chosen = GpuBudget(budget, parts, streamed, stream.processor_rows if stream else 0)
        on_device = GpuLayers(len(layers) - len(streamed) + 1, len(layers) + 1, _why(chosen), chosen)
        return ModelInMemory(
            model, context, sizes, node_hooks, need, closing.pop_all(), gpu_layers=on_device, stream=stream
        )


@contextmanager
def _graphs_made_anew() -> Iterator[None]:
    """Make contexts that are created in the block build each graph anew.

    A graph that llama.cpp reuses would read weights at their old addresses.
    """
    before = os.environ.get(_NO_REUSE)
    os.environ[_NO_REUSE] = "1"
    try:
        yield
    finally:
        del os.environ[_NO_REUSE]
        if before is not None:
            os.environ[_NO_REUSE] = before


@dataclass
class _Account:
    """Use of a device's memory."""

    shape: ModelShape
    handle: int  # ggml's handle of the device
    budget: int
    free: int | None  # bytes before anything was loaded; None: the driver does not report it
    parts: dict[str, int]  # bytes by part
    layer_bytes: Mapping[int, int]

    @property
    def largest(self) -> int:
        """Bytes of the largest layer."""
        return max(self.layer_bytes.values())

    def choose(self) -> tuple[int, ...]:
        """Return the layers to stream. Raises NotEnoughMemory."""
        chosen = share_out(self.layer_bytes, self._most - sum(self.parts.values()))
        if chosen is None:
            raise too_little(self.shape, self.parts | {BUFFERS: SLOTS * self.largest}, self.budget, self.free)
        return chosen

    def count_products(self, uncounted: int = 0) -> None:
        """Update the products part from the driver's report, if it has one.

        uncounted: bytes that are not in `parts` yet.
        """
        if (used := self._used()) > 0:
            others = sum(self.parts.values()) - self.parts[PRODUCTS] + uncounted
            self.parts[PRODUCTS] = max(0, used - others) + MARGIN_BYTES

    def has_room(self, n_bytes: int) -> bool:
        """Return whether the driver can allocate `n_bytes` more, or True if it does not report its memory."""
        return self._used() + n_bytes + _PIECE_BYTES + MARGIN_BYTES <= self._most if self.free is not None else True

    @property
    def _most(self) -> int:
        return self.budget if self.free is None else min(self.budget, self.free)

    def _used(self) -> int:
        """Return the bytes that the driver has allocated since, or 0 if it does not report them."""
        free = None if self.free is None else ggml.gpu_free_bytes([self.handle])
        return 0 if self.free is None or free is None else self.free - free


def _settle(
    stream: LayerStream, layers: Mapping[int, Layer], account: _Account, device: Device, buffers: ExitStack
) -> tuple[int, ...]:
    """Move layers to their permanent place, stream the others, and return the streamed ones. Raises NotEnoughMemory."""
    account.count_products(SLOTS * account.largest)
    stream.finish()
    passing = {n: _page_locked(layers[n], device, buffers) for n in account.choose()}
    if passing:
        account.parts[BUFFERS] = SLOTS * account.largest
        for n in sorted(layers.keys() - passing.keys()):
            # The driver takes more than requested: whole pieces, and tables of the page-locked memory.
            if account.has_room(account.layer_bytes[n]):
                _stay(layers[n], device, buffers)
            else:
                passing[n] = _page_locked(layers[n], device, buffers)
    else:
        stream.close()  # releases its buffers for the last layers
        _stay_together(layers, account, device, buffers)
    stream.stream(passing)
    return tuple(sorted(passing))


def _stay_together(layers: Mapping[int, Layer], account: _Account, device: Device, buffers: ExitStack) -> None:
    """Move layers to as few device buffers as possible, because a driver allocates each in whole pieces."""
    together: list[HostWeight] = []
    n_bytes = 0
    for n, layer in layers.items():
        if together and n_bytes + account.layer_bytes[n] > device.most_bytes:
            _stay(together, device, buffers)
            together, n_bytes = [], 0
        together += layer
        n_bytes += account.layer_bytes[n]
    _stay(together, device, buffers)


def _stay(layer: Layer, device: Device, buffers: ExitStack) -> None:
    """Move one or more layers to a buffer of the device."""
    buffer = device.allocate(sum(device.span(part.weight) for part in layer))
    buffers.callback(buffer.close)
    place_layer(layer, device, buffer)
    copy_layer(layer)


def _layers(file: GgufFile, own: CallerBuffer) -> dict[int, Layer]:
    """Return the weights of each layer with their bytes from the file."""
    layers: dict[int, list[HostWeight]] = {}
    for name, weight in own.weights.items():
        layer = block_of(name)
        assert layer is not None
        layers.setdefault(layer, []).append(HostWeight(weight, np.frombuffer(file.data(name), np.uint8)))
    return dict(layers)


def _page_locked(layer: Layer, device: Device, buffers: ExitStack) -> Layer:
    """Return a copy of the layer in page-locked memory, for fast copies to the device. Without room, return it
    unchanged."""
    spans = [-(-len(part.data) // _ALIGNED) * _ALIGNED for part in layer]
    if sum(spans) > available_memory():
        return layer
    buffer = device.allocate_host(sum(spans))
    buffers.callback(buffer.close)
    to, at, moved = np.frombuffer(buffer.view(), np.uint8), 0, []
    for part, span in zip(layer, spans, strict=True):
        to[at : at + len(part.data)] = part.data
        moved.append(HostWeight(part.weight, to[at : at + len(part.data)], (buffer, at)))
        at += span
    return moved


def _why(chosen: GpuBudget) -> str:
    within = f"within {bytes_text(chosen.budget)}"
    if not chosen.streamed:
        return f"all fit {within}"
    least = f" for more than {chosen.processor_rows} rows at once" if chosen.processor_rows else ""
    return f"{within}; the others pass through two buffers there{least}"

"""Layers that pass through two buffers of a GPU: each is copied there while the layers before it compute."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.buffers import Device, DeviceBuffer, Weight
from edge.llama.ggml import Node
from edge.llama.hooks import Hook

SLOTS = 2  # one layer computes while the next arrives
_LAYER_OUT = re.compile(r"l_out-(\d+)")  # the node of a layer that all others of it come before


@dataclass(frozen=True)
class HostWeight:
    """A weight, and its bytes in this machine's memory."""

    weight: Weight
    data: NDArray[np.uint8]


Layer = Sequence[HostWeight]


def place_layer(layer: Layer, device: Device, buffer: DeviceBuffer) -> None:
    """Let the weights of a layer lie one behind the other in a buffer. Nothing is copied."""
    at = 0
    for part in layer:
        part.weight.place(buffer, at)
        at += device.span(part.weight)


def copy_layer(layer: Layer) -> None:
    """Copy the weights of a layer to where they were placed."""
    for part in layer:
        part.weight.copy_from(int(part.data.ctypes.data))


class LayerStream:
    """Streamed layers of a model. A pass of few rows may leave them where they are, for the processor to compute."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: of the largest layer. NotEnoughMemory."""
        self.least_rows = 1  # of a pass that has the layers on the device
        self._device = device
        self._layers: dict[int, Layer] = {}
        self._by_address: dict[int, int] = {}  # layer of each weight
        self._names: set[str] = set()
        self._slots: list[DeviceBuffer] = []
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="edge-gpu-copy")
        self._order: list[int] = []
        self._next = 0  # place in the order of the layer that is copied next
        self._copies = 0  # begun so far: they take the slots in turn
        self._coming: deque[tuple[int, Future[None]]] = deque()  # layers that have a slot, oldest first
        self._in_use: int | None = None
        self._on_device: bool | None = None  # not known: weights are where they were before
        self._seen: int | None = None  # layer of the last node that was learned
        try:
            for _ in range(SLOTS):
                self._slots.append(device.allocate(slot_bytes))
        except BaseException:
            self.close()
            raise

    def stream(self, layers: Mapping[int, Layer]) -> None:
        """Stream these layers from now on, and no others. Graphs must be made and learned anew."""
        self._drain()
        self._layers = dict(layers)
        self._by_address = {part.weight.address: n for n, layer in layers.items() for part in layer}
        self._names = {part.weight.name for layer in layers.values() for part in layer}
        self._order, self._next, self._in_use, self._on_device = sorted(layers), 0, None, None

    @property
    def layers(self) -> tuple[int, ...]:
        """The streamed layers."""
        return tuple(self._order)

    def begin(self, rows: int) -> None:
        """A pass of so many rows comes next. Call it before its graph is made."""
        self._in_use = self._seen = None  # also of a pass that was interrupted
        on_device = rows >= self.least_rows
        if on_device == self._on_device:
            return
        self._on_device = on_device
        self._drain()
        for n, layer in self._layers.items():
            if on_device:  # for the graph: each is copied, and placed again, before it is used
                place_layer(layer, self._device, self._slots[0])
            else:
                for part in layer:
                    part.weight.point(int(part.data.ctypes.data), repacked=False)
        self._next = 0
        if on_device:
            self._fill()

    def hooks(self) -> list[Hook]:
        """Return the hooks that the graphs need."""
        return [
            Hook(self._enters, lambda _: None, self._acquire, self._ready),
            Hook(self._leaves, self._release),
        ]

    def close(self) -> None:
        """Free the buffers. The model must have been freed."""
        self._copier.shutdown(cancel_futures=True)
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    # --- nodes ---

    def _enters(self, node: Node) -> bool:
        """Return whether a node is the first of a streamed layer."""
        if not self._on_device:
            return False
        for address in node.sources:
            name = Node(address).name if address else ""
            if name.count("#") == 2 and name.split("#")[1] in self._names:
                raise EngineError(
                    f"this GPU does not compute {node.op}, so {name} cannot be streamed; use --gpu-layers"
                )
        layer = self._layer_of(node)
        if layer is None or layer == self._seen:
            return False
        self._seen = layer
        return True

    def _leaves(self, node: Node) -> bool:
        """Return whether a node is the last of a streamed layer."""
        match = _LAYER_OUT.fullmatch(node.name) if self._on_device else None
        if match is None or int(match[1]) not in self._layers:
            return False
        self._seen = None  # a later node of it would bring it back
        return True

    def _layer_of(self, node: Node) -> int | None:
        for address in (*node.sources, *node.viewed):
            if address in self._by_address:
                return self._by_address[address]
        return None

    def _ready(self) -> bool:
        return self._in_use is None and bool(self._coming) and self._coming[0][1].done()

    def _acquire(self, node: Node) -> None:
        """Wait until the layer of a node has arrived."""
        layer = self._layer_of(node)
        assert layer is not None
        if self._in_use is not None:
            raise EngineError(f"layer {self._in_use} does not end before layer {layer} begins; use --gpu-layers")
        if not self._coming or self._coming[0][0] != layer:  # a pass ended early, or this is the first one
            self._drain()
            self._next = self._order.index(layer)
            self._fill()
        self._coming[0][1].result()
        self._in_use = layer

    def _release(self, node: Node) -> None:
        """Let the next layer have the slot of the one that is computed."""
        if self._in_use is not None:
            self._in_use = None
            self._coming.popleft()
            self._fill()

    # --- copies ---

    def _fill(self) -> None:
        """Begin to copy as many layers as there are slots free."""
        while len(self._coming) < min(SLOTS, len(self._order)):
            layer = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            slot = self._slots[self._copies % SLOTS]
            self._copies += 1
            self._coming.append((layer, self._copier.submit(self._copy, layer, slot)))

    def _copy(self, layer: int, slot: DeviceBuffer) -> None:
        place_layer(self._layers[layer], self._device, slot)
        copy_layer(self._layers[layer])

    def _drain(self) -> None:
        """Wait for copies that have begun, and forget them."""
        for _, copy in self._coming:
            copy.exception()
        self._coming.clear()

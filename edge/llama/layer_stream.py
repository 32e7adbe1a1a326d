"""Layers that pass through two buffers of a GPU: each is copied there while the layers before it compute. For passes
of few rows the processor may compute them where they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.buffers import Device, DeviceBuffer, Weight
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from partition.predict.gpu_memory import SLOTS

LAYER_OUT = re.compile(r"l_out-(\d+)")  # the node of a layer that all others of it come before


@dataclass(frozen=True)
class HostWeight:
    """A weight, and its bytes in this machine's memory."""

    weight: Weight
    data: NDArray[np.uint8]
    locked: tuple[DeviceBuffer, int] | None = None  # page-locked memory that has them, and from which byte on


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
    """Streamed layers of a model.

    A layer always has the same of the two buffers: graphs may have views of its weights, with their addresses.
    """

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: of the largest layer. NotEnoughMemory."""
        self._device = device
        self._layers: dict[int, Layer] = {}
        self._by_address: dict[int, int] = {}  # layer of each weight
        self._names: set[str] = set()
        self._slots: list[DeviceBuffer] = []
        self._orders: list[list[int]] = []  # layers of each slot, in the order of use
        self._arriving: list[tuple[int, Future[None]] | None] = []  # layer that each slot has, or will have
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="edge-gpu-copy")
        self._in_use: int | None = None
        self._placed: Literal["slots", "here"] | None = None
        # In a pass of so many rows or fewer the processor computes the layers. Graphs must be learned anew for another.
        self.processor_rows = 0
        self._seen: int | None = None  # layer of the last node that was learned
        try:
            for _ in range(SLOTS):
                self._slots.append(device.allocate(slot_bytes))
        except BaseException:
            self.close()
            raise

    def stream(self, layers: Mapping[int, Layer]) -> None:
        """Stream these layers from now on, and no others. Graphs must be made and learned anew."""
        self.finish()
        self._layers = {n: layers[n] for n in sorted(layers)}
        self._by_address = {part.weight.address: n for n, layer in layers.items() for part in layer}
        self._names = {part.weight.name for layer in layers.values() for part in layer}
        self._orders = [list(self._layers)[slot::SLOTS] for slot in range(SLOTS)]
        self._in_use, self._placed, self.processor_rows = None, None, 0

    @property
    def is_locked(self) -> bool:
        """True if the layers are in page-locked memory, from which the processor can compute."""
        return all(part.locked for layer in self._layers.values() for part in layer)

    def begin(self, rows: int) -> None:
        """A pass of so many rows comes next. Call it before its graph is made."""
        self._in_use = self._seen = None  # also of a pass that was interrupted
        place: Literal["slots", "here"] = "here" if rows <= self.processor_rows else "slots"
        moves = place != self._placed
        for slot, arriving in enumerate(self._arriving):
            # Copies go to where weights are placed, so they end before these move. One that failed is made again.
            if arriving is not None and (moves or arriving[1].done()) and arriving[1].exception() is not None:
                self._arriving[slot] = None
        if not moves:
            return
        self._placed = place
        for slot, order in enumerate(self._orders):
            for n in order:
                if place == "slots":
                    place_layer(self._layers[n], self._device, self._slots[slot])
                else:  # where they are in this machine's memory
                    for part in self._layers[n]:
                        assert part.locked is not None
                        part.weight.place(*part.locked)
            if place == "slots" and order and self._arriving[slot] is None:
                self._copy(slot, order[0])

    def hooks(self) -> list[Hook]:
        """Return the hooks that the graphs need."""
        return [
            Hook(self._enters, lambda _: None, self._acquire, self._ready),
            Hook(self._leaves, self._release),
        ]

    def finish(self) -> None:
        """Wait for copies that have begun, and forget them. Call it before the model is freed."""
        for arriving in self._arriving:
            if arriving is not None:
                arriving[1].exception()
        self._arriving = [None] * SLOTS

    def close(self) -> None:
        """Free the buffers. The model must have been freed."""
        self._copier.shutdown(cancel_futures=True)
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    # --- nodes ---

    def _enters(self, node: Node) -> bool:
        """Return whether a node is the first of a streamed layer."""
        if self._placed == "here":
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
        if self._placed == "here":
            return False
        match = LAYER_OUT.fullmatch(node.name)
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
        """Return whether nothing is to be waited for. What precedes a layer is computed while it still arrives."""
        return all(arriving is None or arriving[1].done() for arriving in self._arriving)

    def _acquire(self, node: Node) -> None:
        """Wait until the layer of a node has arrived."""
        layer = self._layer_of(node)
        assert layer is not None
        if self._in_use is not None:
            raise EngineError(
                f"the graph of this model does not say where layer {self._in_use} ends, so it cannot be streamed;"
                " use --gpu-layers"
            )
        slot = next(slot for slot, order in enumerate(self._orders) if layer in order)
        arriving = self._arriving[slot]
        if arriving is None or arriving[0] != layer:  # a pass ended early
            arriving = self._copy(slot, layer)
        arriving[1].result()
        self._in_use = layer

    def _release(self, _: Node) -> None:
        """Copy the next layer of its buffer in place of the one that is computed."""
        for slot, order in enumerate(self._orders):
            if self._in_use in order and len(order) > 1:
                self._copy(slot, order[(order.index(self._in_use) + 1) % len(order)])
        self._in_use = None

    # --- copies ---

    def _copy(self, slot: int, layer: int) -> tuple[int, Future[None]]:
        """Begin to copy a layer; one copy runs at a time, in the order in which they were begun."""
        arriving = layer, self._copier.submit(copy_layer, self._layers[layer])
        self._arriving[slot] = arriving
        return arriving

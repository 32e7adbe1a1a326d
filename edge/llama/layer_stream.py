"""Stream layers through two GPU buffers: a layer is copied while the layers before it compute.

For passes of few rows the CPU may compute the layers in host memory instead.
"""

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
from partition.predict.residency import SLOTS

LAYER_OUT = re.compile(r"l_out-(\d+)")  # name of a layer's last node


@dataclass(frozen=True)
class HostWeight:
    """Weight and its bytes in host memory."""

    weight: Weight
    data: NDArray[np.uint8]
    locked: tuple[DeviceBuffer, int] | None = None  # page-locked copy: buffer and byte offset


Layer = Sequence[HostWeight]


def place_layer(layer: Layer, device: Device, buffer: DeviceBuffer) -> None:
    """Place the weights of a layer one after the other in a buffer. Nothing is copied."""
    at = 0
    for part in layer:
        part.weight.place(buffer, at)
        at += device.span(part.weight)


def copy_layer(layer: Layer) -> None:
    """Copy the weights of a layer to their places."""
    for part in layer:
        part.weight.copy_from(int(part.data.ctypes.data))


class LayerStream:
    """Streamed layers of a model.

    A layer always uses the same one of the two buffers, because graphs may hold views of its weights by address.
    """

    def __init__(self, device: Device, slot_bytes: int) -> None:
        """slot_bytes: size of the largest layer. Raises NotEnoughMemory."""
        self._device = device
        self._layers: dict[int, Layer] = {}
        self._by_address: dict[int, int] = {}  # layer of each weight address
        self._names: set[str] = set()
        self._slots: list[DeviceBuffer] = []
        self._orders: list[list[int]] = []  # layers of each slot, in the order of use
        self._arriving: list[tuple[int, Future[None]] | None] = []  # layer that each slot holds or is receiving
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="edge-gpu-copy")
        self._in_use: int | None = None
        self._placed: Literal["slots", "here"] | None = None
        # The CPU computes the layers in passes of at most this many rows. If it changes, graphs must be learned anew.
        self.processor_rows = 0
        self._seen: int | None = None  # layer of the node that was learned last
        try:
            for _ in range(SLOTS):
                self._slots.append(device.allocate(slot_bytes))
        except BaseException:
            self.close()
            raise

    def stream(self, layers: Mapping[int, Layer]) -> None:
        """Stream exactly these layers from now on. Graphs must be built and learned anew."""
        self.finish()
        self._layers = {n: layers[n] for n in sorted(layers)}
        self._by_address = {part.weight.address: n for n, layer in layers.items() for part in layer}
        self._names = {part.weight.name for layer in layers.values() for part in layer}
        self._orders = [list(self._layers)[slot::SLOTS] for slot in range(SLOTS)]
        self._in_use, self._placed, self.processor_rows = None, None, 0

    @property
    def is_locked(self) -> bool:
        """Return whether the layers are in page-locked memory, so that the CPU can compute with them."""
        return all(part.locked for layer in self._layers.values() for part in layer)

    def begin(self, rows: int) -> None:
        """Prepare a pass of `rows` rows. Call it before the graph of the pass is built."""
        self._in_use = self._seen = None  # reset also after an interrupted pass
        place: Literal["slots", "here"] = "here" if rows <= self.processor_rows else "slots"
        moves = place != self._placed
        for slot, arriving in enumerate(self._arriving):
            # A copy goes to the current place of its weights, so wait for it before the weights move. Retry a failed
            # copy.
            if arriving is not None and (moves or arriving[1].done()) and arriving[1].exception() is not None:
                self._arriving[slot] = None
        if not moves:
            return
        self._placed = place
        for slot, order in enumerate(self._orders):
            for n in order:
                if place == "slots":
                    place_layer(self._layers[n], self._device, self._slots[slot])
                else:  # compute in host memory
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
        """Wait for running copies and forget them. Call it before the model is freed."""
        for arriving in self._arriving:
            if arriving is not None:
                arriving[1].exception()
        self._arriving = [None] * SLOTS

    def close(self) -> None:
        """Free the buffers. The model must be freed already."""
        self._copier.shutdown(cancel_futures=True)
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    # --- nodes ---

    def _enters(self, node: Node) -> bool:
        """Return whether the node is the first of a streamed layer."""
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
        """Return whether the node is the last of a streamed layer."""
        if self._placed == "here":
            return False
        match = LAYER_OUT.fullmatch(node.name)
        if match is None or int(match[1]) not in self._layers:
            return False
        self._seen = None  # a later node of this layer would load it again
        return True

    def _layer_of(self, node: Node) -> int | None:
        for address in (*node.sources, *node.viewed):
            if address in self._by_address:
                return self._by_address[address]
        return None

    def _ready(self) -> bool:
        """Return whether no copy is running. While a layer still arrives, the nodes before it are computed."""
        return all(arriving is None or arriving[1].done() for arriving in self._arriving)

    def _acquire(self, node: Node) -> None:
        """Wait until the node's layer is in its buffer."""
        layer = self._layer_of(node)
        assert layer is not None
        if self._in_use is not None:
            raise EngineError(
                f"the graph of this model does not mark the end of layer {self._in_use}, so it cannot be streamed;"
                " use --gpu-layers"
            )
        slot = next(slot for slot, order in enumerate(self._orders) if layer in order)
        arriving = self._arriving[slot]
        if arriving is None or arriving[0] != layer:  # after a pass that ended early
            arriving = self._copy(slot, layer)
        arriving[1].result()
        self._in_use = layer

    def _release(self, _: Node) -> None:
        """Replace the computed layer in its buffer by the next layer of that buffer."""
        for slot, order in enumerate(self._orders):
            if self._in_use in order and len(order) > 1:
                self._copy(slot, order[(order.index(self._in_use) + 1) % len(order)])
        self._in_use = None

    # --- copies ---

    def _copy(self, slot: int, layer: int) -> tuple[int, Future[None]]:
        """Start to copy a layer. Copies run one at a time, in the order in which they were started."""
        arriving = layer, self._copier.submit(copy_layer, self._layers[layer])
        self._arriving[slot] = arriving
        return arriving

"""Weights of the parts of a network: resident ones, and those that are read from disk in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import numpy as np

from edge.llama.address_space import PAGE, AddressSpace
from edge.onnx.lean import WeightPlace
from edge.onnx.samples import Array
from edge.weights.direct_file import DirectFile
from partition.predict.residency import SLOTS

_READERS = 4  # threads that read weights
_CHUNK = 2 << 20  # bytes of one read
_STAGING = _CHUNK + 2 * PAGE  # bytes; a read includes whole pages
READ_BUFFERS_BYTES = _READERS * _STAGING

Weights = Mapping[str, WeightPlace]  # weights of a part by name


def n_bytes(weights: Weights) -> int:
    """Return the bytes that the weights of a part take in memory."""
    return sum(place.span for place in weights.values())


class PartWeights:
    """Weights of all parts in memory. A streamed part always uses the same one of the two buffers."""

    def __init__(self, parts: Sequence[Weights], streamed: Sequence[int], closing: ExitStack) -> None:
        """Read the resident weights, and begin to read the first streamed ones.

        streamed: parts that are read in every run, in order
        closing: frees everything

        Raises WeightsError if the weights cannot be read.
        """
        self._parts, self._streamed = parts, streamed
        paths = {place.path for weights in parts for place in weights.values()}
        self._files = {path: DirectFile(path, path.stat().st_size) for path in paths}
        for file in self._files.values():
            closing.callback(file.close)
        resident = [i for i in range(len(parts)) if i not in streamed]
        space = AddressSpace(sum(n_bytes(parts[i]) for i in resident), huge=True)
        slot_bytes = max((n_bytes(parts[i]) for i in streamed), default=0)
        slots = [AddressSpace(slot_bytes, huge=True) for _ in range(SLOTS if streamed else 0)]
        for memory in (space, *slots):
            closing.callback(memory.close)
        closing.callback(self._forget)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="edge-onnx-read")
        closing.callback(self._readers.shutdown, cancel_futures=True)
        self._staging: SimpleQueue[AddressSpace] = SimpleQueue()
        for _ in range(_READERS):
            self._staging.put(AddressSpace(_STAGING))
        self._arriving: list[tuple[int, list[Future[None]]] | None] = [None] * SLOTS
        self._arrays = {i: _views(parts[i], slots[self._slot(i)], 0) for i in streamed}
        at, reads = 0, []
        for i in resident:
            self._arrays[i] = _views(parts[i], space, at)
            at += n_bytes(parts[i])
            reads += self._read(i)
        for read in reads:
            read.result()
        for i in streamed[:SLOTS]:
            self._arrive(i)

    def ready(self, i: int) -> dict[str, Array]:
        """Wait until the weights of a part are in memory, and return them. Raises WeightsError."""
        if i in self._streamed:
            slot = self._slot(i)
            arriving, self._arriving[slot] = self._arriving[slot], None
            if arriving is None or arriving[0] != i or any(map(_has_failed, arriving[1])):
                self._finish(arriving)
                arriving = i, self._read(i)
            for read in arriving[1]:
                read.result()
            self._arriving[slot] = i, []
        return self._arrays[i]

    def computed(self, i: int) -> None:
        """Begin to replace the weights of a part in its buffer by those of the next part."""
        if i in self._streamed:
            same = self._streamed[self._slot(i) :: SLOTS]
            if len(same) > 1:
                self._arrive(same[(same.index(i) + 1) % len(same)])

    def _slot(self, i: int) -> int:
        return self._streamed.index(i) % SLOTS

    def _arrive(self, i: int) -> None:
        """Begin to read the weights of a part into its buffer."""
        self._arriving[self._slot(i)] = i, self._read(i)

    def _read(self, i: int) -> list[Future[None]]:
        """Begin to read the weights of a part to their places."""
        reads = []
        for name, place in self._parts[i].items():
            target = self._arrays[i][name].reshape(-1).view(np.uint8).data
            for start in range(0, place.n_bytes, _CHUNK):
                reads.append(self._readers.submit(self._read_chunk, place, start, target[start : start + _CHUNK]))
        return reads

    def _read_chunk(self, place: WeightPlace, start: int, target: memoryview) -> None:
        staging = self._staging.get()
        try:
            view = staging.view(0, staging.n_bytes)
            skip = self._files[place.path].read(place.offset + start, len(target), view)
            target[:] = view[skip : skip + len(target)]
        finally:
            self._staging.put(staging)

    @staticmethod
    def _finish(arriving: tuple[int, list[Future[None]]] | None) -> None:
        """Wait until nothing is written to a buffer any more."""
        for read in arriving[1] if arriving is not None else ():
            read.exception()

    def _forget(self) -> None:
        self._arrays.clear()


def _has_failed(read: Future[None]) -> bool:
    return read.done() and read.exception() is not None


def _views(weights: Weights, space: AddressSpace, at: int) -> dict[str, Array]:
    """Return the arrays of a part's weights, one after the other in memory."""
    views = {}
    for name, place in weights.items():
        flat = np.frombuffer(space.view(at, place.n_bytes), np.dtype(place.dtype))
        views[name] = flat.reshape(place.shape)
        at += place.span
    return views

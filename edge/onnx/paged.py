"""A network that is larger than its memory budget.

The network is cut into parts, and each part is a session. Large weights are inputs of the sessions, so that their
memory is ours. As many parts as fit keep their weights. The weights of the other parts are read from disk in every run,
through two buffers: one part computes while the next one arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from devices.probe import default_threads, own_rss
from devices.processes.limits import give_back_memory
from edge.closing import Closing
from edge.errors import EngineError, NotEnoughMemory
from edge.onnx.engine import OnnxEngine
from edge.onnx.file import keep_outputs
from edge.onnx.lean import LeanFile, weights_as_inputs
from edge.onnx.model import declared_inputs, declared_outputs, noise
from edge.onnx.part_weights import READ_BUFFERS_BYTES, PartWeights, Weights, n_bytes
from edge.onnx.samples import Array, Feeds
from edge.onnx.signature import dims_of, fit, with_dims
from partition.model.onnx_graph import OnnxGraph
from partition.plan.onnx_cuts import cuts
from partition.predict.residency import SLOTS, share_out
from partition.slices.onnx_slice import slice_model
from quant.text import bytes_text

LARGE = 64 << 10  # bytes; smaller weights stay in the sessions, because kernels may need their values early
_PARTS = 16  # number of parts that fit into the memory for weights, if the network can be cut so often
_MARGIN = 24 << 20  # bytes that the process allocates later
_LOCK_S = 3600.0  # maximum wait for another run
_MIB = 1 << 20


@dataclass(frozen=True)
class _Part:
    """Consecutive nodes of a network."""

    engine: OnnxEngine
    weights: Weights
    takes: tuple[str, ...]  # tensors from earlier parts and inputs of the network
    done: tuple[str, ...]  # tensors that no later part uses


class PagedNetwork(Closing):
    """A network on this device whose process keeps within a memory budget.

    One run at a time is computed. Others wait.
    """

    provider = "cpu"
    fell_back_from: tuple[str, ...] = ()

    def __init__(
        self,
        lean: LeanFile,
        memory: int,
        threads: int | None = None,
        *,
        dims: Mapping[str, int] | None = None,
        outputs: Collection[str] = (),
        feeds: Feeds | None = None,
    ) -> None:
        """Open the network, and read the weights that stay in memory.

        memory: bytes of the whole process
        dims, outputs: as for OnnxEngine
        feeds: an input whose sizes other open dimensions have in the plan of the memory; None: they have size 1

        Raises NotEnoughMemory with the least budget, the errors of OnnxGraph and OnnxEngine, and WeightsError if
        weights cannot be read.
        """
        file = lean.file
        self.path, self.threads, self.memory = file.path, threads or default_threads(), memory
        self.files = file.data_files | {file.path}
        self._lock, self._closing = threading.Lock(), ExitStack()
        try:
            keep_outputs(file.model.graph, outputs)
            self.inputs = with_dims(declared_inputs(file), dims or {})
            self.outputs = declared_outputs(file)
            feeds = noise(self.inputs) if feeds is None else feeds
            fit(self.inputs, feeds)
            self._open(lean, OnnxGraph.from_model(file.model, dims_of(declared_inputs(file), feeds)))
        except BaseException:
            self.close()
            raise

    def _open(self, lean: LeanFile, graph: OnnxGraph) -> None:
        bounds = [0, *(cut.position for cut in cuts(graph)), len(graph.nodes)]
        # A part's tensors, and those that wait for later parts.
        activations = 2 * max(graph.activation_bytes(start, stop) for start, stop in pairwise(bounds))
        needed = {"activations": activations, "read buffers": READ_BUFFERS_BYTES}
        give_back_memory()
        room = self.memory - own_rss() - _MARGIN - sum(needed.values())
        self._parts = list(self._cut(lean, graph, list(_merged(lean, graph, bounds, room // _PARTS))))
        self.uses = {"runtime": own_rss() + _MARGIN, **needed}  # bytes of memory by use
        room = self.memory - sum(self.uses.values())
        sizes = {i: n_bytes(part.weights) for i, part in enumerate(self._parts) if part.weights}
        streamed = share_out(sizes, room)
        if streamed is None:
            raise self._too_little(min(sum(sizes.values()), SLOTS * max(sizes.values(), default=0)))
        self.streamed = streamed
        self._streamed_bytes = sum(sizes[i] for i in streamed)
        resident, slot_bytes = sum(sizes.values()) - self._streamed_bytes, max((sizes[i] for i in streamed), default=0)
        self.uses |= {"resident weights": resident, "two buffers": SLOTS * slot_bytes}
        self._weights = PartWeights([part.weights for part in self._parts], streamed, self._closing)

    def _too_little(self, weights: int) -> NotEnoughMemory:
        """Return the error for a budget that lacks memory for this many bytes of weights."""
        parts = self.uses | {"weights": weights}
        least = -(-sum(parts.values()) // _MIB)
        words = ", ".join(f"{name} {n / _MIB:,.0f}" for name, n in parts.items())
        error = NotEnoughMemory(
            f"{self.path.name} needs a budget of at least {least:,} MiB ({words}); {self.memory / _MIB:,.0f} MiB were"
            " given. Use a larger --memory, or smaller inputs"
        )
        error.least = least * _MIB
        return error

    def _cut(self, lean: LeanFile, graph: OnnxGraph, stages: Sequence[tuple[int, int]]) -> Iterator[_Part]:
        """Yield the parts of a network, one for each range of nodes."""
        protos = [slice_model(lean.file.model, graph, start, stop) for start, stop in stages]
        last = {value.name: i for i, proto in enumerate(protos) for value in proto.graph.input}
        outputs = {output.name for output in self.outputs}
        for i, proto in enumerate(protos):
            takes = tuple(value.name for value in proto.graph.input)
            names = weights_as_inputs(proto.graph, lean.places)
            engine = OnnxEngine(proto.SerializeToString(), self.threads, "cpu", alone=False)
            self._closing.callback(engine.close)
            done = tuple(name for name, user in last.items() if user == i and name not in outputs)
            yield _Part(engine, {name: lean.places[name] for name in names}, takes, done)

    def run(self, feeds: Mapping[str, Array]) -> Feeds:
        """Compute the network and return its outputs by name. Raises WeightsError, and the errors of OnnxEngine."""
        if not self._lock.acquire(timeout=_LOCK_S):
            raise EngineError(f"another run of {self.path.name} has not ended in {_LOCK_S:g} s")
        try:
            fit(self.inputs, feeds)
            values = dict(feeds)
            for i, part in enumerate(self._parts):
                inputs = {name: values[name] for name in part.takes}
                values |= part.engine.run(inputs | self._weights.ready(i))
                self._weights.computed(i)
                for name in part.done:
                    values.pop(name, None)
            return {output.name: values[output.name] for output in self.outputs}
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Make a run in another thread, and later runs, raise Interrupted."""
        for part in self._parts:
            part.engine.stop()

    def resume(self) -> None:
        """Allow runs again after `stop`."""
        for part in self._parts:
            part.engine.resume()

    def describe(self) -> str:
        """Return a line about the memory and the bytes that every run reads."""
        parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in self.uses.items() if n)
        read = f"; {bytes_text(self._streamed_bytes)} of weights are read in every run" if self._streamed_bytes else ""
        return f"{bytes_text(sum(self.uses.values()))} of {bytes_text(self.memory)}: {parts}{read}"

    def to_json(self) -> dict[str, Any]:
        """Return the keys `memory` and `paging` of `edge run --json`."""
        total = sum(self.uses.values())
        return {
            "memory": {"budget_bytes": self.memory, "total_bytes": total, "parts": dict(self.uses)},
            "paging": {
                "parts": len(self._parts),
                "streamed_parts": len(self.streamed),
                "resident_bytes": self.uses["resident weights"],
                "streamed_bytes": self._streamed_bytes,
            },
        }

    def close(self) -> None:
        """Free the network."""
        self._closing.close()


def _merged(lean: LeanFile, graph: OnnxGraph, bounds: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of nodes between cuts, as long as possible with at most `most` bytes of large weights.

    A range that cannot be cut may have more.
    """
    start, there = bounds[0], set[str]()
    for low, high in pairwise(bounds):
        new = {name for node in graph.nodes[low:high] for name in node.weights if name in lean.places}
        if low > start and new - there and sum(lean.places[name].span for name in there | new) > most:
            yield start, low
            start, there = low, set()
        there |= new
    yield start, bounds[-1]

"""Shard: one rank's slice of a model, which computes its part of every step together with the other ranks.

To llama.cpp the slice is an ordinary model. Hooks all-reduce partial sums over the ranks of a stage, and extract the
hidden states at its end. docs/distributed.md walks through one step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devices.probe import default_threads
from edge.errors import EngineError
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from edge.llama.llama import Model, has_gpu
from edge.llm.options import EngineOptions
from edge.llm.snapshots import Snapshots
from edge.parallel.busy import ComputeClock
from edge.parallel.engine_kinds import own_kind
from edge.parallel.error_feedback import ErrorFeedback, adds_sums
from edge.parallel.step_times import StepTime, StepTimes
from edge.parallel.steps import Adapt, CacheStep, Clear, Copy, Remove, SetBack, Shift, Snapshot, output_rows
from edge.parallel.thin import ThinEngine
from edge.parallel.topology import Topology
from partition.architectures.description import SCALED_INPUT, Rules
from partition.architectures.table import RULES
from partition.model.file import ModelFile
from quant.gguf.file import GgufFile
from transport.collective import Group, Wire
from transport.errors import ProtocolError
from transport.link import Link

Floats = NDArray[np.float32]

_LAYER_END = re.compile(r"l_out-\d+")


class Shard:
    """A loaded slice with its position among the ranks. `close()` frees it."""

    def __init__(
        self,
        file: ModelFile,
        options: EngineOptions,
        place: Topology,
        progress: Callable[[float], None] | None = None,
        vocabulary: Model | None = None,
    ) -> None:
        """Load a slice.

        vocabulary: the model's vocabulary, for a rank without layers; `file` is then the model's own file.

        Raises the errors of ModelRunner.
        """
        self.place = place
        self._rules = RULES[file.architecture]
        # All-reduces per layer: FFN or experts, and attention.
        self._sums_a_layer = 1 if self._rules.whole_attention else 2
        # Shares were computed for this number of threads. The deployment owns the prefix cache.
        options = replace(options, threads=options.threads or default_threads(), prefixes=None)
        if not place.thin:
            self.engine = own_kind().open(file, options, place, self._hooks(file), progress)
        elif vocabulary is not None:
            self.engine = ThinEngine(file, options, vocabulary)
        else:
            raise EngineError("a rank without layers has nothing to load on another device; update both devices")
        self.rows = self.engine.rows
        self._has_gpu = has_gpu()
        self.hidden = np.empty((0, 0), np.float32)  # [rows, n_embd] of the last step, at the end of the stage
        self.times = StepTimes()
        self._group: Group | None = None
        self._links: list[Link] = []
        self.wire: Wire | None = None  # type of partial sums, and of hidden states between stages
        self._algorithm: Any = "auto"
        self._exchange_s = 0.0  # total seconds of all-reduces
        self._compute_s = 0.0  # compute seconds of the current step
        self.clock = ComputeClock()
        self._sums = 0  # all-reduces of the current step
        self._output_rows = self.rows.outputs[:0]  # rows with logits of the current step
        self._feedback = ErrorFeedback() if adds_sums(file.tensors) else None

    def join(self, group: Group, algorithm: str = "auto", wire: Wire | None = None) -> None:
        """Compute with these ranks from now on. `group` has links to all ranks of the deployment."""
        self._links = list(group.links.values())
        self._group = group.part(self.place.group)
        self._algorithm, self.wire = algorithm, wire

    # --- a decode step: `begin`, `compute`, `end` ---

    def begin(self) -> None:
        """Start timing a step."""
        self._began = time.perf_counter()
        self._before = self._moved()
        self._compute_s = 0.0

    def time_of(self, n: int, idle_s: float = 0.0) -> StepTime:
        """Return the initial times of a step of `n` rows.

        idle_s: seconds that this rank waited for the step while others were busy.
        """
        is_decode = len(set(self.rows.sequences[:n].tolist())) == n
        return StepTime(n if is_decode else 0, stall_s=idle_s)

    def compute(self, n: int) -> None:
        """Compute the first `n` rows. Then `hidden` has the input of the next stage, or `logits` are available.

        A stage that is not the last computes all rows to its end, whether or not they yield logits. A rank without
        layers computes nothing, and no compute time is counted.
        """
        if self.place.thin:
            self.engine.decode_rows(self.rows, n)
            return
        outputs = self.rows.outputs[:n]
        asked_outputs = outputs.copy()
        if not self.place.last:
            outputs[:] = 1
        self._sums, self._output_rows = 0, asked_outputs if self.place.last else outputs
        if self._feedback is not None:
            self._feedback.begin()
        before = self._exchange_s
        began = time.perf_counter()
        try:
            with self.clock.computing():
                self.engine.decode_rows(self.rows, n)
        finally:
            outputs[:] = asked_outputs
        if len(self.place.group) > 1 and self._sums != self._sums_a_layer * self.engine.shape.n_layers:
            raise EngineError(
                f"{self._sums} all-reduces in {self.engine.shape.n_layers} layers, expected {self._sums_a_layer} per"
                " layer;"
                " this model needs --parallel pipeline"
            )
        exchange_s = self._exchange_s - before
        self.clock.subtract(exchange_s)
        self._compute_s += time.perf_counter() - began - exchange_s

    def end(self, so_far: StepTime) -> StepTime:
        """Return the times of a step, including the time since `begin`."""
        waited_s, sent, received = (after - before for after, before in zip(self._moved(), self._before, strict=True))
        communication_s = max(0.0, time.perf_counter() - self._began - self._compute_s)
        return StepTime(
            so_far.rows,
            so_far.compute_s + self._compute_s,
            so_far.communication_s + communication_s,
            so_far.stall_s + waited_s,
            so_far.sent_bytes + int(sent),
            so_far.received_bytes + int(received),
        )

    def _moved(self) -> tuple[float, float, float]:
        """Return totals of all links: seconds of waiting, bytes sent, bytes received."""
        return (
            sum(link.receive_s for link in self._links),
            sum(link.sent_bytes for link in self._links),
            sum(link.received_bytes for link in self._links),
        )

    def logits(self, n: int) -> list[Floats]:
        """Return the logits [own rows of the head] of each of the first `n` rows with logits, as views that are
        valid until the next step.
        """
        return [self.engine.logits(row) for row in output_rows(self.rows, n)]

    # --- the KV cache ---

    @property
    def knows_removals(self) -> bool:
        """True if this rank knows for all ranks whether positions can be removed."""
        return not isinstance(self.engine, ThinEngine) or self.engine.knows_removals

    def keep(self, step: CacheStep) -> bool:
        """Apply an operation to the KV cache, or change the adapter scales. Return False if only the whole sequence
        can be removed, or if a snapshot is missing.
        """
        match step:
            case Remove(sequence, start, end):
                return self.engine.kv_remove(sequence, start, end)
            case Copy(source, target, start, end):
                self.engine.kv_copy(source, target, start, end)
            case Shift(sequence, start, end, delta):
                self.engine.kv_shift(sequence, start, end, delta)
            case Clear():
                self.engine.kv_clear()
            case Snapshot(sequence, block_hash):
                _snapshots_of(self).make(sequence, block_hash)
            case SetBack(sequence, length, block_hash):
                return _snapshots_of(self).set_back(sequence, length, block_hash)
            case Adapt(scales):
                self.engine.adapters.use(scales)
        return True

    def close(self) -> None:
        """Free the slice. The links stay open."""
        self.engine.close()

    # --- hooks ---

    def _hooks(self, file: GgufFile) -> list[Hook]:
        """Return the hooks of this rank. The last stage without tensor parallelism has none, so llama.cpp runs it
        without callbacks.
        """
        hooks = []
        rules = self._rules
        changed = rules.input_node if rules.takes_tokens or self.place.stage else ""
        changed = SCALED_INPUT if rules.scales_input else changed
        if changed:
            hooks.append(Hook(lambda node: node.name == changed, self._take_input))
        if len(self.place.group) > 1:
            hooks.append(Hook(_partial(rules, file, lambda weight: self.engine.adapters.n_of(weight)), self._sum))
        if rules.deepstack and not self.place.stage:
            hooks.append(
                Hook(lambda node: bool(_LAYER_END.fullmatch(node.name)), lambda node: _add(node, self.rows.deep))
            )
        if not self.place.last:
            blocks = file.metadata.get(f"{file.architecture}.block_count")
            end = rules.end_node.format(int(blocks) - 1 if isinstance(blocks, int) else 0)
            hooks.append(Hook(lambda node: node.name == end, self._take_hidden))
        return hooks

    def _take_input(self, node: Node) -> None:
        rows, _ = node.shape
        node.write(self.rows.embeddings[:rows])

    def _sum(self, node: Node) -> None:
        began = time.perf_counter()
        self._sums += 1
        if self._group is None:
            raise EngineError("the ranks are not connected yet")
        view = node.view()
        x = node.read() if view is None else view  # None: the node is in the memory of a GPU
        lost = None
        if self._feedback is not None and self.wire is not None:
            lost = self._feedback.add(x, self._output_rows)
        self._group.allreduce(x, self._algorithm, self.wire, lost)
        if view is None:
            node.write(x)
        self._exchange_s += time.perf_counter() - began

    def _take_hidden(self, node: Node) -> bool:
        # With a GPU, other parts of the graph continue and may reuse this memory.
        view = None if self._has_gpu else node.view()
        self.hidden = node.read() if view is None else view
        return False  # norm and head belong to the last stage


def _snapshots_of(shard: Shard) -> Snapshots:
    """Return the snapshots of a shard's recurrent layers. Raises ProtocolError for a model without such layers."""
    snapshots = shard.engine.states.snapshots
    if snapshots is None:
        raise ProtocolError(f"snapshots of recurrent layers were requested, but rank {shard.place.rank} has none")
    return snapshots


def _add(node: Node, deep: Floats | None) -> None:
    """Add the rows of a picture for this layer to the end of the layer."""
    layer = int(node.name.rpartition("-")[2])
    if deep is not None and layer < len(deep):
        node.write(node.read() + deep[layer])


def _partial(rules: Rules, file: GgufFile, adapters_of: Callable[[str], int]) -> Callable[[Node], bool]:
    """Return a test whether a node's result is a partial sum over the ranks.

    In most graphs the output projection has no name of its own, so its weight is tested. Experts are summed once, after
    they are weighted and added. Outputs of adapters are also partial, so the all-reduce comes after the last adapter.

    adapters_of: returns the number of active adapters that change a weight.
    """
    weights = re.compile(rf"\.({'' if rules.whole_attention else 'attn_output|'}ffn_down)\.weight$")
    shares_one = rules.shared_sum and any(name.endswith(".ffn_down_shexp.weight") for name in file.tensors)
    nodes = re.compile((rules.shared_sum if shares_one else rules.experts_sum).format(r"\d+"))

    def is_partial(node: Node) -> bool:
        weight, n_added = node.adapted_weight() or (node.weight, 0)
        return n_added == adapters_of(weight) if weights.search(weight) else bool(nodes.fullmatch(node.name))

    return is_partial

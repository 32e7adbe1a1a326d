"""Hooks that read and write chosen nodes while llama.cpp computes a graph.

llama.cpp calls back for every node of every graph (about 700 per token for a 1B model). The order of nodes depends only
on the number of rows, the number of output rows, and the active adapters. So the first graph of a kind is matched by
node name, and later graphs use a counter and a list look-up. A shift of positions adds a graph before the next one; its
nodes are matched by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.batch import Batch
from edge.llama.ggml import Node, use_node_callback
from edge.llama.interrupt import handled_interrupts
from edge.llama.llama import Context


@dataclass(frozen=True)
class Hook:
    """Condition that selects nodes, and the functions to call at these nodes."""

    wants: Callable[[Node], bool]  # called once per node and kind of graph
    # Called after the node is computed. If it returns False, the graph ends there. None: the graph is not interrupted.
    run: Callable[[Node], bool | None] | None
    before: Callable[[Node], None] | None = None  # called before the node is computed
    ready: Callable[[], bool] | None = None  # True: `before` would not block. False: earlier nodes are computed first


class NodeValue:
    """Value of a node that this process does not compute. Hooks use it like a `Node`."""

    def __init__(self, value: NDArray[np.float32], name: str = "", weight: str = "") -> None:
        """value: [rows, width].
        weight: name of the weight of a matrix product.
        """
        self.shape, self.name, self.weight, self._value = value.shape, name, weight, value

    def adapted_weight(self) -> None:
        """Return None, because no adapter is computed."""

    def view(self) -> NDArray[np.float32]:
        """Return the value."""
        return self._value

    read = view


_Readies = tuple[Callable[[], bool], ...]
_Before = tuple[Callable[[Node], None], ...]
_Run = tuple[Callable[[Node], bool | None], ...]


class _Hooks(NamedTuple):
    """Functions that the hooks have for one node."""

    before: _Before
    run: _Run
    ready: _Readies

    @classmethod
    def from_hooks(cls, hooks: Sequence[Hook]) -> _Hooks | None:
        """Return the functions of these hooks, or None if there are no hooks."""
        before = tuple(hook.before for hook in hooks if hook.before is not None)
        run = tuple(hook.run for hook in hooks if hook.run is not None)
        ready = tuple(hook.ready for hook in hooks if hook.ready is not None)
        return cls(before, run, ready) if hooks else None


def _that_call(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    return tuple(hook for hook in hooks if hook.run is not None or hook.before is not None)


class NodeHooks:
    """llama.cpp node callback that runs hooks, for the context passed to `decode`.

    If several hooks select a node, they run in their order.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = _that_call(hooks)
        self._cache: dict[Hashable, tuple[list[_Hooks | None], list[_Readies]]] = {}
        self._plan: list[_Hooks | None] = []  # by node index
        # by node index: `ready` functions of the following node; empty if no hook has one
        self._next: list[_Readies] = []
        self._kind: Hashable | None = None  # kind of the next graph; None: the graph is not cached
        self._learning = True
        self._index = 0
        self._run: _Run = ()  # functions of the node that is computed next
        self._idle = self._ended = False
        self._interrupted = False  # by Ctrl-C; the graph ends at its next node
        self._error: BaseException | None = None
        self._unskip: list[Callable[[], None]] = []  # restore the nodes that were skipped after the end

    def decode(self, context: Context, rows: Batch, n: int, outputs: int) -> None:
        """Decode the first `n` rows. `outputs` of them give logits. Raises the errors of `Context.decode`, hooks and
        `end`."""
        if context._handle:
            use_node_callback(context._handle, context._on_node if self._hooks else None)
        self._idle = not self._hooks  # a new graph still calls back
        if self._idle:
            context.decode(rows, n)
            return
        kind = (n, outputs, context.active_adapters, context.gives_hidden, rows.has_embeddings, rows.causal)
        self.begin(None if context.shift_pending else kind)  # a graph that shifts positions may precede it
        completed = False
        try:
            with handled_interrupts(self._interrupt):
                context.decode(rows, n)
            completed = True
        finally:
            self.end(completed)

    def use(self, hooks: Sequence[Hook]) -> None:
        """Run these hooks from the next graph on, and discard all learned graphs."""
        self._hooks = _that_call(hooks)
        self._cache.clear()

    def begin(self, kind: Hashable | None) -> None:
        """Prepare for the next graph. Graphs of one kind have the same nodes. None: do not cache this graph."""
        self._kind = kind
        cached = self._cache.get(kind) if kind is not None else None
        self._learning = cached is None
        self._plan, self._next = cached if cached is not None else ([], [])
        self._index, self._ended, self._interrupted, self._error = 0, False, False, None

    def end(self, completed: bool) -> None:
        """Finish the graph.

        completed: the decode ran to its end. The nodes of an interrupted graph are not cached.
        Raises the error of a hook, KeyboardInterrupt after Ctrl-C, or EngineError if the graph differs from the cached
        one.
        """
        while self._unskip:
            self._unskip.pop()()
        if self._interrupted:
            raise KeyboardInterrupt from self._error
        if self._error is not None:
            raise self._error
        if not completed or self._kind is None:
            return
        if self._learning:
            readies = [hooks.ready if hooks is not None else () for hooks in self._plan]
            self._cache[self._kind] = self._plan, [*readies[1:], ()] if any(readies) else []
        elif not self._ended and self._index != len(self._plan):
            del self._cache[self._kind]
            raise EngineError(
                f"a graph of {self._index} nodes was computed, but {len(self._plan)} nodes were recorded for"
                f" (rows, outputs, adapters, hidden states, embeddings, causal) = {self._kind}; its hooks may have run"
                " at the wrong nodes"
            )

    def _interrupt(self, frame: FrameType | None) -> None:
        """Handle Ctrl-C during a graph. A hook may block for long, so it is interrupted immediately. Other code ends
        the graph at its next node: Python handles signals on entry to `callback`, which is before its `try`.
        """
        if not self._interrupted and self._error is None and _is_in_hook(frame):
            raise KeyboardInterrupt
        self._interrupted = self._ended = True

    def callback(self, address: int, ask: bool, _: Any) -> bool:
        """Handle llama.cpp's node callback. Exceptions cannot cross native code, so they are stored for `end`."""
        try:
            if not ask:
                node = Node(address)
                for run in self._run:
                    if run(node) is False:
                        self._ended = True
                return not self._ended
            if self._idle:
                return False
            if self._ended:
                if self._interrupted and self._error is None:
                    raise KeyboardInterrupt
                # With a GPU, a graph has several parts, and llama.cpp goes on with the next part. It computes nothing
                # of it: its inputs are missing.
                self._unskip.append(Node(address).skip())
                self._run = ()
                return True
            if self._learning:
                node = Node(address)
                self._plan.append(_Hooks.from_hooks([hook for hook in self._hooks if hook.wants(node)]))
            index = self._index
            self._index += 1
            if index >= len(self._plan):  # more nodes than recorded: `end` raises the error
                return False
            if (hooks := self._plan[index]) is not None:
                self._run = hooks.run
                for before in hooks.before:
                    before(Node(address))
                if hooks.run:
                    return True
            if self._next:
                # A generator would cost a microsecond for each of hundreds of nodes per token.
                for ready in self._next[index]:
                    if not ready():
                        self._run = ()  # this node has no functions, and those of an earlier node have run
                        return True
            return False
        except BaseException as error:
            self._error, self._ended, self._run = error, True, ()
            if ask:  # Do not compute this node: its input may be missing, and ggml aborts the process on wrong numbers.
                self._unskip.append(Node(address).skip())
            return ask  # True: llama.cpp calls again after this node, and the graph ends there


def _is_in_hook(frame: FrameType | None) -> bool:
    """Return whether the interrupted code was called by `NodeHooks.callback`."""
    caller = frame and frame.f_back
    while caller is not None and caller.f_code is not _CALLBACK:
        caller = caller.f_back
    return caller is not None


_CALLBACK = NodeHooks.callback.__code__

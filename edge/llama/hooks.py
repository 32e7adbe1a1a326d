"""Hooks: look at, and write into, chosen nodes while llama.cpp computes a graph.

llama.cpp asks about every node of every graph (about 700 a token for a 1B model). The order of nodes depends only on
how many rows a batch has, how many of them give logits, and which adapters are in use, so the first graph of a kind is
learned by name and later ones are a counter and a list look-up. A shift of positions is a graph of its own, which comes
before the next one: then all nodes are known by name again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from edge.errors import EngineError
from edge.llama.batch import Batch
from edge.llama.ggml import Node, use_node_callback
from edge.llama.interrupt import handled_interrupts
from edge.llama.llama import Context


@dataclass(frozen=True)
class Hook:
    """Hook: the nodes it applies to, and the functions to call there."""

    wants: Callable[[Node], bool]  # asked once per node and kind of graph
    # Called when the node is computed; returning False ends the graph there. Without one, the graph is not interrupted.
    run: Callable[[Node], bool | None] | None
    before: Callable[[Node], None] | None = None  # called before the node is computed
    ready: Callable[[], bool] | None = None  # whether `before` returns at once; if not, what precedes is computed first


_Readies = tuple[Callable[[], bool], ...]
_Before = tuple[Callable[[Node], None], ...]
_Run = tuple[Callable[[Node], bool | None], ...]


class _Hooks(NamedTuple):
    """The functions that hooks have for one node."""

    before: _Before
    run: _Run
    ready: _Readies

    @classmethod
    def from_hooks(cls, hooks: Sequence[Hook]) -> _Hooks | None:
        """Those of these hooks, which want the node; None: none does."""
        before = tuple(hook.before for hook in hooks if hook.before is not None)
        run = tuple(hook.run for hook in hooks if hook.run is not None)
        ready = tuple(hook.ready for hook in hooks if hook.ready is not None)
        return cls(before, run, ready) if hooks else None


def _that_call(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    return tuple(hook for hook in hooks if hook.run is not None or hook.before is not None)


class NodeHooks:
    """Turns hooks into llama.cpp's node callback, of the context that `decode` is given.

    Where several hooks want a node, they run in their order.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = _that_call(hooks)
        self._cache: dict[Hashable, tuple[list[_Hooks | None], list[_Readies]]] = {}
        self._plan: list[_Hooks | None] = []  # by node index
        self._next: list[_Readies] = []  # likewise: what the node behind it may have to wait for; empty: none does
        self._kind: Hashable | None = None  # of the graph that comes; None: it is not to be remembered
        self._learning = True
        self._index = 0
        self._run: _Run = ()  # at the node that is computed next
        self._ended = False
        self._interrupted = False  # by Ctrl-C; the graph ends at its next node
        self._error: BaseException | None = None
        self._unskip: Callable[[], None] | None = None  # the node that an error came before

    def decode(self, context: Context, rows: Batch, n: int, outputs: int) -> None:
        """Decode the first `n` rows, of which `outputs` give logits. Errors of `Context.decode`, of hooks and of
        `end`."""
        if context._handle:
            use_node_callback(context._handle, context._on_node if self._hooks else None)
        if not self._hooks:
            self._ended = True  # a new graph calls all the same
            context.decode(rows, n)
            return
        kind = (n, outputs, context.active_adapters, context.gives_hidden, rows.has_embeddings, rows.causal)
        self.begin(None if context.shift_pending else kind)  # a graph that shifts positions may come before it
        completed = False
        try:
            with handled_interrupts(self._interrupt):
                context.decode(rows, n)
            completed = True
        finally:
            self.end(completed)

    def use(self, hooks: Sequence[Hook]) -> None:
        """Run these hooks from the next graph on, and learn all graphs anew."""
        self._hooks = _that_call(hooks)
        self._cache.clear()

    def begin(self, kind: Hashable | None) -> None:
        """A graph of this kind comes next: those of one kind have the same nodes. None: it is not to be remembered."""
        self._kind = kind
        cached = self._cache.get(kind) if kind is not None else None
        self._learning = cached is None
        self._plan, self._next = cached if cached is not None else ([], [])
        self._index, self._ended, self._interrupted, self._error = 0, False, False, None

    def end(self, completed: bool) -> None:
        """Raise what a hook raised, KeyboardInterrupt after Ctrl-C, or EngineError if the graph was not the one
        remembered.

        completed: the decode ran to its end; what an interrupted graph showed is not remembered.
        """
        if self._unskip is not None:
            self._unskip()
            self._unskip = None
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
                f"a graph of {self._index} nodes came where one of {len(self._plan)} was remembered for"
                f" (rows, outputs, adapters, hidden states, embeddings, causal) = {self._kind}; its hooks may have run"
                " at the wrong nodes"
            )

    def _interrupt(self, frame: FrameType | None) -> None:
        """Take Ctrl-C while a graph is computed. A hook, which may wait for long, is interrupted at once. Elsewhere the
        graph ends at its next node: Python comes to a signal where `callback` is entered, which is before its `try`."""
        if not self._interrupted and self._error is None and _is_in_hook(frame):
            raise KeyboardInterrupt
        self._interrupted = self._ended = True

    def callback(self, address: int, ask: bool, _: Any) -> bool:
        """llama.cpp's side. An exception cannot cross native code: it is kept for `end`, and the graph is ended."""
        try:
            if not ask:
                node = Node(address)
                for run in self._run:
                    if run(node) is False:
                        self._ended = True
                return not self._ended
            if self._ended:
                if self._interrupted and self._error is None:
                    raise KeyboardInterrupt
                return False
            if self._learning:
                node = Node(address)
                self._plan.append(_Hooks.from_hooks([hook for hook in self._hooks if hook.wants(node)]))
            index = self._index
            self._index += 1
            if index >= len(self._plan):  # more nodes than remembered: `end` says so
                return False
            if (hooks := self._plan[index]) is not None:
                self._run = hooks.run
                for before in hooks.before:
                    before(Node(address))
                if hooks.run:
                    return True
            if self._next:
                # A generator would cost a microsecond, and there are hundreds of nodes to a token.
                for ready in self._next[index]:
                    if not ready():
                        self._run = ()  # it has none of its own, and those of a node before ran
                        return True
            return False
        except BaseException as error:
            self._error, self._ended, self._run = error, True, ()
            if ask:  # not computed: what it needs may not be there, and ggml ends the process over wrong numbers
                self._unskip = Node(address).skip()
            return ask  # to be called after this node, and end the graph there


def _is_in_hook(frame: FrameType | None) -> bool:
    """Return whether something that `NodeHooks.callback` called is interrupted."""
    caller = frame and frame.f_back
    while caller is not None and caller.f_code is not _CALLBACK:
        caller = caller.f_back
    return caller is not None


_CALLBACK = NodeHooks.callback.__code__

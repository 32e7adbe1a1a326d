"""Hooks: look at, and write into, chosen nodes while llama.cpp computes a graph.

llama.cpp asks about every node of every graph (about 700 a token for a 1B model). The order of nodes depends only on
how many rows a batch has and how many of them give logits, so the first graph of a kind is learned by name and later
ones are a counter and a list look-up. A shift of positions is a graph of its own, which comes before the next one: then
all nodes are known by name again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge.errors import EngineError
from edge.ggml import Node


@dataclass(frozen=True)
class Hook:
    """What to do at which nodes."""

    wants: Callable[
        [Node], bool
    ]  # asked once per node and kind of graph; a node belongs to the first hook that wants it
    run: Callable[[Node], bool | None]  # called when the node is computed; returning False ends the graph there


class NodeHooks:
    """Turns hooks into llama.cpp's node callback. Call `begin` before a decode and `end` after it."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = tuple(hooks)
        self._known: dict[tuple[int, int], list[Hook | None]] = {}
        self._plan: list[Hook | None] = []  # by node index: the hook that wants it
        self._key: tuple[int, int] | None = None  # of the graph that comes; None: it is not to be remembered
        self._learning = True
        self._index = 0
        self._current: Hook | None = None
        self._ended = False
        self._error: BaseException | None = None

    def begin(self, rows: int, outputs: int, *, shifted: bool = False) -> None:
        """A graph for `rows` rows, of which `outputs` give logits, comes next. shifted: one that shifts positions may
        come before it."""
        self._key = None if shifted else (rows, outputs)
        known = self._known.get(self._key) if self._key else None
        self._learning, self._plan = known is None, known if known is not None else []
        self._index, self._ended, self._error = 0, False, None

    def end(self, completed: bool) -> None:
        """Raise what a hook raised, or EngineError if the graph was not the one remembered.

        completed: the decode ran to its end; what an interrupted graph showed is not remembered.
        """
        if self._error is not None:
            raise self._error
        if not completed or self._key is None:
            return
        if self._learning:
            self._known[self._key] = self._plan
        elif not self._ended and self._index != len(self._plan):
            del self._known[self._key]
            raise EngineError(
                f"a graph of {self._index} nodes came where one of {len(self._plan)} was remembered for"
                f" (rows, outputs) = {self._key}; its hooks may have run at the wrong nodes"
            )

    def callback(self, address: int, ask: bool, _: Any) -> bool:
        """llama.cpp's side. An exception cannot cross native code: it is kept for `end`, and the graph is ended."""
        try:
            if not ask:
                assert self._current is not None
                if self._current.run(Node(address)) is False:
                    self._ended = True
                return not self._ended
            if self._ended:
                return False
            if self._learning:
                node = Node(address)
                self._plan.append(next((hook for hook in self._hooks if hook.wants(node)), None))
            self._current = self._plan[self._index]
            self._index += 1
            return self._current is not None
        except IndexError:  # more nodes than remembered
            self._index += 1
            return False
        except BaseException as error:
            self._error, self._ended = error, True
            return False

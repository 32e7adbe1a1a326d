"""Test hooks for paging: they act before a node, have its predecessors computed first, or end a graph."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge.llama.ggml import Node
from edge.llama.hooks import Hook, NodeHooks
from edge.llm.engine import Engine
from tests.conftest import OPTIONS, Synthetic

TOKENS = [5, 300, 17, 401]
NAMES = ["a", "b", "c", "d", "e"]


class Named(str):
    """A node that is only a name."""

    def skip(self) -> Callable[[], None]:
        logs[-1].log.append(f"skip {self}")
        return lambda: logs[-1].log.append(f"unskip {self}")


class Graph:
    """A graph of named nodes, computed as llama.cpp's scheduler does: it asks node by node up to one that is wanted,
    computes up to there, and tells."""

    def __init__(self, hooks: NodeHooks, monkeypatch: pytest.MonkeyPatch) -> None:
        self._hooks = hooks
        self.log: list[str] = []
        monkeypatch.setattr("edge.llama.hooks.Node", lambda address: Named(NAMES[address]))

    def compute(self, n: int = len(NAMES)) -> list[str]:
        """Return the events of one decode; what a hook raises comes after."""
        self.log.clear()
        self._hooks.begin("of one row")
        first = 0
        while first < n:
            last = first
            expected = self._hooks.callback(last, True, None)
            while not expected and last < n - 1:
                last += 1
                expected = self._hooks.callback(last, True, None)
            self.log.append("compute " + "".join(NAMES[first : last + 1]))
            if expected and not self._hooks.callback(last, False, None):
                break
            first = last + 1
        self._hooks.end(completed=True)
        return list(self.log)


Graphed = Callable[..., Graph]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graphed:
    """`graph(*hooks)`; each hook (nodes, name) logs "NAME before x" and "NAME run x"."""

    def make(*hooks: Hook) -> Graph:
        built = Graph(NodeHooks(hooks), monkeypatch)
        logs.append(built)
        return built

    logs.clear()
    return make


logs: list[Graph] = []


def hook(nodes: str, name: str, *, ready: Callable[[], bool] = lambda: True, before: bool = True) -> Hook:
    return Hook(
        lambda node: str(node) in nodes,
        lambda node: logs[-1].log.append(f"{name} run {node}"),
        (lambda node: logs[-1].log.append(f"{name} before {node}")) if before else None,
        ready,
    )


def test_before_comes_before_a_node_is_computed_and_run_after(graph: Graphed) -> None:
    built = graph(hook("c", "one"))
    for _ in range(2):  # learned, and from memory
        assert built.compute() == ["one before c", "compute abc", "one run c", "compute de"]


def test_hooks_of_one_node_act_in_their_order(graph: Graphed) -> None:
    built = graph(hook("bd", "one"), hook("bc", "two"), hook("b", "three", before=False))
    for _ in range(2):
        assert built.compute() == [
            *("one before b", "two before b", "compute ab", "one run b", "two run b", "three run b"),
            *("two before c", "compute c", "two run c"),
            *("one before d", "compute d", "one run d"),
            "compute e",
        ]


def test_what_precedes_a_node_that_must_wait_is_computed_first(graph: Graphed) -> None:
    ready = True
    built = graph(hook("d", "one", ready=lambda: ready))
    together = ["one before d", "compute abcd", "one run d", "compute e"]
    assert built.compute() == together
    ready = False
    assert built.compute() == ["compute abc", "one before d", "compute d", "one run d", "compute e"]
    ready = True
    assert built.compute() == together


def test_one_hook_that_must_wait_is_enough(graph: Graphed) -> None:
    built = graph(hook("d", "one"), hook("d", "two", ready=lambda: False))
    built.compute()
    assert built.compute()[0] == "compute abc"


def test_the_first_node_has_nothing_before_it_to_compute(graph: Graphed) -> None:
    built = graph(hook("a", "one", ready=lambda: False))
    for _ in range(3):
        assert built.compute() == ["one before a", "compute a", "one run a", "compute bcde"]


def test_wanted_nodes_in_a_row_that_must_wait(graph: Graphed) -> None:
    built = graph(hook("bc", "one", ready=lambda: False))
    built.compute()
    assert built.compute() == [
        *("compute a", "one before b", "compute b", "one run b", "one before c", "compute c", "one run c", "compute de")
    ]


def test_an_error_before_a_node_ends_the_graph_there(graph: Graphed) -> None:
    def fail(_: Node) -> None:
        raise KeyError("no weights")

    built = graph(Hook(lambda node: str(node) == "c", lambda node: None, fail), hook("bce", "two"))
    for _ in range(3):
        with pytest.raises(KeyError, match="no weights"):
            built.compute()
        # What it needs may not be there, so it is left out; later graphs have it.
        assert built.log == ["two before b", "compute ab", "two run b", "skip c", "compute c", "unskip c"]


def test_an_error_while_others_wait(graph: Graphed) -> None:
    broken = False

    def fail(_: Node) -> None:
        if broken:
            raise KeyError("no weights")

    built = graph(Hook(lambda node: str(node) == "d", lambda node: None, fail, lambda: False), hook("e", "two"))
    whole = built.compute()
    broken = True
    with pytest.raises(KeyError, match="no weights"):
        built.compute()
    assert built.log == ["compute abc", "skip d", "compute d", "unskip d"]
    broken = False
    assert built.compute() == ["compute abc", "compute d", *whole[-3:]]


def test_an_error_in_ready_is_an_error_of_the_graph(graph: Graphed) -> None:
    def fail() -> bool:
        raise KeyError("no reader")

    built = graph(hook("d", "one", ready=fail))
    built.compute()
    with pytest.raises(KeyError, match="no reader"):
        built.compute()


# With llama.cpp.


def test_what_is_written_to_a_weight_before_its_node_is_computed_with(synthetic: Synthetic) -> None:
    """And what precedes it was computed, where it had to wait."""
    path = synthetic("llama")
    with Engine(path, OPTIONS) as engine:
        plain = [engine.decode([token], i).copy() for i, token in enumerate(TOKENS)]
    for ready in (True, False):
        seen: list[str] = []
        result = on_ffn_down(path, lambda node: seen.append(node.name), ready)  # noqa: B023
        assert len(seen) == 2 * len(TOKENS)
        for item, other in zip(result, plain, strict=True):
            np.testing.assert_array_equal(item, other)


def on_ffn_down(path: Path, before: Callable[[Node], None], ready: bool) -> list[np.ndarray]:
    hook = Hook(lambda node: node.weight.endswith("ffn_down.weight"), lambda node: None, before, lambda: ready)
    with Engine(path, OPTIONS, hooks=[hook]) as engine:
        return [engine.decode([token], i).copy() for i, token in enumerate(TOKENS)]


def test_an_error_before_a_node_reaches_the_caller_and_the_engine_goes_on(synthetic: Synthetic) -> None:
    path, broken, after = synthetic("llama"), True, 0

    def before(_: Node) -> None:
        if broken:
            raise KeyError("from before")

    def run(_: Node) -> None:
        nonlocal after
        after += 1

    hooks = [
        Hook(lambda node: node.name == "l_out-0", lambda node: None, before),
        Hook(lambda node: node.name in ("l_out-0", "l_out-1"), run),
    ]
    with Engine(path, OPTIONS) as engine:
        plain = engine.decode(TOKENS, 0).copy()
    with Engine(path, OPTIONS, hooks=hooks) as engine:
        for _ in range(2):
            with pytest.raises(KeyError, match="from before"):
                engine.decode(TOKENS, 0)
            assert after == 0
            engine.kv_clear()
        broken = False
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), plain)
        assert after == 2

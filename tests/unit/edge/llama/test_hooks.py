"""Test hooks: they see the nodes they request, may change them or end the graph, and detect wrong nodes."""

import ctypes
import signal
from contextlib import nullcontext

import numpy as np
import pytest

from edge.errors import EngineError
from edge.llama.ggml import Node
from edge.llama.hooks import Hook, NodeHooks
from edge.llm.engine import Engine
from tests.conftest import OPTIONS, Synthetic

TOKENS = [5, 300, 17, 401]


def named(*names: str):  # type: ignore[no-untyped-def]
    return lambda node: node.name in names


def test_a_hook_sees_the_values_of_its_nodes_in_order(synthetic: Synthetic) -> None:
    seen: list[tuple[str, tuple[int, int]]] = []
    hook = Hook(named("l_out-0", "l_out-1"), lambda node: seen.append((node.name, node.read().shape)))
    with Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine:
        engine.decode(TOKENS, 0)
    # The last layer keeps only the rows somebody asked logits for.
    assert seen == [("l_out-0", (4, 128)), ("l_out-1", (1, 128))]


def test_the_second_graph_of_a_kind_runs_the_same_hooks_without_asking(synthetic: Synthetic) -> None:
    requests, ran = [], []

    def wants(node: Node) -> bool:
        requests.append(node.name)
        return node.weight.endswith(("attn_output.weight", "ffn_down.weight"))

    hook = Hook(wants, lambda node: ran.append(node.weight))
    with Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine:
        for position in range(3):
            engine.decode([7], position)
            if position == 0:
                first_asked, first_ran = len(requests), list(ran)
        assert len(first_ran) == 4  # two layers, two products
        assert ran == first_ran * 3
        assert len(requests) == first_asked
        engine.decode(TOKENS, 3)  # another number of rows is another graph
        assert len(requests) > first_asked


def test_a_node_that_is_computed_for_the_next_one_runs_no_hook_of_another(synthetic: Synthetic) -> None:
    """Nodes before one that is not ready are computed, whether a hook wants them or not."""
    ran: list[str] = []
    first = Hook(named("l_out-0"), lambda node: ran.append(node.name))
    late = Hook(named("l_out-1"), None, lambda node: None, lambda: False)
    with Engine(synthetic("llama"), OPTIONS, hooks=[first, late]) as engine:
        for position in range(3):
            engine.decode([7], position)
    assert ran == ["l_out-0"] * 3


def test_hooks_that_call_nothing_are_asked_nothing_until_others_come(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a new graph may be asked about, those of one that is computed again are not."""
    calls, seen, call = [0], list[str](), NodeHooks.callback

    def counted(hooks: NodeHooks, address: int, ask: bool, unused: None) -> bool:
        calls[0] += 1
        return call(hooks, address, ask, unused)

    monkeypatch.setattr(NodeHooks, "callback", counted)
    idle, checks = Hook(named("l_out-0"), None), Hook(named("l_out-0"), lambda node: seen.append(node.name))
    with Engine(synthetic("llama"), OPTIONS, hooks=[idle]) as engine, Engine(synthetic("llama"), OPTIONS) as plain:
        node_hooks = engine._loaded.hooks
        assert node_hooks is not None
        for position in range(8):
            if position == 3:
                node_hooks.use([checks])
            elif position == 6:
                node_hooks.use([idle])
            before = calls[0]
            assert np.array_equal(engine.decode([7], position), plain.decode([7], position))
            assert (calls[0] > before) == (position < 1 or 3 <= position < 6)
            assert len(seen) == min(max(position - 2, 0), 3)


def test_a_hook_that_only_looks_changes_nothing_and_one_that_writes_does(synthetic: Synthetic) -> None:
    path = synthetic("llama")
    with Engine(path, OPTIONS) as engine:
        plain = engine.decode(TOKENS, 0).copy()
    with Engine(path, OPTIONS, hooks=[Hook(named("l_out-0"), lambda node: node.write(node.read()))]) as engine:
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), plain)
    with Engine(path, OPTIONS, hooks=[Hook(named("l_out-0"), lambda node: node.write(2 * node.read()))]) as engine:
        assert np.abs(engine.decode(TOKENS, 0) - plain).max() > 0


def test_returning_false_ends_the_graph(synthetic: Synthetic) -> None:
    seen: list[str] = []

    def end(node: Node) -> bool:
        seen.append(node.name)
        return False

    hooks = [Hook(named("l_out-0"), end), Hook(named("l_out-1"), lambda node: seen.append(node.name))]
    with Engine(synthetic("llama"), OPTIONS, hooks=hooks) as engine:
        for start in (0, 4):
            engine.decode(TOKENS, start)
    assert seen == ["l_out-0", "l_out-0"]


@pytest.mark.parametrize("at", ["before", "run", "end"])
def test_nothing_of_the_next_part_of_a_graph_is_computed_after_the_end(
    at: str, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU, a graph has several parts. After the end of one, llama.cpp begins the next one at its first node."""
    addresses: dict[str, int] = {}
    parts: list[tuple[bool, str, bool]] = []

    def wants(node: Node) -> bool:
        addresses[node.name] = node.address
        return node.name == "l_out-0"

    def fail(_: Node) -> bool:
        if broken:
            raise KeyError("l_out-0")
        return True

    hook = Hook(wants, fail if at == "run" else lambda _: not broken, fail if at == "before" else None)
    broken, call = False, NodeHooks.callback

    def with_next_part(hooks: NodeHooks, address: int, ask: bool, unused: None) -> bool:
        goes_on = call(hooks, address, ask, unused)
        if not ask and not goes_on:
            later = Node(addresses["l_out-1"])
            for _ in range(2):
                parts.append(
                    (call(hooks, later.address, True, unused), later.op, call(hooks, later.address, False, unused))
                )
        return goes_on

    monkeypatch.setattr(NodeHooks, "callback", with_next_part)
    with Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine:
        expected = engine.decode(TOKENS, 0).copy()
        engine.kv_clear()
        engine.decode(TOKENS, 0)
        broken = True
        engine.kv_clear()
        with nullcontext() if at == "end" else pytest.raises(KeyError):
            engine.decode(TOKENS, 0)
        broken = False
        assert parts == [(True, "NONE", False)] * 2
        engine.kv_clear()
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), expected)


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("at", ["before", "run"])
@pytest.mark.parametrize("kind", [KeyError, IndexError])
def test_an_exception_in_a_hook_reaches_the_caller_and_the_engine_goes_on(
    kind: type[Exception], at: str, is_remembered: bool, synthetic: Synthetic
) -> None:
    broken = not is_remembered

    def fail(node: Node) -> None:
        if broken:
            raise kind("from the hook")

    with Engine(synthetic("llama"), OPTIONS, hooks=[Hook(named("l_out-0"), **{"run": None, at: fail})]) as engine:
        if is_remembered:
            engine.decode(TOKENS, 0)
            engine.kv_clear()
            broken = True
        with pytest.raises(kind, match="from the hook"):
            engine.decode(TOKENS, 0)
        broken = False
        engine.kv_clear()
        engine.decode(TOKENS, 0)


class Sends:
    """`Sends() + number` sends a signal to this process in one bytecode: Python comes to it where a function is entered
    next, as with a signal that came while native code computed."""

    __add__ = ctypes.CDLL(None)["raise"]


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize(
    ("at", "ran"),
    [(("l_out-0", True), 0), (("l_out-0", False), 1), (("l_out-1", True), 1), (("result_output", True), 2)],
)
def test_ctrl_c_where_the_callback_is_entered_ends_the_graph_there(
    at: tuple[str, bool], ran: int, is_remembered: bool, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised there: ctypes called the function, and its `try` comes later."""
    seen, nodes, sends, call = list[str](), list[str](), [not is_remembered], NodeHooks.callback

    def entered(hooks: NodeHooks, address: int, ask: bool, unused: None) -> bool:
        nodes.append(Node(address).name)
        if sends[0] and at == (nodes[-1], ask):
            Sends() + signal.SIGINT
        return call(hooks, address, ask, unused)

    monkeypatch.setattr(NodeHooks, "callback", entered)
    hook = Hook(named("l_out-0", "l_out-1"), lambda node: seen.append(node.name))
    with Engine(synthetic("llama"), OPTIONS) as plain, Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine:
        expected = plain.decode(TOKENS, 0)
        if is_remembered:
            engine.decode(TOKENS, 0)
            engine.kv_clear()
            seen.clear()
            sends[0] = True
        with pytest.raises(KeyboardInterrupt):
            engine.decode(TOKENS, 0)
        assert (len(seen), nodes[-1]) == (ran, at[0])
        sends[0] = False
        engine.kv_clear()
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_interrupts_a_hook_at_once_and_a_second_one_is_no_other_error(synthetic: Synthetic) -> None:
    went_on: list[str] = []

    def wait(node: Node) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            went_on.append(node.name)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            raise

    hook = Hook(named("l_out-0"), wait)
    with Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine, pytest.raises(KeyboardInterrupt):
        engine.decode(TOKENS, 0)
    assert went_on == []


def test_reading_what_is_not_float32_is_refused(synthetic: Synthetic) -> None:
    hook = Hook(lambda node: node.name.startswith("cache_k_l0"), lambda node: node.read() is None)
    with (
        Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine,
        pytest.raises(EngineError, match="ggml type 1"),
    ):
        engine.decode(TOKENS, 0)


def test_writing_the_wrong_size_is_refused(synthetic: Synthetic) -> None:
    hook = Hook(named("l_out-0"), lambda node: node.write(np.zeros(3, np.float32)))
    with (
        Engine(synthetic("llama"), OPTIONS, hooks=[hook]) as engine,
        pytest.raises(EngineError, match=r"l_out-0 holds 2048 bytes .* 12 bytes of float32"),
    ):
        engine.decode(TOKENS, 0)


@pytest.mark.parametrize("nodes", [4, 6])
def test_a_graph_that_is_not_the_remembered_one_is_an_error(nodes: int) -> None:
    hooks = NodeHooks([Hook(lambda node: False, lambda node: None)])

    def graph(size: int) -> None:
        hooks.begin("of one row")
        for _ in range(size):
            hooks.callback(0, True, None)
        hooks.end(completed=True)

    graph(5)
    graph(5)
    with pytest.raises(EngineError, match=f"graph of {nodes} nodes was computed, but 5 nodes were recorded"):
        graph(nodes)
    graph(nodes)  # learned anew

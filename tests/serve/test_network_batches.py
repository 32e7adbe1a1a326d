"""Test batches in the process of a network: rows are joined only if they are independent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.onnx.samples import Feeds
from edge.serve.oip import rows
from edge.serve.oip.computing import LocalNetwork
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.works import MOST_ROWS, Timing, Work, Works
from tests.support.helpers import until
from tests.support.onnx_tiny import F32, counting, graph, node

TIMEOUT_S = 60
NO_TIME = Timing()


class Computed:
    """A network whose queue holds requests before it begins."""

    def __init__(self, folder: Path, content: bytes) -> None:
        path = folder / "net.onnx"
        path.write_bytes(content)
        self.network, self.works = LocalNetwork(NetworkConfig(str(path), threads=1)), Works()
        self.outputs: dict[int, Any] = {}
        self.runs: list[int] = []  # rows of each run

    def put(self, number: int, **feeds: Any) -> None:
        self.works.put(Work(number, feeds, ()))

    def answer(
        self, work: Work, outputs: Feeds | Exception, timing: Timing = NO_TIME, rows: int = 1, *, is_first: bool = True
    ) -> None:
        self.outputs[work.number] = outputs
        self.runs += [rows] if is_first else []

    def compute(self, n: int) -> dict[int, Any]:
        """Compute until `n` requests are answered, and return their outputs by number."""
        thread = threading.Thread(target=self.network.compute, args=(self.works, self.answer))
        thread.start()
        try:
            until(lambda: len(self.outputs) >= n, "outputs of all requests")
        finally:
            self.works.close()
            self.network.interrupt()
            thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        return self.outputs


def unary(op: str, **attributes: Any) -> bytes:
    return graph([node(op, ["x"], ["y"], **attributes)], [("x", F32, ("n", 3))], [("y", F32, ("n", 3))])


def values(seed: int, n_rows: int = 1, width: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal((n_rows, width)).astype(np.float32)


@pytest.fixture(autouse=True)
def joining_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_PAYS", 1e9)


def test_waiting_requests_are_computed_together(tmp_path: Path) -> None:
    computed = Computed(tmp_path, unary("Softmax", axis=1))
    for i in range(10):
        computed.put(i, x=values(i, 1 + i % 2))
    outputs = computed.compute(10)
    assert computed.runs == [15]
    for i in range(10):
        x = values(i, 1 + i % 2).astype(float)
        np.testing.assert_allclose(outputs[i]["y"], np.exp(x) / np.exp(x).sum(1, keepdims=True), rtol=1e-5)


def test_a_run_has_a_limited_number_of_rows(tmp_path: Path) -> None:
    computed = Computed(tmp_path, unary("Relu"))
    for i in range(10):
        computed.put(i, x=values(i, 10))
    computed.compute(10)
    assert computed.runs == [30, 30, 30, 10]


def test_rows_that_affect_each_other_are_computed_apart(tmp_path: Path) -> None:
    computed = Computed(tmp_path, unary("Softmax", axis=0))
    same = values(1)
    for i in range(4):
        computed.put(i, x=same)
    outputs = computed.compute(4)
    assert computed.runs == [1] * 4
    assert all((outputs[i]["y"] == 1).all() for i in range(4))


def test_an_output_with_other_rows_than_the_inputs_is_not_divided(tmp_path: Path) -> None:
    nodes = [node("ReduceSum", ["x"], ["y"], keepdims=1)]
    computed = Computed(tmp_path, graph(nodes, [("x", F32, ("n", 3))], [("y", F32, None)]))
    for i in range(3):
        computed.put(i, x=values(i))
    outputs = computed.compute(3)
    for i in range(3):
        np.testing.assert_allclose(outputs[i]["y"].item(), values(i).sum(), rtol=1e-5)


def test_requests_of_other_widths_are_computed_apart(tmp_path: Path) -> None:
    content = graph([node("Relu", ["x"], ["y"])], [("x", F32, ("n", "width"))], [("y", F32, ("n", "width"))])
    computed = Computed(tmp_path, content)
    for i in range(6):
        computed.put(i, x=values(i, 1, 2 + i % 2))
    outputs = computed.compute(6)
    assert computed.runs == [3, 3]
    assert all((outputs[i]["y"] == np.maximum(values(i, 1, 2 + i % 2), 0)).all() for i in range(6))


def test_a_large_request_is_computed_in_parts_behind_others(tmp_path: Path) -> None:
    computed = Computed(tmp_path, unary("Relu"))
    large = values(0, 3 * MOST_ROWS + 5)
    computed.put(0, x=large)
    computed.put(1, x=values(1))
    outputs = computed.compute(2)
    assert list(outputs) == [1, 0]
    assert (outputs[0]["y"] == np.maximum(large, 0)).all()


def test_an_invalid_request_does_not_affect_others(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "z"], ["y"])]
    content = graph(nodes, [("x", F32, ("n", "a")), ("z", F32, ("n", "b"))], [("y", F32, ("n", "b"))])
    computed = Computed(tmp_path, content)
    computed.put(0, x=values(0, 2, 2), z=values(1, 2, 2))
    computed.put(1, x=values(0, 2, 2), z=values(1, 3, 2))  # n has two sizes
    computed.put(2, x=values(0, 2, 3), z=values(1, 2, 2))  # the product is not defined
    outputs = computed.compute(3)
    assert (outputs[0]["y"] == values(0, 2, 2) @ values(1, 2, 2)).all()
    assert "the dimension 'n' is one number for all inputs" in str(outputs[1])
    assert "ONNX Runtime cannot run net.onnx" in str(outputs[2])


def test_a_run_is_stopped_if_no_request_needs_it(tmp_path: Path) -> None:
    computed = Computed(tmp_path, counting())
    computed.put(1, n=np.array(10**15))
    computed.put(2, n=np.array(7))

    def cancel() -> None:
        until(lambda: bool(computed.works._running), "the first run")
        until(lambda: computed.works.cancel(1), "nobody needs the run")
        computed.network.interrupt()

    thread = threading.Thread(target=cancel)
    thread.start()
    outputs = computed.compute(1)
    thread.join(TIMEOUT_S)
    assert list(outputs) == [2]
    assert outputs[2]["y"] == 7

"""Test ONNX networks by the Open Inference Protocol over HTTP: tensors, metadata, bad input, crashes, disconnects."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

from edge.serve.app import create_app
from edge.serve.oip import process
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.framing import HEADER
from edge.serve.oip.networks import Networks
from edge.serve.oip.tensors import NUMPY
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support.helpers import until
from tests.support.onnx_tiny import F32, counting, graph, node

TIMEOUT_S = 120
TYPES = {name: getattr(TensorProto, numpy_name.upper()) for name, numpy_name in NUMPY.items() if "FP" not in name}
TYPES |= {"FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE}
KEY = {"Authorization": "Bearer sk-key"}


def echo() -> bytes:
    """A network with an input of each datatype, which it returns."""
    inputs: Any = [(f"in_{name}", kind, ("n", 2)) for name, kind in TYPES.items()]
    outputs: Any = [(f"out_{name}", kind, ("n", 2)) for name, kind in TYPES.items()]
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"], name) for name in TYPES]
    return graph(nodes, inputs, outputs)


def labels() -> bytes:
    """A network that returns a text for each number."""
    table = helper.make_tensor("table", TensorProto.STRING, (2,), [b"no", "ja!ä".encode()])
    nodes = [node("Gather", ["table", "x"], ["label"])]
    return graph(nodes, [("x", TensorProto.INT64, ("n",))], [("label", TensorProto.STRING, ("n",))], (table,))


class Served:
    """A server with networks."""

    def __init__(self, url: str, networks: Networks) -> None:
        self.client = httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=KEY)
        self.networks = networks

    def post(self, name: str, inputs: list[dict[str, Any]], **more: Any) -> httpx.Response:
        return self.client.post(f"/v2/models/{name}/infer", json={"inputs": inputs, **more})

    def pid(self, name: str) -> int:
        child = self.networks.network(name).process._child
        assert child is not None
        return child._process.pid


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("networks")
    relu = graph([node("Relu", ["x"], ["y"])], [("x", F32, ("n", 3))], [("y", F32, ("n", 3))])
    files = {"echo": echo(), "labels": labels(), "counting": counting(), "relu": relu, "broken": b"no network"}
    for name, content in files.items():
        (folder / f"{name}.onnx").write_bytes(content)
    configs = {name: NetworkConfig(str(folder / f"{name}.onnx"), threads=1) for name in files}
    router = Router({})
    networks = Networks(configs, queue=4, say=lambda line: None, drain=router.drain)
    options = ServeOptions(api_keys=("sk-key",), max_body_bytes=1 << 20)

    async def close() -> None:
        await router.close()
        await networks.close()

    with serving(create_app(router, options, networks), at_end=close) as url:
        item = Served(url, networks)
        with item.client:
            yield item


def tensor(name: str, datatype: str, array: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.tolist()}


ROW = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [-1, 2, 3]}


def test_each_datatype_in_json_and_in_binary(served: Served) -> None:
    arrays = {
        name: np.array([[0, 1], [1, 0]]).astype(NUMPY[name]) if name == "BOOL" else np.array([[1, 2], [3, 100]], kind)
        for name, kind in NUMPY.items()
    }
    body = served.post("echo", [tensor(f"in_{name}", name, array) for name, array in arrays.items()]).json()
    assert "error" not in body, body
    for output in body["outputs"]:
        array = arrays[output["name"].removeprefix("out_")]
        assert output["shape"] == [2, 2]
        assert output["data"] == array.ravel().tolist()
    rows = [
        {"name": f"in_{name}", "datatype": name, "shape": [2, 2], "parameters": {"binary_data_size": array.nbytes}}
        for name, array in arrays.items()
    ]
    text = json.dumps({"inputs": rows, "parameters": {"binary_data_output": True}, "id": "a"}).encode()
    content = text + b"".join(array.tobytes() for array in arrays.values())
    response = served.client.post("/v2/models/echo/versions/1/infer", content=content, headers={HEADER: str(len(text))})
    assert response.status_code == 200
    length = int(response.headers[HEADER])
    description, at = json.loads(response.content[:length]), length
    assert description["id"] == "a"
    for output in description["outputs"]:
        array = arrays[output["name"].removeprefix("out_")]
        n_bytes = output["parameters"]["binary_data_size"]
        assert response.content[at : at + n_bytes] == array.tobytes()
        at += n_bytes
    assert at == len(response.content)


def test_outputs_of_text_are_bytes(served: Served) -> None:
    body = served.post("labels", [tensor("x", "INT64", np.array([1, 0]))]).json()
    assert body["outputs"] == [{"name": "label", "datatype": "BYTES", "shape": [2], "data": ["ja!ä", "no"]}]


def test_metadata_health_index_and_statistics(served: Served) -> None:
    get = served.client.get
    assert get("/v2").json()["extensions"] == ["binary_tensor_data", "model_repository", "statistics"]
    served.post("relu", [ROW])
    assert get("/v2/models/relu").json() == {
        "name": "relu",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    assert get("/v2/models/relu/ready").status_code == get("/v2/models/relu/versions/1/ready").status_code == 200
    assert get("/v2/health/live", headers={"Authorization": ""}).status_code == 200
    before = get("/v2/models/relu/stats").json()["model_stats"][0]
    served.post("relu", [{**ROW, "shape": [2, 3], "data": [1] * 6}])
    served.post("relu", [{**ROW, "shape": [1, 4], "data": [1] * 4}])
    after = get("/v2/models/relu/versions/1/stats").json()["model_stats"][0]
    assert after["inference_count"] == before["inference_count"] + 2
    assert after["execution_count"] == before["execution_count"] + 1
    for phase in ("success", "queue", "compute_infer"):
        assert after["inference_stats"][phase]["count"] == before["inference_stats"][phase]["count"] + 1
    assert after["inference_stats"]["fail"]["count"] == before["inference_stats"]["fail"]["count"] + 1
    assert [batch["batch_size"] for batch in after["batch_stats"]] == [1, 2]
    lines = get("/metrics").text.splitlines()
    phases, count = after["inference_stats"], after["inference_count"]
    assert f'edge_network_requests_total{{model="relu",outcome="fail"}} {float(phases["fail"]["count"])}' in lines
    assert f'edge_network_rows_total{{model="relu"}} {float(count)}' in lines
    assert 'edge_network_requests_running{model="relu"} 0.0' in lines
    assert 'edge_network_ready{model="relu"} 1.0' in lines
    names = [row["name"] for row in get("/v2/models/stats").json()["model_stats"]]
    assert names == ["echo", "labels", "counting", "relu", "broken"]


def test_a_network_that_cannot_be_loaded_is_unavailable(served: Served) -> None:
    response = served.post("broken", [ROW])
    assert response.status_code == 503
    assert "broken is not loaded: " in response.json()["error"]
    assert "is not an ONNX model" in response.json()["error"]
    assert served.client.get("/v2/models/broken/ready").status_code == 503
    assert served.client.get("/v2/health/ready").status_code == 503
    rows = {row["name"]: row for row in served.client.post("/v2/repository/index").json()}
    assert rows["broken"]["state"] == "UNAVAILABLE"
    ready = served.client.post("/v2/repository/index", json={"ready": True}).json()
    assert "broken" not in [row["name"] for row in ready]


@pytest.mark.parametrize(
    ("path", "inputs", "more", "status", "words"),
    [
        ("nobody", [ROW], {}, 404, "there is no network 'nobody' here; there are echo, "),
        ("relu/versions/2", [ROW], {}, 404, "relu has only the version 1, not '2'"),
        ("relu", [{**ROW, "name": "z"}], {}, 400, "relu takes the inputs x, got z"),
        ("relu", [], {}, 400, "relu takes the inputs x, got none"),
        ("relu", [ROW, ROW], {}, 400, "an input is sent twice"),
        ("relu", [{**ROW, "shape": [3, 1]}], {}, 400, "input 'x' takes the shape [n, 3], got [3, 1]"),
        ("relu", [{**ROW, "shape": [3]}], {}, 400, "input 'x' takes the shape [n, 3], got [3]"),
        ("relu", [{**ROW, "datatype": "FP64"}], {}, 400, "input 'x' has the datatype FP32, got 'FP64'"),
        ("relu", [ROW], {"outputs": [{"name": "z"}]}, 400, "relu has no output 'z'; it has y"),
        ("relu", [ROW], {"outputs": [{"name": "y"}] * 2}, 400, "an output is requested twice"),
        ("relu", [{**ROW, "data": [1, 2]}], {}, 400, "has 8 bytes; FP32 of shape [1, 3] has 12"),
        ("relu", [{"name": "x"}], {}, 400, "inputs.0.shape: Field required"),
        ("relu", [ROW], {"outputs": [{"name": "y", "parameters": {"classification": 1}}]}, 400, "not supported"),
        ("labels", [tensor("x", "INT64", np.array([5]))], {}, 400, "ONNX Runtime cannot run labels.onnx"),
        ("relu", [{**ROW, "shape": [200_000, 3], "data": [1.5] * 600_000}], {}, 413, "more than 1048576 bytes"),
    ],
)
def test_invalid_requests_are_refused(
    served: Served, path: str, inputs: list[dict[str, Any]], more: dict[str, Any], status: int, words: str
) -> None:
    response = served.post(path, inputs, **more)
    assert response.status_code == status
    assert words in response.json()["error"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"inputs": 3}', b"\xff\xfe{", b'{"inputs": [{"name": 1}]}'])
def test_bodies_that_are_no_request_are_refused(served: Served, content: bytes) -> None:
    response = served.client.post("/v2/models/relu/infer", content=content)
    assert response.status_code == 400
    assert response.json()["error"]


def test_a_batch_of_10_000_is_computed(served: Served) -> None:
    array = np.arange(30_000, dtype=np.float32).reshape(10_000, 3) - 15_000
    body = served.post("relu", [tensor("x", "FP32", array)]).json()
    assert body["outputs"][0]["shape"] == [10_000, 3]
    assert body["outputs"][0]["data"] == np.maximum(array, 0).ravel().tolist()


def test_concurrent_requests_get_their_own_outputs(served: Served) -> None:
    def infer(i: int) -> list[float]:
        response = httpx.post(
            f"{served.client.base_url}/v2/models/relu/infer",
            json={"inputs": [{**ROW, "data": [i, -i, 2 * i]}]},
            headers=KEY,
            timeout=TIMEOUT_S,
        )
        return list(response.json()["outputs"][0]["data"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(infer, range(40))) == [[i, 0, 2 * i] for i in range(40)]


def test_requests_need_a_key(served: Served) -> None:
    for method, path in (("GET", "/v2"), ("GET", "/v2/models/relu"), ("POST", "/v2/models/relu/infer")):
        assert served.client.request(method, path, headers={"Authorization": "Bearer sk-other"}).status_code == 401


def counts(n: int) -> list[dict[str, Any]]:
    return [{"name": "n", "datatype": "INT64", "shape": [], "data": [n]}]


def test_a_disconnected_client_ends_its_run(served: Served) -> None:
    served.post("counting", counts(1))
    network = served.networks.network("counting")
    pid = served.pid("counting")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.client.base_url}/v2/models/counting/infer",
            json={"inputs": counts(10**15)},
            headers=KEY,
            timeout=0.5,
        )
    assert served.post("counting", counts(5)).json()["outputs"][0]["data"] == [5]
    until(lambda: not network.n_running, "the end of the request")
    assert served.pid("counting") == pid


def test_a_process_that_hangs_is_replaced_and_its_request_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.post("counting", counts(1))
    pid = served.pid("counting")
    monkeypatch.setattr(process, "ANSWER_S", 5.0)
    os.kill(pid, signal.SIGSTOP)
    assert served.post("counting", counts(5)).json()["outputs"][0]["data"] == [5]
    assert served.pid("counting") != pid
    assert served.post("counting", counts(2)).json()["outputs"][0]["data"] == [2]


def test_a_request_survives_the_end_of_the_process(served: Served) -> None:
    served.post("counting", counts(1))
    network, pid = served.networks.network("counting"), served.pid("counting")

    def kill() -> None:
        until(lambda: network.n_running > 0, "the request")
        os.kill(pid, signal.SIGKILL)

    os.kill(pid, signal.SIGSTOP)  # the process has the request, and does not answer
    thread = threading.Thread(target=kill)
    thread.start()
    assert served.post("counting", counts(5)).json()["outputs"][0]["data"] == [5]
    thread.join(TIMEOUT_S)
    assert served.pid("counting") != pid

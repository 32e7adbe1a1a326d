"""Test ONNX networks by the Open Inference Protocol over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from edge.serve.app import create_app
from edge.serve.oip import inference_pb2 as pb
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.grpc_server import SERVICE, GrpcServer
from edge.serve.oip.networks import Networks
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support.helpers import until
from tests.support.onnx_tiny import F32, counting, graph, node

TIMEOUT_S = 60
KEY = (("authorization", "Bearer sk-key"),)
X = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])
RAW = np.array([[-1, 2, 3]], np.float32).tobytes()
Code = grpc.StatusCode


@dataclass
class Served:
    """A server with two networks, and its channel."""

    channel: grpc.Channel
    networks: Networks

    def call(self, method: str, request: Any = b"", metadata: Any = KEY, timeout: float = TIMEOUT_S) -> Any:
        response = getattr(pb, f"{method}Response", pb.ServerLiveResponse)
        send = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda item: item if isinstance(item, bytes) else item.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return send(request, metadata=metadata, timeout=timeout)

    def infer(self, inputs: Any = (X,), raw: Any = (RAW,), name: str = "relu", **more: Any) -> Any:
        request = pb.ModelInferRequest(model_name=name, inputs=inputs, raw_input_contents=raw, **more)
        return self.call("ModelInfer", request)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("networks")
    relu = graph([node("Relu", ["x"], ["y"])], [("x", F32, ("n", 3))], [("y", F32, ("n", 3))])
    for name, content in {"relu": relu, "counting": counting()}.items():
        (folder / f"{name}.onnx").write_bytes(content)
    configs = {name: NetworkConfig(str(folder / f"{name}.onnx"), threads=1) for name in ("relu", "counting")}
    router = Router({})
    networks = Networks(configs, queue=4, say=lambda line: None, drain=router.drain)
    options = ServeOptions(api_keys=("sk-key",), max_body_bytes=1 << 20)
    bound: list[str] = []
    servers: list[GrpcServer] = []
    app = create_app(router, options, networks)

    async def begin(scope: Any, receive: Any, send: Any) -> None:
        """Start the gRPC server in the server's event loop with the first request."""
        if not servers:
            servers.append(GrpcServer(networks, options))
            bound.append(servers[0].bind("127.0.0.1", 0))
            await servers[0].start()
        await app(scope, receive, send)

    async def close() -> None:
        await router.close()
        await networks.close()
        await servers[0].close()

    with serving(begin, at_end=close) as url:  # type: ignore[arg-type]
        httpx.get(f"{url}/v2/health/live")
        with grpc.insecure_channel(bound[0]) as channel:
            yield Served(channel, networks)


def test_metadata_readiness_index_and_statistics(served: Served) -> None:
    assert served.call("ServerLive", metadata=()).live
    served.infer()
    served.infer(name="counting", inputs=[counted()], raw=[np.int64(1).tobytes()])
    assert served.call("ServerReady", metadata=()).ready
    assert served.call("ModelReady", pb.ModelReadyRequest(name="relu", version="1")).ready
    assert served.call("ServerMetadata").name == "edge"
    metadata = served.call("ModelMetadata", pb.ModelMetadataRequest(name="relu"))
    assert [(item.name, item.datatype, list(item.shape)) for item in metadata.inputs] == [("x", "FP32", [-1, 3])]
    index = served.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    assert [(item.name, item.state) for item in index.models] == [("relu", "READY"), ("counting", "READY")]
    [row] = served.call("ModelStatistics", pb.ModelStatisticsRequest(name="relu")).model_stats
    assert row.inference_stats.success.count == row.execution_count > 0
    assert len(served.call("ModelStatistics").model_stats) == 2


def counted() -> Any:
    return pb.ModelInferRequest.InferInputTensor(name="n", datatype="INT64", shape=[])


def test_raw_and_typed_tensors(served: Served) -> None:
    typed = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3])
    typed.contents.fp32_contents.extend([-1, 2, 3])
    for response in (served.infer(id="a"), served.infer(inputs=[typed], raw=[], id="a")):
        assert (response.model_name, response.model_version, response.id) == ("relu", "1", "a")
        assert list(response.outputs[0].shape) == [1, 3]
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [0, 2, 3]


def typed(datatype: str, field: str, values: list[Any]) -> Any:
    item = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=[1, 3])
    getattr(item.contents, field).extend(values)
    return item


@pytest.mark.parametrize(
    ("inputs", "raw", "more", "code", "words"),
    [
        ([X], [RAW], {"name": "nobody"}, Code.NOT_FOUND, "there is no network 'nobody' here"),
        ([X], [RAW], {"model_version": "2"}, Code.NOT_FOUND, "has only the version 1"),
        ([X], [RAW[:-1]], {}, Code.INVALID_ARGUMENT, "has 11 bytes; FP32 of shape [1, 3] has 12"),
        ([X], [b"", b""], {}, Code.INVALID_ARGUMENT, "1 inputs and 2 raw_input_contents"),
        ([X], [], {}, Code.INVALID_ARGUMENT, "has 0 bytes"),
        ([], [], {}, Code.INVALID_ARGUMENT, "relu takes the inputs x, got none"),
        ([X, X], [RAW] * 2, {}, Code.INVALID_ARGUMENT, "an input is sent twice"),
        ([typed("FP64", "fp64_contents", [1, 2, 3])], [], {}, Code.INVALID_ARGUMENT, "has the datatype FP32"),
        ([typed("FP32", "fp64_contents", [1, 2, 3])], [], {}, Code.INVALID_ARGUMENT, "FP32 needs fp32_contents"),
        ([typed("INT8", "int_contents", [1, 2, 300])], [], {}, Code.INVALID_ARGUMENT, "a value that is not INT8"),
        ([typed("FP16", "fp32_contents", [1])], [], {}, Code.INVALID_ARGUMENT, "its values need raw_input_contents"),
        ([typed("FP32", "fp32_contents", [1])], [b"1"], {}, Code.INVALID_ARGUMENT, "has contents and raw_input"),
        ([X], [bytes(2 << 20)], {}, Code.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
def test_invalid_requests_are_refused(
    served: Served, inputs: list[Any], raw: list[bytes], more: dict[str, Any], code: Any, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        served.infer(inputs, raw, **more)
    assert error.value.code() == code
    assert words in error.value.details()


def test_calls_need_a_key(served: Served) -> None:
    for metadata in ((), (("authorization", "Bearer sk-other"),), (("x-api-key", "sk"),)):
        with pytest.raises(grpc.RpcError) as error:
            served.call("ServerMetadata", metadata=metadata)
        assert error.value.code() == Code.UNAUTHENTICATED
    assert served.call("ServerMetadata", metadata=(("x-api-key", "sk-key"),)).name == "edge"


@pytest.mark.parametrize("method", ["ModelConfig", "SystemSharedMemoryStatus", "Nonsense"])
def test_other_methods_are_not_implemented(served: Served, method: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        served.call(method)
    assert error.value.code() == Code.UNIMPLEMENTED
    assert f"edge does not have {method}; it has ServerLive, " in error.value.details()


def test_a_message_that_is_no_request_is_refused(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as error:
        served.call("ModelInfer", b"\xff\xff\xff")
    assert error.value.code() == Code.INVALID_ARGUMENT
    assert "the message is not a ModelInferRequest" in error.value.details()


def test_a_cancelled_call_ends_its_run(served: Served) -> None:
    served.infer(name="counting", inputs=[counted()], raw=[np.int64(1).tobytes()])
    network = served.networks.network("counting")
    request = pb.ModelInferRequest(
        model_name="counting", inputs=[counted()], raw_input_contents=[np.int64(10**15).tobytes()]
    )
    with pytest.raises(grpc.RpcError) as error:
        served.call("ModelInfer", request, timeout=0.5)
    assert error.value.code() == Code.DEADLINE_EXCEEDED
    response = served.infer(name="counting", inputs=[counted()], raw=[np.int64(5).tobytes()])
    assert np.frombuffer(response.raw_output_contents[0], np.int64) == 5
    until(lambda: not network.n_running, "the end of the request")

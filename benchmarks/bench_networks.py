"""A network in ONNX behind `edge serve`, compared with ONNX Runtime in a loop: throughput and latency.

    python benchmarks/bench_networks.py [--model FILE] [--dim NAME=N ...] [--clients 8] [--rounds 5] [--json] [--tiny]

Throughput is that of --clients clients, each of which sends one request after the other. The loop calls ONNX Runtime in
one thread. Latency is the median with one client. Clients send binary tensors over connections of their own.
The sides take turns. The default model is a MobileNetV2 with random weights; other open dimensions than those of --dim
are 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness import Section, alternate, bench, bests, parser_of, table
from edge import units
from edge.onnx.engine import OnnxEngine
from edge.onnx.samples import random_feeds
from edge.onnx.signature import with_dims
from edge.serve.oip import inference_pb2 as pb
from edge.serve.oip.framing import HEADER
from edge.serve.oip.tensors import NUMPY
from tests.support.onnx_networks import mobilenet_v2

START_S, WARM_UP = 300, 10
_DATATYPES = {name: datatype for datatype, name in NUMPY.items()}
Call = Callable[[], object]


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the loop, HTTP and gRPC in turn."""
    path = args.model or folder / "mobilenet.onnx"
    if args.model is None:
        size, narrower = (32, 4) if args.tiny else (224, 1)
        path.write_bytes(mobilenet_v2(size=size, narrower=narrower).SerializeToString())
    seconds, clients = (0.3, 2) if args.tiny else (args.seconds, args.clients)
    with ExitStack() as stack:
        engine = stack.enter_context(OnnxEngine(path))
        feeds = next(random_feeds(with_dims(engine.inputs, dict(args.dim)), 1))
        session, names = engine._session, [output.name for output in engine.outputs]
        of_http, of_grpc = stack.enter_context(serving(path))
        makers: dict[str, Callable[[], Call]] = {
            "loop": lambda: lambda: session.run(names, feeds),
            "http": lambda: http_call(of_http, path.stem, feeds),
            "grpc": lambda: grpc_call(of_grpc, path.stem, feeds, stack),
        }

        def side(name: str) -> dict[str, float]:
            """Connect anew, because the server closes idle connections."""
            return figures([makers[name]() for _ in range(1 if name == "loop" else clients)], seconds)

        rounds = alternate({name: partial(side, name) for name in makers}, 1 if args.tiny else args.rounds)
    return {"model": path.name, "clients": clients, "best": bests(rounds), "rounds": rounds}


def figures(several: list[Call], seconds: float) -> dict[str, float]:
    """Return the throughput of all clients together, and the latency of one of them."""
    counts = [0] * len(several)
    end = time.perf_counter() + seconds

    def work(i: int) -> None:
        while time.perf_counter() < end:
            several[i]()
            counts[i] += 1

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(several))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    times = []
    while len(times) < WARM_UP or time.perf_counter() < end + seconds:
        start = time.perf_counter()
        several[0]()
        times.append(time.perf_counter() - start)
    return {"throughput_per_s": sum(counts) / took, "latency_s": statistics.median(times)}


@contextmanager
def serving(path: Path) -> Iterator[tuple[str, str]]:
    """Serve a network, and yield the addresses for HTTP and gRPC."""
    command = [sys.executable, "-m", "apps.cli", "serve", str(path), "--port", "0", "--grpc", "127.0.0.1:0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = server.stdout.readline() + server.stdout.readline()
        addresses = re.findall(r"\w+://(\S+)", lines)
        assert len(addresses) == 2, "the server did not start"
        yield addresses[0], addresses[1]
    finally:
        server.terminate()
        server.wait(START_S)


def http_call(address: str, name: str, feeds: dict[str, Any]) -> Call:
    """Return a function that sends a request and reads its outputs."""
    connection = http.client.HTTPConnection(address)
    rows = [
        {
            "name": key,
            "datatype": _DATATYPES[array.dtype.name],
            "shape": array.shape,
            "parameters": {"binary_data_size": array.nbytes},
        }
        for key, array in feeds.items()
    ]
    text = json.dumps({"inputs": rows, "parameters": {"binary_data_output": True}}).encode()
    body = text + b"".join(array.tobytes() for array in feeds.values())

    def call() -> bytes:
        connection.request("POST", f"/v2/models/{name}/infer", body, {HEADER: str(len(text))})
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return content

    return call


def grpc_call(address: str, name: str, feeds: dict[str, Any], stack: ExitStack) -> Call:
    """Return a function that sends a request and reads its outputs."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channel = stack.enter_context(grpc.insecure_channel(address, options))
    infer = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelInferResponse.FromString,
    )
    inputs = [
        pb.ModelInferRequest.InferInputTensor(name=key, datatype=_DATATYPES[array.dtype.name], shape=array.shape)
        for key, array in feeds.items()
    ]
    raw = [array.tobytes() for array in feeds.values()]
    request = pb.ModelInferRequest(model_name=name, inputs=inputs, raw_input_contents=raw)
    return lambda: infer(request, timeout=START_S)


def text(r: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    loop = r["best"]["loop"]
    lines = [
        [
            name,
            f"{row['throughput_per_s']:.1f}",
            f"{row['throughput_per_s'] / loop['throughput_per_s']:.3f}",
            f"{1e3 * row['latency_s']:.2f}",
            f"{1e3 * (row['latency_s'] - loop['latency_s']):+.2f}",
        ]
        for name, row in r["best"].items()
    ]
    header = [f"{r['model']}, {r['clients']} clients", "inputs/s", "of the loop", "latency (ms)", "more (ms)"]
    return table(header, lines)


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, metavar="FILE", help="an ONNX file (default: MobileNetV2)")
    parser.add_argument("--dim", action="append", type=units.dimension, default=[], metavar="NAME=N")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: 2)")
    bench(parser, Section(measure, text))

"""tritonclient, over HTTP or gRPC. EDGE_GRPC: address of the server for gRPC."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from common import URL, main
from tritonclient.utils import InferenceServerException

PROTOCOL = sys.argv[1]
NETWORK = os.environ.get("EDGE_NETWORK", "mixed")
if PROTOCOL == "grpc":
    import tritonclient.grpc as triton

    CLIENT: Any = triton.InferenceServerClient(os.environ["EDGE_GRPC"])
    FORMS: list[dict[str, bool]] = [{}]  # tensors are always binary
else:
    import tritonclient.http as triton

    CLIENT = triton.InferenceServerClient(URL.removeprefix("http://"), concurrency=8)
    FORMS = [{"binary_data": True}, {"binary_data": False}]
ROWS = 3
TYPES = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}


def value(item: Any, key: str) -> Any:
    """Return a field of JSON or of a protobuf message."""
    return item[key] if isinstance(item, dict) else getattr(item, key)


def feeds(seed: int = 0) -> dict[str, Any]:
    """Return random inputs of the network, with small values that are valid in any type."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for spec in value(CLIENT.get_model_metadata(NETWORK), "inputs"):
        shape = [ROWS if int(size) < 0 else int(size) for size in value(spec, "shape")]
        arrays[value(spec, "name")] = rng.integers(0, 2, shape).astype(TYPES[value(spec, "datatype")])
    return arrays


def infer(arrays: dict[str, Any], form: dict[str, bool], **more: Any) -> dict[str, Any]:
    names, arguments = request(arrays, form)
    result = CLIENT.infer(more.pop("network", NETWORK), **arguments, **more)
    return {name: result.as_numpy(name) for name in names}


def request(arrays: dict[str, Any], form: dict[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the outputs, and the arguments of a request for them."""
    inputs = []
    for name, array in arrays.items():
        datatype = next(key for key, kind in TYPES.items() if kind == array.dtype)
        item = triton.InferInput(name, list(array.shape), datatype)
        item.set_data_from_numpy(array, **form)
        inputs.append(item)
    names = [value(spec, "name") for spec in value(CLIENT.get_model_metadata(NETWORK), "outputs")]
    outputs = [triton.InferRequestedOutput(name, **form) for name in names]
    return names, {"inputs": inputs, "outputs": outputs}


def hello() -> str:
    """Infer in every form, with and without compression, and get the same outputs."""
    arrays = feeds()
    results = [infer(arrays, form, request_id="7", model_version="1") for form in FORMS]
    if PROTOCOL == "http":
        results.append(infer(arrays, FORMS[0], request_compression_algorithm="gzip"))
    for result in results:
        assert result.keys() == results[0].keys()
        assert all(np.allclose(result[name], results[0][name]) for name in result)
    assert len(results[0]) >= 1
    return f"{len(results[0])} outputs in {len(results)} forms"


def tools() -> str:
    """Ask for everything but inference."""
    assert CLIENT.is_server_live()
    assert CLIENT.is_server_ready()
    assert CLIENT.is_model_ready(NETWORK, "1")
    assert value(CLIENT.get_server_metadata(), "name") == "edge"
    index = CLIENT.get_model_repository_index()
    rows = index if isinstance(index, list) else index.models
    assert NETWORK in [value(row, "name") for row in rows]
    before = statistics()
    infer(feeds(), FORMS[0])
    assert statistics() == before + 1
    return f"{len(rows)} networks"


def statistics() -> int:
    [row] = value(CLIENT.get_inference_statistics(NETWORK), "model_stats")
    return int(value(value(value(row, "inference_stats"), "success"), "count"))


def stream() -> str:
    """Send many concurrent requests; each gets its own outputs."""
    several = [feeds(seed) for seed in range(16)]
    alone = [infer(arrays, FORMS[0]) for arrays in several]
    if PROTOCOL == "grpc":
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda arrays: infer(arrays, FORMS[0]), several))
    else:  # this client belongs to one thread
        prepared = [request(arrays, FORMS[0]) for arrays in several]
        sent = [CLIENT.async_infer(NETWORK, **arguments) for _, arguments in prepared]
        results = [item.get_result() for item in sent]  # each result can be read once
        together = [
            {name: result.as_numpy(name) for name in names}
            for (names, _), result in zip(prepared, results, strict=True)
        ]
    for first, second in zip(alone, together, strict=True):
        assert all(np.allclose(first[name], second[name], atol=1e-4) for name in first)
    return f"{len(several)} requests"


def structured() -> str:
    """Get an error for each invalid request."""
    arrays = feeds()
    name, array = next(iter(arrays.items()))
    wrong = [
        ({**arrays, name: np.repeat(array[None], 2, 0)}, {}),
        ({**arrays, name: array.astype(np.int64 if array.dtype != np.int64 else np.float32)}, {}),
        ({key: item for key, item in arrays.items() if key != name}, {}),
        ({**arrays, "more": array}, {}),
        (arrays, {"network": "nobody"}),
        (arrays, {"model_version": "2"}),
    ]
    codes = []
    for inputs, more in wrong:
        try:
            infer(inputs, FORMS[0], **more)
        except InferenceServerException as error:
            codes.append(str(error.status()).removeprefix("StatusCode."))
    invalid, unknown = ("INVALID_ARGUMENT", "NOT_FOUND") if PROTOCOL == "grpc" else ("400", "404")
    assert codes == [invalid] * 4 + [unknown] * 2, codes
    return " ".join(codes)


main({"hello": hello, "stream": stream, "tools": tools, "structured": structured})

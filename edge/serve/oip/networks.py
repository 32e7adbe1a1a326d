"""The networks of a server, independent of the protocol: requests, metadata and statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge.errors import EdgeError, EngineError, EngineGone, UnknownModel
from edge.serve.drain import Drain
from edge.serve.http.errors import BadRequest
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.framing import InferRequest, InferResponse
from edge.serve.oip.process import NetworkProcess
from edge.serve.oip.statistics import Statistics
from edge.serve.oip.tensors import TensorSpec
from edge.serve.places import Places
from edge.version import version
from quant.text import listed

VERSION = "1"  # the only version of each network
PLATFORM = "onnxruntime_onnx"  # Triton's name for ONNX Runtime
EXTENSIONS = ["binary_tensor_data", "model_repository", "statistics"]
_AT_ONCE = 64  # requests that the process of a network has at the same time


class Network:
    """A served network."""

    def __init__(self, name: str, config: NetworkConfig, queue: int, say: Callable[[str], None]) -> None:
        """queue: number of requests that may wait besides those that the process has."""
        self.name = name
        self.process = NetworkProcess(name, config, say)
        self.statistics = Statistics()
        self._places = Places(f"the network {name}", _AT_ONCE, queue)
        self.n_running = 0

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the outputs of a request.

        Raises BadRequest if it does not fit the network, Overloaded if the queue is full, and EngineGone.
        """
        began, self.n_running = time.monotonic_ns(), self.n_running + 1
        try:
            async with self._places.place():
                await self.loaded()
                self._check(request)
                message, outputs = await self.process.ask(request)
        except EdgeError as error:
            self.statistics.failed(time.monotonic_ns() - began)
            if type(error) is EngineError:  # ONNX Runtime could not compute these inputs
                raise BadRequest(str(error), "inputs") from error
            raise
        finally:
            self.n_running -= 1
        total_ns = time.monotonic_ns() - began
        self.statistics.succeeded(
            total_ns, message["timing"], message["own_rows"], message["rows"], is_first=message["is_first"]
        )
        return InferResponse(self.name, VERSION, request.id, outputs)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the network."""
        declared = {
            key: [
                {"name": spec.name, "datatype": spec.datatype, "shape": spec.public_shape} for spec in self._specs(key)
            ]
            for key in ("inputs", "outputs")
        }
        return {"name": self.name, "versions": [VERSION], "platform": PLATFORM, **declared}

    def index(self) -> dict[str, str]:
        """Return the row of the network in the repository's index."""
        row = {"name": self.name, "version": VERSION}
        if self.process.is_ready:
            return {**row, "state": "READY", "reason": ""}
        if self.process.failed is not None:
            return {**row, "state": "UNAVAILABLE", "reason": str(self.process.failed)}
        return {**row, "state": "LOADING", "reason": ""}

    async def loaded(self) -> None:
        """Load the network if it has never been loaded, because requests are checked by its declarations."""
        if not self.process.about:
            try:
                await self.process.start()
            except (EdgeError, OSError) as error:
                raise EngineGone(f"{self.name} is not loaded: {error}") from error

    def _specs(self, key: str) -> list[TensorSpec]:
        rows = self.process.about.get(key, [])
        return [
            TensorSpec(name, datatype, None if shape is None else tuple(shape), tuple(dims))
            for name, datatype, shape, dims in rows
        ]

    def _check(self, request: InferRequest) -> None:
        """Raise BadRequest if names, datatypes or shapes do not fit the network."""
        specs = {spec.name: spec for spec in self._specs("inputs")}
        names = [tensor.name for tensor in request.inputs]
        if len(set(names)) != len(names):
            raise BadRequest("an input is sent twice; send it once", "inputs")
        if sorted(names) != sorted(specs):
            raise BadRequest(
                f"{self.name} takes the inputs {listed(list(specs))}, got"
                f" {listed([name[:80] for name in names[:20]]) or 'none'}",
                "inputs",
            )
        for tensor in request.inputs:
            specs[tensor.name].check(tensor)
        outputs = [spec.name for spec in self._specs("outputs")]
        for name in request.outputs:
            if name not in outputs:
                raise BadRequest(f"{self.name} has no output {name[:80]!r}; it has {listed(outputs)}", "outputs")
        if len(set(request.outputs)) != len(request.outputs):
            raise BadRequest("an output is requested twice; request it once", "outputs")


class Networks:
    """All networks of a server. Use it in one event loop."""

    def __init__(
        self, configs: Mapping[str, NetworkConfig], *, queue: int, say: Callable[[str], None], drain: Drain
    ) -> None:
        """configs: configurations by name. queue: maximum waiting requests of each network."""
        self._networks = {name: Network(name, config, queue, say) for name, config in configs.items()}
        self._say, self._drain = say, drain
        drain.also_used(lambda: any(network.n_running for network in self._networks.values()))

    async def start(self, *, needs_all: bool) -> None:
        """Load the networks.

        needs_all: raise the error of a network that cannot be loaded, instead of reporting it.
        """
        for name, network in self._networks.items():
            try:
                await network.process.start()
            except (EdgeError, OSError) as error:  # the other networks answer
                if needs_all:
                    raise
                self._say(f"{name}: {error}")

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(network.process.close() for network in self._networks.values()))

    @property
    def is_ready(self) -> bool:
        """True if all networks are loaded and the server accepts requests."""
        return not self._drain.begun and all(network.process.is_ready for network in self._networks.values())

    def network(self, name: str, its_version: str = "") -> Network:
        """Return a network. its_version: empty for the latest. Raises UnknownModel."""
        network = self._networks.get(name)
        if network is None:
            raise UnknownModel(f"there is no network {name[:200]!r} here; there are {listed(list(self._networks))}")
        if its_version not in ("", VERSION):
            raise UnknownModel(f"{name} has only the version {VERSION}, not {its_version[:40]!r}")
        return network

    async def infer(self, name: str, its_version: str, request: InferRequest) -> InferResponse:
        """Return the outputs of a request. Raises UnknownModel, and the errors of `Network.infer`."""
        self._drain.check_open()
        return await self.network(name, its_version).infer(request)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the server."""
        return {"name": "edge", "version": version("edge-runtime"), "extensions": EXTENSIONS}

    def index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Return the index of all networks. ready: only those that are loaded."""
        rows = [network.index() for network in self._networks.values()]
        return [row for row in rows if not ready or row["state"] == "READY"]

    def statistics(self, name: str = "", its_version: str = "") -> dict[str, Any]:
        """Return the statistics of a network, or of all networks without a name. Raises UnknownModel."""
        networks: Sequence[Network] = [self.network(name, its_version)] if name else list(self._networks.values())
        return {"model_stats": [network.statistics.to_json(network.name, VERSION) for network in networks]}

    def figures(self) -> list[dict[str, Any]]:
        """Return the statistics of all networks, with the number of requests that run, and whether each is loaded."""
        return [
            {
                **network.statistics.to_json(network.name, VERSION),
                "running": network.n_running,
                "ready": network.process.is_ready,
            }
            for network in self._networks.values()
        ]

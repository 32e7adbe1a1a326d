"""Whole copies of a network on several devices, which answer different inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from edge.closing import Closing
from edge.cluster.failures import is_loss
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE, Exchange
from edge.cluster.onnx_ranks import OnnxRanks
from edge.deployment.deployed_network import OneDevice, stages_json
from edge.deployment.networks import NetworkBuilding
from edge.onnx.failover import Runner
from edge.onnx.model import OnnxSource
from edge.onnx.replicas import Copy, ReplicaPipeline
from edge.profiling.cluster import Cluster
from edge.quantization.onnx_compare import OutputError
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from quant.text import counted

_ALONE = "this device"


class NetworkReplicas(Closing):
    """Copies of a network on devices. Its `pipeline` computes."""

    def __init__(
        self,
        model: OnnxSource,
        devices: Sequence[str],
        exchange: Exchange = DEFAULT_EXCHANGE,
        *,
        threads: int | None = None,
        provider: str | None = None,
        insecure: bool = False,
        steps: Steps = SILENT,
    ) -> None:
        """Load a copy on each device.

        devices: addresses of workers, and LOCAL for this device.
        threads, provider: those of a copy on this device.

        Raises PlanError if a device is named twice, WorkerError if a device does not answer, and the errors of
        `OnnxRanks` and `OneDevice`.
        """
        if len(set(devices)) != len(devices):
            raise PlanError("a device is named twice; it computes one copy of a network")
        self._model, self._devices, self._insecure = model, tuple(devices), insecure
        self._building = NetworkBuilding(model, exchange, threads, provider, steps.say)
        self._loaded: dict[str, OneDevice | OnnxRanks] = {}  # by device
        self.exchange, self.wire = exchange, exchange.wire
        names = {device: _ALONE if device == LOCAL else device for device in devices}
        copies = {device: Copy(name, partial(self._load, device)) for device, name in names.items()}
        self._copies = copies
        alone = copies.get(LOCAL) or Copy(_ALONE, partial(self._load, LOCAL))
        with steps.step(f"Loading {model.name} on {counted(len(devices), 'device')}"):
            self.pipeline = ReplicaPipeline(list(copies.values()), alone, is_loss, steps.say)

    @property
    def names(self) -> tuple[str, ...]:
        """Device names of the copies, for people."""
        return tuple(copy.name for copy in self.pipeline.copies)

    @property
    def why(self) -> str:
        """The reason for the copies."""
        return f"a copy of the network on each of {counted(len(self._devices), 'device')}"

    def to_json(self, _compute_ms: Sequence[float | None], wire_errors: Sequence[OutputError]) -> dict[str, Any]:
        """Return values for a command's JSON output.

        wire_errors: differences from outputs with F32 on the wire; empty if the wire type is F32.
        """
        stages = [
            row
            for copy, device in zip(self.pipeline.copies, [*self._devices, LOCAL], strict=False)
            if copy.runner is not None
            for row in stages_json(self._model, self._model.plan((device,), []), (copy.name,), self._loaded[device])
        ]
        return {
            "provider": None,
            "fell_back_from": [],
            "threads": None,
            "stages": stages,
            "plan": None,
            "why": self.why,
            "transport": self.exchange.transport,
            "wire": self.wire,
            "wire_errors": [asdict(error) for error in wire_errors] if wire_errors else None,
        }

    def close(self) -> None:
        """Unload all copies."""
        self.pipeline.stop()
        self.pipeline.close()

    def _load(self, device: str, stack: ExitStack) -> Runner:
        """Load the copy of a device."""
        plan = self._model.plan((device,), [])
        workers = () if device == LOCAL else (device,)
        cluster = stack.enter_context(Cluster(workers, insecure=self._insecure, needs_all=True))
        fleet = cluster.connected(plan)
        if fleet is not None:
            [worker] = fleet.workers.values()
            self._copies[device].name = worker.label
        runner, ranks = self._building.load(fleet, plan, stack, SILENT)
        current = ranks or runner
        assert isinstance(current, OneDevice | OnnxRanks)
        self._loaded[device] = current
        return runner

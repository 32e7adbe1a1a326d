"""Computes the requests of a network: on this device in batches, or through a pipeline of several devices."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edge.cluster.failures import is_loss
from edge.errors import EdgeError, EngineError, Interrupted, WorkerError
from edge.onnx.engine import OnnxEngine
from edge.onnx.failover import FailoverPipeline
from edge.onnx.pipeline import Result
from edge.onnx.replicas import ReplicaPipeline
from edge.onnx.samples import ANY_SHAPE, TYPES, Feeds, Input, Output
from edge.onnx.signature import fit
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.rows import RowTest, divided, joined
from edge.serve.oip.tensors import BYTES, DATATYPES, OPEN
from edge.serve.oip.works import MOST_ROWS, Timing, Work, Works
from edge.tasks import Steps

if TYPE_CHECKING:
    from edge.deployment.deployed_network import DeployedNetwork
    from edge.deployment.network_replicas import NetworkReplicas

_WAITING_STAGES = 2  # inputs in flight for each device of a pipeline


class Answer(Protocol):
    """Sends the outputs of a request, or its error.

    rows: rows of the whole run.
    is_first: the request is the first one of its run.
    """

    def __call__(
        self, work: Work, outputs: Feeds | Exception, timing: Timing = ..., rows: int = ..., *, is_first: bool = ...
    ) -> None: ...


class Computing(Protocol):
    """A loaded network."""

    def about(self) -> dict[str, Any]:
        """Return the description of the network: its inputs, outputs and devices."""

    def compute(self, works: Works, answer: Answer) -> None:
        """Compute requests until the queue is closed."""

    def interrupt(self) -> None:
        """Stop the current run, which no request needs any more."""

    def close(self) -> None:
        """Free the network."""


def opened(config: NetworkConfig, steps: Steps) -> Computing:
    """Load a network on its devices. Raises the errors of `OnnxEngine` and `deploy_network`."""
    if config.workers or config.plan is not None:
        return NetworkPipeline(config, steps)
    return LocalNetwork(config)


class LocalNetwork:
    """A network on this device. Requests with independent rows are computed together."""

    def __init__(self, config: NetworkConfig) -> None:
        self._engine = OnnxEngine(Path(config.path), config.threads)
        self._rows = RowTest(self._engine.inputs, self._engine.outputs)

    def about(self) -> dict[str, Any]:
        engine = self._engine
        devices = [f"{engine.provider}, {engine.threads} threads"]
        return {**signature_json(engine.inputs, engine.outputs), "devices": devices}

    def compute(self, works: Works, answer: Answer) -> None:
        while batch := works.take(MOST_ROWS if self._rows.is_possible else 0):
            self._engine.resume()  # a stop may have come after the end of its run
            self._compute(batch, works, answer)

    def _compute(self, batch: list[Work], works: Works, answer: Answer) -> None:
        try:
            for work in batch:
                fit(self._engine.inputs, work.feeds)
            first = batch[0]
            several = len(batch) > 1 or first.rows > MOST_ROWS
            if several and self._rows.independent(self._engine.run, first.feeds):
                if first.rows > MOST_ROWS:
                    self._compute_part(first, works, answer)
                    return
                if self._rows.pays:
                    self._together(batch, answer)
                    return
            if len(batch) == 1:
                self._together(batch, answer)
                return
        except Interrupted:
            pass
        except Exception as error:
            if len(batch) == 1:
                answer(batch[0], error)
                return
        # Each request alone: one of them is invalid, they cannot be joined, or the stop came for an earlier run.
        for work in batch:
            if not work.cancelled and not works.is_closed():
                self._engine.resume()
                self._compute([work], works, answer)

    def _together(self, batch: list[Work], answer: Answer) -> None:
        """Compute requests in one run. Raises the errors of `OnnxEngine.run`."""
        times = [time.monotonic_ns()]
        for work in batch:
            work.begin()
        feeds = joined([work.feeds for work in batch])
        times.append(time.monotonic_ns())
        outputs = self._engine.run(feeds)
        times.append(time.monotonic_ns())
        rows = [work.rows for work in batch]
        parts = [outputs] if len(batch) == 1 else divided(outputs, rows)
        times.append(time.monotonic_ns())
        if parts is None:
            raise EdgeError("an output has another number of rows than the inputs")
        timing = Timing(*(end - start for start, end in pairwise(times)))
        for i, (work, part) in enumerate(zip(batch, parts, strict=True)):
            answer(work, part, timing, sum(rows), is_first=i == 0)

    def _compute_part(self, work: Work, works: Works, answer: Answer) -> None:
        """Compute the next rows of a large request. Other requests come before its remaining rows."""
        start = sum(len(next(iter(part.values()))) for part in work.parts)
        feeds = {name: array[start : start + MOST_ROWS] for name, array in work.feeds.items()}
        work.begin()
        began = time.monotonic_ns()
        outputs = self._engine.run(feeds)
        work.infer_ns += time.monotonic_ns() - began
        work.parts.append(outputs)
        if start + MOST_ROWS < work.rows:
            works.put(work)
            return
        answer(work, joined(work.parts), Timing(0, work.infer_ns, 0), MOST_ROWS)

    def interrupt(self) -> None:
        self._engine.stop()

    def close(self) -> None:
        self._engine.close()


class NetworkPipeline:
    """A network over several devices. Requests are in flight at the same time, each for itself."""

    def __init__(self, config: NetworkConfig, steps: Steps) -> None:
        self._config, self._steps = config, steps
        self._stack = ExitStack()
        self._deployed: DeployedNetwork | NetworkReplicas
        self._open()

    def _open(self) -> None:
        from edge.cluster.llm_ranks import Exchange
        from edge.deployment.network_replicas import NetworkReplicas
        from edge.deployment.networks import deploy_network
        from edge.onnx.file import keep_outputs, load
        from edge.onnx.model import OnnxSource, declared_outputs
        from edge.planning.choice import PlanChoice
        from edge.planning.onnx_space import arrange_network
        from edge.profiling.cluster import Cluster
        from partition.plan.onnx_plan import OnnxPlan
        from partition.plan.plan import LOCAL

        config, steps = self._config, self._steps
        file = load(Path(config.path))
        keep_outputs(file.model.graph)
        source = OnnxSource.from_file(file, dict(config.dims or {}))
        self._inputs = source.inputs
        self._outputs = declared_outputs(file)
        exchange = Exchange(config.transport, wire=config.wire)
        if config.replicas:
            self._deployed = self._stack.enter_context(
                NetworkReplicas(
                    source, config.workers, exchange, threads=config.threads, insecure=config.insecure, steps=steps
                )
            )
            return
        if config.plan is not None:
            plan = OnnxPlan.from_json(dict(config.plan))
            choice = PlanChoice(file.path, plan, f"as {config.plan_name} says", is_given=True)
        else:
            choice = arrange_network(source, config.workers, shares=config.shares, threads=config.threads, steps=steps)
            assert isinstance(choice.plan, OnnxPlan)
            plan = choice.plan
        with ExitStack() as stack:
            workers = [device for device in plan.devices if device != LOCAL]
            cluster = stack.enter_context(Cluster(workers, insecure=config.insecure, needs_all=True))
            self._deployed = stack.enter_context(
                deploy_network(choice, source, cluster, exchange, threads=config.threads, steps=steps)
            )
            self._stack = stack.pop_all()

    def about(self) -> dict[str, Any]:
        return {**signature_json(self._inputs, self._outputs), "devices": list(self._deployed.names)}

    def compute(self, works: Works, answer: Answer) -> None:
        while not works.is_closed():
            in_flight: dict[int, Work] = {}  # by number
            ended = threading.Event()
            pipeline = self._deployed.pipeline
            window = _WAITING_STAGES * len(self._deployed.names)
            try:
                feeds = self._feeds(works, in_flight, ended.is_set, answer)
                for number, result in completed(pipeline, feeds, window, self._deployed.wire):
                    compute_s = sum(result.compute_s) or result.seconds
                    work = in_flight.pop(number)
                    answer(work, result.outputs, Timing(0, round(1e9 * compute_s), 0), work.rows, is_first=True)
            except Exception as error:
                ended.set()
                works.wake()
                if not works.is_closed():
                    self._try_alone(list(in_flight.values()), error, answer)

    def _feeds(
        self, works: Works, in_flight: dict[int, Work], until: Callable[[], bool], answer: Answer
    ) -> Iterator[Feeds]:
        """Yield the inputs of requests that fit the network. `in_flight` holds the requests."""
        numbers = itertools.count()
        while batch := works.take(until=until):
            [work] = batch
            try:
                fit(self._inputs, work.feeds)
            except EdgeError as error:
                answer(work, error)
                continue
            work.begin()
            in_flight[next(numbers)] = work
            yield work.feeds

    def _try_alone(self, suspects: Sequence[Work], error: Exception, answer: Answer) -> None:
        """Load the network again, and compute these requests one at a time. The request that fails gets the error."""
        self._steps.say(f"{error}; loading the network again")
        self._reopen()
        for work in suspects:
            try:
                result = self._deployed.pipeline.run(work.feeds, self._deployed.wire)
            except Exception as own:
                # A worker that could not compute these inputs reports it as this device would.
                refused = isinstance(own, WorkerError) and own.error == EngineError.__name__
                answer(work, EngineError(str(own)) if refused else own)
                if is_loss(own):
                    raise
                self._reopen()
            else:
                answer(work, result.outputs, Timing(0, round(1e9 * result.seconds), 0), work.rows, is_first=True)

    def _reopen(self) -> None:
        self._stack.close()
        self._open()

    def interrupt(self) -> None:
        """Do nothing, because other requests are in flight."""

    def close(self) -> None:
        self._stack.close()


def completed(
    pipeline: FailoverPipeline | ReplicaPipeline, feeds: Iterator[Feeds], window: int, wire: str
) -> Iterator[tuple[int, Result]]:
    """Yield the number and the result of each input as soon as it is complete. The results of stages are in order."""
    if isinstance(pipeline, ReplicaPipeline):
        return pipeline.completed(feeds, window, wire)
    return enumerate(pipeline.map(feeds, window, wire))


def signature_json(inputs: Sequence[Input], outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the declarations of inputs and outputs as [name, datatype, shape, names of dimensions]."""
    return {"inputs": [_declared(tensor) for tensor in inputs], "outputs": [_declared(tensor) for tensor in outputs]}


def _declared(tensor: Input | Output) -> list[Any]:
    datatype = DATATYPES[TYPES[tensor.type]] if tensor.type in TYPES else BYTES
    if not tensor.type.startswith("tensor("):  # maps of a ZipMap become a matrix
        datatype = "FP32"
    if tensor.shape == ANY_SHAPE:
        return [tensor.name, datatype, None, []]
    shape = [size if isinstance(size, int) else OPEN for size in tensor.shape]
    return [tensor.name, datatype, shape, list(map(str, tensor.shape))]

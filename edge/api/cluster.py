"""Several devices: which there are, what should run where, and a model that runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from devices.cluster_file import Cluster as ClusterFile
from devices.cluster_file import read_cluster
from edge.api.local import PathLike, model_path
from edge.api.onnx import OnnxModel
from edge.cluster.deployment import DEFAULT_EXCHANGE, Deployment, Exchange
from edge.cluster.fleet import Fleet
from edge.errors import WorkerError
from edge.llm.model import Model
from edge.llm.options import EngineOptions
from edge.planning.deployed import alone
from edge.planning.front import Front
from edge.planning.plan_file import read_plan, save_plan
from edge.planning.spaces import DEFAULTS, PlanOptions, is_onnx, spaces
from edge.survey.profile import reachable
from edge.tasks import SILENT, Steps
from edge.units import as_bytes
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL, Plan
from partition.predict.prediction import Prediction
from quant.gguf.file import GgufFile

if TYPE_CHECKING:
    from edge.onnx.bench import Flow

Axis = Literal["latency", "throughput", "memory", "energy"]
Objective = Literal["latency", "throughput", "ttft", "memory", "energy"]


class Cluster:
    """This device and others. `open()` connects them, `close()` lets them go; it is also a context manager."""

    def __init__(self, workers: Sequence[str] = (), *, file: PathLike | None = None, insecure: bool = False) -> None:
        """workers: HOST or HOST:PORT of each. file: a cluster.toml, in their place. insecure: also workers that do not
        encrypt. ValueError for both at once; ClusterFileError for a file that cannot be used."""
        if workers and file is not None:
            raise ValueError("the file names the devices, and so do workers: leave one of them out")
        self.devices = read_cluster(Path(file)) if file is not None else ClusterFile.of_addresses(workers)
        self.fleet: Fleet | None = None  # the workers that answered; None before `open`, and where there is none
        self.notes: list[str] = []  # who did not answer, for people
        self._insecure = insecure
        self._stack = ExitStack()

    def open(self) -> Cluster:
        """Connect the workers that answer. TransportError or WorkerError for one that answers and cannot take part."""
        if self.fleet is None:
            self.fleet, self.notes = self._stack.enter_context(reachable(self.devices, insecure=self._insecure))
        return self

    def close(self) -> None:
        """End all connections, and with them what runs on the workers."""
        self.fleet = None
        self._stack.close()

    def __enter__(self) -> Cluster:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class PlanChoice:
    """A plan for one model, and why it is this one."""

    model: Path
    plan: Plan | OnnxPlan
    why: str  # in one line
    predicted: Prediction | None = None  # None for a plan that was read from a file

    @classmethod
    def load(cls, model: PathLike | None, plan: PathLike) -> PlanChoice:
        """A saved plan for a model. PlanError where the file holds none."""
        path = model_path(model)
        file = Path(plan)
        chosen = read_plan(file, OnnxPlan) if is_onnx(path) else read_plan(file, Plan)
        return cls(path, chosen, f"as {file} says")

    def save(self, path: PathLike) -> None:
        """Write the plan as JSON, as `load` and the commands' `--plan` take it."""
        save_plan(Path(path), self.plan)


def plan(
    model: PathLike | None,
    cluster: Cluster,
    *,
    objective: Objective = "latency",
    limits: Mapping[str, float] | None = None,
    options: PlanOptions = DEFAULTS,
    steps: Steps = SILENT,
) -> PlanChoice:
    """Where a model should run: the plan that is best by one objective, by measurement.

    limits: what objectives may be at most, in seconds (throughput: seconds a token or input), bytes or joules.
    PlanError, with need and have, where nothing fits.
    """
    path = model_path(model)
    (space,) = spaces(path, cluster.devices, cluster.fleet, cluster.notes, options, steps=steps)
    point, why = space.best(objective, limits or {})
    return PlanChoice(path, point.plan, why, point.predicted)


def pareto(
    model: PathLike | None,
    cluster: Cluster,
    *,
    axes: Sequence[Axis] = ("latency", "throughput"),
    measure: int = 0,
    types: Sequence[str] = (),
    options: PlanOptions = DEFAULTS,
    steps: Steps = SILENT,
) -> Front:
    """The plans between which a person can choose. measure: how many of the most promising ones are run and measured.

    types: choose between these types of the weights, too. PlanError, with need and have, where nothing fits.
    """
    path = model_path(model)
    found = spaces(path, cluster.devices, cluster.fleet, cluster.notes, options, types=types, steps=steps)
    front = Front(found, axes)
    if measure:
        front.measure(measure, cluster.fleet, fresh=options.fresh, steps=steps)
    return front


def deploy(
    choice: PlanChoice,
    cluster: Cluster,
    *,
    exchange: Exchange = DEFAULT_EXCHANGE,
    memory: int | str | None = None,
    steps: Steps = SILENT,
    **options: Any,
) -> Model | OnnxModel:
    """A model on the devices that its plan names: a Model, or an OnnxModel.

    memory and options are of EngineOptions, and for language models only. WorkerError where a device of the plan is not
    connected; PlanError for a plan of another model; NotEnoughMemory, with need and have.
    """
    chosen = choice.plan
    if isinstance(chosen, OnnxPlan):
        return OnnxModel.over(choice.model, partial(_pipeline, choice.model, chosen, cluster, exchange)).open()
    engine_options = EngineOptions(memory=as_bytes(memory), **options)
    if chosen.world_size == 1:
        engine = alone(choice.model, engine_options, chosen, steps)
        return Model(engine, engine.close)
    with steps.step(f"Loading {choice.model.name} on {len(set(chosen.devices))} devices") as show:
        fleet = _connected(cluster, chosen)
        deployment = Deployment(fleet, chosen, GgufFile.open(choice.model), engine_options, exchange, show, steps.say)
    return Model(deployment.engine, deployment.close)


def _connected(cluster: Cluster, chosen: Plan | OnnxPlan) -> Fleet:
    """The workers of a plan."""
    there = cluster.fleet.workers if cluster.fleet else {}
    missing = [device for device in chosen.devices if device != LOCAL and device not in there]
    if missing or cluster.fleet is None:
        raise WorkerError(
            f"the plan needs {', '.join(missing)}; connected are {', '.join(there) or 'none'}: open a cluster with them"
        )
    return cluster.fleet


def _pipeline(path: Path, chosen: OnnxPlan, cluster: Cluster, exchange: Exchange, stack: ExitStack) -> Flow:
    from edge.cluster.onnx_deployment import OnnxDeployment
    from edge.onnx.bench import in_turn
    from edge.onnx.engine import OnnxEngine
    from edge.onnx.file import load
    from edge.onnx.model import OnnxSource

    source = OnnxSource.of(load(path), {})
    source.check(chosen)
    if chosen.own is not None and not chosen.remote:
        return in_turn(stack.enter_context(OnnxEngine(path, chosen.own.threads, chosen.own.provider)).run)
    deployment = OnnxDeployment(_connected(cluster, chosen), source, chosen, transport=exchange.transport)
    return partial(stack.enter_context(deployment).start().map, wire=exchange.wire)

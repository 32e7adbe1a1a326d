"""Deploy an ONNX network: turn a plan, a cluster and options into a pipeline that survives the loss of devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from devices.cluster_file import Cluster as ClusterFile
from edge.cluster.failures import is_loss
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE, Exchange
from edge.cluster.onnx_ranks import OnnxRanks
from edge.cluster.rank_group import RankGroup
from edge.deployment.deployed_network import DeployedNetwork, OneDevice
from edge.deployment.kinds import Building, Deciding
from edge.deployment.supervisor import Supervisor
from edge.onnx.failover import FailoverPipeline, Runner
from edge.onnx.model import OnnxSource
from edge.planning.choice import PlanChoice
from edge.planning.onnx_space import OnnxSpace
from edge.planning.plan_options import PlanOptions
from edge.profiling.cluster import Cluster
from edge.profiling.onnx_survey import onnx_speeds
from edge.tasks import SILENT, Progress, Steps
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from quant.text import counted


def deploy_network(
    choice: PlanChoice,
    model: OnnxSource,
    cluster: Cluster,
    exchange: Exchange = DEFAULT_EXCHANGE,
    *,
    threads: int | None = None,
    provider: str | None = None,
    deciding: Deciding[OnnxPlan] | None = None,
    steps: Steps = SILENT,
) -> DeployedNetwork:
    """Deploy a network on the devices that its plan names, and return it with its stages loaded.

    If a device is lost, the pipeline continues on the devices of the cluster that answer, and `steps` shows a line.

    threads, provider: defaults for a stage in this process if the plan sets none.
    deciding: planner after a loss; None: plan by measurement.

    Raises WorkerError if a device of the plan is not connected, and PlanError if the plan is for another model. Also
    raises the errors of `OnnxRanks`.
    """
    if not isinstance(choice.plan, OnnxPlan):
        raise PlanError(f"{choice.model.name} is a language model: deploy it with deploy")
    model.check(choice.plan)
    fleet = cluster.connected(choice.plan)
    building = NetworkBuilding(model, exchange, threads, provider, steps.say)
    if deciding is None:
        deciding = NetworkReplanner(choice, model, cluster.devices, exchange, threads)
    supervisor = Supervisor(deciding, building, steps, insecure=cluster.insecure)
    first = supervisor.start(fleet, choice.plan, choice.why)

    def recovered(error: Exception, check: Callable[[], None]) -> Runner:
        if not is_loss(error):
            raise error
        return supervisor.replace(error, pipeline.losses_in_a_row, check)

    pipeline = FailoverPipeline(first, recovered)
    deployed = DeployedNetwork(model, pipeline, supervisor.running, exchange, supervisor.close)
    supervisor.on_change.append(deployed.change)
    return deployed


class NetworkReplanner(Deciding[OnnxPlan]):
    """Plans a network over the workers that answer. It measures devices whose measurements are not cached."""

    def __init__(
        self, choice: PlanChoice, model: OnnxSource, cluster: ClusterFile, exchange: Exchange, threads: int | None
    ) -> None:
        """choice: the first plan.
        threads: compute threads on this device.
        """
        there = [replace(entry, preset=None) for entry in cluster.devices if entry.preset is None or entry.is_local]
        self._model, self._cluster = model, replace(cluster, devices=tuple(there))
        self._exchange, self._threads, self._choice = exchange, threads, choice
        self.note = ", by another plan than the one that was given" if choice.is_given else ""
        self.shunned: set[str] = set()

    @property
    def addresses(self) -> list[str]:
        """Addresses of the cluster's workers."""
        return [
            worker.address for worker in self._cluster.workers if worker.address and worker.address not in self.shunned
        ]

    def over(
        self, fleet: Fleet | None, notes: list[str], steps: Steps, *, several: bool = False
    ) -> tuple[OnnxPlan, str]:
        if fleet is None:
            return self._model.plan((LOCAL,), []), "no other device answers"
        choice = self._choice
        options = PlanOptions(threads=self._threads, transport=self._exchange.transport, wire=self._exchange.wire)
        with steps.step("Measuring devices", unit="steps") as show:
            known, cuts = onnx_speeds(
                self._model, self._cluster, fleet, notes,
                threads=options.threads, transport=options.transport, on_step=show,
            )  # fmt: skip
        if choice.keeps_off:
            known = replace(known, speeds=known.speeds[1:])
        space = OnnxSpace(self._model, known, cuts, options)
        objective = "throughput" if choice.predicted is None else choice.objective
        try:
            point, why = space.best(objective, choice.limits)
        except PlanError:  # fewer devices may be unable to keep the limits
            if not choice.limits:
                raise
            point, why = space.best(objective, {})
        assert isinstance(point.plan, OnnxPlan)
        return point.plan, why

    def pays(self, plan: OnnxPlan, current: OnnxPlan) -> bool:
        """Return False: a network is replanned only after a loss."""
        return False


class NetworkBuilding(Building[OnnxPlan, Runner]):
    """Loader of the stages of a network."""

    def __init__(
        self,
        model: OnnxSource,
        exchange: Exchange,
        threads: int | None,
        provider: str | None,
        say: Callable[[str], None],
    ) -> None:
        """threads, provider: defaults for a stage in this process if a plan sets none.
        say: called with a message about a device that stands still.
        """
        self._model, self._exchange, self._say = model, exchange, say
        self._threads, self._provider = threads, provider

    def load(
        self, fleet: Fleet | None, plan: OnnxPlan, life: ExitStack, steps: Steps
    ) -> tuple[Runner, RankGroup | None]:
        model, threads, provider = self._model, self._threads, self._provider
        with steps.step(f"Loading {model.name} on {counted(len(set(plan.devices)), 'device')}") as show:
            if not plan.remote:
                alone = OneDevice(model, plan, threads, provider)
                life.callback(alone.close)
                return alone, None
            assert fleet is not None
            transport = self._exchange.transport
            several = OnnxRanks(
                fleet, model, plan, transport=transport, threads=threads, provider=provider, progress=show,
                say=self._say, gives_up=True,
            )  # fmt: skip
        life.callback(several.close)
        return several.start(), several

    def send_ahead(self, fleet: Fleet, plan: OnnxPlan, check: Progress) -> None:
        """Do nothing, because a network is replanned only after a loss."""

"""An ONNX model on the devices there are: where one is lost, it is planned anew over those that answer, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from devices.cluster_file import Cluster
from edge.cluster.connect import LOSS_TIMEOUT_S
from edge.cluster.failures import is_loss
from edge.cluster.fleet import Fleet
from edge.cluster.lost import listed, lost_words
from edge.cluster.onnx_deployment import Loaded, OnnxDeployment
from edge.cluster.preflight import check_memory
from edge.errors import NotEnoughMemory
from edge.onnx.bench import sequential
from edge.onnx.engine import OnnxEngine
from edge.onnx.failover import FailoverPipeline, Runner
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import Result
from edge.onnx.wire import Array
from edge.planning.onnx_space import OnnxSpace
from edge.slices.local import OwnSlices
from edge.survey.onnx_survey import onnx_speeds
from edge.survey.profile import reachable
from edge.tasks import SILENT, ShowStep, Steps
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from quant.text import counted

MOST_TRIES = 4  # to bring a model up again: another device may be lost meanwhile

Check = Callable[[], None]  # raises Interrupted where nobody waits any more


@dataclass(frozen=True)
class OnnxPlacement:
    """Where a model's stages are to run: as a plan says, or on these devices, cut as a person says or by work."""

    devices: tuple[str, ...]  # of the stages; LOCAL can be the first
    plan: OnnxPlan | None = None
    why: str = "as the plan says"
    cuts: tuple[str, ...] | None = None  # labels or positions; without them and a plan, by `shares`
    shares: tuple[float, ...] | None = None  # what part of the work each device does; None: equal parts
    transport: str = "auto"
    wire: str = "f32"
    threads: int | None = None  # of a stage in this process, like the next
    provider: str | None = None
    insecure: bool = False  # allow workers that do not encrypt

    @property
    def is_given(self) -> bool:
        """Whether a person said where to cut."""
        return self.plan is not None or self.cuts is not None or self.shares is not None

    @property
    def keeps_off(self) -> bool:
        """Whether a person said that this device is to have no stage."""
        return self.plan is None and LOCAL not in self.devices


# How to plan over the workers that answer: the model, they, notes of those that do not, and progress; a plan, and why.
PlanAgain = Callable[[OnnxSource, Fleet, list[str], ShowStep], tuple[OnnxPlan, str]]


class SurvivingDeployment:
    """A model whose stages are on their devices. `close()` ends it on all of them."""

    def __init__(
        self,
        model: OnnxSource,
        placement: OnnxPlacement,
        plan: OnnxPlan,
        why: str,
        fleet: Fleet | None,
        cluster: Cluster,
        *,
        steps: Steps = SILENT,
        plan_again: PlanAgain | None = None,
    ) -> None:
        """Bring `plan` to life. fleet: its workers, connected; they stay open. cluster: whom to ask when one is lost.
        plan_again: None: the plan with the highest throughput by measurement. The errors of OnnxDeployment."""
        self.model, self.why = model, why
        self._placement, self._cluster, self._steps = placement, _without_presets(cluster), steps
        self._plan_again = plan_again or self._best
        self._life = ExitStack()  # of what runs now
        try:
            self.pipeline = FailoverPipeline(self._bring_up(plan, fleet, _no_check), self._recovered)
        except BaseException:
            self._life.close()
            raise

    def close(self) -> None:
        """Unload everything, here and there."""
        self.pipeline.stop()
        self._life.close()

    def _bring_up(self, plan: OnnxPlan, fleet: Fleet | None, check: Check) -> Runner:
        """Load the stages, and let them follow."""
        placement = self._placement
        devices = counted(len(set(plan.devices)), "device")
        with self._steps.step(f"Loading {self.model.name} on {devices}") as show:
            self.current: OnnxDeployment | OneDevice
            if not plan.remote:
                self.current = OneDevice(self.model, plan, placement.threads, placement.provider)
            else:
                assert fleet is not None
                self.current = OnnxDeployment(
                    fleet,
                    self.model,
                    plan,
                    transport=placement.transport,
                    threads=placement.threads,
                    provider=placement.provider,
                    progress=_checked(show, check),
                    say=self._steps.say,
                    gives_up=True,
                )
        self._life.callback(self.current.close)
        workers = fleet.workers if fleet else {}
        self.names = tuple("this device" if one == LOCAL else workers[one].label for one in plan.devices)
        return self.current.start()

    def _recovered(self, error: Exception, check: Check) -> Runner:
        """The model on the devices that still answer. The error itself where nothing was lost; PlanError and
        NotEnoughMemory say what they lack."""
        if not is_loss(error):
            raise error
        words = lost_words(self.current.lost, error)
        for tries_left in reversed(range(MOST_TRIES)):
            self._life.close()
            check()
            try:
                return self._again(words, check)
            except (PlanError, NotEnoughMemory) as lacking:
                raise type(lacking)(f"{words}, and the model cannot go on without: {lacking}") from error
            except Exception as failed:
                if not tries_left or not is_loss(failed):
                    raise
        raise AssertionError("the last try returns or raises")

    def _again(self, words: str, check: Check) -> Runner:
        workers = reachable(
            self._cluster, insecure=self._placement.insecure, timeout_s=LOSS_TIMEOUT_S, return_s=LOSS_TIMEOUT_S
        )
        fleet, notes = self._life.enter_context(workers)
        check()
        if fleet is None:
            plan, why = self.model.plan((LOCAL,), []), "no other device answers"
        else:
            with self._steps.step("Measuring devices", unit="steps") as show:
                plan, why = self._plan_again(self.model, fleet, notes, _checked(show, check))
        started, self.why = self._bring_up(plan, fleet, check), why
        anew = ", by another plan than the one that was given" if self._placement.is_given else ""
        self._steps.say(f"{words}: going on with {listed(self.names)}{anew}")
        return started

    def _best(self, model: OnnxSource, fleet: Fleet, notes: list[str], show: ShowStep) -> tuple[OnnxPlan, str]:
        placement = self._placement
        known, cuts = onnx_speeds(
            model,
            self._cluster,
            fleet,
            notes,
            threads=placement.threads,
            transport=placement.transport,
            on_step=show,
        )
        if placement.keeps_off:
            known = replace(known, speeds=known.speeds[1:])
        space = OnnxSpace(
            model, known, cuts, threads=placement.threads, transport=placement.transport, wire=placement.wire
        )
        point, why = space.best("throughput", {})
        assert isinstance(point.plan, OnnxPlan)
        return point.plan, why


class OneDevice:
    """A whole model on this device, with what there is to say of a deployment."""

    links = (None,)  # to the stages
    lost: tuple[str, ...] = ()  # devices

    def __init__(self, model: OnnxSource, plan: OnnxPlan, threads: int | None, provider: str | None) -> None:
        """Load it. NotEnoughMemory, with need and have; PlanError where the file has changed; the errors of OnnxEngine.

        threads, provider: where the plan has none."""
        own, n = plan.stages[0], len(model.graph.nodes)
        weight_bytes = model.graph.stage_weight_bytes(0, n)
        need = weight_bytes + model.graph.activation_bytes(0, n)
        check_memory(None, [(LOCAL, {"the whole model": need})], "free memory there, or add a device")
        if OwnSlices().model_digest(model.file.path) != model.digest:
            raise PlanError(f"{model.name} has changed since it was loaded; start again")
        engine = self._engine = OnnxEngine(model.file.path, own.threads or threads, own.provider or provider)
        self.plan = plan
        self.loaded = (Loaded(LOCAL, weight_bytes, 0, engine.provider, engine.fell_back_from, engine.threads),)

    def start(self) -> Runner:
        """What to talk to."""
        return self

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """The results of inputs, one after the other. The errors of `OnnxEngine.run`."""
        return sequential(self._engine.run)(feeds, window)

    def stop(self) -> None:
        """Make what runs, and all that follows, raise Interrupted."""
        self._engine.stop()

    def resume(self) -> None:
        """Compute again."""
        self._engine.resume()

    def close(self) -> None:
        """Free the model."""
        self._engine.close()


def _without_presets(cluster: Cluster) -> Cluster:
    """The devices that are there."""
    real = [replace(one, preset=None) for one in cluster.devices if one.preset is None or one.is_local]
    return replace(cluster, devices=tuple(real))


def _checked(show: ShowStep, check: Check) -> ShowStep:
    def shown(n: float, total: float | None = None, what: str = "") -> None:
        check()
        show(n, total, what)

    return shown


def _no_check() -> None:
    """Somebody waits."""

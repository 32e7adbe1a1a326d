"""A language model on several devices that goes on when one of them is lost or leaves, and when one comes back: planned
again over those that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace

from devices.cluster_file import Cluster
from devices.probe import available_memory
from edge.cluster.connect import CONNECT_TIMEOUT_S, LOSS_TIMEOUT_S
from edge.cluster.deployment import Deployment, Exchange
from edge.cluster.failures import is_loss
from edge.cluster.fleet import Fleet, by_device, device
from edge.cluster.lost import LostLately, listed, lost_words
from edge.cluster.preflight import left_here
from edge.cluster.rank_group import RankGroup
from edge.cluster.sending import send_ahead
from edge.cluster.spares import Room, Spares
from edge.cluster.standby import Standby, slices_limits, stand_by
from edge.errors import EdgeError, Interrupted
from edge.llama import llama
from edge.llm.engine import Engine, load
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.parallel.mirror import MirroredHistory, mirror_of
from edge.parallel.surviving import SurvivingEngine
from edge.planning.arrange import Arrangement, again, shared
from edge.survey.joining import FindWorkers, JoinedDevice, Newcomers
from edge.survey.profile import reachable
from edge.survey.straggler_watch import StragglerWatch
from edge.tasks import CheckedSteps, Progress, Repeated, Steps
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import NEW_PLAN
from quant.gguf.file import GgufFile

LOOK_S = 0.5  # between two looks whether a device leaves
REST_S = 0.3  # without a step: nobody waits for one
QUIET_S = 2.0  # without a step: nobody minds
OFFER_S = 10.0  # between two looks whether a device is there again
MOST_TRIES = 4  # to go on after a loss: the last one on this device alone
BUSY_S = 10.0  # between two looks whether a device became slow, where there is always somebody who asks
CLOSE_S = 30.0  # for a move that hears late that it is to end
PAGED_SHARE = 0.8  # of the memory that is free, for a model that is larger and has no other device left


class Supervisor:
    """Brings a model to life, and again elsewhere. `close()` ends it; it is also a context manager."""

    def __init__(
        self,
        file: GgufFile,
        digest: str,
        options: EngineOptions,
        exchange: Exchange,
        steps: Steps,
        insecure: bool,
        *,
        arranged: Arrangement | None = None,
        spare: int | str = 0,
        seek: FindWorkers | None = None,
    ) -> None:
        """digest: of the file. arranged: what the first plan was made from; None: it was given. spare: losses of
        devices that `start` prepares for; `edge.cluster.spares.AUTO`: as many as there is room for. seek: for devices
        that join; None: no others are to take part."""
        self._file, self._digest, self._options, self._exchange = file, digest, options, exchange
        self._steps, self._insecure, self._spare = steps, insecure, spare
        self._made = arranged
        self.standby: Standby | None = None  # where it is to be ready for a loss
        self.slow = StragglerWatch(arranged.survey if arranged else None, arranged.work if arranged else None)
        self._stack = ExitStack()  # what lasts
        self._running = ExitStack()  # what another plan replaces
        self._ranks: RankGroup | None = None  # of other devices; None where there are none
        self._there: frozenset[str] = frozenset()  # workers that were there for the last plan, by address
        self._shunned: set[str] = set()  # those that could not be taken
        self._lost_lately = LostLately()
        self._newcomers = Newcomers(seek, file, digest, exchange.transport, insecure=insecure) if seek else None
        self._joined: JoinedDevice | None = None  # measured, and not offered yet
        self._offered = ExitStack()  # of a plan that waits to take over
        self._stays_with: list[str] = []  # devices that leave, and nothing else can do their part
        self._offer_at = time.monotonic() + OFFER_S
        self._slow_at = time.monotonic() + BUSY_S
        self._watch: Repeated | None = None
        self.changed: Callable[[Plan, str, tuple[str, ...]], None] = lambda plan, why, names: None

    def start(self, fleet: Fleet, plan: Plan) -> SurvivingEngine:
        """The engine of a plan, which lives as long as this object. The fleet is the caller's.

        The errors of `Deployment`, and of `stand_by`.
        """
        self._plan = self._current = by_device(plan)
        vocabulary = llama.Model(self._file.path, vocabulary_only=True)
        self._stack.callback(vocabulary.close)
        self._vocabulary = vocabulary
        if self._spare and plan.world_size > 1:
            self.standby = self._stand_by(fleet)
        if plan.world_size == 1:
            engine: TextEngine = self._running.enter_context(self._alone(plan, self._steps))
        else:
            engine = self._deployed(fleet, plan, self._steps)
        self._there = frozenset(map(device, fleet.workers))
        self._options = replace(self._options, context=engine.context, batch=engine.batch)
        self._engine = SurvivingEngine(engine, vocabulary, self._recovered, self._mirror)
        self.slow.begin(
            engine, self._plan, [fleet.workers[one].label if one != LOCAL else "this device" for one in plan.devices]
        )
        self._watch = Repeated(self._look, LOOK_S, "members")
        return self._engine

    def _stand_by(self, fleet: Fleet) -> Standby | None:
        def planned(workers: Sequence[str]) -> tuple[Plan, str]:
            plan, why = self._planned(workers)
            return by_device(plan), why

        spares = Spares(self._plan, self._addresses(), planned, self._file, self._digest)
        budget = self._options.memory or self._plan.shard(0).memory
        mirror = mirror_of(self._file, self._options, self._vocabulary, budget)

        def left(plan: Plan) -> int:
            known = self._arranged.left_here(plan) if self._arranged is not None else None
            left = left_here(plan, self._file, self._digest, self._options) if known is None else known
            return left - self._options.reserved

        room = Room(left, slices_limits(fleet))
        return stand_by(self._spare, spares, mirror, room, fleet, self._file, self._plan.sizes, self._steps)

    @property
    def _mirror(self) -> MirroredHistory | None:
        return self.standby.mirror if self.standby is not None else None

    @property
    def _arranged(self) -> Arrangement | None:
        """What plans are made from by now."""
        return replace(self._made, survey=self.slow.survey) if self._made else None

    def stay(self) -> None:
        """Move no more. A look at who is there may take seconds and is not waited for; a move under way ends soon."""
        if self._watch is not None:
            self._watch.close()
            self._engine.wait_for_move(CLOSE_S)

    def close(self) -> None:
        """Unload everything."""
        self.stay()
        self._running.close()
        self._offered.close()
        self._stack.close()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deployed(self, fleet: Fleet, plan: Plan, steps: Steps) -> TextEngine:
        with steps.step(f"Loading {self._file.path.name} on {len(set(plan.devices))} devices") as show:
            deployment = Deployment(
                fleet,
                plan,
                self._file,
                self._options,
                self._exchange,
                show,
                self._steps.say,
                vocabulary=self._vocabulary,
                gives_up=True,
                reserved=self._mirror.max_bytes if self._mirror else 0,
            )
        self._ranks = self._running.enter_context(deployment)
        return deployment.engine

    # --- a device is lost ---

    def _recovered(self, error: Exception) -> TextEngine:
        """Another engine, in place of the one that failed so: without workers that are lost meanwhile or cannot do
        their part, and at last on this device alone. What keeps it from being there is raised, with why."""
        lost = self._ranks.lost if self._ranks else []
        words = lost_words(lost, error) if lost else str(error)
        lost_now = [self._current.devices[rank] for rank in self._ranks.lost_ranks] if self._ranks else []
        without = self._lost_lately.again(lost_now, self._engine.losses_in_a_row)
        for tries_left in reversed(range(MOST_TRIES)):
            self._check_open()
            self._end_running(ExitStack())
            try:
                there = [address for address in self._addresses() if tries_left and address not in without]
                fleet, _ = self._running.enter_context(self._reachable(LOSS_TIMEOUT_S, there))
                plan, why = self._planned(list(fleet.workers) if fleet is not None else [])
                return self._brought_up(fleet, plan, why, words, self._steps)
            except EdgeError as again:
                if not tries_left or isinstance(again, Interrupted) or not (again.devices or is_loss(again)):
                    raise type(again)(f"{words}, and without it: {again}") from again
                without.update(again.devices)
                words = str(again)
        raise AssertionError("the last try returns or raises")

    def _brought_up(self, fleet: Fleet | None, plan: Plan, why: str, words: str, steps: Steps) -> TextEngine:
        """The engine of a plan, in the life that is running now. words: why it is another one."""
        names = tuple("this device" if fleet is None else self._name(fleet, one) for one in plan.devices)
        self._steps.say(f"{words}: going on with {listed(names)}")
        if fleet is None or plan.world_size == 1:
            engine: TextEngine = self._running.enter_context(self._alone(plan, steps))
        else:
            engine = self._deployed(fleet, plan, steps)
        if self._mirror is not None:
            self._mirror.active = fleet is not None and plan.world_size > 1
        self._current, self._there = plan, frozenset(fleet.workers if fleet else ())
        self.slow.begin(engine, plan, names)
        self._offer_at = time.monotonic() + OFFER_S
        self.changed(plan, why, names)
        return engine

    def _end_running(self, following: ExitStack) -> None:
        """Unload what runs; what follows has another life."""
        with suppress(EdgeError):  # parts of it are gone
            self._running.close()
        self._running, self._ranks = following, None

    # --- a device leaves, or is there again: looked at in the background, done between two steps ---

    def _look(self) -> None:
        """Whether another plan should take over. Errors are for whoever asks next, who meets them, too."""
        with suppress(EdgeError):
            if self._engine.is_moving:
                if self._engine.quiet_s > REST_S:
                    self._engine.settle()
                return
            self._engine.copy_while_quiet(self._is_quiet)
            leaving = self._ranks.leaving if self._ranks else []
            if leaving and leaving != self._stays_with:
                self._leave(leaving)
            elif (self.slow.is_due or self.slow.notes) and (self._is_quiet() or time.monotonic() > self._slow_at):
                self._look_for_slow()
            elif self._engine.quiet_s > QUIET_S and time.monotonic() > self._offer_at:
                self._offer_at = time.monotonic() + OFFER_S
                self._take_back()
                self._meet()

    def _is_quiet(self) -> bool:
        """Whether nobody waits for a step, and it is not to end."""
        return self._watch is not None and not self._watch.is_over and self._engine.quiet_s > REST_S

    def _leave(self, names: list[str]) -> None:
        words = f"{listed(names)} {'are' if len(names) > 1 else 'is'} about to end"
        try:
            self._offer(words, lambda plan: True, self._check_open)
        except EdgeError as error:
            self._stays_with = names
            self._check_open()
            self._steps.say(f"{words}, and without it: {error}")

    def _take_back(self) -> None:
        """Where devices are there that were not, offer a plan with them that is clearly better."""
        joined = self._joined.address if self._joined else None
        missing = [address for address in self._addresses() if address not in self._there and address != joined]
        if not missing:
            return
        with reachable(Cluster.of_addresses(missing), insecure=self._insecure) as (fleet, _):
            if fleet is None:
                return
            names = [worker.label for worker in fleet.workers.values()]
        self._offer(f"{listed(names)} {'are' if len(names) > 1 else 'is'} there again", self._pays, self._check_quiet)

    def _meet(self) -> None:
        """Where a device joined, measure it, and offer a plan with it that is clearly better."""
        survey = self.slow.survey
        if self._newcomers is None or survey is None or self._engine.is_moving:
            return
        if self._joined is None:
            self._joined = self._newcomers.measured(survey, self._check_quiet)
            if self._joined is None:
                return
            self.slow.survey = self._joined.survey
        joined = self._joined
        try:
            is_offered = self._offer(f"{joined.name} joined", self._pays, self._check_quiet)
        except Interrupted:  # an answer began: it is offered at the next quiet moment
            raise
        except EdgeError:
            self._shunned.add(joined.address)
            is_offered = False
        self._joined = None
        if not is_offered:
            self._there |= {joined.address}
            self._steps.say(f"{joined.name} joined; the plan stays as it is")

    def _look_for_slow(self) -> None:
        """Where devices became slow, or fast again, or tokens take far longer than predicted, say so, and offer a plan
        that is clearly better by now."""
        self._slow_at = time.monotonic() + BUSY_S
        check = self._check_quiet if self._is_quiet() else self._check_open
        if self.slow.is_due:
            self._engine.between_steps(self.slow.look)
            if self._arranged is not None and self._options.sequences == 1:
                self.slow.notes += self._arranged.far_off(self._current, self.slow.first_times())
        if not (words := "; ".join(self.slow.notes)):
            return
        try:
            is_offered = self._offer(words, self._pays_by_now, check)
        except Interrupted:  # an answer began: it is offered at the next quiet moment, or beside answers
            return
        except EdgeError:  # nothing else can be: the plan stays
            is_offered = False
        self.slow.notes.clear()
        if not is_offered:
            self._steps.say(f"{words}; the plan stays as it is")

    def _pays_by_now(self, plan: Plan) -> bool:
        """As `_pays`; a plan that a person gave stays."""
        return self._arranged is not None and self._arranged.survey is not None and self._pays(plan)

    def _check_open(self, *_: object) -> None:
        """Interrupted once all is to end."""
        if self._watch is not None:
            self._watch.check()

    def _check_quiet(self, *_: object) -> None:
        """Interrupted once somebody asks: nothing that can wait is done beside an answer."""
        self._check_open()
        if self._engine.quiet_s < REST_S:
            raise Interrupted("an answer began")

    def _pays(self, plan: Plan) -> bool:
        """Whether a plan is clearly better than the one that runs. Of plans that were given, the fullest is."""
        made = self._arranged
        return made.pays(plan, self._current, NEW_PLAN) if made and made.survey else plan != self._current

    def _offer(self, words: str, is_worth: Callable[[Plan], bool], check: Progress) -> bool:
        """Plan over those that answer, and let that take over where it is worth it; whether it is. check: ends it by
        raising."""
        running, life = self._running, ExitStack()
        try:
            fleet, _ = life.enter_context(self._reachable())
            plan, why = self._planned(list(fleet.workers) if fleet is not None else [])
            if not is_worth(plan):
                life.close()
                return False
            if fleet is not None:
                send_ahead(fleet, plan, self._file, self._digest, check)
            check(0, 0)
        except BaseException:
            life.close()
            raise
        self._offered = life
        self._engine.go_on_with(lambda: self._moved(running, life, fleet, plan, why, words))
        return True

    def _moved(
        self, running: ExitStack, life: ExitStack, fleet: Fleet | None, plan: Plan, why: str, words: str
    ) -> TextEngine | None:
        """The engine of a plan that waited; None where something else came first."""
        if running is not self._running or (self._watch is not None and self._watch.is_over):
            life.close()
            return None
        before = self._there
        self._end_running(life)
        try:
            return self._brought_up(fleet, plan, why, words, CheckedSteps(self._check_open))
        except EdgeError:
            self._shunned.update(set(fleet.workers if fleet else ()) - before)
            raise

    # --- plans ---

    def _reachable(
        self, timeout_s: float = CONNECT_TIMEOUT_S, addresses: Sequence[str] | None = None
    ) -> AbstractContextManager[tuple[Fleet | None, list[str]]]:
        """addresses: of whom to ask while an answer waits; None: of all, at leisure."""
        asked = Cluster.of_addresses(self._addresses() if addresses is None else addresses)
        return_s = None if addresses is None else timeout_s
        return reachable(asked, insecure=self._insecure, timeout_s=timeout_s, return_s=return_s)

    def _addresses(self) -> list[str]:
        """Of all workers that were measured, or that a given plan names."""
        survey = self._arranged.survey if self._arranged else None
        devices = (speed.device for speed in survey.speeds) if survey else self._plan.devices
        return [one for one in dict.fromkeys(map(device, devices)) if one != LOCAL and one not in self._shunned]

    def _planned(self, workers: Sequence[str]) -> tuple[Plan, str]:
        """What those do that answer, and why. Nothing is measured now, as somebody waits."""
        if not workers:
            return shared({LOCAL: 1.0}, "pipeline", self._file, self._digest), "no other device answers"
        made = self._arranged
        if made is not None and (found := made.over(workers, self._file, self._digest)) is not None:
            return found
        return again(self._plan, workers, self._file, self._digest)

    def _alone(self, plan: Plan, steps: Steps) -> Engine:
        options, path = self._options, self._file.path
        free = available_memory()
        if options.memory is None and path.stat().st_size > free:
            options = replace(options, memory=round(PAGED_SHARE * free))
        return load(path, replace(options, threads=options.threads or plan.shard(0).threads), steps)

    def _name(self, fleet: Fleet, address: str) -> str:
        return "this device" if device(address) == LOCAL else fleet.workers[address].label

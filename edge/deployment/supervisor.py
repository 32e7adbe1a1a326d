"""Keeping a model running: another plan takes over where devices are lost, or where another plan is better by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Generic

from devices.cluster_file import Cluster
from edge.cluster.connect import CONNECT_TIMEOUT_S, LOSS_TIMEOUT_S
from edge.cluster.failures import LostLately, is_loss, loss_reason
from edge.cluster.fleet import Fleet, device
from edge.deployment.kinds import Building, Deciding, E, P, Running
from edge.errors import EdgeError, Interrupted
from edge.survey.profile import reachable
from edge.tasks import CheckedSteps, Progress, Steps
from edge.worker.local import local_worker
from partition.plan.plan import LOCAL
from quant.text import listed

Reached = AbstractContextManager[tuple[Fleet | None, list[str]]]
MOST_TRIES = 4  # to go on after a loss: the last one on this device alone


class Supervisor(Generic[P, E]):
    """Replaces what runs. A `Deciding` says by what, a `Building` brings it to life, and others watch the devices and
    call `offer`. `close()` ends it all."""

    running: Running[P, E]  # from `start` on; nobody asks before

    def __init__(self, deciding: Deciding[P], building: Building[P, E], steps: Steps, *, insecure: bool) -> None:
        """insecure: also workers that do not encrypt."""
        self.deciding, self._building = deciding, building
        self._steps, self._insecure = steps, insecure
        self.on_change: list[Callable[[Running[P, E]], None]] = []
        self._life = ExitStack()  # of what runs, which another plan replaces
        self._offered = ExitStack()  # of a plan that waits to take over
        self._lost_lately = LostLately()
        self.is_closed = False

    def start(self, fleet: Fleet | None, plan: P, why: str) -> E:
        """Bring the first plan to life, on the devices of a fleet that is the caller's. The errors of `Building.load`,
        after which everything is unloaded again."""
        try:
            return self._bring_up(fleet, plan, why, "", self._steps)
        except BaseException:
            self._life.close()
            raise

    def stop(self) -> None:
        """Replace no more: what is under way ends soon."""
        self.is_closed = True

    def close(self) -> None:
        """Unload everything, here and there."""
        self.stop()
        with self._offered:
            self._life.close()

    def check_open(self, *_: object) -> None:
        """Interrupted once all is to end."""
        if self.is_closed:
            raise Interrupted("given up")

    def replace(self, error: Exception, losses_in_a_row: int, check: Callable[[], None]) -> E:
        """Return another engine in place of one that failed so: without workers that are lost meanwhile or cannot do
        their part, and at last on this device alone. What keeps it from being there is raised, with why.

        losses_in_a_row: while one thing was done, this one included. check: ends this by raising.
        """
        ranks = self.running.ranks
        lost = ranks.lost if ranks else []
        reason = loss_reason(lost, error) if lost or is_loss(error) else str(error)
        without = self._lost_lately.again(ranks.lost_addresses if ranks else [], losses_in_a_row)
        for tries_left in reversed(range(MOST_TRIES)):
            self.check_open()
            check()
            self._end_running(ExitStack())
            try:
                there = [address for address in self.deciding.addresses if tries_left and address not in without]
                reached = self.reach(there, LOSS_TIMEOUT_S, LOSS_TIMEOUT_S, anyway=True)
                fleet, notes = self._life.enter_context(self._or_here(reached))
                check()
                steps = CheckedSteps(check, self._steps)
                plan, why = self.deciding.over(fleet, notes, steps)
                return self._bring_up(fleet, plan, why, reason, steps)
            except EdgeError as again:
                if not tries_left or isinstance(again, Interrupted) or not (again.devices or is_loss(again)):
                    raise type(again)(f"{reason}, and the model cannot go on without: {again}") from again
                without.update(again.devices)
                reason = str(again)
        raise AssertionError("the last try returns or raises")

    def offer(
        self,
        reason: str,
        is_worth: Callable[[P], bool],
        check: Progress,
        switch_to: Callable[[Callable[[], E | None]], None],
    ) -> bool:
        """Plan over the devices that answer, and let that plan take over by `switch_to`, where it is worth it; whether
        it is. reason: why. check: ends this by raising."""
        replaced, life = self.running, ExitStack()
        try:
            fleet, notes = life.enter_context(self._or_here(self.reach(self.deciding.addresses)))
            plan, why = self.deciding.over(fleet, notes, CheckedSteps(lambda: check(0, 0)))
            if not is_worth(plan):
                life.close()
                return False
            if fleet is not None:
                self._building.send_ahead(fleet, plan, check)
            check(0, 0)
        except BaseException:
            life.close()
            raise
        self._offered = life

        def switched() -> E | None:
            if self.running is not replaced or self.is_closed:  # something else came first
                life.close()
                return None
            self._end_running(life)
            try:
                return self._bring_up(fleet, plan, why, reason, CheckedSteps(self.check_open))
            except EdgeError:
                self.deciding.shunned.update(set(fleet.workers if fleet else ()) - replaced.workers)
                raise

        switch_to(switched)
        return True

    def _bring_up(self, fleet: Fleet | None, plan: P, why: str, reason: str, steps: Steps) -> E:
        """Return the engine of a plan, in the life that is running now. reason: why it takes over; "": it is the
        first."""
        workers = fleet.workers if fleet else {}
        names = tuple("this device" if address == LOCAL else workers[address].label for address in plan.devices)
        if reason:
            self._steps.say(f"{reason}: going on with {listed(names)}{self.deciding.note}")
        engine, ranks = self._building.load(fleet, plan, self._life, steps)
        self.change(Running(engine, plan, why, names, frozenset(map(device, workers)), ranks))
        return engine

    def change(self, running: Running[P, E]) -> None:
        """This runs from now on, and whoever wants to know is told."""
        self.running = running
        for tell in self.on_change:
            tell(running)

    def _end_running(self, following: ExitStack) -> None:
        """Unload what runs; what follows has another life."""
        with suppress(EdgeError):  # parts of it are gone
            self._life.close()
        self._life = following

    def reach(
        self,
        addresses: Sequence[str],
        timeout_s: float = CONNECT_TIMEOUT_S,
        return_s: float | None = None,
        anyway: bool = False,
    ) -> Reached:
        """The workers that answer, as `reachable` has them."""
        cluster = Cluster.of_addresses(addresses)
        return reachable(cluster, insecure=self._insecure, timeout_s=timeout_s, return_s=return_s, anyway=anyway)

    @contextmanager
    def _or_here(self, reached: Reached) -> Iterator[tuple[Fleet | None, list[str]]]:
        """Those reached, to plan over. Where there is none and this device alone does not do, a worker on this
        device."""
        with reached as (fleet, notes):
            if fleet is not None or not self.deciding.needs_worker:
                yield fleet, notes
                return
            with local_worker() as address, Fleet([address]) as here:
                yield here, notes

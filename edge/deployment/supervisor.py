"""Supervisor: keeps a model running by replacing its plan after a loss, or when another plan becomes better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Generic

from devices.cluster_file import Cluster
from edge.cluster.connect import CONNECT_TIMEOUT_S, LOSS_TIMEOUT_S
from edge.cluster.failures import LostLately, is_loss, loss_reason
from edge.cluster.fleet import Fleet, device
from edge.deployment.kinds import Building, Deciding, E, OtherCopies, P, RunningPlan
from edge.errors import EdgeError, Interrupted
from edge.profiling.profile import reachable
from edge.tasks import CheckedSteps, Progress, Steps
from edge.worker.local import local_worker
from partition.plan.plan import LOCAL
from quant.text import counted, listed

Reached = AbstractContextManager[tuple[Fleet | None, list[str]]]
MOST_TRIES = 4  # attempts to continue after a loss; the last one uses this device alone


class Supervisor(Generic[P, E]):
    """Replaces the running plan. The planner (`Deciding`) picks the new plan, the loader (`Building`) starts it,
    and device watches call `offer`. `close()` ends everything.
    """

    running: RunningPlan[P, E]  # set by `start`

    def __init__(
        self,
        deciding: Deciding[P],
        building: Building[P, E],
        steps: Steps,
        *,
        insecure: bool,
        other_copies: OtherCopies[P] | None = None,
    ) -> None:
        """insecure: also accept workers that do not encrypt. other_copies: runs the further copies of plans."""
        self.deciding, self._building = deciding, building
        self._steps, self._insecure, self._other_copies = steps, insecure, other_copies
        self.on_change: list[Callable[[RunningPlan[P, E]], None]] = []
        self._life = ExitStack()  # unloads the running plan
        self._offered = ExitStack()  # unloads a plan that waits to take over
        self._lost_lately = LostLately()
        self.is_closed = False

    def start(self, fleet: Fleet | None, plan: P, why: str, others: Sequence[P] = ()) -> E:
        """Start the first plan on the devices of the caller's fleet, and return its engine.

        others: further copies of the model, which other processes run.
        Raises the errors of `Building.load`; everything is unloaded then.
        """
        try:
            return self._bring_up(fleet, plan, why, "", others, self._steps)
        except BaseException:
            self._life.close()
            raise

    def stop(self) -> None:
        """Stop replacing plans. Operations in progress end soon."""
        self.is_closed = True

    def close(self) -> None:
        """Unload everything on all devices."""
        self.stop()
        with self._offered:
            self._life.close()

    def check_open(self, *_: object) -> None:
        """Raise Interrupted if the supervisor is closed."""
        if self.is_closed:
            raise Interrupted("given up")

    def replace(self, error: Exception, losses_in_a_row: int, check: Callable[[], None]) -> E:
        """Return another engine after the running one failed with `error`.

        Each attempt excludes workers that were lost or failed at their part; the last attempt uses this device alone.

        losses_in_a_row: number of failures during the current work, including this one.
        check: called meanwhile; stops the replacement if it raises.

        Raises the error that prevented the last attempt, with the reason for the replacement.
        """
        ranks = self.running.ranks
        lost = ranks.lost if ranks else []
        reason = loss_reason(lost, error) if lost or is_loss(error) else str(error)
        without = self._lost_lately.again(ranks.lost_addresses if ranks else [], losses_in_a_row)
        others = self.running.others
        without.update(device(address) for copy in others for address in copy.all_devices)
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
                return self._bring_up(fleet, plan, why, reason, others, steps)
            except EdgeError as again:
                if not tries_left or isinstance(again, Interrupted) or not (again.devices or is_loss(again)):
                    raise type(again)(f"{reason}, and the model cannot continue without it: {again}") from again
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
        """Plan over the devices that answer. If the plan is worth it, prepare it and let it take over. Return True if
        so.

        reason: reason shown to people.
        is_worth: returns True if a plan should take over.
        check: called meanwhile; stops the attempt if it raises.
        switch_to: receives the function that starts the plan, and calls it between two steps.
        """
        replaced, life = self.running, ExitStack()
        try:
            fleet, notes = life.enter_context(self._or_here(self.reach(self.deciding.addresses)))
            several = self._other_copies is not None
            whole, why = self.deciding.over(fleet, notes, CheckedSteps(lambda: check(0, 0)), several=several)
            if not is_worth(whole):
                life.close()
                return False
            copies = self.deciding.copies(whole)
            plan = next((copy for copy in copies if self.deciding.is_same(copy, replaced.plan)), copies[0])
            others = tuple(self._running_copy(copy) for copy in copies if copy is not plan)
            is_same = several and self.deciding.is_same(plan, replaced.plan)
            if fleet is not None and not is_same:
                self._building.send_ahead(fleet, plan, check)
            check(0, 0)
            replaced = self._end_others(replaced, others)
            if is_same:
                life.close()
                self._steps.say(f"{reason}: going on with {counted(1 + len(others), 'replica')} of the model")
                workers = frozenset(map(device, fleet.workers if fleet else ()))
                self.change(replace(replaced, why=why, workers=workers, others=others))
                return True
        except BaseException:
            life.close()
            raise
        self._offered = life

        def switched() -> E | None:
            if self.running is not replaced or self.is_closed:  # another plan took over first
                life.close()
                return None
            self._end_running(life)
            try:
                return self._bring_up(fleet, plan, why, reason, others, CheckedSteps(self.check_open))
            except EdgeError:
                self.deciding.shunned.update(set(fleet.workers if fleet else ()) - replaced.workers)
                raise

        switch_to(switched)
        return True

    def _running_copy(self, copy: P) -> P:
        """Return the same copy as another process runs it now, or the copy itself."""
        return next((other for other in self.running.others if self.deciding.is_same(other, copy)), copy)

    def _end_others(self, running: RunningPlan[P, E], others: Sequence[P]) -> RunningPlan[P, E]:
        """End the copies in other processes that are not among `others`. Return what runs then."""
        staying = tuple(copy for copy in running.others if copy in others)
        if self._other_copies is None or staying == running.others:
            return running
        self._other_copies.end_all_but(staying)
        running = replace(running, others=staying)
        self.change(running)
        return running

    def _bring_up(self, fleet: Fleet | None, plan: P, why: str, reason: str, others: Sequence[P], steps: Steps) -> E:
        """Load a plan as the running one, and return its engine.

        reason: reason for the replacement; empty for the first plan.
        others: further copies of the model.
        """
        workers = fleet.workers if fleet else {}
        names = tuple("this device" if address == LOCAL else workers[address].label for address in plan.devices)
        if reason:
            replicas = f", {counted(1 + len(others), 'replica')}" if others else ""
            self._steps.say(f"{reason}: going on with {listed(names)}{replicas}{self.deciding.note}")
        engine, ranks = self._building.load(fleet, plan, self._life, steps)
        self.change(RunningPlan(engine, plan, why, names, frozenset(map(device, workers)), ranks, tuple(others)))
        return engine

    def change(self, running: RunningPlan[P, E]) -> None:
        """Set the running plan and notify all listeners."""
        self.running = running
        for tell in self.on_change:
            tell(running)

    def _end_running(self, following: ExitStack) -> None:
        """Unload the running plan, and make `following` the stack that unloads the next one."""
        with suppress(EdgeError):  # parts of the plan are gone
            self._life.close()
        self._life = following

    def reach(
        self,
        addresses: Sequence[str],
        timeout_s: float = CONNECT_TIMEOUT_S,
        return_s: float | None = None,
        anyway: bool = False,
    ) -> Reached:
        """Connect to the workers that answer, as `reachable` does."""
        cluster = Cluster.of_addresses(addresses)
        return reachable(cluster, insecure=self._insecure, timeout_s=timeout_s, return_s=return_s, anyway=anyway)

    @contextmanager
    def _or_here(self, reached: Reached) -> Iterator[tuple[Fleet | None, list[str]]]:
        """Yield the fleet to plan over. If no worker answers and plans need one, start a worker on this device."""
        with reached as (fleet, notes):
            if fleet is not None or not self.deciding.needs_worker:
                yield fleet, notes
                return
            with local_worker() as address, Fleet([address]) as here:
                yield here, notes

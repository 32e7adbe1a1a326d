"""Watch the devices of a running language model: a device may leave, become slow, come back, or join.

The watch runs in the background and delays no step. It offers other plans to the `Supervisor` and shows messages. It
does not plan or load by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from edge.cluster.fleet import device
from edge.deployment.kinds import RunningPlan
from edge.deployment.replanning import Replanner
from edge.deployment.supervisor import Supervisor
from edge.errors import EdgeError, Interrupted
from edge.llm.interface import TextEngine
from edge.parallel.replacements import Replacements
from edge.profiling.joining import EstimatedDevices, JoinedDevice, JoiningDevices
from edge.profiling.straggler_watch import StragglerWatch
from edge.profiling.survey import Survey
from edge.tasks import Repeated, Steps
from partition.plan.plan import Plan
from partition.predict.hysteresis import PLAN
from partition.predict.speeds import DeviceSpeed
from quant.text import listed

LOOK_S = 0.5  # interval between checks for leaving devices
REST_S = 0.3  # time without a step after which no request is assumed to wait
QUIET_S = 2.0  # time without a step after which other devices may be contacted
OFFER_S = 10.0  # interval between checks for devices that came back
BUSY_S = 10.0  # interval between checks for slow devices while requests never pause
CLOSE_S = 30.0  # time for a move to notice that it has to end


class MembershipWatch:
    """Watch of a model's devices. It runs until `close()`."""

    def __init__(
        self,
        supervisor: Supervisor[Plan, TextEngine],
        replanner: Replanner,
        replacements: Replacements,
        joining: JoiningDevices | None,
        estimated: EstimatedDevices | None,
        steps: Steps,
    ) -> None:
        """joining: finds devices that join; None: no other device takes part. estimated: measures devices that were
        only estimated; None: the plan stays whatever such devices turn out to be.
        """
        self._supervisor, self._replanner, self._replacements = supervisor, replanner, replacements
        self._joining, self._estimated, self._steps = joining, estimated, steps
        work = replanner.planner.work if replanner.planner else None
        self.slow = StragglerWatch(replanner.survey, work)
        self._declined: set[str] = set()  # workers that joined, but that no better plan uses
        self._joined: JoinedDevice | None = None  # measured, but not offered yet
        self._stays_with: list[str] = []  # leaving devices without which no plan fits
        self._included: set[str] = set()  # workers that are no longer left out, and were not offered yet
        self._slow_at = time.monotonic() + BUSY_S
        self._begin(self._supervisor.running)
        supervisor.on_change.append(self._begin)
        self._looks = Repeated(self._look, LOOK_S, "members")

    def close(self) -> None:
        """Stop checking and offering plans. A check may take seconds and is not waited for. A move in progress ends
        soon.
        """
        self._looks.close()
        self._supervisor.stop()
        self._replacements.wait_for_move(CLOSE_S)

    def leave_out(self, addresses: frozenset[str]) -> None:
        """Plan without these workers from now on, and with workers that were left out before.

        A plan takes over between two steps, also while requests wait.

        addresses: addresses in the form of `device`.
        """
        included = self._replanner.left_out - addresses
        self._replanner.left_out = addresses
        self._included = (self._included | included) - addresses
        self._declined -= included
        self._stays_with = []

    def _begin(self, running: RunningPlan[Plan, TextEngine]) -> None:
        """Watch the devices of a new plan."""
        self.slow.begin(running.engine, running.plan, running.names)
        self._declined.clear()
        self._offer_at = time.monotonic() + OFFER_S

    def _look(self) -> None:
        """Check whether another plan should take over. Errors are ignored, because the next request meets them, too."""
        with suppress(EdgeError):
            if self._replacements.is_moving:
                if self._replacements.quiet_s > REST_S:
                    self._replacements.switch_now()
                return
            leaving, left_out = self._supervisor.running.leaving, self._left_out()
            if leaving and leaving != self._stays_with:
                self._offer_drain(leaving, f"{listed(leaving)} {'are' if len(leaving) > 1 else 'is'} about to end")
            elif left_out and left_out != self._stays_with:
                self._offer_drain(left_out, f"{listed(left_out)} {'are' if len(left_out) > 1 else 'is'} left out")
            elif not self._replanner.moves:
                return
            elif self._included:
                self._offer_included()
            elif (self.slow.is_due or self.slow.notes or self.slow.corrected) and (
                self._is_quiet() or time.monotonic() > self._slow_at
            ):
                self._offer_without_stragglers()
            elif self._replacements.quiet_s > QUIET_S and time.monotonic() > self._offer_at:
                self._offer_at = time.monotonic() + OFFER_S
                self._offer_measured()
                self._offer_rejoin()
                self._offer_join()

    def _offer(self, reason: str, is_worth: Callable[[Plan], bool], check: Callable[..., None]) -> bool:
        return self._supervisor.offer(reason, is_worth, check, self._replacements.switch_to)

    def _left_out(self) -> list[str]:
        """Return the names of the running plan's devices that a person leaves out."""
        running = self._supervisor.running
        names = dict(zip(map(device, running.plan.devices), running.names, strict=True))
        devices = dict.fromkeys(map(device, running.plan.all_devices))
        return [names.get(address, address) for address in devices if address in self._replanner.left_out]

    def _offer_drain(self, names: list[str], reason: str) -> None:
        """Offer a plan without these devices, even if it is slower. reason: reason shown to people."""
        try:
            self._offer(reason, lambda plan: True, self._supervisor.check_open)
        except EdgeError as error:
            self._stays_with = names
            self._supervisor.check_open()
            self._steps.say(f"{reason}, and without it: {error}")

    def _offer_included(self) -> None:
        """Offer a plan with the workers that are no longer left out, because a person wants them to take part."""
        included, self._included = sorted(self._included), set()
        addresses = [address for address in self._replanner.addresses if address in included]
        with self._supervisor.reach(addresses) as (fleet, _):
            if fleet is None:  # they are offered when they answer again
                return
            names = [worker.label for worker in fleet.workers.values()]
        reason = f"{listed(names)} {'take' if len(names) > 1 else 'takes'} part again"
        running = self._supervisor.running.plan
        if not self._offer(reason, lambda plan: plan != running, self._supervisor.check_open):
            self._steps.say(f"{reason}; the plan stays as it is")

    def _offer_rejoin(self) -> None:
        """If devices came back, offer a plan with them if it is clearly better."""
        known = {*self._supervisor.running.workers, *self._declined, *([self._joined.address] if self._joined else [])}
        missing = [address for address in self._replanner.addresses if address not in known]
        if not missing:
            return
        with self._supervisor.reach(missing) as (fleet, _):
            if fleet is None:
                return
            names = [worker.label for worker in fleet.workers.values()]
        reason = f"{listed(names)} {'are' if len(names) > 1 else 'is'} there again"
        self._offer(reason, self._pays, self._check_quiet)

    def _offer_measured(self) -> None:
        """Measure devices that were only estimated, and offer a plan if it is clearly better by the new figures."""
        survey = self._replanner.survey
        if survey is None or self._estimated is None or self._replacements.is_moving:
            return
        if not self._estimated.are_left(survey):
            return
        self._use(self._estimated.measured(survey, self._check_quiet))
        running = self._running_plan()
        # The running plan was chosen by estimates. So it has no advantage over other plans.
        self._offer(
            "devices are measured now", lambda plan: self._replanner.pays(plan, running, PLAN), self._check_quiet
        )

    def _use(self, survey: Survey[DeviceSpeed]) -> None:
        """Plan with a new survey from now on."""
        self.slow.survey = survey
        self._replanner.measured(survey)

    def _offer_join(self) -> None:
        """If a device joined, measure it, and offer a plan with it if it is clearly better."""
        survey = self._replanner.survey
        if self._joining is None or survey is None or self._replacements.is_moving:
            return
        if self._joined is None:
            self._joined = self._joining.measured(survey, self._check_quiet)
            if self._joined is None:
                return
            self._use(self._joined.survey)
        joined = self._joined
        try:
            is_offered = self._offer(f"{joined.name} joined", self._pays, self._check_quiet)
        except Interrupted:  # a request began; the device is offered again at the next quiet moment
            raise
        except EdgeError:
            self._replanner.shunned.add(joined.address)
            is_offered = False
        self._joined = None
        if not is_offered:
            self._declined.add(joined.address)
            self._steps.say(f"{joined.name} joined; the plan stays as it is")

    def _offer_without_stragglers(self) -> None:
        """If devices became slow or fast again, report it, and offer a plan if it is clearly better now. The same after
        steps have corrected estimates, which is not reported.
        """
        self._slow_at = time.monotonic() + BUSY_S
        check = self._check_quiet if self._is_quiet() else self._supervisor.check_open
        if self.slow.is_due:
            self._replacements.between_steps(self.slow.look)
            if self.slow.survey is not None:
                self._replanner.measured(self.slow.survey)
        notes = "; ".join(self.slow.notes)
        self.slow.corrected = self.slow.corrected and self._estimated is not None
        if not (reason := notes or ("steps take other times than estimated" if self.slow.corrected else "")):
            return
        try:
            is_offered = self._offer(reason, self._pays_by_now, check)
        except Interrupted:  # a request began; the plan is offered again later
            return
        except EdgeError:  # no other plan fits, so the current plan stays
            is_offered = False
        self.slow.notes.clear()
        self.slow.corrected = False
        if notes and not is_offered:
            self._steps.say(f"{reason}; the plan stays as it is")

    def _running_plan(self) -> Plan:
        """Return the running plan with all copies of the model."""
        running = self._supervisor.running
        return replace(running.plan, replicas=running.others)

    def _pays(self, plan: Plan) -> bool:
        return self._replanner.pays(plan, self._running_plan())

    def _pays_by_now(self, plan: Plan) -> bool:
        """Return True if a plan is clearly better than the current one. A plan that a person gave always stays."""
        return self._replanner.planner is not None and self._pays(plan)

    def _is_quiet(self) -> bool:
        """Return True if no request waits for a step, and the watch is open."""
        return not self._supervisor.is_closed and self._replacements.quiet_s > REST_S

    def _check_quiet(self, *_: object) -> None:
        """Raise Interrupted when a request begins to compute, because work that can wait must not slow requests
        down.
        """
        self._supervisor.check_open()
        if self._replacements.quiet_s < REST_S:
            raise Interrupted("an answer began")

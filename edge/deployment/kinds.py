"""Interfaces that each kind of model implements: planning over the connected devices, and loading a plan.

The `Supervisor` does everything else for all kinds of model: it connects, compares plans, loads, watches and replaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edge.cluster.fleet import Fleet
from edge.cluster.rank_group import RankGroup
from edge.tasks import Progress, Steps
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import Plan

P = TypeVar("P", bound=Plan | OnnxPlan)
E = TypeVar("E")  # computes steps: an engine or a pipeline


@dataclass(frozen=True)
class RunningPlan(Generic[P, E]):
    """A plan that is loaded and runs."""

    engine: E
    plan: P
    why: str
    names: tuple[str, ...]  # device names by rank, for people
    workers: frozenset[str] = field(default_factory=frozenset)  # addresses of the workers that answered at the start
    ranks: RankGroup | None = None  # ranks on other devices; None if there are none
    others: tuple[P, ...] = ()  # further copies of the model, which other processes run

    @property
    def leaving(self) -> list[str]:
        """Names of the devices that are about to leave."""
        return self.ranks.leaving if self.ranks else []


class Deciding(ABC, Generic[P]):
    """Planner of one kind of model, over the devices that answer."""

    note = ""  # text for people that follows the list of devices after a loss
    moves = True  # True if a better plan may take over although no device was lost
    needs_worker = False  # True if plans need an engine process besides this process
    shunned: set[str]  # addresses of workers that failed at their part
    left_out: frozenset[str] = frozenset()  # addresses of workers that a person leaves out

    @property
    @abstractmethod
    def addresses(self) -> list[str]:
        """Addresses of the workers that may take part."""

    @abstractmethod
    def over(self, fleet: Fleet | None, notes: list[str], steps: Steps, *, several: bool = False) -> tuple[P, str]:
        """Return the plan for this device and the workers of a fleet, with the reason for it.

        notes: collects lines about workers that do not answer.
        several: True if the plan may have several copies of the model.

        Raises PlanError if no plan fits.
        """

    @abstractmethod
    def pays(self, plan: P, current: P) -> bool:
        """Return True if a plan is clearly better than the current one."""

    def copies(self, plan: P) -> tuple[P, ...]:
        """Return the plan of each copy of the model; this process runs the first one."""
        return (plan,)

    def is_same(self, plan: P, other: P) -> bool:
        """Return True if both plans divide the model alike among the same devices."""
        return plan == other


class OtherCopies(ABC, Generic[P]):
    """Processes that run further copies of the model."""

    @abstractmethod
    def run(self, plan: P, others: Sequence[P]) -> None:
        """Let other processes run exactly the copies `others`. Return immediately. plan: runs in this process."""

    @abstractmethod
    def end_all_but(self, others: Sequence[P]) -> None:
        """End all copies except these, because another plan needs their devices. Wait until they have ended.

        Raises EngineError if they do not end.
        """


class Building(ABC, Generic[P, E]):
    """Loader of plans for one kind of model."""

    @abstractmethod
    def load(self, fleet: Fleet | None, plan: P, life: ExitStack, steps: Steps) -> tuple[E, RankGroup | None]:
        """Load a plan. Return the engine or pipeline that runs it, and its ranks on other devices.

        life: receives the callbacks that unload the plan.

        Raises the errors of deployments and engines.
        """

    @abstractmethod
    def send_ahead(self, fleet: Fleet, plan: P, check: Progress) -> None:
        """Send the slices of a plan to its workers before it takes over.

        check: called meanwhile; stops the transfer if it raises.
        """

"""A deployed language model: its plan, the times of its steps, and descriptions for people and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Generic

from edge.closing import Closing
from edge.cluster.fleet import device
from edge.cluster.llm_ranks import Exchange
from edge.deployment.kinds import E, P, RunningPlan
from edge.deployment.watch import MembershipWatch
from edge.errors import ReplicaLost
from edge.llm.interface import TextEngine
from edge.net.dialling import LinkState
from edge.parallel.engine import DistributedEngine
from edge.parallel.step_times import Summary
from partition.plan.plan import Plan
from quant.text import counted, listed


class Deployed(Closing, Generic[P, E]):
    """A model that runs on devices. After the loss of a device, `running` is the plan on the other devices.
    `close()` unloads the model; a `Deployed` is also a context manager.
    """

    def __init__(self, running: RunningPlan[P, E], exchange: Exchange, close: Callable[[], None]) -> None:
        self.running, self.exchange = running, exchange
        self._stack = ExitStack()
        self._stack.callback(close)

    @property
    def plan(self) -> P:
        """The current plan."""
        return self.running.plan

    @property
    def why(self) -> str:
        """The reason for the current plan."""
        return self.running.why

    @property
    def names(self) -> tuple[str, ...]:
        """Device names by rank, for people."""
        return self.running.names

    def change(self, running: RunningPlan[P, E]) -> None:
        """Record the new current plan."""
        self.running = running

    def close(self) -> None:
        """Unload the model on all of its devices."""
        self._stack.close()


class DeployedModel(Deployed[Plan, TextEngine]):
    """A language model that runs on devices. Its `engine` computes steps."""

    def __init__(
        self,
        engine: TextEngine,
        running: RunningPlan[Plan, TextEngine],
        exchange: Exchange,
        close: Callable[[], None],
        watch: MembershipWatch | None = None,
        replicas: tuple[Plan, ...] = (),
    ) -> None:
        """watch: watches the devices; None: nothing else can take over.
        replicas: plans of further copies of the model, which other processes run.
        """
        super().__init__(running, exchange, close)
        self.engine, self.watch, self.replicas = engine, watch, replicas

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        super().close()

    @property
    def _ranks(self) -> DistributedEngine | None:
        engine = self.running.engine
        return engine if isinstance(engine, DistributedEngine) else None

    @property
    def links(self) -> Mapping[int, str]:
        """Transport of this process's link to each other rank: "tcp" or "grpc"."""
        return self._ranks.links if self._ranks else {}

    def times(self, *, clear: bool = False) -> list[dict[str, Summary]]:
        """Return the step times of each rank, as `DistributedEngine.times`. Without other devices there are none."""

        def times(engine: TextEngine) -> list[dict[str, Summary]]:
            return engine.times(clear=clear) if isinstance(engine, DistributedEngine) else [{}]

        return self.engine.states.use.between_steps(times, self.engine)

    @property
    def link_states(self) -> Sequence[LinkState]:
        """States of the links of all ranks."""
        return self._ranks.link_states if self._ranks else ()

    @property
    def computed_s(self) -> float | None:
        """Seconds for which this process has computed its rank; None if the engine does not count them."""
        return self._ranks.shard.clock.computed_s if self._ranks else None

    def leave_out(self, addresses: Collection[str]) -> None:
        """Go on without these workers, see `MembershipWatch.leave_out`. addresses: in the form of `device`.

        Raises ReplicaLost if one of them is in this plan, and no other plan may take over.
        """
        if self.watch is not None:
            self.watch.leave_out(frozenset(addresses))
        elif names := sorted({*map(device, self.plan.all_devices)} & set(addresses)):
            raise ReplicaLost(f"{listed(names)} left out by a person")

    def link_lines(self) -> list[str]:
        """Return one line about each link of this device."""
        return [f"ranks 0 and {state.ranks[1]}: {state.why}" for state in self.link_states if state.ranks[0] == 0]

    def line(self) -> str:
        """Return one line with the devices, their parts of the model, and the reason for the plan."""
        if self.plan.prefill is not None:
            devices = counted(len(set(self.plan.prefill.devices)), "device")
            few = f" of {self.plan.prefill_from} new tokens and more" if self.plan.prefill_from else ""
            return f"{self._parts()}; prompts{few} are computed on {devices}: {listed(self.plan.prefill.devices)}"
        return self._parts()

    def _parts(self) -> str:
        if len(self.names) == 1:
            return self.why
        staged = len(self.plan.stages) > 1
        parts = []
        for rank, name in enumerate(self.names):
            cut = self.plan.slice(rank)
            texts = [f"layers {cut.layers}" if cut.layers else "no layer"] if staged else []
            if len(self.plan.group(rank)) > 1:
                texts += [f"heads {cut.heads}", f"ff {cut.ff}"]
            parts.append(f"{name} {', '.join(texts)}")
        return f"{'; '.join(parts)} ({self.why})"

    def to_json(self, times: Sequence[Mapping[str, Summary]]) -> dict[str, Any]:
        """Return values for a command's --json output. times: step times of each rank."""
        ranks: list[dict[str, Any]] = []
        for rank, by_kind in enumerate(times):
            kinds = {"decode": by_kind.get("decode"), "prefill": by_kind.get("prefill")}
            figures = {kind: summary.to_json() if summary else None for kind, summary in kinds.items()}
            ranks.append({"rank": rank, "device": self.plan.devices[rank], "link": self.links.get(rank), **figures})
        return {
            "ranks": ranks,
            "links": [state.to_json() for state in self.link_states],
            "plan": self.plan.to_json(),
            "why": self.why,
            "transport": self.exchange.transport,
            "wire": self.exchange.wire,
            "allreduce": self.exchange.algorithm,
        }

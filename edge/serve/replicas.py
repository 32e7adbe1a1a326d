"""The replicas of a served model: each is an engine process with a whole copy of the model, on devices of its own.

`edge/serve/dispatch.py` sends requests to them. A lost replica is started again when its devices are back. A model with
one copy has one replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import EdgeError, EngineGone
from edge.serve.answer import AnswersOwner
from edge.serve.dispatch import Dispatcher, Replica
from edge.serve.events import Events
from edge.serve.process import EngineProcess
from edge.serve.prompt_blocks import PromptBlocks

STATUS_S = 0.3  # time for the processes to answer a request for their status
_REPLANNED = "the model runs with another plan"
RETRY_S = 10.0  # interval between attempts to start a lost replica again

NewProcess = Callable[[EngineConfig, AnswersOwner], EngineProcess]
"""Returns an engine process that is not started yet."""


class Replicas:
    """All replicas of one model. Use it in one event loop."""

    def __init__(self, name: str, config: EngineConfig, new_process: NewProcess, events: Events) -> None:
        """events: gets lines for users."""
        self.name, self.config = name, config
        self._new_process, self._events = new_process, events
        self._status: asyncio.Task[dict[str, Any]] | None = None  # the last request for the status
        self._last_status: dict[str, Any] | None = None
        self._dispatcher = Dispatcher(self._replanned)
        self._changing = asyncio.Lock()  # held while replicas are started or ended because of another plan
        self._changes: set[asyncio.Task[None]] = set()
        self.generate = self._dispatcher.generate
        self._dispatcher.replicas.append(self._new(config))

    @property
    def _replicas(self) -> list[Replica]:
        return self._dispatcher.replicas

    # --- state ---

    @property
    def processes(self) -> list[EngineProcess]:
        """The current process of each replica, the first replica first."""
        return [replica.process for replica in self._replicas]

    @property
    def about(self) -> Mapping[str, Any]:
        """The key `model` of the status when the model was last loaded, with the sequences of all loaded replicas."""
        known = [replica for replica in self._replicas if replica.process.about]  # not those of a new process
        return {**known[0].process.about, "sequences": sum(replica.sequences for replica in known)} if known else {}

    @property
    def failed(self) -> Exception | None:
        """The reason why no more requests are accepted: all replicas have failed."""
        return self._dispatcher.all_failed

    @property
    def is_ready(self) -> bool:
        """True if a replica is loaded, or if all have failed."""
        return any(replica.is_loaded for replica in self._replicas) or self.failed is not None

    @property
    def restarts(self) -> int:
        """Number of processes that crashed."""
        return sum(process.restarts for process in self.processes)

    @property
    def busy(self) -> bool:
        """True if a client waits for a replica, or if the model is being moved."""
        return bool(self._dispatcher.moves) or any(process.busy for process in self.processes)

    @property
    def health(self) -> dict[str, Any]:
        """An item of `ServedModels.health`: the first replica that works, and otherwise the first one."""
        states = [process.health for process in self.processes]
        return next((state for state in states if "reason" not in state and state["state"] != "loading"), states[0])

    def n_answers(self, client: str | None = None) -> int:
        """Return the number of answers that a client waits for. client: None: all clients."""
        answers = [process.answers for process in self.processes]
        return sum(map(len, answers)) if client is None else sum(own.n_of(client) for own in answers)

    async def status(self) -> dict[str, Any]:
        """Return the status of all loaded replicas as one; see `ServedModel.status`.

        A process answers between two steps. A step that waits for a lost device may take long, so after STATUS_S the
        last status is returned, with the latest events.
        """
        if self._status is None or self._status.done():
            self._status = asyncio.create_task(self._figures())
            self._status.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks it as retrieved
        if self._last_status is None:
            self._last_status = await asyncio.shield(self._status)
        else:
            await asyncio.wait({self._status}, timeout=STATUS_S)
            if self._status.done():
                self._last_status = self._status.result()
        return {**self._last_status, "restarts": self.restarts, "events": self._events.to_json()}

    async def _figures(self) -> dict[str, Any]:
        loaded = [replica for replica in self._replicas if replica.is_loaded] or self._replicas[:1]
        statuses = [replica.process.ask("status", {}) for replica in loaded]
        figures = await asyncio.gather(*statuses, return_exceptions=True)
        states = [state for state in figures if isinstance(state, dict)]
        if not states:
            raise next(error for error in figures if isinstance(error, BaseException))
        state, first = _together(states), self._replicas[0]
        if state["plan"] is not None and self._dispatcher.copies and loaded[0] is first:
            state["plan"] = {**state["plan"], "replicas": list(self._dispatcher.copies)}
        return state

    # --- life ---

    async def start(self) -> None:
        """Load the first replica; the others are loaded in the background. Raises the errors of loading."""
        await self.processes[0].start()
        self._start_others()

    async def close(self, why: str = "the server is ending") -> None:
        """End all processes. Their requests end with EngineGone. why: message of that error."""
        self._dispatcher.is_closing = True
        await asyncio.gather(*self._changes)
        await self._end(self._replicas, why)
        await asyncio.gather(*self._dispatcher.moves)

    async def use(self, config: EngineConfig) -> None:
        """Switch the model and its answers to another configuration, see `EngineProcess.use`."""
        async with self._changing:
            first, *others = self._replicas
            if changes := config != self.config:
                self._replicas[:], self._dispatcher.copies = [first], ()
                await self._end(others, _REPLANNED)  # the next plan may need their devices
            try:
                await first.process.use(config)
                self.config = first.config = config
            finally:
                if changes and first.process.failed is None:
                    self._start_others()

    def _replanned(self) -> None:
        """Run the replicas of the plan that the first process has made while it runs."""
        task = asyncio.create_task(self._follow_plan())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _follow_plan(self) -> None:
        async with self._changing:
            copies, first = self._dispatcher.copies, self._replicas[0]
            ending = [replica for replica in self._replicas[1:] if replica.config.plan not in copies]
            self._replicas[:] = [replica for replica in self._replicas if replica not in ending]
            await self._end(ending, _REPLANNED)
            first.process.tell({"do": "replicas ended"})
            if not self._dispatcher.is_closing:
                self._start_others()

    def leave_out(self, addresses: Sequence[str]) -> None:
        """Run the model without these workers from now on. A replica that needs one of them pauses."""
        self._dispatcher.left_out = addresses
        for process in self.processes:
            process.tell({"do": "leave_out", "addresses": addresses})

    def _new(self, config: EngineConfig) -> Replica:
        return Replica(config, self._new_process(config, self._dispatcher))

    def _start_others(self) -> None:
        there = [replica.config.plan for replica in self._replicas[1:]]
        for plan in [copy for copy in self._dispatcher.copies if copy not in there]:
            own = replace(self.config, plan=dict(plan), workers=(), save_plan=None, joining=False, is_replica=True)
            self._replicas.append(self._new(own))
        if len(self._replicas) > 1:
            for replica in self._replicas:
                replica.starting = replica.starting or asyncio.create_task(self._run(replica))

    async def _run(self, replica: Replica) -> None:
        """Keep a replica running: load it, and load it again after it has failed for good."""
        says = True
        while True:
            try:
                if not replica.process.is_ready:
                    await replica.process.start()
                says = True
                while replica.process.failed is None:
                    self._dispatcher.changes.clear()
                    await self._dispatcher.changes.wait()
                reason = replica.process.failed
            except (EdgeError, OSError) as error:
                reason = error
                await replica.process.close(str(error))
            if says:
                self._events.say(
                    f"{self.name}: {reason}; the other replicas go on, and it is tried again every {RETRY_S:g} s"
                )
                says = False
            await asyncio.sleep(RETRY_S)
            replica.config = replica.process.config  # the plan of a process that lost a device
            replica.process = self._new_process(replica.config, self._dispatcher)
            replica.blocks = PromptBlocks()

    async def _end(self, replicas: Sequence[Replica], why: str) -> None:
        starting = [replica.starting for replica in replicas if replica.starting is not None]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for replica in replicas:
            replica.starting = None
        await asyncio.gather(*(replica.process.close(why) for replica in replicas))

    # --- requests ---

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer of a replica to a request other than a generation, see `EngineProcess.ask`."""
        while True:
            replica = self._dispatcher.usable[0]
            try:
                return await replica.process.ask(what, arguments)
            except EngineGone:
                if not self._dispatcher.goes_on_elsewhere(replica):
                    raise

    async def until_ready(self) -> None:
        """Wait until a replica is loaded. Raises the error of a failed load if no other replica can be loaded."""
        while not self.is_ready:
            replica = self._dispatcher.usable[0]
            try:
                await replica.process.until_ready()
            except (EdgeError, OSError):
                if not self._dispatcher.goes_on_elsewhere(replica):
                    raise
        if self.failed is not None:
            raise self.failed


def _together(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of several replicas as one. Figures are sums; the rest is that of the first replica."""
    if len(states) == 1:
        return states[0]
    first = states[0]
    counters = {key: sum(state["counters"][key] for state in states) for key in first["counters"]}
    return {
        **first,
        "model": {**first["model"], "sequences": sum(state["model"]["sequences"] for state in states)},
        "slots": [{**slot, "replica": i} for i, state in enumerate(states) for slot in state["slots"]],
        "devices": [{**device, "replica": i} for i, state in enumerate(states) for device in state["devices"]],
        "waiting": sum(state["waiting"] for state in states),
        "links": [link for state in states for link in state["links"]],
        "tokens_per_s": sum(state["tokens_per_s"] for state in states),
        "counters": counters,
    }

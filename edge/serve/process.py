"""The engine process of a model: its start, health watch, restarts, and switches to other devices.

If a process crashes, its running requests are sent to the next process with the tokens generated so far. The client
only sees a pause. Requests that the process handled may have caused the crash (see `edge.serve.suspects`). Switching
to other devices works in the same way, but does not count as a crash. A lock allows only one start at a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import EdgeError, EngineGone, ReplicaLost
from edge.serve.answer import Answers, AnswersOwner, ProcessAnswer
from edge.serve.engine_child import EngineChild, NewShare
from edge.serve.messages import generation_json
from edge.serve.suspects import ENDS_IN_A_ROW, Case
from edge.serve.watch import DEADLINES, RESTARTING, Deadlines, Watch

LOAD_S = 3600.0  # maximum time to load a model; parts of it may have to be sent to other devices
RESTARTS_IN_A_ROW = 3  # restarts without an answer in between, after which the model counts as broken
_STATES = ("heartbeat", "status")  # requests about the process itself


class _Moved(Exception):
    """The process was ended to run the model elsewhere. Its requests go to the next process."""


class EngineProcess:
    """The engine process of a model, and the processes that replace it. Use it in one event loop."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        say: Callable[[str], None],
        deadlines: Deadlines = DEADLINES,
        share: NewShare | None = None,
        owner: AnswersOwner | None = None,
    ) -> None:
        """say: called with lines for users. share: creates the memory share of each process, see `EngineChild`."""
        self.name, self.config, self.restarts, self._say = name, config, 0, say
        self.about: Mapping[str, Any] = {}  # the key `model` of its status when the model was last loaded
        self.failed: Exception | None = None  # reason why no more requests are accepted
        self._share = share
        self.answers = Answers(name, owner or AnswersOwner())
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()  # held while the process is replaced
        self._child: EngineChild | None = None  # current process
        self._tasks: set[asyncio.Task[None]] = set()  # references that protect the tasks from garbage collection
        self._watch = Watch(deadlines)
        self._ready, self._closing = asyncio.Event(), asyncio.Event()
        self._ended_in_a_row = 0

    @property
    def health(self) -> dict[str, Any]:
        """An item of `ServedModels.health`."""
        return self._watch.to_json(self.failed)

    @property
    def is_ready(self) -> bool:
        """True if the model is loaded, or if loading has failed for good."""
        return self._ready.is_set()

    @property
    def busy(self) -> bool:
        """True if a client waits for the process, or if the model is being moved."""
        return bool(self.answers) or self.answers.n_other > 0 or self._starting.locked()

    async def start(self) -> None:
        """Load the model. Raises the errors of loading, and EngineGone if the process ended."""
        async with self._starting:
            await self._load(self.config)

    async def close(self, why: str = "the server is ending") -> None:
        """End the process. Its requests end with EngineGone. why: message of that error."""
        self._closing.set()
        reason = EngineGone(why)
        try:
            await self._end_child(reason)
        finally:  # even if the wait is cancelled, no request may wait forever
            self._give_up(reason)
        await asyncio.gather(*self._tasks)  # the tasks end soon, because everything that they wait for has failed

    async def use(self, config: EngineConfig) -> None:
        """Switch the model and its running requests to another configuration.

        If that fails, the model returns to its previous configuration, or fails for good.
        """
        running: list[ProcessAnswer] = []
        try:
            async with self._starting:
                if config == self.config and self._child is not None:
                    return
                await self._end_child(_Moved())
                running = self.answers.take_accepted()
                try:
                    await self._load(config)
                except (EdgeError, OSError) as error:
                    try:
                        await self._load(self.config)
                    except (EdgeError, OSError) as again:
                        gone = EngineGone(f"it could not be moved: {error}; and it does not run as before: {again}")
                        self._give_up(gone)
                        raise gone from again
                    raise
                self.config, self._ended_in_a_row = config, 0
        finally:
            await self._go_on(running)

    # --- requests ---

    async def generate(self, answer: ProcessAnswer) -> None:
        """Generate an answer, which may have tokens already. Return once it is accepted.

        Raises the errors of the request.
        """
        answer.use_process(next(self._numbers), lambda number: self.tell(_cancel(number)))
        self.answers[answer.number] = answer
        await self._begin(answer)

    async def _begin(self, answer: ProcessAnswer) -> None:
        """Send the request of an answer, which continues after its present tokens. Raises the errors of the request."""
        try:
            values = generation_json(answer.generation, answer.tokens)
            await self.ask("generate", values, answer.number, answer.case)
        except BaseException:
            self.answers.pop_answer(answer.number)
            self.answers.suspects.abandon(answer.number, answer.case)
            self.tell(_cancel(answer.number))
            raise
        if answer.cancelled:  # the client cancelled while the request was being sent
            self.tell(_cancel(answer.number))

    async def ask(
        self, what: str, arguments: Mapping[str, Any], number: int | None = None, case: Case | None = None
    ) -> Any:
        """Return the answer of the engine process to a request.

        If the process ends or the model is switched, the request goes to the next process.

        case: case of a generation, for which this answer only means its acceptance; None: the answer completes the
        request.
        Raises the errors of the request, and PoisonousRequest if it crashes the processes.
        """
        number = next(self._numbers) if number is None else number
        own, suspects = Case(what, lambda: arguments) if case is None else case, self.answers.suspects
        counts = what not in _STATES
        self.answers.n_other += counts
        try:
            while True:
                if counts:
                    await suspects.turn(own)
                await self.until_ready()
                if self._child is None or (counts and suspects.waits(own)):  # a process has just ended
                    continue
                if counts:  # handled until it is answered, even if its client disconnects
                    suspects.handled[number], own.ended_by = own, None
                try:
                    answer = await self._child.ask(number, what, arguments)
                except _Moved:
                    continue
                except Exception:
                    if own.ended_by is None:
                        raise
                    if own.is_cause:
                        raise suspects.error(own.ended_by) from own.ended_by
                    continue
                if counts and case is None:
                    self._ended_in_a_row = 0
                return answer
        finally:
            self.answers.n_other -= counts
            if case is None:
                suspects.abandon(number, own)

    async def until_ready(self) -> None:
        """Wait until the model is loaded. Raises the error of a failed load."""
        if self.failed is None:
            try:
                await asyncio.wait_for(self._ready.wait(), LOAD_S)
            except asyncio.TimeoutError:
                raise EngineGone(f"{self.name} was not loaded in {LOAD_S:g} s") from None
        if self.failed is not None:
            raise self.failed

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message that gets no answer. It is dropped if there is no process."""
        if self._child is not None:
            self._child.send(message)

    def _receive(self, message: Mapping[str, Any]) -> None:
        if "say" in message:
            self._say(f"{self.name}: {message['say']}")
        elif "ready" in message:
            self.about, self.failed = message["ready"]["model"], None
            self._ready.set()
            self.answers.owner.loaded(message["ready"]["replicas"])
        elif "replicas" in message:
            self.answers.owner.replanned(message["replicas"])
        elif self.answers.receive(message):  # the message has a token
            self._ended_in_a_row = 0

    async def _go_on(self, answers: Sequence[ProcessAnswer]) -> None:
        """Send these requests again. If that fails, their answers end with the error."""

        async def go_on(answer: ProcessAnswer) -> None:
            try:
                await self._begin(answer)
            except (EdgeError, OSError) as error:
                answer.pieces.put_nowait(error)

        await asyncio.gather(*map(go_on, answers))  # each request waits for its own turn

    # --- the process ---

    async def _load(self, config: EngineConfig, *, resumes: bool = False) -> None:
        """Start a process, and wait until it has loaded the model. Raises the error that the process reports.

        resumes: see `EngineConfig.deployed`.
        """
        gone = EngineGone("the server is ending")
        if self._closing.is_set():
            raise gone
        child = EngineChild(self.name, self._receive, self._ended, self._share)
        await child.start(config, resumes=resumes, left_out=self.answers.owner.left_out)
        self._child = child
        self.tell({"do": "leave_out", "addresses": self.answers.owner.left_out})  # it may have changed meanwhile
        if self._closing.is_set():  # `close` was called when there was no process to end
            await self._end_child(gone)
        try:
            await asyncio.wait_for(child.loaded, LOAD_S)
        except asyncio.TimeoutError:
            gone = EngineGone(f"{self.name} was not loaded in {LOAD_S:g} s")
            await self._end_child(gone)
            raise gone from None
        self._watch.begin(partial(self.ask, "heartbeat", {}), child.kill)

    def _ended(self, reason: Exception) -> None:
        """Handle a crashed process.

        If it had loaded the model, start another one and send it the unfinished requests.
        """
        self._watch.leave(RESTARTING)
        child, self._child = self._child, None
        if child is None or not child.loaded.done():
            return  # `_load` raises the reason
        if isinstance(reason, ReplicaLost):  # no request has caused it, and the devices are needed to load it again
            self.answers.suspects.forget_handled()
            self.config = child.to_resume()
            self._give_up(reason)
            return
        self._ready.clear()
        cause = self.answers.process_ended(reason)
        running = self.answers.take_accepted()
        self._ended_in_a_row, self.restarts = self._ended_in_a_row + 1, self.restarts + 1
        if cause is not None:
            # The request caused the crash, not the model.
            self._ended_in_a_row = max(0, self._ended_in_a_row - ENDS_IN_A_ROW)
            self._say(f"{reason}, again during the same request, which now fails")
        task = asyncio.create_task(self._restart(reason, running, child.to_resume()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, reason: Exception, running: Sequence[ProcessAnswer], config: EngineConfig) -> None:
        """Start the next process on the devices that answer. Give up after several failed attempts."""
        async with self._starting:
            if self._child is None and not self._closing.is_set():  # otherwise the model was switched meanwhile
                if self._ended_in_a_row > RESTARTS_IN_A_ROW:
                    self._give_up(EngineGone(f"{reason}, {self._ended_in_a_row} times in a row"))
                else:
                    self._say(f"{reason}; starting it again")
                    for tries_left in reversed(range(RESTARTS_IN_A_ROW)):
                        try:
                            await self._load(config, resumes=True)
                            break
                        except (EdgeError, OSError) as error:
                            if not tries_left or self._closing.is_set():
                                self._say(f"{error}; giving up")
                                self._give_up(error)
                                break
                            self._say(f"{error}; trying again")  # a device may have disappeared during the load
        await self._go_on(running)

    async def _end_child(self, reason: Exception) -> None:
        """End the current process and wait for that. Unanswered requests fail with this reason."""
        self._ready.clear()
        self._watch.leave(None)
        child, self._child = self._child, None
        self.answers.suspects.forget_handled()
        if child is not None:
            await child.end(reason)

    def _give_up(self, reason: Exception) -> None:
        """Fail all present and future requests."""
        self.failed = reason
        self._ready.set()  # wakes waiting tasks, which then raise the reason
        for answer in self.answers.take_accepted():
            if self.answers.owner.moved(answer):
                self.answers.release(answer)
            else:
                self.answers.end(answer, reason)
        self.answers.owner.failed()


def _cancel(number: int) -> dict[str, Any]:
    return {"id": number, "do": "cancel"}

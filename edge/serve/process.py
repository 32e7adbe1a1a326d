"""Served model: its engine process, started, given requests, and started again when it ends.

Requests that were running when a process ended are sent to the next one, each with the tokens it had: the client sees a
pause. A request during which two processes in a row ended may be the cause, and fails. Moving the model to other
devices works in the same way, and counts as no end.

One process is started at a time, under a lock. Its messages count only while it is the one in use, so the next one may
get requests under the same numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import EdgeError, EngineGone, Overloaded
from edge.serve.answer import ProcessAnswer
from edge.serve.messages import error_of, generation_json, piece_of, settle
from edge.serve.served import Generation
from edge.serve.spawn import exit_code, how_ended, spawn
from edge.serve.watch import DEADLINES, RESTARTING, Deadlines, Watch

LOAD_S = 3600.0  # for a model to be loaded: on several devices parts of it may have to be sent
ANSWER_S = 660.0  # for the answer to a request other than a generation
ENDS_IN_A_ROW = 2  # ends of processes that computed a request, after which it fails
RESTARTS_IN_A_ROW = 3  # without a token in between, after which the model counts as broken


class _Moved(Exception):
    """The process was ended to run the model elsewhere: its requests go to the next one."""


class _NoAnswer(EngineGone):
    """The process runs, and does not answer."""


class EngineProcess:
    """A served model in an engine process. Implements `edge.serve.served.ServedModel`; for one event loop."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        queue: int,
        say: Callable[[str], None],
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        """queue: requests that may wait beside the running ones. say: gets lines for people."""
        self.name, self.config, self.restarts = name, config, 0
        self._queue, self._say = queue, say
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()  # held while the process is replaced
        self._process: asyncio.subprocess.Process | None = None  # the one in use
        self._writer: asyncio.StreamWriter | None = None
        self._loaded: asyncio.Future[None] | None = None  # whether the process has loaded the model
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # references, so that they are not collected
        self._watch = Watch(deadlines)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._answers: dict[int, ProcessAnswer] = {}  # answers that have not ended, whichever process computes them
        self._ready = asyncio.Event()
        self._failed: Exception | None = None  # why it cannot be loaded
        self._fatal: Exception | None = None  # the error that the process reported before its end
        self._ended_in_a_row = 0
        self._about: dict[str, Any] = {}  # the key `model` of its status
        self._closing = False

    @property
    def failed(self) -> Exception | None:
        """Reason why it takes no more requests; None while it does."""
        return self._failed

    @property
    def known(self) -> Mapping[str, Any]:
        """`about`, as of the last time the model was loaded, without waiting for it."""
        return self._about

    @property
    def health(self) -> dict[str, Any]:
        """Health, as an item of `ServedModels.health`."""
        return self._watch.to_json(self._failed)

    @property
    def busy(self) -> bool:
        """True if answers are running, or the model is being moved."""
        return bool(self._answers) or self._starting.locked()

    async def start(self) -> None:
        """Load the model. The errors of loading it; EngineGone if the process ended."""
        async with self._starting:
            await self._load(self.config)

    async def close(self) -> None:
        """End the process; running answers end with EngineGone."""
        self._closing = True
        await self._end_process()
        self._give_up(EngineGone("the server ends"))
        await asyncio.gather(*self._tasks)  # everything they wait for has failed

    async def use(self, config: EngineConfig) -> None:
        """Run the model, and its requests, as configured now. After an error it runs as before, or not at all."""
        running: list[ProcessAnswer] = []
        try:
            async with self._starting:
                if config == self.config and self._process is not None:
                    return
                await self._end_process()
                running = self._take_accepted()
                self._fail_pending(_Moved())
                try:
                    await self._load(config)
                except (EdgeError, OSError) as error:
                    await self._load_as_before(error)
                    raise
                self.config, self._ended_in_a_row = config, 0
        finally:
            await self._go_on(running)

    # --- requests ---

    async def generate(self, generation: Generation) -> ProcessAnswer:
        """As ServedModel.generate."""
        sequences = self._about.get("sequences", 1)
        if len(self._answers) >= sequences + self._queue:
            raise Overloaded(f"{sequences} requests are answered and {self._queue} wait: no more may; ask again later")
        answer = ProcessAnswer(next(self._numbers), generation, self._cancel)
        self._answers[answer.number] = answer
        await self._begin(answer)
        return answer

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """As ServedModel.tokenize."""
        options = {"add_special": add_special, "parse_special": parse_special}
        return list(await self._ask("tokenize", {"text": text, **options}))

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """As ServedModel.pieces."""
        return [piece.encode("latin-1") for piece in await self._ask("pieces", {"tokens": list(tokens)})]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """As ServedModel.render."""
        lists = {"messages": [dict(m) for m in messages], "tools": [dict(t) for t in tools]}
        return str(await self._ask("render", {**lists, "variables": dict(variables)}))

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """As ServedModel.embed."""
        embedded = await self._ask("embed", {"texts": [t if isinstance(t, str) else list(t) for t in texts]})
        return embedded["embeddings"], embedded["tokens"]

    async def status(self) -> dict[str, Any]:
        """As ServedModel.status."""
        if not self._ready.is_set():  # a list of all models does not wait for one
            raise EngineGone(f"{self.name} is being loaded")
        return {**await self._ask("status", {}), "restarts": self.restarts}

    async def about(self) -> dict[str, Any]:
        """As ServedModel.about."""
        await self._until_ready()
        return self._about

    # --- messages ---

    async def _begin(self, answer: ProcessAnswer) -> None:
        """Send a request for an answer, from where it is; raise its errors. After a process ends, ask the next."""
        try:
            while True:
                try:
                    await self._ask("generate", generation_json(answer.generation, answer.tokens), answer.number)
                    break
                except _NoAnswer:
                    raise
                except EngineGone:
                    answer.ends += 1
                    if answer.ends >= ENDS_IN_A_ROW or self._failed is not None:
                        raise
        except BaseException:
            self._answers.pop(answer.number, None)
            self._cancel(answer.number)
            raise
        if answer.cancelled:  # while it was asked for again
            self._cancel(answer.number)

    async def _ask(self, what: str, arguments: Mapping[str, Any], number: int | None = None) -> Any:
        """Return the process's answer to a request; if the model is moved meanwhile, the next process's."""
        number = next(self._numbers) if number is None else number
        while True:
            await self._until_ready()
            future = self._pending[number] = asyncio.get_running_loop().create_future()
            try:
                self._send({"id": number, "do": what, "with": arguments})
                return await asyncio.wait_for(future, ANSWER_S)
            except _Moved:
                continue
            except asyncio.TimeoutError:
                raise _NoAnswer(f"the engine process gave no answer in {ANSWER_S:g} s") from None
            finally:
                if self._pending.get(number) is future:
                    del self._pending[number]

    def _cancel(self, number: int) -> None:
        self._send({"id": number, "do": "cancel"})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _receive(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the process."""
        if "say" in message:
            self._say(f"{self.name}: {message['say']}")
        elif "ready" in message:
            self._about = message["ready"]["model"]
            self._failed = None
            self._ready.set()
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_result(None)
        elif "fatal" in message:
            self._fatal = error_of(message["fatal"])
        elif (future := self._pending.get(message["id"])) is not None and not future.done():
            answer = self._answers.get(message["id"])
            if (
                answer is not None and "result" in message
            ):  # at once: its pieces may come before the waiting task goes on
                answer.accepted, answer.prompt_tokens = True, message["result"]["prompt_tokens"]
            settle(future, message)
        elif (answer := self._answers.get(message["id"])) is not None:
            self._progress(answer, message)

    def _progress(self, answer: ProcessAnswer, message: Mapping[str, Any]) -> None:
        if "begun" in message:
            answer.begun = True
            return
        if "error" in message:
            self._end(answer, error_of(message["error"]))
            return
        piece = piece_of(message["piece"])
        if not answer.tokens:
            answer.cached_tokens = message["cached_tokens"]
        if piece.token_id is not None:
            answer.tokens.append(piece.token_id)
            answer.ends = self._ended_in_a_row = 0
        if piece.finish_reason is not None:
            self._answers.pop(answer.number, None)
        answer.pieces.put_nowait(piece)

    def _end(self, answer: ProcessAnswer, reason: Exception) -> None:
        """End an answer with an error, unless it has ended."""
        if self._answers.pop(answer.number, None):
            answer.pieces.put_nowait(reason)

    # --- the process ---

    async def _load(self, config: EngineConfig) -> None:
        """Start a process, and wait until it has loaded the model. Raises why it has not; no process is left then."""
        if self._is_closing():
            raise EngineGone("the server ends")
        process, reader, writer = await spawn("edge.serve.child")
        loaded = asyncio.get_running_loop().create_future()
        self._process, self._writer, self._loaded, self._fatal = process, writer, loaded, None
        self._send({"config": config.to_json()})
        self._reader = asyncio.create_task(self._listen(reader, process, loaded))
        if self._is_closing():  # closed meanwhile, when there was no process to end
            await self._end_process()
        try:
            await asyncio.wait_for(loaded, LOAD_S)
        except asyncio.TimeoutError:
            await self._end_process()
            raise EngineGone(f"{self.name} was not loaded in {LOAD_S:g} s") from None
        self._watch.begin(partial(self._ask, "beat", {}), partial(self._end_stuck, process))

    def _end_stuck(self, process: asyncio.subprocess.Process, reason: str) -> None:
        self._fatal = EngineGone(f"{self.name}: {reason}, and was ended")
        process.kill()

    async def _load_as_before(self, error: Exception) -> None:
        """Load the model as before a move that failed. EngineGone if that fails, too."""
        try:
            await self._load(self.config)
        except (EdgeError, OSError) as again:
            gone = EngineGone(f"it could not be moved: {error}; and it does not run as before: {again}")
            self._give_up(gone)
            raise gone from again

    async def _until_ready(self) -> None:
        """Wait until the model is loaded. Raises why it cannot be."""
        if self._failed is not None:
            raise self._failed
        try:
            await asyncio.wait_for(self._ready.wait(), LOAD_S)
        except asyncio.TimeoutError:
            raise EngineGone(f"{self.name} was not loaded in {LOAD_S:g} s") from None
        if self._failed is not None:
            raise self._failed

    async def _listen(
        self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process, loaded: asyncio.Future[None]
    ) -> None:
        """Receive a process's messages; at its end, start what comes next."""
        with suppress(ConnectionError):
            async for line in reader:
                if line.endswith(b"\n") and process is self._process:  # else it ended in the middle of a message
                    for message in json.loads(line):
                        self._receive(message)
        code, by_itself = await exit_code(process), process is self._process
        reason: Exception = EngineGone(f"{self.name} was told to end")
        if by_itself:
            reason = self._fatal or EngineGone(how_ended(self.name, code))
            self._watch.leave(RESTARTING)
            self._process = None
            if self._writer is not None:
                self._writer.close()
        if not loaded.done():
            loaded.set_exception(reason)  # `_load` raises it
        elif by_itself:
            self._ended(reason)

    def _ended(self, reason: Exception) -> None:
        """Handle a process that ended by itself: start another, and send it the requests that are not complete."""
        self._ready.clear()
        running = self._take_accepted()
        for answer in running:
            answer.ends += answer.begun
            if answer.ends >= ENDS_IN_A_ROW:
                self._end(answer, reason)
        self._fail_pending(reason)
        self._ended_in_a_row, self.restarts = self._ended_in_a_row + 1, self.restarts + 1
        left = [answer for answer in running if answer.number in self._answers]
        task = asyncio.create_task(self._restart(reason, left))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, reason: Exception, running: Sequence[ProcessAnswer]) -> None:
        async with self._starting:
            if self._process is None and not self._closing:  # else it was moved meanwhile
                if self._ended_in_a_row > RESTARTS_IN_A_ROW:
                    self._give_up(EngineGone(f"{reason}, {self._ended_in_a_row} times in a row"))
                else:
                    self._say(f"{reason}; it is started again")
                    try:
                        await self._load(self.config)
                    except (EdgeError, OSError) as error:
                        self._say(f"{error}; it is not started again")
                        self._give_up(error)
        await self._go_on(running)

    async def _go_on(self, answers: Sequence[ProcessAnswer]) -> None:
        """Send these requests again; if that fails, their answers do."""
        for answer in answers:
            try:
                await self._begin(answer)
            except (EdgeError, OSError) as error:
                answer.pieces.put_nowait(error)

    def _take_accepted(self) -> list[ProcessAnswer]:
        """Return the answers that the process had accepted, to be requested again. Other tasks handle the rest."""
        accepted = [answer for answer in self._answers.values() if answer.accepted]
        for answer in accepted:
            answer.accepted = answer.begun = False
        return accepted

    async def _end_process(self) -> None:
        """End the process in use, and wait for it."""
        self._ready.clear()
        self._watch.leave(None)
        process, self._process = self._process, None
        if self._writer is not None:
            self._writer.close()
        if process is not None:
            await exit_code(process)
        if self._reader is not None:
            await self._reader

    def _is_closing(self) -> bool:
        """Return whether it is closing: a method, because it may change during waits."""
        return self._closing

    def _give_up(self, reason: Exception) -> None:
        """Fail all requests, now and later."""
        self._failed = reason
        self._ready.set()  # tasks that wait for it get the reason
        self._fail_pending(reason)
        for answer in self._take_accepted():
            self._end(answer, reason)

    def _fail_pending(self, reason: Exception) -> None:
        for future in (pending for pending in self._pending.values() if not pending.done()):
            future.set_exception(reason)

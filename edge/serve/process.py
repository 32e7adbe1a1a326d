"""A served model: its engine process, started, spoken to, and started again where it ended.

Requests that were under way when a process ended are asked again of the next one, each with the tokens it had: whoever
waits sees a pause. A request that two in a row ended at may be why, and fails.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from devices.interpreter import module_command
from edge.errors import EngineGone, Overloaded
from edge.serve.config import EngineConfig
from edge.serve.messages import MOST_LINE_BYTES, error_of, generation_json, piece_of
from edge.serve.served import Generation, Piece

LOAD_S = 3600.0  # for a model to be loaded: on several devices parts of it may have to be sent
ANSWER_S = 660.0  # for what is no generation
EXIT_S = 10.0  # for a process to end by itself
ENDS_IN_A_ROW = 2  # of processes that computed a request: then it fails
RESTARTS_IN_A_ROW = 3  # without a token in between: then the model cannot be run


class ProcessAnswer:
    """An answer in the making. As `edge.serve.served.Answer`."""

    def __init__(self, generation: Generation, cancel: Callable[[ProcessAnswer], None]) -> None:
        self.generation = generation
        self.prompt_tokens = self.cached_tokens = 0
        self.tokens: list[int] = []  # told so far
        self.begun = False  # its process computes it
        self.cancelled = False
        self.ends = 0  # of processes that computed it, since its last token
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._cancel = cancel

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces as they come."""
        while True:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return

    def cancel(self) -> None:
        """End it, within a step."""
        self.cancelled = True
        self._cancel(self)


class EngineProcess:
    """As `edge.serve.served.ServedModel`; for one event loop."""

    def __init__(self, name: str, config: EngineConfig, *, queue: int, say: Callable[[str], None]) -> None:
        """queue: requests that may wait beside those that are answered. say: told lines for people."""
        self.name, self.config, self.restarts = name, config, 0
        self._queue, self._say = queue, say
        self._numbers = itertools.count(1)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._going_on: asyncio.Task[None] | None = None  # what asks again; held, or it might be collected
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answers: dict[int, ProcessAnswer] = {}
        self._ready = asyncio.Event()
        self._failed: Exception | None = None  # why it cannot be loaded
        self._fatal: Exception | None = None  # the process's last words
        self._ended_in_a_row = 0
        self._sequences = 1
        self._closing = False

    @property
    def failed(self) -> Exception | None:
        """Why nothing can be asked of it any more; None while it can."""
        return self._failed

    @property
    def busy(self) -> bool:
        """Whether answers are under way."""
        return bool(self._answers)

    async def start(self) -> None:
        """Load the model. The errors of loading it, EngineGone where the process ended."""
        await self._launch()
        await self._until_ready()

    async def close(self) -> None:
        """End the process; what is under way ends with EngineGone."""
        self._closing = True
        await self._end_process()
        self._give_up(EngineGone("the server ends"))

    async def use(self, config: EngineConfig) -> None:
        """Run the model as another configuration says; answers go on there. Its errors; it then runs as before."""
        before, self.config = self.config, config
        self._ready.clear()
        await self._end_process()
        under_way = [answer for number, answer in self._answers.items() if not self._is_asked(number)]
        self._answers.clear()
        self._fail_asked(EngineGone(f"{self.name} is moved to other devices; ask again"))
        try:
            await self.start()
        except Exception:
            self.config = before
            await self.start()
            raise
        finally:
            await self._go_on(under_way)

    # --- what is asked of it ---

    async def generate(self, generation: Generation) -> ProcessAnswer:
        """As ServedModel."""
        if len(self._answers) >= self._sequences + self._queue:
            raise Overloaded(
                f"{self._sequences} requests are answered and {self._queue} wait: no more may; ask again later"
            )
        answer = ProcessAnswer(generation, self._cancel)
        await self._begin(answer)
        return answer

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """As ServedModel."""
        found: list[int] = await self._ask(
            "tokenize", {"text": text, "add_special": add_special, "parse_special": parse_special}
        )
        return found

    async def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """As ServedModel."""
        return [piece.encode("latin-1") for piece in await self._ask("pieces", {"tokens": list(tokens)})]

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """As ServedModel."""
        arguments = {"messages": [dict(m) for m in messages], "tools": [dict(t) for t in tools]}
        return str(await self._ask("render", arguments))

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> tuple[list[list[float]], int]:
        """As ServedModel."""
        given = [text if isinstance(text, str) else list(text) for text in texts]
        found = await self._ask("embed", {"texts": given})
        return found["embeddings"], found["tokens"]

    async def status(self) -> dict[str, Any]:
        """As ServedModel."""
        return {**await self._ask("status", {}), "restarts": self.restarts}

    # --- messages ---

    async def _begin(self, answer: ProcessAnswer) -> None:
        """Ask for an answer, from where it is; what is wrong with it is raised. A process that ends meanwhile may have
        ended for another one, so the next is asked, too."""
        while True:
            try:
                await self._begin_here(answer)
                return
            except EngineGone:
                answer.ends += 1
                if answer.ends >= ENDS_IN_A_ROW or self._failed is not None:
                    raise

    async def _begin_here(self, answer: ProcessAnswer) -> None:
        number = next(self._numbers)
        self._answers[number] = answer  # now: its pieces may come with the word that it was accepted
        try:
            accepted = await self._ask("generate", generation_json(answer.generation, answer.tokens), number)
        except BaseException:
            self._answers.pop(number, None)
            self._tell({"id": number, "do": "cancel"})
            raise
        answer.prompt_tokens = accepted["prompt_tokens"]
        if answer.cancelled:  # while it was asked for again
            self._cancel(answer)

    async def _ask(self, what: str, arguments: Mapping[str, Any], number: int | None = None) -> Any:
        await self._until_ready()
        number = next(self._numbers) if number is None else number
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._tell({"id": number, "do": what, "with": arguments})
            return await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            raise EngineGone(f"the engine process gave no answer in {ANSWER_S:g} s") from None
        finally:
            self._asked.pop(number, None)

    def _cancel(self, answer: ProcessAnswer) -> None:
        for number, one in self._answers.items():
            if one is answer:
                self._tell({"id": number, "do": "cancel"})

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _heard(self, message: Mapping[str, Any]) -> None:
        """Something the process says."""
        if "say" in message:
            self._say(f"{self.name}: {message['say']}")
        elif "ready" in message:
            self._sequences = message["ready"]["model"]["sequences"]
            self._ready.set()
        elif "fatal" in message:
            self._fatal = error_of(message["fatal"])
        elif (future := self._asked.get(message["id"])) is not None and not future.done():
            _settle(future, message)
        elif (answer := self._answers.get(message["id"])) is not None:
            self._told(message["id"], answer, message)

    def _told(self, number: int, answer: ProcessAnswer, message: Mapping[str, Any]) -> None:
        if "begun" in message:
            answer.begun = True
            return
        if "error" in message:
            if self._answers.pop(number, None):
                answer.pieces.put_nowait(error_of(message["error"]))
            return
        piece = piece_of(message["piece"])
        if not answer.tokens:
            answer.cached_tokens = message["cached_tokens"]
        if piece.token_id is not None:
            answer.tokens.append(piece.token_id)
            answer.ends = self._ended_in_a_row = 0
        if piece.finish_reason is not None:
            self._answers.pop(number, None)
        answer.pieces.put_nowait(piece)

    # --- the process ---

    async def _launch(self) -> None:
        """Start a process; whoever reads what it says sees to its end."""
        ours, theirs = socket.socketpair()
        self._failed = self._fatal = None
        self._ready.clear()
        with theirs:
            command = module_command("edge.serve.child", "--control", str(theirs.fileno()))
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MOST_LINE_BYTES)
        self._tell(self.config.to_json())
        self._reader = asyncio.create_task(self._listen(reader, self._writer, self._process))

    async def _until_ready(self) -> None:
        """Wait until the model is loaded. Why it cannot be."""
        if self._failed is not None:
            raise self._failed
        try:
            await asyncio.wait_for(self._ready.wait(), LOAD_S)
        except TimeoutError:
            raise EngineGone(f"{self.name} was not loaded in {LOAD_S:g} s") from None
        if self._failed is not None:
            raise self._failed

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process
    ) -> None:
        """Hear what the process says; at its end, see to what is next."""
        with suppress(ConnectionError):
            async for line in reader:
                if line.endswith(b"\n"):  # else it ended in the middle of what it said
                    self._heard(json.loads(line))
        writer.close()
        code = await process.wait()
        was_ready = self._ready.is_set()
        self._ready.clear()
        if self._closing or process is not self._process:
            return
        reason = self._fatal or EngineGone(_end(self.name, code))
        if not was_ready:  # it could not be loaded: the next would not be, either
            self._give_up(reason)
            return
        under_way = self._take_answers(reason)
        self._fail_asked(EngineGone(str(reason)))
        await self._restart(reason, under_way)

    async def _restart(self, reason: Exception, under_way: Sequence[ProcessAnswer]) -> None:
        """Start another process, and ask it what the last one did not complete."""
        self._ended_in_a_row += 1
        self.restarts += 1
        self._say(f"{reason}; it is started again")
        if self._ended_in_a_row > RESTARTS_IN_A_ROW:
            failure = EngineGone(f"{reason}, {self._ended_in_a_row} times in a row")
            for answer in under_way:
                answer.pieces.put_nowait(failure)
            self._give_up(failure)
            return
        await self._launch()
        self._going_on = asyncio.create_task(self._go_on(under_way))

    def _take_answers(self, reason: Exception) -> list[ProcessAnswer]:
        """Those to be asked again; others have failed too often."""
        answers = [answer for number, answer in self._answers.items() if not self._is_asked(number)]
        self._answers.clear()
        for answer in answers:
            answer.ends += answer.begun
            answer.begun = False
            if answer.ends >= ENDS_IN_A_ROW:
                answer.pieces.put_nowait(EngineGone(str(reason)))
        return [answer for answer in answers if answer.ends < ENDS_IN_A_ROW]

    async def _go_on(self, answers: Sequence[ProcessAnswer]) -> None:
        for answer in answers:
            try:
                await self._begin(answer)
            except Exception as error:
                answer.pieces.put_nowait(error)

    async def _end_process(self) -> None:
        """End the process, and wait for it."""
        process, self._process = self._process, None
        if self._writer is not None:
            self._writer.close()
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), EXIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    def _give_up(self, reason: Exception) -> None:
        """Nothing more comes of what was asked."""
        self._failed = reason
        self._ready.set()  # whoever waits for it hears why
        self._fail_asked(reason)
        for answer in self._answers.values():
            answer.pieces.put_nowait(reason)
        self._answers.clear()

    def _is_asked(self, number: int) -> bool:
        """Whether it is not accepted yet: who asks for it then sees to what is next."""
        return number in self._asked and not self._asked[number].done()

    def _fail_asked(self, reason: Exception) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(reason)


def _settle(future: asyncio.Future[Any], message: Mapping[str, Any]) -> None:
    if "error" in message:
        future.set_exception(error_of(message["error"]))
    else:
        future.set_result(message["result"])


def _end(name: str, code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"the engine process of {name} ended with exit code {code}"
    hint = " (out of memory is the usual cause)" if -code == signal.SIGKILL else ""
    return f"the engine process of {name} was killed by {signal.Signals(-code).name}{hint}"

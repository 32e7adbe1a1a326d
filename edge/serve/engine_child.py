"""One engine process, from its start to its end: its messages, and the requests that wait for its answers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol

from devices.processes.interpreter import module_command
from edge.api.config import EngineConfig
from edge.errors import EngineGone
from edge.serve.messages import MOST_LINE_BYTES, error_of, resolve
from edge.weights.elastic.signals import memory_signals_blocked

# Size of a socket's buffer, which takes the tensors of most requests at once. The system may limit it.
_SEND_BYTES = 1 << 21
ANSWER_S = 660.0  # maximum wait for the answer to a request other than a generation
EXIT_S = 10.0  # maximum wait for a process to end by itself


class ChildShare(Protocol):
    """Memory share of a process."""

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Handle a message of the process. Return False if the message is not about memory."""

    def leave(self) -> None:
        """Release the memory share of the process, which has ended."""


NewShare = Callable[[Callable[[Mapping[str, Any]], None]], ChildShare]


class NoAnswer(EngineGone):
    """The process runs but does not answer."""


class EngineChild:
    """An engine process and the server's end of its socket. After `end`, its messages are ignored."""

    def __init__(
        self,
        name: str,
        receive: Callable[[Mapping[str, Any]], None],
        ended: Callable[[Exception], None],
        share: NewShare | None = None,
    ) -> None:
        """name: name of the model.
        receive: called with each message.
        ended: called with the reason if the process crashes.

        share: creates the memory share, from a function that sends messages to the process; None: memory as configured.
        """
        self._name, self._receive, self._ended = name, receive, ended
        self._share = None if share is None else share(self.send)
        # Done when the model is loaded; raises the error if loading fails.
        self.loaded = asyncio.get_running_loop().create_future()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._fatal: Exception | None = None  # error that the process reported before its end
        self._config: EngineConfig  # configuration that it was started with
        self._plan: Mapping[str, Any] | None = None  # plan that it ran initially; None: one device
        self._is_ending = False

    async def start(self, config: EngineConfig, *, resumes: bool = False, left_out: Sequence[str] = ()) -> None:
        """Start the process, which loads the model once it has its memory share.

        resumes, left_out: see `EngineConfig.deployed`. Raises OSError.
        """
        try:
            self.process, reader, self._writer = await spawn("edge.serve.engine.child")
        except BaseException:
            self._leave()
            raise
        self._config = config
        how = {"shares_memory": self._share is not None, "resumes": resumes, "left_out": left_out}
        self.send({"config": config.to_json(), **how})
        self.listening = asyncio.create_task(self._listen(reader))  # until the process has ended

    def to_resume(self) -> EngineConfig:
        """Return the configuration for the process that replaces this one.

        It has the plan of this process, because planning again would measure the devices first.
        """
        if self._config.plan is not None or self._plan is None:
            return self._config
        return replace(self._config, plan=self._plan, plan_name="the plan before")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. It is dropped if the process is ending."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def ask(self, number: int, what: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer to a request, or raise its error.

        Raises EngineGone if the process ends before answering.
        """
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self.send({"id": number, "do": what, "with": arguments})
            await asyncio.wait({future}, timeout=ANSWER_S)  # before Python 3.12 wait_for may lose a cancellation
            if not future.done():
                raise NoAnswer(f"the engine process gave no answer in {ANSWER_S:g} s")
            return future.result()
        except asyncio.CancelledError:
            if future.done():
                future.exception()  # marks it as retrieved
            self.send({"id": number, "do": "cancel"})
            raise
        finally:
            del self._pending[number]

    def kill(self, reason: str) -> None:
        """Kill the process. reason: reported as the cause of its end."""
        self._fatal = EngineGone(f"{self._name}: {reason}, and was killed")
        with suppress(ProcessLookupError):
            self.process.kill()

    async def end(self, reason: Exception) -> None:
        """Ask the process to end, and wait for that.

        Unanswered requests fail with this reason, even if the wait is cancelled.
        """
        self._is_ending = True
        self._writer.close()
        try:  # shielded: even if this task is cancelled, the process ends and its memory becomes free
            await asyncio.shield(asyncio.gather(exit_code(self.process), self.listening))
        finally:
            self._fail_pending(reason)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            async for line in reader:
                # Otherwise the process ended in the middle of a message.
                if line.endswith(b"\n") and not self._is_ending:
                    for message in json.loads(line):
                        self._take(message)
        except ConnectionError:
            pass
        except Exception as error:  # for example a line that is too long: the rest cannot be read
            self.kill(f"it sent an invalid message ({error})")
        code = await exit_code(self.process)
        self._leave()
        self._writer.close()
        reason: Exception = EngineGone(f"{self._name} was asked to end")
        if not self._is_ending:
            reason = self._fatal or EngineGone(how_ended(self._name, code))
            self._fail_pending(reason)
            self._ended(reason)
        if not self.loaded.done():
            self.loaded.set_exception(reason)

    def _leave(self) -> None:
        if self._share is not None:
            self._share.leave()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "fatal" in message:
            self._fatal = error_of(message["fatal"])
            return
        if self._share is not None and self._share.receive(message):
            return
        self._receive(message)
        if "ready" in message and not self.loaded.done():
            self._plan = message["ready"]["plan"]
            if replicas := message["ready"]["replicas"]:
                self._plan = {**self._plan, "replicas": replicas}
            self.loaded.set_result(None)
        elif "replicas" in message:
            self._plan = {**message.get("plan", self._plan), "replicas": message["replicas"]}
        elif (future := self._pending.get(message.get("id", 0))) is not None and not future.done():
            resolve(future, message)

    def _fail_pending(self, reason: Exception) -> None:
        for future in (pending for pending in self._pending.values() if not pending.done()):
            future.set_exception(reason)


async def spawn(module: str) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start a process that runs a module with `--control` and its end of a socket. Return it with the other end.

    Raises OSError.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    with theirs, ExitStack() as stack:
        stack.callback(ours.close)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_LINE_BYTES)
        stack.callback(writer.close)
        # The process is started last, because a cancellation after its start would leave it running.
        with memory_signals_blocked():
            process = await asyncio.create_subprocess_exec(
                *module_command(module, "--control", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        stack.pop_all()
    return process, reader, writer


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process and return its exit code. Kill it if it does not end within EXIT_S."""
    try:
        return await asyncio.wait_for(process.wait(), EXIT_S)
    except asyncio.TimeoutError:
        process.kill()
        return await process.wait()


def how_ended(name: str, code: int) -> str:
    """Return a message about how the engine process of a model ended."""
    if code >= 0:
        return f"the engine process of {name} ended with exit code {code}"
    hint = " (out of memory is the usual cause)" if -code == signal.SIGKILL else ""
    return f"the engine process of {name} was killed by {signal.Signals(-code).name}{hint}"

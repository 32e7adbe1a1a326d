"""The process of a network, seen from the server: its start, its requests, and its restart after a crash."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from edge.errors import EdgeError, EngineGone, PoisonousRequest
from edge.serve.engine_child import exit_code, how_ended, spawn
from edge.serve.messages import error_of
from edge.serve.oip.config import NetworkConfig
from edge.serve.oip.framing import InferRequest
from edge.serve.oip.messages import HEAD, frame, message_of, tensors_of
from edge.serve.oip.tensors import Tensor

LOAD_S = 3600.0  # maximum time to load a network; its stages may have to be sent to other devices
ANSWER_S = 600.0  # maximum time for an answer, after which the process counts as hanging
_RETRY_S = 5.0  # time after a failed load before the next request tries again

Reply = tuple[Mapping[str, Any], list[Tensor]]  # message of the process, and the outputs in it


class _Crash(EngineGone):
    """The process ended while it had a request."""


class _Child:
    """One process of a network."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self.about: Mapping[str, Any] = {}
        self.ended: Exception | None = None  # reason of its end
        self._is_closing = False
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._loaded = asyncio.get_running_loop().create_future()

    async def start(self, config: NetworkConfig) -> None:
        """Start the process, and wait until the network is loaded. Raises the error of loading."""
        self._process, self._reader, self._writer = await spawn("edge.serve.oip.child")
        self._send({"config": config.to_json()})
        self._listening = asyncio.create_task(self._listen())
        try:
            await asyncio.wait_for(asyncio.shield(self._loaded), LOAD_S)
        except asyncio.TimeoutError:
            await self.close()
            raise EngineGone(f"{self._name} was not loaded in {LOAD_S:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def ask(self, number: int, request: InferRequest) -> Reply:
        """Return the reply to a request. Raises its error, and _Crash if the process ends."""
        if self.ended is not None:
            raise self.ended
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future

        async def answer() -> Reply:
            self._send({"id": number, "outputs": request.outputs}, request.inputs)
            await self._writer.drain()
            return await future

        try:
            return await asyncio.wait_for(answer(), ANSWER_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await asyncio.shield(self._listening)
            raise _Crash(f"{self._name} did not answer in {ANSWER_S:g} s") from None
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        except ConnectionError:  # `_listen` sets the reason
            return await future
        finally:
            del self._pending[number]

    async def close(self) -> None:
        """End the process."""
        self._is_closing = True
        self._writer.close()
        await asyncio.shield(self._listening)

    def _send(self, message: Mapping[str, Any], inputs: tuple[Tensor, ...] | None = None) -> None:
        if not self._writer.is_closing():
            self._writer.writelines(frame(message, inputs or (), "" if inputs is None else "inputs"))

    async def _listen(self) -> None:
        """Handle the messages of the process until it ends."""
        reason: Exception | None = None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                n_text, n_data = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                message = message_of(await self._reader.readexactly(n_text))
                data = await self._reader.readexactly(n_data)
                if "fatal" in message:
                    reason = error_of(message["fatal"])
                else:
                    self._take(message, data)
        self._writer.close()
        code = await exit_code(self._process)
        self.ended = reason or _Crash(how_ended(self._name, code))
        if self._is_closing:
            self.ended = EngineGone("the server is ending")
        if not self._loaded.done():
            self._loaded.set_exception(self.ended)
            self._loaded.exception()  # marks the error as retrieved if the start was cancelled
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self.ended)

    def _take(self, message: Mapping[str, Any], data: bytes) -> None:
        if "say" in message:
            self._say(f"{self._name}: {message['say']}")
        elif "ready" in message:
            self.about = message["ready"]
            if not self._loaded.done():
                self._loaded.set_result(None)
        elif (future := self._pending.get(message["id"])) is not None and not future.done():
            if "error" in message:
                future.set_exception(error_of(message["error"]))
            else:
                future.set_result((message, tensors_of(message["outputs"], data)))


class NetworkProcess:
    """The process of a network, and the processes that replace it after a crash. Use it in one event loop.

    Requests that a process had when it crashed are suspects. The next process gets them one at a time, before all
    others. A suspect whose process crashes again fails.
    """

    def __init__(self, name: str, config: NetworkConfig, say: Callable[[str], None]) -> None:
        self.name, self._config, self._say = name, config, say
        self.about: Mapping[str, Any] = {}  # description of the network when it was last loaded
        self.failed: Exception | None = None  # reason why the network is not loaded
        self._failed_at = -_RETRY_S
        self._child: _Child | None = None
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()
        self._suspect = asyncio.Lock()  # held by the suspect that is computed
        self._n_suspects = 0
        self._no_suspects = asyncio.Event()
        self._no_suspects.set()
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """True if the network is loaded."""
        return self._child is not None and self._child.ended is None

    async def start(self) -> _Child:
        """Return the process with the loaded network. Start one if there is none. Raises the error of loading."""
        async with self._loading:
            child = self._child
            if child is not None and child.ended is None:
                return child
            if self._is_closed:
                raise EngineGone("the server is ending")
            if self.failed is not None and time.monotonic() - self._failed_at < _RETRY_S:
                raise EngineGone(f"{self.name} is not loaded: {self.failed}") from self.failed
            if child is not None:
                self._say(f"{child.ended}; starting it again")
            self._child = self.failed = None
            child = _Child(self.name, self._say)
            try:
                await child.start(self._config)
            except (EdgeError, OSError) as error:
                self.failed, self._failed_at = error, time.monotonic()
                raise
            self._child, self.about = child, child.about
            return child

    async def ask(self, request: InferRequest) -> Reply:
        """Return the reply to a request. Raises its error, and the errors of `start`."""
        await self._no_suspects.wait()
        try:
            return await self._ask(request)
        except _Crash:
            self._n_suspects += 1
            self._no_suspects.clear()
        try:
            async with self._suspect:
                try:
                    return await self._ask(request)
                except _Crash as error:
                    raise PoisonousRequest(f"{error}, again during the same request, which now fails") from error
        finally:
            self._n_suspects -= 1
            if not self._n_suspects:
                self._no_suspects.set()

    async def _ask(self, request: InferRequest) -> Reply:
        child = self._child if self.is_ready else None
        if child is None:
            try:
                child = await self.start()
            except EngineGone:
                raise
            except (EdgeError, OSError) as error:
                raise EngineGone(f"{self.name} is not loaded: {error}") from error
        return await child.ask(next(self._numbers), request)

    async def close(self) -> None:
        """End the process. Its requests fail with EngineGone."""
        self._is_closed = True
        async with self._loading:
            if self._child is not None:
                await self._child.close()

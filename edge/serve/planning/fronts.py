"""The plans that users can choose from: a front from a file, and fronts that the server makes on request."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.errors import EdgeError, Overloaded
from edge.serve.apis.models import model_of
from edge.serve.caller import check_administrator
from edge.serve.http.bodies import to_json
from edge.serve.http.errors import NotThere, error_body, failure
from edge.serve.planning.process import planned
from edge.serve.served import ServedModels

MAX_FRONT = 64 << 20  # bytes of the front file
LIMIT_S = 300.0  # maximum time to make a front; measuring takes 20 s, and each silent device 5 s
_PROGRESS_S = 0.5  # interval of progress lines

Addresses = Callable[[], Awaitable[Sequence[str]]]


class Fronts:
    """The fronts of one server. Use it in one event loop."""

    def __init__(self, models: ServedModels, file: Path | None, addresses: Addresses) -> None:
        """file: JSON of a front, or None. addresses: returns the addresses of the workers that plans may use."""
        self._models, self._file, self._addresses = models, file, addresses
        self._by_model: dict[str, Any] = {}  # by name of the model, the newest last
        self._making: str | None = None  # model whose front is being made

    async def get(self, model: str | None = None) -> Any:
        """Return the JSON of `edge pareto --json`: the front that was made last, or else that of the file.

        model: name of a model, for the front that was made for it. Without any front there are no points.
        Raises NotThere if the file is unreadable.
        """
        if model is not None and (own := self._by_model.get(model)) is not None:
            return own
        if model is None and self._by_model:
            return list(self._by_model.values())[-1]
        if self._file is None:
            return {"points": []}
        front = await asyncio.to_thread(_read, self._file)
        other = front.get("model") if isinstance(front, dict) else None
        is_other = model is not None and isinstance(other, str) and other != model and other in self._models.names
        return {"points": []} if is_other else front

    async def devices(self) -> set[str]:
        """Return the addresses of devices in all fronts, which plans may use."""
        of_file = [] if self._file is None else [await asyncio.to_thread(_read, self._file)]
        return set(_devices([*self._by_model.values(), *of_file]))

    def make(self, model: str | None) -> AsyncGenerator[str, None]:
        """Make the front of a model, and yield lines of progress. Closing the generator ends that.

        Raises UnknownModel, NotAllowed, and Overloaded while another front is made.
        """
        check_administrator("have plans made")
        name = model_of(model, self._models)
        if self._making is not None:
            raise Overloaded(f"plans for {self._making} are being made; wait until they are ready, or cancel them")
        self._making = name
        newest: dict[str, Any] = {"status": "Starting"}
        # A task of its own, because its process must end even if the client disconnects.
        task = asyncio.create_task(self._make(name, newest))
        task.add_done_callback(self._ended)
        lines = _lines(task, newest)
        # Closing a generator that has not begun does not run its `finally`.
        weakref.finalize(lines, task.cancel).atexit = False
        return lines

    async def _make(self, name: str, newest: dict[str, Any]) -> None:
        """Make a front. newest: receives the progress."""

        def progress(values: Mapping[str, Any]) -> None:
            newest.clear()
            newest.update(values)

        arguments = {"config": self._models.configs[name].to_json(), "devices": await self._addresses()}
        result = await planned("front", arguments, LIMIT_S, progress)
        self._by_model.pop(name, None)
        self._by_model[name] = {**result, "model": name}

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._making = None
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, also if the client has gone


async def _lines(task: asyncio.Task[None], newest: Mapping[str, Any]) -> AsyncGenerator[str, None]:
    """Yield lines of progress until the task has ended. Closing the generator cancels the task."""
    try:
        while not task.done():
            yield _line(newest)
            await asyncio.wait({task}, timeout=_PROGRESS_S)
        task.result()
        yield _line({"status": "success"})
    except (EdgeError, OSError) as error:
        yield _line(error_body(failure(error), "/v1/front"))
    finally:
        task.cancel()


def _line(values: Mapping[str, Any]) -> str:
    return f"{to_json(values)}\n"


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FRONT + 1)
        if len(text) > MAX_FRONT:
            raise NotThere(f"{path.name} has more than {MAX_FRONT} bytes; it is not a front")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise NotThere(f"{path.name} cannot be read: {error}") from error


def _devices(values: Any) -> Iterator[str]:
    """Yield the device names in the plans of a front."""
    for value in values if isinstance(values, list) else values.values() if isinstance(values, dict) else ():
        yield from _devices(value)
    if isinstance(values, dict) and isinstance(device := values.get("device"), str):
        yield device

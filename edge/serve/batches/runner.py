"""Runner of batches: answers their requests while nobody else asks, one batch after the other."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

from pydantic import ValidationError

from edge import log
from edge.errors import EdgeError
from edge.serve.apis.adapters import check_no_adapter
from edge.serve.apis.api import Api
from edge.serve.apis.chat import CHAT
from edge.serve.apis.completions import COMPLETIONS, prompts_of
from edge.serve.apis.embeddings import EmbeddingsRequest, embeddings
from edge.serve.apis.responses import RESPONSES
from edge.serve.batches.lines import Line, answered_line, failed_line, read_lines
from edge.serve.batches.store import Batch, BatchStore
from edge.serve.http.errors import BadRequest, error_body, failure
from edge.serve.http.generating import background_answer
from edge.serve.served import ServedModels

T = TypeVar("T")
EMBEDDINGS = "/v1/embeddings"
APIS: Mapping[str, Api[Any]] = {api.path: api for api in (CHAT, COMPLETIONS, RESPONSES)}
ENDPOINTS = (*APIS, EMBEDDINGS)
AT_ONCE = 8  # requests of a batch
LOOK_S = 0.2  # between looks whether others ask, or the batch is to stop
TRIES = 5  # of a request whose engine has gone, or has no room
AGAIN_S = 5.0  # between two of them
_DISK_WAITS = 12  # of these until a full disk is tried again
_FOR_NOW = (429, 503)  # statuses of failures that pass


class Interrupted(Exception):
    """A request that is to be answered later."""


class BatchRunner:
    """Answers the batches of a store; for one event loop."""

    def __init__(self, store: BatchStore, models: ServedModels, *, again_s: float = AGAIN_S) -> None:
        """again_s: seconds until a request is tried again that failed for now."""
        self.store, self._models, self._again_s = store, models, again_s
        self._lock = asyncio.Lock()  # of the store
        self._task: asyncio.Task[None] | None = None

    async def do(self, work: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """Return what a function of the store returns, in a thread: disks can be slow. Its errors."""
        async with self._lock:
            thread = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **more))
            try:
                return await asyncio.shield(thread)
            finally:  # who is cancelled, and cancelled again, leaves the store to nobody else before it is done
                while not thread.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({thread})
                thread.exception()  # nobody else takes it where who asked was cancelled

    async def resume(self) -> None:
        """Go on with what a server before this one left. OSError, PrefixError."""
        await self.do(self.store.load)
        self.start()

    def start(self) -> None:
        """Answer all batches that have not ended, unless that is done already."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. What is not answered goes on with the next server."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)  # a server that ends has more to close

    async def _run(self) -> None:
        while True:
            try:
                if not await self._answer_oldest():
                    return
            except (EdgeError, OSError) as error:  # the disk is full, or gone
                log.warning("batches wait", error=str(error))
                await asyncio.sleep(self._again_s * _DISK_WAITS)

    async def _answer_oldest(self) -> bool:
        """Answer the oldest batch that has not ended, and end it; return whether there is one. OSError, PrefixError."""
        waiting = [batch for batch in await self.do(self.store.batches) if not batch.ended]
        for batch in waiting[-1:]:
            try:
                await self._answer_all(batch)
            except OSError:
                raise
            except Exception as error:  # others must not wait for it for ever
                log.warning("batch failed", batch=batch.id, error=f"{type(error).__name__}: {error}")
                await self.do(self.store.end, batch, "failed")
        return bool(waiting)

    async def _answer_all(self, batch: Batch) -> None:
        """Answer what a batch has left, and end it. OSError, PrefixError; NotThere if its file was damaged."""
        file = await self.do(self.store.file, batch.owner, batch.input_file_id)
        content = await self.do(self.store.content, file)
        lines, broken = await asyncio.to_thread(read_lines, content, batch.endpoint)
        if batch.status == "validating":
            await self.do(self.store.move, batch, "in_progress")
        for number, text in broken.items():
            if number not in batch.done:
                await self.do(self.store.note, batch, number, text, answered=False)
        remaining: list[Line] = []
        lines = [line for line in lines if line.number not in batch.done]
        for _, group in groupby(lines, key=lambda line: line.model):  # two models may not have room beside each other
            left = deque(group)
            await self._answer_group(batch, left)
            remaining += left
        is_cancelled = batch.is_cancelled and not batch.is_expired
        if remaining and not is_cancelled and not batch.is_expired:
            await self.do(self.store.expire, batch)
        code, why = ("batch_cancelled", "cancelled") if is_cancelled else ("batch_expired", "over")
        for line in remaining:
            text = failed_line(line.custom_id, code, f"it was not answered before the batch was {why}")
            await self.do(self.store.note, batch, line.number, text, answered=False)
        status = "cancelled" if is_cancelled else "expired" if batch.is_expired else "completed"
        await self.do(self.store.end, batch, status)

    async def _answer_group(self, batch: Batch, left: deque[Line]) -> None:
        """Answer lines for one model. Those stay that are not answered before the batch is to stop."""
        failures: Counter[int] = Counter()
        await self._work(batch, left, failures, most=1)  # what others have in common with it is computed once
        workers = [asyncio.create_task(self._work(batch, left, failures)) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, batch: Batch, left: deque[Line], failures: Counter[int], most: int | None = None) -> None:
        """Answer lines, `most` of them, until there are none or the batch is to stop."""
        while left and most != 0 and not self._stops(batch):
            line = left.popleft()
            try:
                status, body = await self._unless_others_ask(batch, line)
            except Interrupted:
                left.appendleft(line)
                continue
            if status in _FOR_NOW and failures[line.number] < TRIES - 1:
                failures[line.number] += 1
                left.append(line)
                await asyncio.sleep(self._again_s)
                continue
            text = answered_line(line.custom_id, status, body)
            await self.do(self.store.note, batch, line.number, text, answered=status == 200)
            most = None if most is None else most - 1

    def _stops(self, batch: Batch) -> bool:
        return batch.is_cancelled or batch.is_expired or self.store.clock() >= batch.expires_at

    async def _unless_others_ask(self, batch: Batch, line: Line) -> tuple[int, Any]:
        """Return the status and the body of a line's response. Whoever asks the same model goes first in its
        scheduler; for one who asks another, this request gives up. Interrupted then, and where the batch stops."""
        while self._others_ask(line):
            if self._stops(batch):
                raise Interrupted
            await asyncio.sleep(LOOK_S)
        answering = asyncio.ensure_future(self._answer(batch, line))
        try:
            while not (await asyncio.wait({answering}, timeout=LOOK_S))[0]:
                if self._stops(batch) or self._others_ask(line):
                    raise Interrupted
            status, body = answering.result()
            if status in _FOR_NOW and self._others_ask(line):  # its model was unloaded for theirs
                raise Interrupted
            return status, body
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _others_ask(self, line: Line) -> bool:
        with suppress(EdgeError, OSError):  # the line gets the error
            return self._models.busy_beside(line.model)
        return False

    async def _answer(self, batch: Batch, line: Line) -> tuple[int, Any]:
        """Return the status and the body of the response to a request."""
        try:
            if batch.endpoint == EMBEDDINGS:
                return 200, await self._embeddings(EmbeddingsRequest.model_validate_json(line.body))
            api = APIS[batch.endpoint]
            request = api.request.model_validate_json(line.body)
            if request.stream:
                raise BadRequest("an answer of a batch is not streamed; leave stream out", "stream")
            return 200, await background_answer(api, self._models, request, batch.namespace)
        except Exception as error:
            if not isinstance(error, EdgeError | ValidationError):
                log.warning("request of a batch failed", error=f"{type(error).__name__}: {error}")
            failed = failure(error)
            return failed.status, error_body(failed, batch.endpoint)

    async def _embeddings(self, request: EmbeddingsRequest) -> dict[str, Any]:
        """Return embeddings that are computed text by text. The errors of `embeddings`."""
        check_no_adapter(request.model, self._models)
        model = await self._models.model(request.model)
        parts: list[dict[str, Any]] = []
        texts: Sequence[Any] = prompts_of(request.input, "input")
        for text in texts:
            while model.busy:
                await asyncio.sleep(LOOK_S)
            parts.append(await embeddings(request.model_copy(update={"input": text}), model))
        data = [{**part["data"][0], "index": index} for index, part in enumerate(parts)]
        tokens = sum(part["usage"]["prompt_tokens"] for part in parts)
        return {**parts[0], "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

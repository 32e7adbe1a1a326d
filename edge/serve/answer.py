"""Answers of an engine process, as the server streams them to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from edge.serve.caller import CALLER
from edge.serve.messages import error_of, generation_json, piece_of
from edge.serve.served import Generation, Piece
from edge.serve.suspects import Case, Suspects


class ProcessAnswer:
    """An answer that is being generated. Implements `edge.serve.served.Answer`."""

    def __init__(self, number: int, generation: Generation, cancel: Callable[[int], None]) -> None:
        """number: request id in messages of the engine process. cancel: asks the engine process to end the answer."""
        self.number, self.generation, self.client = number, generation, CALLER.get().client
        self.prompt_tokens = self.cached_tokens = 0
        self.tokens: list[int] = []  # tokens received so far
        self.accepted = False  # True once the engine process has accepted the request; until then a task waits for it
        self.begun = False  # True once the engine process has begun to compute the answer
        self.cancelled = False
        self.case = Case("generate", lambda: generation_json(generation, []))
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._cancel = cancel

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return

    def cancel(self) -> None:
        self.cancelled = True
        self._cancel(self.number)


class Answers(dict[int, ProcessAnswer]):
    """Unfinished answers by number, of all engine processes of a model."""

    n_other = 0  # pending requests other than generations and status requests

    def __init__(self, name: str) -> None:
        """name: name of the model."""
        super().__init__()
        self.suspects = Suspects(name)

    def n_of(self, client: str) -> int:
        """Return the number of answers that a client waits for."""
        return sum(answer.client == client for answer in self.values())

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Handle a message about a request. Return True if it brings a token."""
        answer = self.get(message["id"])
        case = self.suspects.handled.pop(message["id"], None) if {"result", "error"} & message.keys() else None
        if answer is not None and {"piece", "error"} & message.keys():
            self.suspects.acquit(answer.case)
        elif answer is None and case is not None:
            self.suspects.acquit(case)
        if answer is None:
            return False
        # Set here, because pieces may arrive before the task that waits for the result continues.
        if "result" in message:
            answer.accepted, answer.prompt_tokens = True, message["result"]["prompt_tokens"]
        elif "begun" in message:
            answer.begun = True
        elif "piece" in message:
            return self._add_piece(answer, message)
        elif answer.accepted:  # otherwise the task that waits for the result raises the error
            self.end(answer, error_of(message["error"]))
        return False

    def _add_piece(self, answer: ProcessAnswer, message: Mapping[str, Any]) -> bool:
        piece = piece_of(message["piece"])
        if not answer.tokens:
            answer.cached_tokens = message["cached_tokens"]
        if piece.token_id is not None:
            answer.tokens.append(piece.token_id)
        if piece.finish_reason is not None:
            self.pop(answer.number, None)
        answer.pieces.put_nowait(piece)
        return piece.token_id is not None

    def end(self, answer: ProcessAnswer, reason: Exception) -> None:
        """End an answer with an error, unless it has already ended."""
        if self.pop(answer.number, None):
            self.suspects.leave(answer.case)
            answer.pieces.put_nowait(reason)

    def process_ended(self, reason: Exception) -> Case | None:
        """Record that the engine process crashed. Return the request that caused it, if that is certain.

        reason: the error of the crash. The answer of the returned request ends with it.
        """
        begun = [answer for answer in self.values() if answer.accepted and answer.begun]
        cause = self.suspects.ended([*self.suspects.handled.values(), *(answer.case for answer in begun)], reason)
        for answer in begun:
            if answer.case is cause:
                self.end(answer, self.suspects.error(reason))
        return cause

    def take_accepted(self) -> list[ProcessAnswer]:
        """Return the answers that the engine process had accepted, to submit them again.

        Answers that were not accepted yet are handled by the tasks that wait for their acceptance.
        """
        accepted = [answer for answer in self.values() if answer.accepted]
        for answer in accepted:
            answer.accepted = answer.begun = False
        return accepted

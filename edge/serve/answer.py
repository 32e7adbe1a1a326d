"""Answers of an engine process, as the server streams them to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from edge.serve.caller import CALLER
from edge.serve.messages import error_of, generation_json, piece_of
from edge.serve.served import Generation, Piece
from edge.serve.speeds import Speeds
from edge.serve.suspects import Case, Suspects


class ProcessAnswer:
    """An answer that is being generated. Implements `edge.serve.served.Answer`."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.client = generation, CALLER.get().client
        self.number = 0  # request id in messages of the engine process that generates the answer
        self.prompt_tokens = self.cached_tokens = 0
        self.tokens: list[int] = []  # tokens received so far
        self.accepted = False  # True once the engine process has accepted the request; until then a task waits for it
        self.begun = False  # True once the engine process has begun to compute the answer
        self.cancelled = False
        self.case = Case("generate", lambda: generation_json(generation, []))
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._cancel: Callable[[int], None] = lambda number: None

    def use_process(self, number: int, cancel: Callable[[int], None]) -> None:
        """Let an engine process generate the answer from now on. cancel: asks the process to end request `number`."""
        self.number, self._cancel = number, cancel

    def leave_process(self) -> None:
        """Ask the process to forget the answer, which has not begun, because another process will generate it."""
        self._cancel(self.number)
        self.accepted = False

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


class AnswersOwner:
    """Owner of the answers of engine processes. This one does nothing with them."""

    left_out: Sequence[str] = ()  # addresses of workers that the processes do not use

    def begun(self, answer: ProcessAnswer) -> None:
        """Note that a process has begun to compute an answer."""

    def ended(self, answer: ProcessAnswer) -> None:
        """Note that an answer has ended."""

    def loaded(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Note that a process has loaded the model. replicas: plans of further copies that its plan has."""

    def replanned(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Note that a process plans for other replicas. replicas: plans of all further copies of the model."""

    def failed(self) -> None:
        """Note that a process has failed for good."""

    def moved(self, answer: ProcessAnswer) -> bool:
        """Let another process continue an answer, because its process fails for good. Return False if none can."""
        return False


class Answers(dict[int, ProcessAnswer]):
    """Unfinished answers by number, of all engine processes of a model."""

    n_other = 0  # pending requests other than generations and status requests

    def __init__(self, name: str, owner: AnswersOwner) -> None:
        """name: name of the model."""
        super().__init__()
        self.owner = owner
        self.suspects = Suspects(name)
        self.speeds = Speeds()

    def pop_answer(self, number: int) -> ProcessAnswer | None:
        """Remove an answer that has ended or leaves the process."""
        self.speeds.ended(number)
        return self.pop(number, None)

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
            self.speeds.begun(answer.number)
            self.owner.begun(answer)
        elif "piece" in message:
            return self._add_piece(answer, message)
        elif answer.accepted:  # otherwise the task that waits for the result raises the error
            self.end(answer, error_of(message["error"]))
        return False

    def _add_piece(self, answer: ProcessAnswer, message: Mapping[str, Any]) -> bool:
        piece = piece_of(message["piece"])
        is_first = not answer.tokens
        if is_first:
            answer.cached_tokens = message["cached_tokens"]
        if piece.token_id is not None:
            answer.tokens.append(piece.token_id)
            self.speeds.token(answer.number, answer.prompt_tokens - answer.cached_tokens if is_first else 0)
        if piece.finish_reason is not None:
            self.pop_answer(answer.number)
            self.owner.ended(answer)
        answer.pieces.put_nowait(piece)
        return piece.token_id is not None

    def end(self, answer: ProcessAnswer, reason: Exception) -> None:
        """End an answer with an error, unless it has already ended."""
        if self.pop_answer(answer.number):
            self.suspects.leave(answer.case)
            answer.pieces.put_nowait(reason)
            self.owner.ended(answer)

    def release(self, answer: ProcessAnswer) -> None:
        """Forget an answer, because another process generates it."""
        self.pop_answer(answer.number)
        self.suspects.leave(answer.case)

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

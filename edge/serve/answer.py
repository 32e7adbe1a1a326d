"""Answer of an engine process, from the side of the server that streams it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from edge.serve.served import Generation, Piece


class ProcessAnswer:
    """An answer that is being generated. Implements `edge.serve.served.Answer`."""

    def __init__(self, number: int, generation: Generation, cancel: Callable[[int], None]) -> None:
        """number: its id in the messages of the process. cancel: asks the process to end it."""
        self.number, self.generation = number, generation
        self.prompt_tokens = self.cached_tokens = 0
        self.tokens: list[int] = []  # received so far
        self.accepted = False  # by its process; until then a task waits for the acceptance
        self.begun = False  # whether its process computes it
        self.cancelled = False
        self.ends = 0  # processes that ended while they computed it, since its last token
        self.pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._cancel = cancel

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield the pieces as they come."""
        while True:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return

    def cancel(self) -> None:
        """End it within a step."""
        self.cancelled = True
        self._cancel(self.number)

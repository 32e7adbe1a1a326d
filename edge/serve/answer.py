"""An answer that an engine process makes, as who asked for it sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from edge.serve.served import Generation, Piece


class ProcessAnswer:
    """An answer in the making. As `edge.serve.served.Answer`."""

    def __init__(self, number: int, generation: Generation, cancel: Callable[[int], None]) -> None:
        """number: by which the process knows it. cancel: tells the process to end it."""
        self.number, self.generation = number, generation
        self.prompt_tokens = self.cached_tokens = 0
        self.tokens: list[int] = []  # told so far
        self.accepted = False  # by its process; else somebody is asking for it
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
        self._cancel(self.number)

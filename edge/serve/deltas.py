"""Answers as all APIs tell them: text, calls, an end. From an engine's pieces."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edge.serve.served import Answer, Generation, Piece, ServedModel
from edge.serve.tools.parser import CallParser, ParsedCall

Reason = Literal["stop", "length", "tool_calls"]
AHEAD = 64  # deltas that wait for a slow reader; an engine's answer waits after that


@dataclass(frozen=True)
class Begin:
    """The prompt has been computed."""

    prompt_tokens: int
    cached_tokens: int  # of them


@dataclass(frozen=True)
class Text:
    """More text. `pieces` are the tokens it came of, where their probabilities were asked for."""

    text: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Call:
    """A function is called."""

    id: str
    name: str
    arguments: str  # JSON of an object


@dataclass(frozen=True)
class End:
    """Why an answer ended, and how many tokens it has."""

    reason: Reason
    stop_string: str | None
    generated_tokens: int
    ended_by: str | None = None  # "repetition" where that is why; the clients' types have no such reason

    @property
    def extra(self) -> dict[str, str]:
        """The field beside the reason that tells what the reason cannot."""
        return {"ended_by": self.ended_by} if self.ended_by else {}


Delta = Begin | Text | Call | End
Deltas = AsyncIterator[tuple[int, Delta]]
"""Of several answers, each with its number, as they come."""


async def deltas_of(answer: Answer, parser: CallParser | None) -> AsyncGenerator[Delta, None]:
    """One answer. Its last delta is an End; EngineGone where its engine ended."""
    begun, called = False, False
    tokens = 0
    pieces: list[Piece] = []
    async for piece in answer:
        if not begun:
            begun = True
            yield Begin(answer.prompt_tokens, answer.cached_tokens)
        tokens += piece.token_id is not None
        if piece.logprob is not None:
            pieces.append(piece)
        parts: list[str | ParsedCall] = parser.add(piece.text) if parser else [piece.text]
        if piece.finish_reason is not None and parser:
            parts += [*parser.end(), ""]  # tokens may be left that made no text
        for part in parts:
            if isinstance(part, ParsedCall):
                called = True
                pieces.clear()  # its tokens are told of no text
                yield Call(f"call_{secrets.token_hex(12)}", part.name, part.arguments)
            elif part or pieces:
                yield Text(part, tuple(pieces))
                pieces.clear()
        if piece.finish_reason is not None:
            is_cut = piece.finish_reason in ("length", "repetition")
            reason: Reason = "length" if is_cut else "tool_calls" if called else "stop"
            ended_by = "repetition" if piece.finish_reason == "repetition" else None
            yield End(reason, piece.stop_string, tokens, ended_by)


async def begin(model: ServedModel, generations: Sequence[Generation]) -> list[Answer]:
    """Begin all answers, or none: what `ServedModel.generate` raises."""
    answers: list[Answer] = []
    try:
        for generation in generations:
            answers.append(await model.generate(generation))
    except BaseException:
        for answer in answers:
            answer.cancel()
        raise
    return answers


async def merged(
    answers: Sequence[Answer], parsers: Sequence[CallParser | None]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all answers. Where this is closed, or one of them fails, all are ended."""
    if len(answers) == 1:  # needs no task beside the one that asks
        try:
            async for one in deltas_of(answers[0], parsers[0]):
                yield 0, one
        finally:
            answers[0].cancel()
        return
    waiting: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(AHEAD)

    async def follow(index: int) -> None:
        try:
            async for delta in deltas_of(answers[index], parsers[index]):
                await waiting.put((index, delta))
        except Exception as error:
            await waiting.put((index, error))
        else:
            await waiting.put((index, None))

    tasks = [asyncio.create_task(follow(index)) for index in range(len(answers))]
    running = len(tasks)
    try:
        while running:
            index, delta = await waiting.get()
            if isinstance(delta, BaseException):
                raise delta
            if delta is None:
                running -= 1
            else:
                yield index, delta
    finally:
        for answer in answers:
            answer.cancel()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

"""Deltas of answers for all APIs, made from an engine's pieces: thoughts, text, calls and an end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edge.serve.served import Answer, Generation, Piece, ServedModel
from edge.serve.tools.parser import CallArguments, CallEnd, CallParser, CallStart, Part

Reason = Literal["stop", "length", "tool_calls"]
AHEAD = 64  # deltas queued for a slow client; beyond that, the engine's answer is not read


@dataclass(frozen=True)
class Begin:
    """The prompt has been computed."""

    prompt_tokens: int
    cached_tokens: int  # cached tokens of the prompt


@dataclass(frozen=True)
class Text:
    """More text. `pieces`: its tokens, if log-probabilities were requested."""

    text: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Thought:
    """More of the thought before the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """Start of a function call. CallArguments follow, then a CallEnd."""

    id: str
    name: str


@dataclass(frozen=True)
class End:
    """End of an answer: its reason and number of tokens."""

    reason: Reason
    stop_string: str | None
    generated_tokens: int
    thought_tokens: int = 0  # thought tokens among the generated tokens
    ended_by: str | None = None  # "repetition" for a repetition loop, which clients' finish reasons cannot express

    @property
    def extra(self) -> dict[str, str]:
        """Additional field for a reason that the finish reason cannot express."""
        return {"ended_by": self.ended_by} if self.ended_by else {}


Delta = Begin | Thought | Text | Call | CallArguments | CallEnd | End
Deltas = AsyncIterator[tuple[int, Delta]]
"""Deltas of several answers while they are generated, each with the answer's number."""


async def deltas_of(answer: Answer, parser: CallParser | None) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of one answer, with an End as the last. Raises EngineGone if its engine process ended."""
    begun, called, is_done = False, False, False
    tokens = thought_tokens = 0
    pieces: list[Piece] = []
    async for piece in answer:
        if not begun:
            begun = True
            yield Begin(answer.prompt_tokens, answer.cached_tokens)
        tokens += piece.token_id is not None
        parts: list[Part | Thought] = []
        if piece.thought:
            parts = [*(parser.break_off() if parser else ()), Thought(piece.thought)]
        if piece.logprob is not None and piece.thought_tokens == thought_tokens:
            pieces.append(piece)
        thought_tokens = max(thought_tokens, piece.thought_tokens)
        parts += parser.add(piece.text) if parser else [piece.text]
        if piece.finish_reason is not None and parser:
            parts += [*parser.end(), ""]  # "": the last tokens may have produced no text
        for part in parts:
            if isinstance(part, Thought):
                yield part
            elif not isinstance(part, str):
                pieces.clear()  # tokens of a call do not belong to a text
                if isinstance(part, CallEnd):
                    called = called or part.is_complete
                yield Call(f"call_{secrets.token_hex(12)}", part.name) if isinstance(part, CallStart) else part
                if is_done := called and parser is not None and parser.is_single:
                    answer.cancel()
                    break
            elif part or pieces:
                yield Text(part, tuple(pieces))
                pieces.clear()
        if is_done or piece.finish_reason is not None:
            is_cut = not is_done and piece.finish_reason in ("length", "repetition")
            # If one call is broken, the client must not execute the other calls.
            broke = parser is not None and parser.has_broken
            reason: Reason = "length" if is_cut else "tool_calls" if called and not broke else "stop"
            ended_by = "repetition" if is_cut and piece.finish_reason == "repetition" else None
            yield End(reason, piece.stop_string, tokens, thought_tokens, ended_by)
            return


async def begin(model: ServedModel, generations: Sequence[Generation]) -> list[Answer]:
    """Begin all answers, or none. Raises the errors of `ServedModel.generate`."""
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
    """Yield the deltas of all answers. If the generator is closed or an answer fails, all answers are cancelled."""
    if len(answers) == 1:  # needs no additional task
        try:
            async for only_delta in deltas_of(answers[0], parsers[0]):
                yield 0, only_delta
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

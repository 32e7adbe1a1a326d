"""What crosses between the server and an engine process: JSON values of requests, pieces and errors.

A line is a message of the server, or a list of messages of the process: all that one step brought.

From the server: {"config"}, then {"id", "do": what, "with": arguments}, such as "beat", or {"id", "do": "cancel"}.
From the process: {"say": a line for people}, {"ready": status}, {"fatal": error}; of what was asked {"id", "result"} or
{"id", "error"}, and of a generation then {"id", "begun"} once it is computed, {"id", "piece"} until one has a finish
reason, or {"id", "error"}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import devices.errors
import edge.errors
import partition.errors
import quant.errors
import transport.errors
from edge.serve.served import Generation, Piece, TokenLogprob

MOST_LINE_BYTES = 256 << 20  # a request has at most 32 MiB, as text

_TREES = (edge.errors, partition.errors, quant.errors, devices.errors, transport.errors)


def error_json(error: Exception) -> dict[str, str]:
    """An error as it crosses: the class and the message."""
    return {"kind": type(error).__name__, "message": str(error)}


def error_of(values: Mapping[str, str]) -> Exception:
    """The error that crossed; EngineError where its class is none that people can act on."""
    for tree in _TREES:
        kind = getattr(tree, values["kind"], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error: Exception = kind(values["message"])
            return error
    return edge.errors.EngineError(f"{values['kind']}: {values['message']}")


def generation_json(generation: Generation, generated: list[int]) -> dict[str, Any]:
    """A generation as it crosses, with the tokens of it that were told already."""
    return {**asdict(generation), "generated": generated}


def piece_of(values: Mapping[str, Any]) -> Piece:
    """The piece that crossed."""
    chosen = values.get("logprob")
    return Piece(
        values["text"],
        values.get("token_id"),
        values.get("finish_reason"),
        values.get("stop_string"),
        None if chosen is None else _logprob(chosen),
        tuple(map(_logprob, values.get("alternatives", ()))),
    )


def _logprob(values: list[Any]) -> TokenLogprob:
    token, piece, logprob = values
    return TokenLogprob(token, piece.encode("latin-1"), logprob)


def logprob_json(token: int, piece: bytes, logprob: float) -> list[Any]:
    """A token with its probability, as it crosses."""
    return [token, piece.decode("latin-1"), logprob]


def settle(future: asyncio.Future[Any], message: Mapping[str, Any]) -> None:
    """Give a future the result in an answer, or its error."""
    if "error" in message:
        future.set_exception(error_of(message["error"]))
    else:
        future.set_result(message["result"])

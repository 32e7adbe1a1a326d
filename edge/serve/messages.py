"""Messages between the server and an engine process: JSON of requests, pieces and errors.

A line is a message of the server, or a list of messages of the process: all those of one step.

From the server: {"config", "shares_memory": whether the process asks before it loads, "resumes": as of
`EngineConfig.deployed`}, then {"id", "do": what, "with": arguments}, such as "heartbeat", {"id", "do": "cancel"}, or
{"do": "memory", "with": arguments of MemoryShare.follow}.
From the process: {"say": a line for people}, {"claim": [least, most] bytes}, {"memory": fields of MemoryUse}, {"ready":
status}, {"fatal": error}; as an answer {"id", "result"} or {"id", "error"}; for a generation then {"id", "begun"} once
it is computed, and {"id", "piece"} until one has a finish reason, or {"id", "error"}.
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
    """Return an error as JSON: the class and the message."""
    return {"kind": type(error).__name__, "message": str(error)}


def error_of(values: Mapping[str, str]) -> Exception:
    """Return the error in a message; EngineError if its class is none that people can act on."""
    for tree in _TREES:
        kind = getattr(tree, values["kind"], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error: Exception = kind(values["message"])
            return error
    return edge.errors.EngineError(f"{values['kind']}: {values['message']}")


def generation_json(generation: Generation, generated: list[int]) -> dict[str, Any]:
    """Return a generation as JSON, with its tokens that were sent to the client already."""
    return {**asdict(generation), "generated": generated}


def piece_of(values: Mapping[str, Any]) -> Piece:
    """Return the piece in a message."""
    chosen = values.get("logprob")
    return Piece(
        values["text"],
        values.get("token_id"),
        values.get("finish_reason"),
        values.get("stop_string"),
        None if chosen is None else _logprob(chosen),
        tuple(map(_logprob, values.get("alternatives", ()))),
        values.get("thought", ""),
        values.get("thought_tokens", 0),
    )


def _logprob(values: list[Any]) -> TokenLogprob:
    token, piece, logprob = values
    return TokenLogprob(token, piece.encode("latin-1"), logprob)


def logprob_json(token: int, piece: bytes, logprob: float) -> list[Any]:
    """Return a token with its probability as JSON."""
    return [token, piece.decode("latin-1"), logprob]


def resolve(future: asyncio.Future[Any], message: Mapping[str, Any]) -> None:
    """Set the result in an answer, or its error, on a future."""
    if "error" in message:
        future.set_exception(error_of(message["error"]))
    else:
        future.set_result(message["result"])

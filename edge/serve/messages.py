"""Messages between the server and an engine process: JSON of requests, pieces and errors.

A line from the server is one message. A line from the process is a list of messages, all those of one step.

From the server: first {"config", "shares_memory": whether the process claims memory before loading, "resumes": see
`EngineConfig.deployed`}, then {"id", "do": name, "with": arguments}, {"id", "do": "cancel"}, {"do": "replicas ended"}
after replicas of a plan, or {"do": "memory", "with": arguments of MemoryShare.follow}.
From the process: {"say": line for users}, {"claim": [least, most] bytes}, {"memory": fields of MemoryUse}, {"ready":
status}, {"fatal": error}, {"plan": plan of this process, "replicas": plans of the others} if it has planned again. The
answer to a request is {"id", "result"} or {"id", "error"}. For a generation follow {"id", "begun"} once it is computed,
and {"id", "piece"} until one has a finish reason, or {"id", "error"}.
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

MOST_LINE_BYTES = 256 << 20  # a request has at most 32 MiB of text

_TREES = (edge.errors, partition.errors, quant.errors, devices.errors, transport.errors)


def error_json(error: Exception) -> dict[str, str]:
    """Return an error as JSON with its class and message."""
    return {"kind": type(error).__name__, "message": str(error)}


def error_of(values: Mapping[str, str]) -> Exception:
    """Return the error in a message. An error of an unknown class becomes an EngineError."""
    for tree in _TREES:
        kind = getattr(tree, values["kind"], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error: Exception = kind(values["message"])
            return error
    return edge.errors.EngineError(f"{values['kind']}: {values['message']}")


def generation_json(generation: Generation, generated: list[int]) -> dict[str, Any]:
    """Return a generation as JSON, with the tokens that were already sent to the client."""
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
    """Return a token with its log-probability as JSON."""
    return [token, piece.decode("latin-1"), logprob]


def resolve(future: asyncio.Future[Any], message: Mapping[str, Any]) -> None:
    """Set the result or error of an answer on a future."""
    if "error" in message:
        future.set_exception(error_of(message["error"]))
    else:
        future.set_result(message["result"])

"""Constraint on an answer, as the sampler sees it: a process that says which tokens may come next.

Grammars are code of strangers. A small one may take for ever to compile or to follow, and native code cannot be
interrupted. So none of them runs in this process (child.py): one that takes too long is ended there, with its answer.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge.constraints.process import COMPILE_S, ROOM_BYTES, TOKEN_S, process_of
from edge.errors import SamplingError
from edge.llama.llama import Model
from quant.text import bytes_text

WAIT_S = 20.0  # for an answer: the process may get little of a busy processor
_POLL_S = 0.1  # between checks whether anybody still waits
KINDS = {"grammar": "grammar", "json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
Mask = NDArray[np.bool_]  # grammar mask [n_vocab]: tokens that may come next


def never_given_up() -> bool:
    """Return False: the caller still waits."""
    return False


class Constraint:
    """Allowed next tokens of one answer. Remembers the tokens it accepted. All methods raise SamplingError if the
    constraint cannot be followed, or takes too much to follow."""

    def __init__(self, model: Model, kind: str, source: str, given_up: Callable[[], bool] = never_given_up) -> None:
        """kind: a key of KINDS. given_up: returns whether nobody waits any more; called while the constraint
        compiles."""
        self._n_vocab, self._kind = model.n_vocab, kind
        self._has_begun = False
        self._error: SamplingError | None = None
        try:
            self._socket = process_of(model).start(tokenizer=kind != "grammar")
        except OSError as error:
            raise SamplingError(f"the process that follows a {KINDS[kind]} cannot be started: {error}") from error
        self._socket.settimeout(WAIT_S)
        self._stream = self._socket.makefile("rb")
        self._end = weakref.finalize(self, _close, self._stream, self._socket)
        try:
            n_vocab = self._ask({"kind": kind, "source": source}, given_up)["n_vocab"]
            if n_vocab != self._n_vocab:
                raise SamplingError(f"{model.path} was changed since it was loaded: it has {n_vocab} tokens now")
        except BaseException:
            self.close()
            raise
        self._has_begun = True

    def allows(self, token: int) -> bool:
        """Return whether this token may come next."""
        return bool(self._ask({"allows": token})["allowed"])

    def masks(self, draft: Sequence[int]) -> list[Mask | None] | None:
        """Return masks of the allowed tokens: of the next token, and then after each of these draft tokens; None after
        one that is not allowed. Return None if masks take longer than logits on their way: llama.cpp takes 37 ms for a
        mask of 128,256 tokens of a GBNF grammar, and their logits 4 ms over 1 Gbit/s."""
        if self._kind == "grammar":
            return None
        try:
            masks: list[Mask | None] = self._ask({"masks": list(draft)})["mask"]
            return masks
        except SamplingError:
            return None  # the next request raises the error, where it ends this answer alone

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits [n_vocab] with -inf for tokens that may not come next."""
        (allowed,) = self._ask({})["mask"]
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Accept the next token without waiting. An error is raised by the next request."""
        if self._error is None:
            try:
                self._send({"accept": token})
            except TimeoutError:
                self._failed(f"was not {self._done} in {WAIT_S:g} s: the machine is busy")

    def close(self) -> None:
        """End the process that follows it."""
        self._end()

    def _ask(self, request: dict[str, Any], given_up: Callable[[], bool] = never_given_up) -> dict[str, Any]:
        """Return the answer to a request; where it has "mask", with the masks that follow it."""
        if self._error is not None:
            raise self._error
        try:
            self._send(request)
            self._wait(given_up)
            answer: dict[str, Any] = json.loads(self._line() or b"{}")
            if "mask" in answer:
                answer["mask"] = [self._mask() if is_there else None for is_there in answer["mask"]]
        except TimeoutError:
            raise self._failed(f"was not {self._done} in {WAIT_S:g} s: the machine is busy") from None
        if "error" in answer:
            self._error = SamplingError(answer["error"])
            raise self._error
        if "ended" in answer or not answer:
            raise self._failed(self._why(answer))
        return answer

    def _wait(self, given_up: Callable[[], bool]) -> None:
        """Wait until there is an answer. TimeoutError."""
        deadline, readable = time.monotonic() + WAIT_S, select.poll()
        readable.register(self._socket, select.POLLIN)
        while not readable.poll(1e3 * _POLL_S):
            if given_up():
                raise self._failed("is not needed any more: the client has gone")
            if time.monotonic() > deadline:
                raise TimeoutError

    def _mask(self) -> Mask:
        packed = self._stream.read(-(-self._n_vocab // 8))
        if len(packed) * 8 < self._n_vocab:
            raise self._failed(self._why({}))
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=self._n_vocab) > 0

    def _line(self) -> bytes:
        try:
            return self._stream.readline()
        except ConnectionResetError:  # the process ended before it had read all
            return b""

    def _send(self, request: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # reading the answer says why it ended
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def _failed(self, reason: str) -> SamplingError:
        """Close, and return the error that this and all later requests raise."""
        self.close()
        self._error = SamplingError(f"this {KINDS[self._kind]} {reason}")
        return self._error

    @property
    def _done(self) -> str:
        return "followed" if self._has_begun else "compiled"

    def _why(self, answer: dict[str, Any]) -> str:
        """Return the reason why its process ended."""
        code = answer.get("ended")
        if code == -signal.SIGPROF:
            most = f"{TOKEN_S:g} s a token" if self._has_begun else f"{COMPILE_S:g} s"
            return f"takes more than {most} of processor time to be {self._done}; simplify it"
        if code is None:
            return f"cannot be {self._done}: the process that does so was ended"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"cannot be {self._done} within {bytes_text(ROOM_BYTES)} of memory: its process {how}; simplify it"


def _close(stream: BinaryIO, its_socket: socket.socket) -> None:
    stream.close()
    its_socket.close()

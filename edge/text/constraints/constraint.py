"""Constraint of an answer, as the sampler uses it: a handle of a process that computes the allowed next tokens.

Grammars come from untrusted clients. A small grammar may take forever to compile or to follow, and native code cannot
be interrupted. Therefore a separate process (child.py) compiles and follows them. A process that takes too long is
killed, and its answer fails.
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

from edge.errors import ConstraintUnavailable, SamplingError
from edge.llama.llama import Model
from edge.text.constraints.process import COMPILE_S, ROOM_BYTES, TOKEN_S, process_of
from quant.text import bytes_text

WAIT_S = 20.0  # wait for an answer; the process may get little of a busy processor
_POLL_S = 0.1  # interval of checks whether the client is still connected
KINDS = {"grammar": "grammar", "json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
Mask = NDArray[np.bool_]  # mask of allowed next tokens [n_vocab]


def never_given_up() -> bool:
    """Return False: the client never disconnects."""
    return False


class Constraint:
    """Allowed next tokens of one answer. The constraint remembers the tokens that it accepted.

    All methods raise SamplingError if the constraint cannot be followed or exceeds a limit.
    """

    def __init__(self, model: Model, kind: str, source: str, given_up: Callable[[], bool] = never_given_up) -> None:
        """kind: a key of KINDS. given_up: returns True if the client has disconnected; called during compilation."""
        self._n_vocab, self._kind = model.n_vocab, kind
        self._has_begun = False
        self._error: SamplingError | None = None
        try:
            self._socket = process_of(model).start(tokenizer=kind != "grammar")
        except OSError as error:
            raise ConstraintUnavailable(
                f"the process that follows a {KINDS[kind]} cannot be started: {error}"
            ) from error
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
        """Return True if this token may come next."""
        return bool(self._ask({"allows": token})["allowed"])

    def masks(self, draft: Sequence[int]) -> list[Mask | None] | None:
        """Return masks of allowed tokens: for the next token, and then after each of these draft tokens.

        The mask after a token that is not allowed is None. Return None instead of a list if computing masks would take
        longer than sending logits. For a GBNF grammar llama.cpp takes 37 ms for a mask of 128,256 tokens; sending their
        logits takes 4 ms over 1 Gbit/s.
        """
        if self._kind == "grammar":
            return None
        try:
            masks: list[Mask | None] = self._ask({"masks": list(draft)})["mask"]
            return masks
        except SamplingError:
            return None  # the next request raises the error, and only this answer fails

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits [n_vocab] with -inf for tokens that are not allowed."""
        (allowed,) = self._ask({})["mask"]
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Accept the next token without waiting. The next request raises the error, if there is one."""
        if self._error is None:
            try:
                self._send({"accept": token})
            except TimeoutError:
                self._failed(f"was not {self._done} in {WAIT_S:g} s: the machine is busy", ConstraintUnavailable)

    def close(self) -> None:
        """End the process that follows this constraint."""
        self._end()

    def _ask(self, request: dict[str, Any], given_up: Callable[[], bool] = never_given_up) -> dict[str, Any]:
        """Return the answer to a request. "mask" in the answer is replaced by the masks that follow it."""
        if self._error is not None:
            raise self._error
        try:
            self._send(request)
            self._wait(given_up)
            answer: dict[str, Any] = json.loads(self._line() or b"{}")
            if "mask" in answer:
                answer["mask"] = [self._mask() if is_there else None for is_there in answer["mask"]]
        except TimeoutError:
            reason = f"was not {self._done} in {WAIT_S:g} s: the machine is busy"
            raise self._failed(reason, ConstraintUnavailable) from None
        if "error" in answer:
            self._error = SamplingError(answer["error"])
            raise self._error
        if "ended" in answer or not answer:
            raise self._failed(self._why(answer))
        return answer

    def _wait(self, given_up: Callable[[], bool]) -> None:
        """Wait until an answer arrives. Raises TimeoutError."""
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
        except ConnectionResetError:  # the process ended before it had read the whole request
            return b""

    def _send(self, request: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # reading the answer reports why the process ended
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def _failed(self, reason: str, kind: type[SamplingError] = SamplingError) -> SamplingError:
        """Close, and return the error that this and all later requests raise."""
        self.close()
        self._error = kind(f"this {KINDS[self._kind]} {reason}")
        return self._error

    @property
    def _done(self) -> str:
        return "followed" if self._has_begun else "compiled"

    def _why(self, answer: dict[str, Any]) -> str:
        """Return the reason why the process ended."""
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

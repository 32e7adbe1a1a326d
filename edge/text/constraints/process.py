"""Handle of a model's constraint process: starts the process when it is first needed and restarts it if it ended."""

from __future__ import annotations

import socket
import subprocess
import threading
import weakref

from devices.processes.interpreter import module_command
from edge.llama.llama import Model

COMPILE_S = 1.0  # processor time to compile; a schema of 100 properties takes 0.02 s
TOKEN_S = 0.05  # processor time per token of an answer, on average
MOST_AT_ONCE_S = 0.5  # maximum processor time of a single token, if earlier tokens took less than the average
ROOM_BYTES = 192 << 20  # memory in addition to the vocabulary
WITH_TOKENIZER, WITHOUT = b"t", b"-"

_processes: weakref.WeakKeyDictionary[Model, ConstraintProcess] = weakref.WeakKeyDictionary()
_processes_lock = threading.Lock()


def process_of(model: Model) -> ConstraintProcess:
    """Return the constraint process of a model. Closing the model ends it."""
    with _processes_lock:
        if model not in _processes:
            _processes[model] = process = ConstraintProcess(model.path)
            model.at_close.callback(process.close)
        return _processes[model]


class ConstraintProcess:
    """Process that forks a child for each constraint. Any thread may use it."""

    def __init__(self, path: str) -> None:
        """path: file of the model whose vocabulary the constraints use."""
        self._path, self._lock = path, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self, *, tokenizer: bool) -> socket.socket:
        """Return a socket to a new fork, which ends when this socket is closed.

        tokenizer: True if the fork needs the tokenizer of llguidance. Raises OSError if the fork cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            kind = WITH_TOKENIZER if tokenizer else WITHOUT
            try:
                socket.send_fds(self._running(), [kind], [theirs.fileno()])
            except BrokenPipeError:  # the process was killed after its last use
                socket.send_fds(self._running(), [kind], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the process and its forks."""
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command("edge.text.constraints.child"),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must end the parent alone
            )
        self._control.sendall(self._path.encode() + b"\n")
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

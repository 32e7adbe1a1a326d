"""Daemon's handle of a session's engine process: start it, exchange messages, report its death, end it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from devices.files import removed_at_end
from devices.processes.forking import ForkedProcess, ForkServer
from devices.processes.interpreter import module_command
from edge import log
from edge.weights.elastic.signals import memory_signals_blocked
from edge.worker.limits import ResourceLimits
from transport import edge_pb2 as pb
from transport.errors import TransportError
from transport.frame import Kind
from transport.link import IDLE_S, Deadlines
from transport.tcp_link import TcpLink

EXIT_S = 2.0  # time for the process to end by itself before it is killed
KILL_S = 10.0  # time for a killed process to end; a process that waits for a disk or driver may not end
_LONGEST_LINE = 4 << 10  # bytes; a longer line is split
_LAST_LINES = 5  # number of output lines in the report of its death


class RankProcess:
    """Running engine process."""

    def __init__(
        self,
        host: str,
        credentials: Path | None,
        limits: ResourceLimits,
        session: str,
        fork_server: ForkServer | None = None,
        shares_memory: bool = False,
    ) -> None:
        """Start the process.

        host: address of its TCP links.
        credentials: folder of credentials, if links are encrypted.
        fork_server: forks the process instead of starting a new interpreter.
        shares_memory: the process requests its memory from the daemon and may give memory back.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="edge-"))
        self._registered = ExitStack()  # an immediate exit by a signal also removes the folder
        self._registered.enter_context(removed_at_end(self.folder))
        arguments = ["--host", host, "--folder", str(self.folder), "--limits", limits.to_text()]
        if shares_memory:
            arguments.insert(0, "--shares-memory")
        if credentials is not None:
            arguments += ["--credentials", str(credentials)]
        with ExitStack() as undo:  # cleanup if the process does not start
            undo.callback(self._remove_folder)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            undo.callback(theirs.close)
            output, their_output = os.pipe()
            undo.callback(os.close, output)
            with os.fdopen(their_output, "wb"), memory_signals_blocked():
                self._process = _start(arguments, [theirs.fileno(), their_output], fork_server)
            theirs.close()
            undo.pop_all()
        self.pid = self._process.pid
        self._session = session
        self._socket = ours
        self._link = TcpLink(ours, "the engine process", Deadlines(), poll_s=0)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stopping = False
        self._lock = threading.Lock()
        self._listener = threading.Thread(
            target=self._listen, args=(os.fdopen(output, "rb"),), daemon=True, name="child's words"
        )
        self._listener.start()

    @property
    def door(self) -> Path:
        """Path of the Unix socket on which the process accepts links relayed by the daemon."""
        return self.folder / "door"

    def send(self, command: pb.Command) -> None:
        """Send a command. Raises LinkClosed if the process has ended."""
        self._link.send(command.SerializeToString(), Kind.CONTROL)

    def receive(self) -> pb.Event | None:
        """Return the next event, or None if the process has ended."""
        try:
            event: pb.Event = pb.Event.FromString(bytes(self._link.receive(IDLE_S).payload))
            return event
        except TransportError:
            return None

    def died(self) -> pb.Event | None:
        """Wait until the process ends. Return an event with the reason, or None if it was asked to end."""
        self._end()
        if self._stopping:
            return None
        return pb.Event(died=pb.Died(reason=self._reason()))

    def ask_to_end(self) -> None:
        """Ask the process to end, without waiting. The thread that receives its events waits for the end."""
        self._stopping = True
        with suppress(OSError):  # already closed
            # The receiving thread closes the socket, because its number could be reused.
            self._socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End the process and wait for its end."""
        self.ask_to_end()
        self._end()

    def _end(self) -> None:
        with self._lock:
            try:
                self._process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # native code reacts to nothing else
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(KILL_S)
            self._listener.join(EXIT_S)
            self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._registered.close()

    def _reason(self) -> str:
        code = self._process.poll()
        if code is None:
            return f"the engine process was killed, and did not end within {KILL_S:g} s"
        how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory is the usual cause)" if code == -signal.SIGKILL else ""
        lines = f": {' | '.join(self._last_lines)}" if self._last_lines else ""
        return f"the engine process {how}{hint}{lines}"

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").strip()
                if text:
                    self._last_lines.append(text[:500])
                    log.info("engine-said", session=self._session, line=text[:500])


def _start(
    arguments: list[str], descriptors: list[int], fork_server: ForkServer | None
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start the process. descriptors: file descriptors of its commands and of its output."""
    if fork_server is not None:
        return fork_server.start(arguments, descriptors)
    control, output = descriptors
    return subprocess.Popen(
        module_command("edge.worker.rank", *arguments, "--control", str(control)),
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        stderr=output,
        start_new_session=True,  # Ctrl-C must end only the parent
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

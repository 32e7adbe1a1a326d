"""The engine process of a session, as the daemon sees it: start it, talk to it, learn how it died, end it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

from devices.processes.forking import ForkedProcess, ForkServer
from devices.processes.interpreter import module_command
from edge import log
from edge.worker.limits import ResourceLimits
from transport import edge_pb2 as pb
from transport.errors import TransportError
from transport.frame import Kind
from transport.link import Deadlines
from transport.tcp_link import TcpLink

EXIT_S = 2.0  # for the process to end by itself before it is killed
_IDLE_S = 7 * 86400.0  # for its next event: as long as a session may lie idle
_LONGEST_LINE = 4 << 10  # what is longer is shown as several
_LAST_LINES = 5  # of what it said, to tell how it died


class Child:
    """A running engine process."""

    def __init__(
        self,
        host: str,
        credentials: Path | None,
        lent: ResourceLimits,
        session: str,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Starts it. host: where it takes TCP links; credentials: the folder, where links are encrypted; fork_server:
        who starts it, in place of an interpreter of its own."""
        self.folder = Path(tempfile.mkdtemp(prefix="edge-"))
        ours, theirs = socket.socketpair()
        arguments = ["--host", host, "--folder", str(self.folder), *lent.options()]
        if credentials is not None:
            arguments += ["--credentials", str(credentials)]
        says, theirs_to_say = os.pipe()
        try:
            with os.fdopen(theirs_to_say, "wb"):
                self._process = _start(arguments, [theirs.fileno(), theirs_to_say], fork_server)
        except BaseException:
            ours.close()
            os.close(says)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._session = session
        self._socket = ours
        self._link = TcpLink(ours, "the engine process", Deadlines(), poll_s=0)
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._stopping = False
        self._lock = threading.Lock()
        self._listener = threading.Thread(
            target=self._listen, args=(os.fdopen(says, "rb"),), daemon=True, name="child's words"
        )
        self._listener.start()

    @property
    def door(self) -> Path:
        """The Unix socket where it takes links that come through the daemon."""
        return self.folder / "door"

    def send(self, command: pb.Command) -> None:
        """Hand a command over; LinkClosed where the process is gone."""
        self._link.send(command.SerializeToString(), Kind.CONTROL)

    def receive(self) -> pb.Event | None:
        """Its next event; None once it is gone."""
        try:
            event: pb.Event = pb.Event.FromString(bytes(self._link.receive(_IDLE_S).payload))
            return event
        except TransportError:
            return None

    def died(self) -> pb.Event | None:
        """Wait for its end: the event that tells how, or None where it was asked to end."""
        self._end()
        if self._stopping:
            return None
        return pb.Event(died=pb.Died(reason=self._reason()))

    def let_go(self) -> None:
        """Ask it to end, and do not wait: whoever waits for its next event sees to the end."""
        self._stopping = True
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # who receives closes it: its number may soon be another's

    def stop(self) -> None:
        """End it, and do not return before it has ended."""
        self.let_go()
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._process_end()

    def _process_end(self) -> None:
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # in native code it hears nothing else
            self._process.wait()
        self._listener.join(EXIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _reason(self) -> str:
        code = self._process.wait()
        how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory is the usual cause)" if code == -signal.SIGKILL else ""
        words = f": {' | '.join(self._said)}" if self._said else ""
        return f"the engine process {how}{hint}{words}"

    def _listen(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").strip()
                if text:
                    self._said.append(text[:500])
                    log.info("engine-said", session=self._session, line=text[:500])


def _start(
    arguments: list[str], descriptors: list[int], fork_server: ForkServer | None
) -> ForkedProcess | subprocess.Popen[bytes]:
    """descriptors: for its commands, and for what it says."""
    if fork_server is not None:
        return fork_server.start(arguments, descriptors)
    control, says = descriptors
    return subprocess.Popen(
        module_command("edge.worker.rank", *arguments, "--control", str(control)),
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        stderr=says,
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

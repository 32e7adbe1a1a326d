"""Handle of the process that renders chat templates: starts it early, sends requests and restarts it if it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import weakref
from typing import Any

from devices.processes.interpreter import module_command
from edge.errors import TemplateError, TemplateStopped

CPU_S = 0.8  # processor time for a request; a thousand messages take 0.02 s
WAIT_S = 20.0  # wait for an answer; the process may get little of a busy processor
_CHUNK = 1 << 16


class TemplateProcess:
    """A template process, which handles one request at a time.

    The process ends when this object is closed or garbage-collected.
    """

    def __init__(self) -> None:
        """Start the process without waiting. It becomes ready while the model loads."""
        self._start()

    def ask(self, request: dict[str, Any], wait_s: float = WAIT_S) -> str:
        """Return the rendered text.

        Raises TemplateError if rendering fails, and TemplateStopped if it exceeds a limit. The next request then gets a
        new process.
        """
        if self._process.poll() is not None:
            self._replace()
        try:
            answer = self._exchange(json.dumps(request).encode() + b"\n", wait_s)
        except TimeoutError:
            self._replace()
            raise TemplateStopped(
                f"chat template: the process that renders it gave no answer in {wait_s:g} s"
            ) from None
        except OSError:  # the process ended while the request was sent
            answer = b""
        except BaseException:
            # This answer was not read, and the next request would receive it.
            self._replace()
            raise
        if not answer:
            raise TemplateStopped(self._reason())
        answer_fields: dict[str, str] = json.loads(answer.decode(errors="surrogatepass"))
        if "stopped" in answer_fields:
            raise TemplateStopped(answer_fields["stopped"])
        if "error" in answer_fields:
            raise TemplateError(answer_fields["error"])
        return answer_fields["text"]

    def close(self) -> None:
        """End the process."""
        self._end()

    def _exchange(self, line: bytes, wait_s: float) -> bytes:
        """Send a line and return the line that answers it, or b"" if the process ended."""
        deadline = time.monotonic() + wait_s
        self._socket.settimeout(wait_s)
        self._socket.sendall(line)
        parts: list[bytes] = []
        while not (parts and parts[-1].endswith(b"\n")):
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            parts.append(self._socket.recv(_CHUNK))
            if not parts[-1]:
                return b""
        return b"".join(parts)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command("edge.text.templates.child"),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must end the parent alone
            )
        self._end = weakref.finalize(self, _end, self._process, self._socket)

    def _replace(self) -> None:
        self._end()
        self._start()

    def _reason(self) -> str:
        self._end()
        code = self._process.wait()  # it may still be ending, although its socket is closed; another thread may end it
        if code == -signal.SIGPROF:
            return f"chat template does not end: it took more than {CPU_S:g} s of processor time"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"chat template cannot be rendered: its process {how}"


def _end(process: subprocess.Popen[bytes], its_socket: socket.socket) -> None:
    its_socket.close()
    process.kill()
    process.wait()

"""Handle of the process that renders chat templates: starts it early, sends requests, and replaces it when it ends."""

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

CPU_S = 0.8  # of processor time, for a request; one with a thousand messages takes 0.02 s
WAIT_S = 20.0  # for an answer, where the process gets little of a processor
_CHUNK = 1 << 16


class TemplateProcess:
    """A template process, which takes one request at a time and ends when this object is closed or collected."""

    def __init__(self) -> None:
        """Start the process without waiting: it is ready before a model is loaded."""
        self._start()

    def ask(self, request: dict[str, Any], wait_s: float = WAIT_S) -> str:
        """Return the text of the answer. TemplateError if it fails; TemplateStopped if it exceeds a limit: the next
        request then has a new process."""
        if self._process.poll() is not None:
            self._replace()
        try:
            answer = self._exchange(json.dumps(request).encode() + b"\n", wait_s)
        except TimeoutError:
            self._replace()
            raise TemplateStopped(
                f"chat template: the process that renders it gave no answer in {wait_s:g} s"
            ) from None
        except OSError:  # it ended while the request was sent
            answer = b""
        except BaseException:
            self._replace()  # this answer was not read: the next request would take it for its own
            raise
        if not answer:
            raise TemplateStopped(self._reason())
        answer_fields: dict[str, str] = json.loads(answer.decode(errors="surrogatepass"))
        if "error" in answer_fields:
            raise TemplateError(answer_fields["error"])
        return answer_fields["text"]

    def close(self) -> None:
        """End the process."""
        self._end()

    def _exchange(self, line: bytes, wait_s: float) -> bytes:
        """Return the line that answers `line`; empty if the process ended."""
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
                module_command("edge.templates.child"),
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
        self._end()  # it may not have ended yet where only its socket did
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"chat template does not end: it took more than {CPU_S:g} s of processor time"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"chat template cannot be rendered: its process {how}"


def _end(process: subprocess.Popen[bytes], its_socket: socket.socket) -> None:
    its_socket.close()
    process.kill()
    process.wait()

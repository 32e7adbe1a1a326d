"""Connection of an engine process to the page that computes for it, through the bridge's Unix socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from edge.browser.frames import Frame, Splitter, pack
from edge.errors import EngineError
from transport.errors import ProtocolError

DOOR = "door"  # name of the Unix socket in the page's folder
PROFILE = "profile.json"  # name of the file with the page's profile, in the same folder
CHUNK_BYTES = 1 << 20
_CONNECT_S = 5.0
ANSWER_S = 600.0  # longest operation: a prompt on a slow phone. The bridge notices a lost page much earlier
_CHUNKS_AHEAD = 4  # chunks on their way
_READ_BYTES = 1 << 18


class FileIncomplete(EngineError):
    """The page lacks chunks of a file, because it received another file or restarted its compute worker."""


class PageConnection:
    """Operations of a page. One thread calls them; `stop` and `resume` may be called by others."""

    def __init__(self, folder: Path) -> None:
        """folder: folder of the page. Raises EngineError if the page is closed."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_CONNECT_S)
        try:
            self._socket.connect(str(folder / DOOR))
        except OSError as error:
            self._socket.close()
            raise EngineError(f"the browser's page is closed: {error.strerror or error}; open its link again") from None
        self._socket.settimeout(ANSWER_S)
        self._sending = threading.Lock()
        self._splitter, self._frames = Splitter(), list[Frame]()
        self._number = 0
        self.on_progress: Callable[[float], None] | None = None  # receives the loaded fraction

    def call(self, op: str, payload: bytes | memoryview = b"", **fields: Any) -> Frame:
        """Carry out an operation. Return the header and the payload of its answer.

        Raises EngineError if the page refuses it, or if the page was lost.
        """
        return self._answer(self._ask(op, payload, **fields))

    def load_file(self, path: Path, op: str, **fields: Any) -> Frame:
        """Send the parts of a file that the page lacks, and load the file with the operation `op`.

        The page forgets parts if another session ends meanwhile. They are sent again while fewer are missing each time.

        Return the answer. Raises EngineError as `call` does.
        """
        whole, digests = sha256(), list[str]()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                whole.update(chunk)
                digests.append(sha256(chunk).hexdigest())
            name, size, least = whole.hexdigest(), file.tell(), len(digests) + 1
            while True:
                header, _ = self.call("file", name=name, size=size, chunk_bytes=CHUNK_BYTES, chunks=digests)
                missing = header.get("missing")
                if not isinstance(missing, list) or not all(index in range(len(digests)) for index in missing):
                    raise EngineError("the browser's page answers with chunks that the file does not have")
                try:
                    self._send_chunks(file, name, missing)
                    return self.call(op, file=name, **fields)
                except FileIncomplete:
                    if len(missing) >= least:
                        raise
                    least = len(missing)

    def _send_chunks(self, file: BinaryIO, name: str, missing: list[int]) -> None:
        waiting = list[int]()
        for number, index in enumerate(missing):
            file.seek(index * CHUNK_BYTES)
            waiting.append(self._ask("chunk", file.read(CHUNK_BYTES), name=name, index=index))
            if len(waiting) == _CHUNKS_AHEAD:
                self._answer(waiting.pop(0))
            if self.on_progress is not None:
                self.on_progress(number / len(missing))
        for number in waiting:
            self._answer(number)

    def stop(self) -> None:
        """Make the current decode end, and later ones fail."""
        self._tell("stop")

    def resume(self) -> None:
        """Allow decodes again after `stop`."""
        self._tell("resume")

    def show(self, model: str, layers: str) -> None:
        """Show the computed layers to the page's user."""
        self._tell("show", model=model, layers=layers)

    def close(self) -> None:
        """End the connection. The page frees the memory of its slice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _tell(self, op: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the page was lost, which the next operation reports
            self._send(pack({"op": op, **fields}))

    def _ask(self, op: str, payload: bytes | memoryview = b"", **fields: Any) -> int:
        """Send an operation, and return the number of its answer."""
        self._number += 1
        try:
            self._send(pack({"id": self._number, "op": op, **fields}, payload))
        except OSError as error:
            raise _lost(error) from error
        return self._number

    def _send(self, data: bytes) -> None:
        with self._sending:
            self._socket.sendall(data)

    def _answer(self, number: int) -> Frame:
        while True:
            header, payload = self._next()
            if header.get("event") == "loading":
                fraction = header.get("fraction")
                if self.on_progress is not None and isinstance(fraction, (int, float)):
                    self.on_progress(min(1.0, max(0.0, fraction)))
            elif header.get("id") == number:
                if (error := header.get("error")) is not None:
                    kind = FileIncomplete if header.get("incomplete") is True else EngineError
                    raise kind(f"the browser's page: {error!s:.500}")
                return header, payload

    def _next(self) -> Frame:
        try:
            while not self._frames:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise EngineError("the browser's page was closed or lost")
                self._frames += self._splitter.add(data)
        except ProtocolError as error:
            raise EngineError(str(error)) from error
        except OSError as error:
            raise _lost(error) from error
        return self._frames.pop(0)


def _lost(error: OSError) -> EngineError:
    if isinstance(error, TimeoutError):
        return EngineError(f"the browser's page gave no answer for {ANSWER_S:g} s")
    return EngineError(f"the browser's page was lost: {error.strerror or error}")

"""Two ends of a link inside one process."""

from __future__ import annotations

import threading
from collections import deque

from transport.frame import Frame, parse_frame
from transport.link import DEFAULTS, Deadlines, Link

_ROOM = 64  # frames that may wait; a sender then waits for the receiver


class MemoryLink(Link):
    """One end. Made by `pair`."""

    kind = "memory"

    def __init__(self, peer: str, incoming: _Pipe, outgoing: _Pipe, deadlines: Deadlines) -> None:
        super().__init__(peer, deadlines)
        self._incoming = incoming
        self._outgoing = outgoing

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        pipe = self._outgoing
        with pipe.changed:
            if not pipe.changed.wait_for(lambda: len(pipe.frames) < _ROOM or pipe.ended, timeout_s):
                raise self._send_timeout()
            if pipe.ended:
                raise self._gone()
            pipe.frames.append(header + payload)
            pipe.changed.notify_all()

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        pipe = self._incoming
        with pipe.changed:
            if not pipe.changed.wait_for(lambda: pipe.frames or pipe.ended, timeout_s):
                raise self._timeout(timeout_s)
            if not pipe.frames:
                raise self._gone()
            data = pipe.frames.popleft()
            pipe.changed.notify_all()
        frame = self._received.parsed(parse_frame, memoryview(data))
        self._received.limit(frame.kind, len(frame.payload), max_bytes)
        return frame

    def _end(self) -> None:
        for pipe in (self._incoming, self._outgoing):
            with pipe.changed:
                pipe.ended = True
                pipe.changed.notify_all()


class _Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.ended = False  # by either end; what was sent before may still be read
        self.changed = threading.Condition()


def pair(names: tuple[str, str] = ("a", "b"), deadlines: Deadlines = DEFAULTS) -> tuple[MemoryLink, MemoryLink]:
    """Two ends: what one sends the other receives. `names` are the ends' own."""
    there, back = _Pipe(), _Pipe()
    return MemoryLink(names[1], back, there, deadlines), MemoryLink(names[0], there, back, deadlines)

"""What a rank says of its end, where a link to it broke."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from edge.blame import is_cause, telling
from edge.engine_session import EngineSession
from transport.errors import LinkTimeout, TransportError
from transport.link import Link

WORD_S = 1.5  # for a rank to say why it made others wait for too long
# For a rank to say why its link broke: its daemon first waits for a process that is about to end and for what it
# said last (`edge.child.EXIT_S` each), and that a daemon's host has vanished is known after five seconds.
LAST_WORD_S = 6.0
_LOOK_S = 0.02


def last_words(error: Exception, links: Iterable[Link] | None, sessions: Sequence[EngineSession]) -> Exception:
    """What one of the `sessions` says, where a link broke and it says so in a moment; else the error as it is.

    A process that died is the cause; ranks that lost their links to it only follow. links: of this process; None where
    they were never made.
    """
    broken = links is None or any(link.broken for link in links)
    if not (broken and isinstance(error, TransportError)):
        return error
    deadline = time.monotonic() + (WORD_S if isinstance(error, LinkTimeout) else LAST_WORD_S)
    while True:
        words = [word for session in sessions if (word := session.word()) is not None]
        if any(map(is_cause, words)) or len(words) == len(sessions) or time.monotonic() > deadline:
            return telling(words, error)
        time.sleep(_LOOK_S)

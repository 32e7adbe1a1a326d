"""Bridge of a server: invites one browser, and serves pages until the server closes its input."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from devices.names import join_address
from edge import log
from edge.bridge.inviting import Link, serve_pages
from edge.errors import EdgeError


def main() -> int:
    """Serve until standard input ends. Its first line has the options as JSON; one line with the link is the answer."""
    values = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_server, daemon=True, name="server").start()
    log.set_up(events=False)

    def show(link: Link | None, _names: list[str], serves: bool) -> None:
        _answer(link=link.url if link else None, is_secure=link is not None and link.is_secure, serves=serves)

    try:
        serve_pages(values["name"], values["lifetime_s"], join_address(values["host"], values["port"]), show)
    except (EdgeError, OSError) as error:
        _answer(error=str(error), is_address=isinstance(error, OSError))
        return 1
    except KeyboardInterrupt:  # uvicorn raises its signal again once it has ended
        return 0
    return 0


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _end_with_the_server() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())

"""Worker daemon of one page. The bridge starts it when the page is there, and ends it when the page was lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from devices.files import usable
from edge import log
from edge.worker.daemon import DaemonOptions, serve
from edge.worker.limits import WorkerOptions


def main() -> None:
    """Serve until standard input ends. Its first line has the options as JSON."""
    values = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_bridge, daemon=True, name="bridge").start()
    log.set_up(events=False)
    secure = values["credentials"] is not None
    serve(
        DaemonOptions(
            worker=WorkerOptions(
                name=values["name"],
                host=values["host"],
                threads=values["threads"],
                memory_limit_bytes=None,
                models=None,
                credentials=Path(values["credentials"]) if secure else None,
                prefix_bytes=0,  # reading the KV cache from a page takes longer than computing it again
            ),
            port=values["port"],
            insecure=False,
            announce=None,
            cache=usable(Path(values["cache"])),
            cache_bytes=values["cache_bytes"],
            state=Path(values["cache"]),
        )
    )


def _end_with_the_bridge() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)  # ends all sessions at once


if __name__ == "__main__":
    main()

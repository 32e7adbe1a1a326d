"""The process in which llama.cpp quantizes: a job as JSON on standard input, events as JSON on standard output.

It ends, and removes what it has written, when its standard input is closed: also where its parent was killed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from edge.errors import EdgeError

_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+) +- \[")
_TYPE = re.compile(r"size = .* MiB \((\w+)\)$")
_FALLS_BACK = re.compile(r"falling back to +(\w+)")
_NOT_WHOLE = re.compile(r"warning: (\S+) +- ncols +(\d+) not divisible by +(\d+) \(required for type +(\w+)\)")


def main() -> int:
    """Do one job; 0, or 1 after an event that says why not."""
    job = json.loads(sys.stdin.buffer.readline())
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what native code prints is no event
    complete = threading.Event()
    threading.Thread(target=_until_closed, args=(job["target"], complete), daemon=True).start()

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    try:
        _run(job, tell)
    except (EdgeError, OSError) as error:
        tell(error=str(error), kind=type(error).__name__)
        return 1
    complete.set()
    tell(complete=True)
    return 0


def _run(job: dict[str, Any], tell: Callable[..., None]) -> None:
    from edge.llama.quantizer import quantize_model

    importance = {}
    if job["imatrix"]:
        from quant.gguf.file import GgufFile
        from quant.gguf.imatrix import read_imatrix

        importance = read_imatrix(job["imatrix"]).weights_of(GgufFile.open(job["source"]))
    for mix in job["mixes"]:
        quantize_model(
            job["source"],
            job["target"],
            mix,
            threads=job["threads"],
            types=job["types"],
            importance=importance,
            dry=job["dry"],
            on_log=_Lines(tell),
        )
        tell(made=mix)


class _Lines:
    """Turns what llama.cpp says into events."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._name = ""

    def __call__(self, line: str) -> None:
        if found := _TENSOR.match(line):
            self._name = found[3]
            self._tell(tensor=found[3], number=int(found[1]), of=int(found[2]))
        elif found := _TYPE.match(line):
            self._tell(tensor=self._name, type=found[1].lower())
        elif found := _NOT_WHOLE.match(line):
            self._tell(misfit=found[1], columns=int(found[2]), block=int(found[3]), wanted=found[4].lower())
        elif found := _FALLS_BACK.search(line):
            self._tell(instead=found[1].lower())


def _until_closed(target: str, complete: threading.Event) -> None:
    """Wait for the end of standard input, and then end the process, whatever it does."""
    while os.read(sys.stdin.fileno(), 1 << 10):  # a buffered reader would hold a lock while the interpreter ends
        pass
    if not complete.is_set():
        with suppress(OSError):
            os.unlink(target)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""Process in which llama.cpp quantizes: a job as JSON on standard input, events as JSON on standard output.

When its standard input is closed, the process removes its output and ends. This also happens if its parent was killed.
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
    """Do one job. Return 0, or 1 after an event with the reason for the failure."""
    job = json.loads(sys.stdin.buffer.readline())
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # native code must not print between events
    complete = threading.Event()
    threading.Thread(target=_until_closed, args=(job["target"], complete), daemon=True).start()

    def emit(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    try:
        _run(job, emit)
    except (EdgeError, OSError) as error:
        emit(error=str(error), kind=type(error).__name__)
        return 1
    complete.set()
    emit(complete=True)
    return 0


def _run(job: dict[str, Any], emit: Callable[..., None]) -> None:
    from edge.llama.quantizer import quantize_model

    importance = {}
    if job["imatrix"]:
        from quant.gguf.file import GgufFile
        from quant.gguf.imatrix import read_imatrix

        importance = read_imatrix(job["imatrix"]).weights_of(GgufFile.open(job["sources"][0][0]))
    for source, mix in job["sources"]:
        quantize_model(
            source,
            job["target"],
            mix,
            threads=job["threads"],
            types=job["types"],
            importance=importance,
            dry=job["dry"],
            on_log=_Lines(emit),
        )
        emit(quantized=mix)


class _Lines:
    """Turns llama.cpp's log lines into events."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._name = ""

    def __call__(self, line: str) -> None:
        if match := _TENSOR.match(line):
            self._name = match[3]
            self._emit(tensor=match[3], number=int(match[1]), total=int(match[2]))
        elif match := _TYPE.match(line):
            self._emit(tensor=self._name, type=match[1].lower())
        elif match := _NOT_WHOLE.match(line):
            self._emit(misfit=match[1], columns=int(match[2]), block=int(match[3]), requested=match[4].lower())
        elif match := _FALLS_BACK.search(line):
            self._emit(instead=match[1].lower())


def _until_closed(target: str, complete: threading.Event) -> None:
    """Wait for the end of standard input, then end the process immediately."""
    while os.read(sys.stdin.fileno(), 1 << 10):  # a buffered reader would hold a lock during interpreter shutdown
        pass
    if not complete.is_set():
        with suppress(OSError):
            os.unlink(target)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""ONNX Runtime, quiet: sessions on the CPU, and its errors in plain words."""

from __future__ import annotations

import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from edge.errors import EdgeError, EngineError, NotEnoughMemory
from quant.text import first_line

# Error codes, the temporary file, and the function of ONNX Runtime that noticed.
_OWN_WORDS = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|\S*onnxruntime_src/\S+:\d+ .*?\) (\[.*?\] )?"
)
_NOTHING, _WARNINGS = 4, 2  # severities of ONNX Runtime's log


def runtime() -> Any:
    """Return the module onnxruntime. Import it only here: it reports its use to its maker unless that is switched off.

    A value of ORT_DISABLE_TELEMETRY that is already set stays.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def session(path: Path, threads: int, name: str) -> Any:
    """Return an InferenceSession of the model in `path` with this many threads. EngineError, which names the model
    `name`."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _NOTHING
    with refusals(f"load {name}", path.parent):
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def refusals(what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn errors of ONNX Runtime and its tools inside the block into EngineError: "ONNX Runtime cannot `what`".

    NotEnoughMemory if memory ran out. folder: a temporary one, which is removed from messages.
    """
    try:
        yield
    except (OSError, EdgeError):
        raise
    except MemoryError as exc:
        raise NotEnoughMemory(f"memory ran out; a device with more of it can {what}") from exc
    except Exception as exc:  # they share no class
        said = _OWN_WORDS.sub("", first_line(exc)) or type(exc).__name__
        raise EngineError(f"ONNX Runtime cannot {what}: {said.replace(f'{folder}/', '')}") from exc


@contextmanager
def quiet_tools(folder: Path) -> Iterator[None]:
    """Silence ONNX Runtime's tools inside the block: they print, log and warn nothing, and keep temporary files in
    `folder`.

    This holds for the whole process: other threads are silent, too.
    """
    ort = runtime()
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    before = tempfile.tempdir
    logging.disable(logging.CRITICAL)
    ort.set_default_logger_severity(_NOTHING)
    tempfile.tempdir = str(folder)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        tempfile.tempdir = before
        ort.set_default_logger_severity(_WARNINGS)
        logging.disable(disabled)
        root.handlers[:] = handlers  # one of the tools sets up logging as it is imported
        root.setLevel(level)

"""ONNX Runtime without console output: sessions on the best execution provider, and its errors in plain words."""

from __future__ import annotations

import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from devices.probe import cpu_quota
from edge.errors import EdgeError, EngineError, NotEnoughMemory
from quant.text import first_line

# Parts removed from messages: error codes, the temporary file, and the ONNX Runtime function that raised the error.
_OWN_WORDS = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|\S*onnxruntime_src/\S+:\d+ .*?\) (\[.*?\] )?"
)
_NOTHING, _WARNINGS = 4, 2  # severities of ONNX Runtime's log
# Execution providers, best first, without the suffix "ExecutionProvider". Others are used only if the caller names
# them.
ORDER = ("CUDA", "CoreML", "Xnnpack", "Nnapi", "OpenVINO", "CPU")
_SUFFIX = "ExecutionProvider"
_UNKNOWN = re.compile(
    r"Fatal error: (\S+?)\(-?\d+\) is not a registered function/op|No Op registered for (\S+) with domain_version"
)


def runtime() -> Any:
    """Return the module onnxruntime. All imports go through this function, which switches its telemetry off.

    An existing value of ORT_DISABLE_TELEMETRY is kept.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def session_options(threads: int | None) -> Any:
    """Return quiet SessionOptions with this number of threads; None: ONNX Runtime's default."""
    options = runtime().SessionOptions()
    options.log_severity_level = _NOTHING
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def session(path: Path, threads: int, name: str) -> Any:
    """Return an InferenceSession of the model in `path`.

    threads: number of threads
    name: the model's name in errors

    Raises EngineError if the model cannot be loaded.
    """
    with refusals(f"load {name}", path.parent):
        return runtime().InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])


@contextmanager
def refusals(what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn errors of ONNX Runtime and its tools inside the block into EngineError "ONNX Runtime cannot {what}: ...".

    Raises NotEnoughMemory if memory runs out.

    what: the failed action, such as "load model.onnx"
    folder: a temporary folder whose path is removed from messages
    """
    try:
        yield
    except (OSError, EdgeError):
        raise
    except MemoryError as exc:
        raise NotEnoughMemory(f"memory ran out; {what} on a device with more memory") from exc
    except Exception as exc:  # ONNX Runtime's exceptions share no class
        said = _OWN_WORDS.sub("", first_line(exc)) or type(exc).__name__
        raise EngineError(f"ONNX Runtime cannot {what}: {said.replace(f'{folder}/', '')}") from exc


@contextmanager
def quiet_tools(folder: Path) -> Iterator[None]:
    """Silence ONNX Runtime's tools inside the block. Their temporary files go into `folder`.

    This applies to the whole process: output of other threads is silenced, too.
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
        root.handlers[:] = handlers  # importing one of the tools configures logging
        root.setLevel(level)


def open_session(
    model: str | bytes,
    name: str,
    threads: int,
    provider: str | None,
    dims: Mapping[str, int],
    nodes: Mapping[str, str],
    *,
    alone: bool = True,
) -> tuple[Any, str, tuple[str, ...]]:
    """Open a session of a model. Return (session, provider, refusals).

    The provider is a short name such as "cpu" or "cuda". The refusals name better providers of this build that could
    not run the model, each with the reason.

    model: path or content of a model file
    name: the model's name in errors
    provider: short name of the provider; None: the best one that accepts the model
    dims: sizes of open dimensions by name
    nodes: name of the first node by "domain:operator", for errors
    alone: False: one of many sessions that run in turn. Its threads do not spin, and it keeps no memory between runs.

    Raises EngineError if the provider is missing or unusable, or if an operator is unknown.
    """
    offered = runtime().get_available_providers()
    if provider is not None:
        offered_by_name = {_short(full_name): full_name for full_name in offered}
        if provider not in offered_by_name:
            raise EngineError(
                f"there is no provider {provider!r} in this build of ONNX Runtime; there is"
                f" {', '.join(offered_by_name)}"
            )
        named, last = offered_by_name[provider], f"{ORDER[-1]}{_SUFFIX}"
        session = _session(model, name, threads, list(dict.fromkeys((named, last))), dims, nodes, alone)
        if named not in session.get_providers():
            raise EngineError(f"the provider {provider!r} cannot be used on this device; leave it out to get another")
        return session, _short(named), ()
    *better, last = (f"{short}{_SUFFIX}" for short in ORDER if short == ORDER[-1] or f"{short}{_SUFFIX}" in offered)
    refused = []
    for candidate in better:
        try:
            session = _session(model, name, threads, [candidate, last], dims, nodes, alone)
        except EngineError as exc:
            refused.append(f"{_short(candidate)}: {exc}")
            continue
        if candidate in session.get_providers():
            return session, _short(candidate), tuple(refused)
        refused.append(f"{_short(candidate)}: it cannot be used on this device")
    return _session(model, name, threads, [last], dims, nodes, alone), _short(last), tuple(refused)


def _session(
    model: str | bytes,
    name: str,
    threads: int,
    providers: list[str],
    dims: Mapping[str, int],
    nodes: Mapping[str, str],
    alone: bool,
) -> Any:
    ort, options = runtime(), session_options(threads)
    options.enable_cpu_mem_arena = alone
    for dim, value in dims.items():
        options.add_free_dimension_override_by_name(dim, value)
    settings: list[dict[str, str]] = [{} for _ in providers]
    xnnpack = "XnnpackExecutionProvider" in providers
    if xnnpack:
        settings[providers.index("XnnpackExecutionProvider")]["intra_op_num_threads"] = str(threads)
    # Idle threads spin by default. They would take processors from XNNPACK's threads or other
    # sessions, or use up a CPU quota.
    if xnnpack or not alone or (cpu_quota() or threads) < threads:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # The default logger would print the names of libraries that cannot be loaded.
    ort.set_default_logger_severity(_NOTHING)
    try:
        with refusals(f"load {name}"):
            try:
                # With the fallback ONNX Runtime would print the failure and continue on the CPU.
                return ort.InferenceSession(model, options, providers, settings, enable_fallback=0)
            except Exception as exc:
                if unknown := _UNKNOWN.search(str(exc)):
                    operator = unknown[1] or unknown[2]
                    node = nodes.get(unknown[1] or f":{operator}", "?")
                    raise EngineError(
                        f"ONNX Runtime cannot load {name}: it has no operator {operator}, which node {node!r} uses"
                    ) from exc
                raise
    finally:
        ort.set_default_logger_severity(_WARNINGS)


def _short(name: str) -> str:
    return name.removesuffix(_SUFFIX).lower()

"""ONNX Runtime, quiet: sessions by the best execution provider of this build, and its errors in plain words."""

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

# Error codes, the temporary file, and the function of ONNX Runtime that noticed.
_OWN_WORDS = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from .*? failed:|\S*onnxruntime_src/\S+:\d+ .*?\) (\[.*?\] )?"
)
_NOTHING, _WARNINGS = 4, 2  # severities of ONNX Runtime's log
# Best first, as ONNX Runtime names them without "ExecutionProvider". Others are used only if named by hand.
ORDER = ("CUDA", "CoreML", "Xnnpack", "Nnapi", "OpenVINO", "CPU")
_SUFFIX = "ExecutionProvider"
_UNKNOWN = re.compile(
    r"Fatal error: (\S+?)\(-?\d+\) is not a registered function/op|No Op registered for (\S+) with domain_version"
)


def runtime() -> Any:
    """Return the module onnxruntime. Import it only here: it reports its use to its maker unless that is switched off.

    A value of ORT_DISABLE_TELEMETRY that is already set stays.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def session_options(threads: int | None) -> Any:
    """Return quiet SessionOptions with so many threads; None: as ONNX Runtime likes."""
    options = runtime().SessionOptions()
    options.log_severity_level = _NOTHING
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def session(path: Path, threads: int, name: str) -> Any:
    """Return an InferenceSession of the model in `path` with this many threads. EngineError, which names the model
    `name`."""
    with refusals(f"load {name}", path.parent):
        return runtime().InferenceSession(str(path), session_options(threads), providers=["CPUExecutionProvider"])


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


def open_session(
    model: str | bytes,
    name: str,
    threads: int,
    provider: str | None,
    dims: Mapping[str, int],
    nodes: Mapping[str, str],
) -> tuple[Any, str, tuple[str, ...]]:
    """Open a session of the model, a path or a file's bytes, with this many threads. Return (session, provider it runs
    on: "cpu", "cuda", ..., better ones of this build that refused the model, each with the reason).

    provider: a short name; None: the best one that takes the model. dims: values for dimensions that the model leaves
    open. nodes: "domain:operator" to the name of its first node, for errors. EngineError, which calls the model `name`,
    for a provider that is not there or not usable, or an operator that is not known.
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
        session = _session(model, name, threads, list(dict.fromkeys((named, last))), dims, nodes)
        if named not in session.get_providers():
            raise EngineError(f"the provider {provider!r} cannot be used on this device; leave it out to get another")
        return session, _short(named), ()
    *better, last = (f"{short}{_SUFFIX}" for short in ORDER if short == ORDER[-1] or f"{short}{_SUFFIX}" in offered)
    refused = []
    for candidate in better:
        try:
            session = _session(model, name, threads, [candidate, last], dims, nodes)
        except EngineError as exc:
            refused.append(f"{_short(candidate)}: {exc}")
            continue
        if candidate in session.get_providers():
            return session, _short(candidate), tuple(refused)
        refused.append(f"{_short(candidate)}: it cannot be used on this device")
    return _session(model, name, threads, [last], dims, nodes), _short(last), tuple(refused)


def _session(
    model: str | bytes, name: str, threads: int, providers: list[str], dims: Mapping[str, int], nodes: Mapping[str, str]
) -> Any:
    ort, options = runtime(), session_options(threads)
    for dim, value in dims.items():
        options.add_free_dimension_override_by_name(dim, value)
    settings: list[dict[str, str]] = [{} for _ in providers]
    xnnpack = "XnnpackExecutionProvider" in providers
    if xnnpack:
        settings[providers.index("XnnpackExecutionProvider")]["intra_op_num_threads"] = str(threads)
    # Waiting threads spin by default: they would take processors from XNNPACK's threads, or use up a CPU quota.
    if xnnpack or (cpu_quota() or threads) < threads:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    ort.set_default_logger_severity(_NOTHING)  # the default logger would print libraries that cannot be loaded
    try:
        with refusals(f"load {name}"):
            try:
                # With fallback it would print what failed, and go on with the CPU.
                return ort.InferenceSession(model, options, providers, settings, enable_fallback=0)
            except Exception as exc:
                if unknown := _UNKNOWN.search(str(exc)):
                    operator = unknown[1] or unknown[2]
                    node = nodes.get(unknown[1] or f":{operator}", "?")
                    raise EngineError(
                        f"ONNX Runtime cannot load {name}: it has no operator {operator}, which node {node!r} is"
                    ) from exc
                raise
    finally:
        ort.set_default_logger_severity(_WARNINGS)


def _short(name: str) -> str:
    return name.removesuffix(_SUFFIX).lower()

"""Imports of a fork server of tests, and the work of each process that it forks: for helpers.begin a command, for
OwnEngines an engine process of this device, for forked_modules one of this project's modules. What these start is
forked from them (forked_children)."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from apps import cli
from apps.show import progress
from edge import microbenchmark
from edge.quantization import sensitivity
from tests.support import (
    BRIEF_LINKS,
    BRIEF_MEASUREMENTS,
    ENGINE,
    FEW_PROBES,
    GARBAGE_AFTER,
    MODULE,
    MOST_OF_A_NAME,
    NEVER_S,
    PLAIN_LINES,
    ROOT,
    ask_for_default_threads,
    made_up_rates,
    one_thread,
)  # fmt: skip
from tests.support.foreground import lead_terminal
from tests.support.forked_children import fork_children
from tests.support.forked_server import fork_its_server

gc.set_threshold(GARBAGE_AFTER)
cli.quiet_grpc()  # before it is imported, as commands do
cli.build_parser()  # imports what it needs
for module in (
    "apps.show.terminal",
    "edge.cluster.llm_ranks",
    "edge.text.constraints.child",
    "edge.llm.chat",
    "edge.deployment.deploy",
    "edge.media.child",
    "edge.quantization.gguf_child",
    "edge.serve.engine.child",
    "edge.text.templates.child",
    "edge.worker.daemon",
    "edge.worker.load",
):
    importlib.import_module(module)
dialling, rank = map(importlib.import_module, ("edge.net.dialling", "edge.worker.rank"))
vars(dialling).update(BRIEF_LINKS)
vars(importlib.import_module("devices.processes.rates"))["measured_apart"] = made_up_rates
for asks in ask_for_default_threads():
    vars(asks)["default_threads"] = one_thread
vars(progress).update(dict.fromkeys(PLAIN_LINES, NEVER_S))
for name, brief in BRIEF_MEASUREMENTS.items():
    vars(importlib.import_module(name.rpartition(".")[0]))[name.rpartition(".")[2]] = brief
microbenchmark.SAMPLE_S, rank._LEAST_MEASURED_S = 0.005, 0.02  # type: ignore[attr-defined]
sensitivity.PROBES = sensitivity.PROBES[:FEW_PROBES]  # type: ignore[assignment]


def run_forked(arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Be as a process that has just been started. arguments: the environment in JSON, and those of the command;
    descriptors: standard input, output and error, and maybe where to say that the command
    begins. Or with `ENGINE` the working folder, and what `rank.run_forked` takes."""
    os.environ.clear()
    os.environ.update(json.loads(arguments[0]))
    tempfile.tempdir = None
    fork_children(be_module)
    if arguments[1:2] == [ENGINE]:
        os.chdir(arguments[2])
        rank.run_forked(arguments[3:], descriptors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[1:2] == [MODULE]:
        _run_module(*arguments[2:], descriptors=descriptors)
    for place, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, place)
        os.close(descriptor)
    lead_terminal()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["edge", *arguments[1:]]
    os.chdir(ROOT)
    time.tzset()
    for begun in descriptors[3:]:
        os.write(begun, b"!")
        os.close(begun)
    if arguments[1:2] == ["worker"] and "--memory" not in arguments:
        fork_its_server()
    _end_with(cli.main)


def _end_with(run: Callable[[], object]) -> NoReturn:
    """Run this, and end as an interpreter does; but what is in memory is not taken apart, which takes half of a short
    command's time."""
    try:
        code: object = run()
    except SystemExit as end:
        code = end.code
    if not isinstance(code, int):  # of a module that ran to its end
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _run_module(folder: str, module: str, *arguments: str, descriptors: list[int]) -> NoReturn:
    """Be as `python -m module`, in this folder. A fourth descriptor is its last argument, as a number."""
    os.setsid()
    os.chdir(folder)
    for place, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, place)
        os.close(descriptor)
    be_module([module, *arguments, *map(str, descriptors[3:])])


def be_module(command: list[str]) -> NoReturn:
    """Run a module and its arguments, with the standard streams that this process has."""
    Path("/proc/self/comm").write_text(command[0][-MOST_OF_A_NAME:])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.modules.pop(command[0], None)
    sys.argv = command
    _end_with(partial(runpy.run_module, command[0], run_name="__main__", alter_sys=True))

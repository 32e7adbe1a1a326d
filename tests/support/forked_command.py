"""What a fork server of tests imports, and what each process that it forks does: for helpers.begin a command, for
OwnEngines an engine process of this device."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import NoReturn

from apps import cli
from apps.options import quiet_grpc
from tests.support import ENGINE, ROOT
from tests.support.foreground import lead_terminal
from tests.support.forked_server import fork_its_server

quiet_grpc()  # before it is imported, as commands do
cli.build_parser()  # imports what it needs
for module in (
    "apps.show.terminal",
    "edge.cluster.deployment",
    "edge.llm.chat",
    "edge.planning.deployed",
    "edge.worker.daemon",
    "edge.worker.load",
    "edge.worker.rank",
):
    importlib.import_module(module)


def run_forked(arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Be as a process that has just been started. arguments: the environment in JSON, and those of the command;
    descriptors: standard input, output and error, and maybe where to say that the command
    begins. Or with `ENGINE` the working folder, and what `rank.run_forked` takes."""
    os.environ.clear()
    os.environ.update(json.loads(arguments[0]))
    tempfile.tempdir = None
    if arguments[1:2] == [ENGINE]:
        from edge.worker import rank  # which has been imported

        os.chdir(arguments[2])
        rank.run_forked(arguments[3:], descriptors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    sys.exit(cli.main())

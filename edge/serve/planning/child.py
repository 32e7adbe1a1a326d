"""Planning process of the server: it advises on models, or makes the Pareto front of a model.

Planning needs numpy and connections to workers, and the server has neither. A process gets one job, {"do", "with"}, and
ends with its result, or when the server closes the socket. It sends lines: {"progress"}, {"result"} or {"fatal"}.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from devices.files import remove_temporary
from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.models.catalog import known_models
from edge.planning.advise import AdviceOptions, advise
from edge.planning.choose import work_options
from edge.planning.front import Front
from edge.planning.spaces import llm_space
from edge.profiling.cluster import Cluster
from edge.serve.messages import error_json
from edge.tasks import ShowStep, Steps

_EVERY_S = 0.2  # minimum interval of progress reports


class Reports(Steps):
    """Steps that are reported to the server, with the amounts done and in total."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        known, reported = total, time.monotonic()
        self._send({"progress": {"status": label, "completed": 0, "total": total}})

        def show(n: float, total: float | None = None, what: str = "") -> None:
            nonlocal known, reported
            known = known if total is None else total
            if time.monotonic() >= reported + _EVERY_S:
                reported = time.monotonic()
                self._send({"progress": {"status": label, "completed": n, "total": known}})

        yield show

    def say(self, line: str) -> None:
        self._send({"progress": {"status": line}})


def advice(
    steps: Steps,
    devices: Sequence[str],
    insecure: bool,
    threads: int | None,
    memory: int | None,
) -> dict[str, Any]:
    """Return the JSON of `edge advise` for this device and the workers among `devices` that answer."""
    with Cluster(devices, insecure=insecure) as cluster:
        options = AdviceOptions(engine=EngineOptions(threads=threads, memory=memory))
        return advise(known_models(), cluster, options, steps).to_json()


def front(steps: Steps, config: Mapping[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Return the front of a model, as `edge pareto --json`, with the plan for this device alone.

    Other plans that are not on the front are left out.
    config: how the server loads the model. The plans are for the same context and number of requests.
    devices: addresses of workers. Those that do not answer are left out.
    """
    own = EngineConfig.from_json(config)
    with Cluster(devices, insecure=own.insecure) as cluster:
        work = replace(
            work_options(own.file, own.engine_options(), own.transport, own.wire),
            projector=None if own.mmproj is None else Path(own.mmproj),
            encoder=own.encoder,
            encoder_timed=False,  # this device may have no room to time an encoder next to the running model
        )
        result = Front([llm_space(own.file, cluster, work, steps)]).to_json()
    points = [point for point in result["points"] if point["on_front"] or len(point["devices"]) == 1]
    return {**result, "points": points}


JOBS: Mapping[str, Callable[..., dict[str, Any]]] = {"advice": advice, "front": front}


def main() -> int:
    """Do one job. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True, help="file descriptor of a socket to the server")
    control = socket.socket(fileno=parser.parse_args().control)
    lock, lines = threading.Lock(), control.makefile("rb")
    job = json.loads(lines.readline())

    def watch() -> None:
        """End the process when the server closes the socket, because then the result is not needed."""
        with suppress(ConnectionError):
            lines.read()
        _end(1)

    def send(message: Mapping[str, Any]) -> None:
        with lock, suppress(OSError):  # `watch` notices that the server has gone
            control.sendall(json.dumps(message).encode() + b"\n")

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        send({"result": JOBS[job["do"]](Reports(send), **job["with"])})
    except Exception as error:  # the server passes any error on to the client
        send({"fatal": error_json(error)})
        return 1
    return 0


def _end(code: int) -> None:
    remove_temporary()
    os._exit(code)  # skip waiting for threads


if __name__ == "__main__":
    _end(main())

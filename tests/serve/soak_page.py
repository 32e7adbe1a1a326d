"""Measure what an open page costs: the growth of its tab's memory, and the server's time for it.

    python -m tests.serve.soak_page --minutes 30

A server of scripted models streams 8 answers to other clients while Chromium shows the page. The page's views take
turns, and its chat streams an answer of its own. The server's time is compared with that of 9 streams to other
clients and no page, before and after. Needs Linux and Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.served import Generation, Piece
from tests.serve.page_actions import Stage, ask
from tests.serve.scripted import Scripted, ScriptedAnswer, ScriptedModels
from tests.serve.serving import serving
from tests.support.browser import Page, browser

STREAMS = 8
TOKEN_S = 0.1
TOKENS = 600
VIEW_S = 5.0
WARM_UP = 0.25  # part of the time that is not counted; the server computes its advice once
BASELINE = 0.25  # time of each baseline in times of the page's


class SlowAnswer(ScriptedAnswer):
    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for piece in super().__aiter__():
            yield piece
            await asyncio.sleep(TOKEN_S)
            if self.cancelled.is_set():
                return


class SlowModel(Scripted):
    """Gives long answers slowly, and remembers only the latest."""

    async def generate(self, generation: Generation) -> ScriptedAnswer:
        self.answers = [*self.answers, SlowAnswer(self, generation)][-STREAMS - 1 :]
        return self.answers[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    time_s = 60 * parser.parse_args().minutes
    with served() as (address, pid), tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        before = baseline(address, pid, BASELINE * time_s)
        with streams(address, STREAMS):
            stage = Stage(page, address, Path(folder))
            stage.open(1280)
            samples = [{**sample, "cpu_s": cpu_s(pid)} for sample in watched(stage, time_s)]
        page.open("about:blank")
        after = baseline(address, pid, BASELINE * time_s)
    counted = [sample for sample in samples if sample["s"] - samples[0]["s"] >= WARM_UP * time_s]
    during = slope(counted, "cpu_s")
    result = {
        "minutes": time_s / 60,
        "server_percent_of_a_core": {"page": 100 * during, "before": 100 * before, "after": 100 * after},
        "cost_of_the_page_percent": 100 * (during - (before + after) / 2),
        "first": counted[0],
        "last": counted[-1],
        "growth_a_minute": {name: 60 * slope(counted, name) for name in ("heap_kib", "nodes", "listeners")},
    }
    print(json.dumps(result, indent=1))


def watched(stage: Stage, time_s: float) -> Iterator[dict[str, float]]:
    """Show one view after the other for a time, and yield the tab's memory after each."""
    ends = time.monotonic() + time_s
    page, views = stage.page, ("chat", "devices", "models")
    page.call("Performance.enable")
    while True:
        for view in views:
            stage.go(view)
            if view == "chat" and page.value("!document.getElementById('send').hidden"):
                page.value("window.confirm = () => true; document.getElementById('clear').click()")
                ask(page, "Count.")
            page.value(f"new Promise(done => setTimeout(done, {1e3 * VIEW_S}))")
        yield memory(page)
        if time.monotonic() > ends:
            return


def memory(page: Page) -> dict[str, float]:
    page.call("HeapProfiler.collectGarbage")
    metrics = {item["name"]: item["value"] for item in page.call("Performance.getMetrics")["metrics"]}
    return {
        "s": time.monotonic(),
        "heap_kib": metrics["JSHeapUsedSize"] / 1024,
        "nodes": metrics["Nodes"],
        "listeners": metrics["JSEventListeners"],
    }


def slope(samples: list[dict[str, float]], name: str) -> float:
    """Return the growth of a figure a second, by least squares."""
    return statistics.linear_regression([item["s"] for item in samples], [item[name] for item in samples]).slope


def baseline(address: str, pid: int, time_s: float) -> float:
    """Return the server's part of a core for as many streams without a page."""
    with streams(address, STREAMS + 1):
        began, used_s = time.monotonic(), cpu_s(pid)
        threading.Event().wait(time_s)
        return (cpu_s(pid) - used_s) / (time.monotonic() - began)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def streams(address: str, number: int) -> Iterator[None]:
    """Keep this many answers running."""
    ended = threading.Event()

    def follow() -> None:
        request: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
        with httpx.Client(timeout=60) as client:
            while not ended.is_set():
                with client.stream("POST", f"{address}/v1/chat/completions", json=request) as response:
                    for _ in response.iter_bytes():
                        if ended.is_set():
                            break

    threads = [threading.Thread(target=follow) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """The address and process id of a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    process.start()
    try:
        yield here.recv(), process.pid or 0
    finally:
        here.send("end")
        process.join()


def serve(parent: Connection) -> None:
    models = ScriptedModels()
    models.scripted = SlowModel()
    models.scripted.says = "".join(f"{number}, " for number in range(TOKENS))[:TOKENS]
    with serving(create_app(models, ServeOptions())) as address:
        parent.send(address)
        parent.recv()


if __name__ == "__main__":
    main()

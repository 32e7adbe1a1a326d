"""Run everything at once on one server over two workers: losses, full disks and pipes, clock jumps, and all clients.

    python -m tests.system.everything_at_once [MINUTES] [SEED]

A server runs the bundled model in three stages: on this device and on two workers. While chats are answered, one thing
after the other happens, in a seeded order:

| disturbance | what happens |
| --- | --- |
| kill worker | SIGKILL to a worker and all its processes; it is started again |
| stop worker | SIGSTOP for some seconds, as where a device hangs |
| kill engine | SIGKILL to the server's engine process |
| full disk | the folder of the server's cache and state has no byte left for some seconds |
| full pipe | nobody reads the server's standard error for some seconds; in the last third it is closed |
| clock jump | the server's clock goes a day ahead, or back (by a library that is preloaded; needs a C compiler) |
| hostile | ten hostile requests of `hostile_requests.py` |
| clients | every recorded request of a real client, and four clients that leave in the middle of an answer |

Each chat must have the text that the undisturbed server gave. /health is asked every 100 ms from a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run
from typing import Any

import httpx
import psutil

from benchmarks.harness import EDGE, ROOT
from benchmarks.lent_device import Worker, end_with_parent
from benchmarks.servers import HOST, free_port
from edge.models.demo import MODEL_PATH
from edge.planning.choice import save_plan
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.serve.attack import memory_of
from tests.support.small_disk import small_disk
from tests.system.hostile_requests import _request as hostile_request
from tools.demo_model.grammar import held_out

CHATS, TOKENS, QUESTIONS = 4, 32, 24
START_S, ANSWER_S, HEALTH_WAIT_S = 120.0, 120.0, 30.0
LASTS_S = 4.0  # a disturbance that is undone again
PAUSE_S = 3.0  # between two disturbances, at most
SAMPLE_S = 10.0  # between two looks at memory
RECORDED = (ROOT / "tests" / "serve" / "recorded", ROOT / "tests" / "data" / "requests")
# Adds the seconds in a file to the time of day, and to nothing else: sleeps and deadlines use the monotonic clock.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) {
        char text[32] = {0};
        int file = open(getenv("EDGE_TEST_CLOCK"), O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
            close(file);
        }
    }
    return result;
}
"""


@dataclass
class Outcome:
    """Outcome of a run."""

    disturbances: Counter[str] = field(default_factory=Counter)
    chats: int = 0  # with the right text
    wrong: list[str] = field(default_factory=list)  # chats with another text, or with an error
    client_failures: list[str] = field(default_factory=list)  # answers of 500 and more to other requests
    worst_health_s: float = 0.0
    slow_health: int = 0  # answers that took more than a second
    health_answers: int = 0
    health_failures: list[str] = field(default_factory=list)
    memory_mib: list[int] = field(default_factory=list)  # of the server and its processes, over time


class Surroundings:
    """The server, its workers, disk, pipe and clock, and what can happen to them."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self.folder, self.disk = folder, disk
        self.clock = folder / "clock"
        self.clock.write_text("0")
        self.library = folder / "clock.so"
        (folder / "clock.c").write_text(CLOCK)
        run(["cc", "-shared", "-fPIC", "-o", self.library, folder / "clock.c", "-ldl"], check=True, timeout=START_S)
        addresses = [f"{HOST}:{free_port()}" for _ in range(2)]
        self.workers = [Worker(folder / f"worker-{n}", address) for n, address in enumerate(addresses)]
        stages = make_plan(
            limits(GgufFile.open(MODEL_PATH)), MODEL_PATH.stem, "", [LOCAL, *addresses], stages_of=(1, 1, 1)
        )
        save_plan(folder / "plan.json", stages)
        self.reads = threading.Event()  # whether the server's standard error is read
        self.reads.set()
        self.url, self.process = "", Popen(["true"])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the workers and the server."""
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait()
        homes = {f"XDG_{kind}_HOME": str(self.disk / kind.lower()) for kind in ("CACHE", "STATE", "CONFIG")}
        clock = {"LD_PRELOAD": str(self.library), "EDGE_TEST_CLOCK": str(self.clock)}
        environment = {**os.environ, **homes, **clock}
        options = ("--port", "0", "--threads", "1", "--requests", "8", "--context", str(8 * 1024))
        command = [*EDGE, "serve", str(MODEL_PATH), "--plan", str(self.folder / "plan.json"), *options]
        self.process = Popen(
            command, cwd=ROOT, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, preexec_fn=end_with_parent
        )
        reader = threading.Thread(target=self._read, daemon=True)
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline().decode()
            self.url = line.split()[-1]
            assert self.url.startswith("http"), f"the server does not listen; it said {line!r}"
            reader.start()
            yield
        finally:
            self.reads.set()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(START_S)
            finally:
                self.process.kill()
                for worker in self.workers:
                    worker.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with (self.folder / "server.log").open("wb") as log, suppress(ValueError, OSError):
            while data := os.read(self.process.stderr.fileno(), 1 << 12):
                log.write(data)
                log.flush()
                self.reads.wait()

    def engines(self) -> list[psutil.Process]:
        """Return the processes of the server that compute."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any("edge.serve.engine.child" in word for word in child.cmdline())]

    async def kill_worker(self, random_: random.Random) -> None:
        worker = random_.choice(self.workers)
        worker.kill()
        await asyncio.sleep(random_.uniform(0, LASTS_S))
        worker.start()
        await asyncio.to_thread(worker.wait)

    async def stop_worker(self, random_: random.Random) -> None:
        process = random_.choice(self.workers).process
        assert process is not None
        own = psutil.Process(process.pid)
        stopped = [own, *own.children(recursive=True)]
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.suspend()
        await asyncio.sleep(random_.uniform(0, LASTS_S))
        for each in stopped:
            with suppress(psutil.NoSuchProcess):
                each.resume()

    async def kill_engine(self, random_: random.Random) -> None:
        for engine in self.engines():
            with suppress(psutil.NoSuchProcess):
                engine.kill()

    async def fill_disk(self, random_: random.Random) -> None:
        file = self.disk / "full"
        with file.open("wb", buffering=0) as all_of_it, suppress(OSError):
            while True:
                all_of_it.write(bytes(1 << 20))
        await asyncio.sleep(random_.uniform(0, LASTS_S))
        file.unlink()

    async def fill_pipe(self, random_: random.Random) -> None:
        self.reads.clear()
        await asyncio.sleep(2 * LASTS_S)
        self.reads.set()

    async def jump(self, random_: random.Random) -> None:
        self.clock.write_text(random_.choice(("86400", "-86400", "3600", "-3600", "0")))

    def close_pipe(self) -> None:
        """Close the reading end of the server's standard error."""
        self.reads.set()
        assert self.process.stderr is not None
        self.process.stderr.close()


async def _answer(client: httpx.AsyncClient, messages: Any) -> str:
    ask = {"model": MODEL_PATH.stem, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=ask)
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {response.text[:200]}"
    return str(response.json()["choices"][0]["message"]["content"])


async def _chat(
    client: httpx.AsyncClient, questions: list[Any], answers: list[str], outcome: Outcome, end: float, seed: int
) -> None:
    random_ = random.Random(seed)
    while time.monotonic() < end:
        number = random_.randrange(len(questions))
        try:
            text = await _answer(client, questions[number])
        except httpx.HTTPError as error:
            text = repr(error)
        if text == answers[number]:
            outcome.chats += 1
        else:
            outcome.wrong.append(f"{number}: {text!r} in place of {answers[number]!r}")


async def _send(client: httpx.AsyncClient, path: str, body: Any, outcome: Outcome) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        outcome.client_failures.append(f"{path} {content[:80]!r}: {error!r}")
        return
    if response.status_code >= 500:
        outcome.client_failures.append(f"{path} {content[:80]!r}: {response.status_code} {response.text[:200]}")


async def _leave(client: httpx.AsyncClient, question: Any) -> None:
    """Ask for an answer, and leave in the middle of it."""
    ask = {"messages": question, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/chat/completions", json=ask) as response:
            async for _ in response.aiter_lines():
                return


def recorded() -> list[tuple[str, Any]]:
    """Return the requests of real clients: paths and bodies."""
    requests = []
    for file in sorted(path for folder in RECORDED if folder.is_dir() for path in folder.glob("*.json")):
        entries = json.loads(file.read_text())
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, dict) and "path" in entry and "body" in entry:
                requests.append((entry["path"], {**entry["body"], "stream": False}))
    return requests


def _watch(url: str, server: psutil.Process, outcome: Outcome, ended: threading.Event) -> None:
    next_look = time.monotonic()
    with httpx.Client(base_url=url, timeout=HEALTH_WAIT_S) as client:
        while not ended.wait(0.1):
            began = time.monotonic()
            try:
                client.get("/health")  # 503 while a model is started again
                outcome.health_answers += 1
            except httpx.HTTPError as error:
                outcome.health_failures.append(repr(error))
            took_s = time.monotonic() - began
            outcome.worst_health_s = max(outcome.worst_health_s, took_s)
            outcome.slow_health += took_s > 1
            if time.monotonic() >= next_look:
                next_look += SAMPLE_S
                with suppress(psutil.NoSuchProcess):
                    outcome.memory_mib.append(memory_of(server) >> 20)


async def _disturbed(around: Surroundings, seconds: float, seed: int) -> Outcome:
    outcome, random_, ended = Outcome(), random.Random(seed), threading.Event()
    questions = [list(messages) for messages, _ in held_out(QUESTIONS, seed=seed)]
    clients = recorded()
    async with httpx.AsyncClient(base_url=around.url, timeout=ANSWER_S) as client:
        answers = [await _answer(client, question) for question in questions]
        assert not [text for text in answers if text.startswith("HTTP ")], answers
        watch = threading.Thread(
            target=_watch, args=(around.url, psutil.Process(around.process.pid), outcome, ended), daemon=True
        )
        watch.start()
        began = time.monotonic()
        end = began + seconds
        chats = [asyncio.create_task(_chat(client, questions, answers, outcome, end, seed + n)) for n in range(CHATS)]

        async def hostile(random_: random.Random) -> None:
            requests = [hostile_request(random_, [MODEL_PATH.stem]) for _ in range(10)]
            await asyncio.gather(*(_send(client, path, body, outcome) for path, body in requests))

        async def come_and_go(random_: random.Random) -> None:
            leaving = [_leave(client, random_.choice(questions)) for _ in range(4)]
            await asyncio.gather(*leaving, *(_send(client, path, body, outcome) for path, body in clients))

        ways: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "kill worker": around.kill_worker,
            "stop worker": around.stop_worker,
            "kill engine": around.kill_engine,
            "full disk": around.fill_disk,
            "full pipe": around.fill_pipe,
            "hostile": hostile,
            "clients": come_and_go,
            "clock jump": around.jump,
        }
        order: list[str] = []
        is_closed = False
        while time.monotonic() < end:
            if not is_closed and time.monotonic() - began > seconds * 2 / 3:
                around.close_pipe()
                is_closed = True
                del ways["full pipe"]
                order = []
            if not order:
                order = random_.sample(sorted(ways), len(ways))
            way = order.pop()
            outcome.disturbances[way] += 1
            figures = f"{outcome.chats} chats, {len(outcome.wrong)} wrong, health within {outcome.worst_health_s:.2f} s"
            print(f"{time.monotonic() - began:.0f} s: {way}; {figures}", file=sys.stderr, flush=True)
            await ways[way](random_)
            await asyncio.sleep(random_.uniform(0, PAUSE_S))
        await asyncio.gather(*chats)
        ended.set()
        await asyncio.to_thread(watch.join, HEALTH_WAIT_S)
    return outcome


def disturbed(seconds: float, seed: int) -> Outcome:
    """Return the outcome of so many seconds. Needs root, for a small disk."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = stack.enter_context(small_disk(folder / "disk", "size=64m"))
        around = Surroundings(folder, disk)
        with around.running():
            return asyncio.run(_disturbed(around, seconds, seed))


if __name__ == "__main__":
    minutes, its_seed = (float(text) for text in [*sys.argv[1:], "30", "1"][:2])
    print(json.dumps(vars(disturbed(60 * minutes, int(its_seed))), indent=1))

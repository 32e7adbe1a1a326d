"""Test hostile constraints against a server: clients cancel each request after a moment, ten at a time, during chats.

    python -m tests.serve.attack MODEL

asks all of them of `edge serve MODEL`, and prints what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from edge.models.demo import MODEL_PATH
from tests.cli.test_serve_command import served
from tests.support.forked_modules import runs
from tests.support.hostile import Constraint, hostile_constraints

AT_ONCE, CHATS = 10, 4
MOMENTS_S = (0.25, 1.0, 2.5)  # that clients wait, one after the other
MOST_THREADS = 6  # that pools start when all of them are needed for the first time, and keep
WAIT_S = 300.0  # for anything at all
SETTLE_S = 120.0  # for memory to be given back
LOOK_S = 0.05
CONTEXT = 4096
OPTIONS = ("--requests", "8", "--context", str(CONTEXT), "--draft", "off", "--prefix-cache", "0")
# What the bundled model is asked, and what it says; and a trained one, whose words depend on who else is there.
SUMS = {f"What is {a} plus {b}?": f"{a} plus {b} is {a + b}." for a, b in ((3, 4), (27, 38), (5, 61), (40, 2))}
FACTS = {
    "Where is the Eiffel Tower?": "Paris",
    "Which planet is called the red planet?": "Mars",
    "What is the chemical symbol of gold?": "Au",
    "In which country is Tokyo?": "Japan",
}
_CHILD = "edge.text.constraints.child"


@dataclass
class Outcome:
    """Outcome of an attack."""

    statuses: Counter[str] = field(default_factory=Counter)  # of hostile requests; "left": by the client
    longest_s: float = 0.0  # that a process lived which followed a constraint
    chats: int = 0  # answered rightly meanwhile
    fewest_chats: int = 0  # of one of those who chat
    longest_chat_s: float = 0.0
    grown_bytes: int = 0  # of the server and its processes, afterwards
    left_over: list[str] = field(default_factory=list)  # processes, afterwards
    threads: int = 0  # more than before, afterwards


async def attack(
    url: str, server: psutil.Process, constraints: Sequence[Constraint], questions: Mapping[str, str]
) -> Outcome:
    """Ask for all of these. questions: of the chats, with words of the right answers; AssertionError for another."""
    outcome, ended = Outcome(), asyncio.Event()
    async with httpx.AsyncClient(
        base_url=url, timeout=WAIT_S, limits=httpx.Limits(max_keepalive_connections=0)
    ) as client:
        for mild in (("regex", "[a-z]{3}"), ("grammar", 'root ::= "yes"'), ("json_schema", '{"type":"integer"}')):
            assert (await client.post("/v1/chat/completions", content=_body(*mild))).status_code == 200
        await _fill(client)
        for question in questions:
            await _ask(client, question, questions[question])
        memory, threads = memory_of(server), _threads(server)
        chats = [asyncio.create_task(_chat(client, n, questions, outcome, ended)) for n in range(CHATS)]
        watching = asyncio.create_task(_watch(server, outcome, ended))
        waiting = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(
            *(_hostile(url, waiting, n, constraint, outcome) for n, constraint in enumerate(constraints))
        )
        ended.set()
        counts = await asyncio.gather(*chats)
        await watching
        outcome.chats, outcome.fewest_chats = sum(counts), min(counts)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            outcome.grown_bytes = memory_of(server) - memory
            outcome.left_over = [fork.name() for fork in _forks(server)]
            outcome.threads = _threads(server) - threads
            if outcome.grown_bytes < 64 << 20 and not outcome.left_over and outcome.threads <= MOST_THREADS:
                break
            await asyncio.sleep(LOOK_S)
        for question in questions:
            await _ask(client, question, questions[question])
    return outcome


async def _fill(client: httpx.AsyncClient) -> None:
    """Fill the context once: memory of keys and values is the process's from then on, and is no growth later."""
    prompts = [[100 + n] * (CONTEXT // CHATS - 24) for n in range(CHATS)]
    request = (client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 16}) for prompt in prompts)
    for filled in await asyncio.gather(*request):
        assert filled.status_code == 200, filled.text


async def _hostile(url: str, waiting: asyncio.Semaphore, n: int, constraint: Constraint, outcome: Outcome) -> None:
    async with waiting, httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        try:
            request = client.post("/v1/chat/completions", content=_body(*constraint))
            status = str((await asyncio.wait_for(request, MOMENTS_S[n % len(MOMENTS_S)])).status_code)
        except asyncio.TimeoutError:
            status = "left"
        outcome.statuses[status] += 1


def _body(kind: str, source: str) -> str:
    """A schema goes as it is, also where it is no JSON."""
    ask = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 200, "temperature": 1.0}
    if kind != "json_schema":
        return json.dumps({**ask, kind: source})
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "it", "schema": {source}}}}}'
    return f'{json.dumps(ask)[:-1]}, "response_format": {schema}}}'


async def _ask(client: httpx.AsyncClient, question: str, words: str) -> None:
    ask = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=ask)
    assert response.status_code == 200, response.text
    answer = response.json()["choices"][0]["message"]["content"]
    assert words in answer, f"{question} {answer}"


async def _chat(
    client: httpx.AsyncClient, n: int, questions: Mapping[str, str], outcome: Outcome, ended: asyncio.Event
) -> int:
    """Ask; return how many right answers came."""
    count = 0
    while not ended.is_set() or not count:
        question = list(questions)[(n + count) % len(questions)]
        began = time.monotonic()
        await _ask(client, question, questions[question])
        outcome.longest_chat_s = max(outcome.longest_chat_s, time.monotonic() - began)
        count += 1
    return count


async def _watch(server: psutil.Process, outcome: Outcome, ended: asyncio.Event) -> None:
    while not ended.is_set():
        for fork in _forks(server):
            outcome.longest_s = max(outcome.longest_s, time.time() - fork.create_time())
        await asyncio.sleep(LOOK_S)


def _all(server: psutil.Process) -> list[psutil.Process]:
    return [server, *server.children(recursive=True)]


def _forks(server: psutil.Process) -> list[psutil.Process]:
    """The processes that follow a constraint now."""
    processes = []
    for process in _all(server):
        try:
            parent = process.parent()
            if runs(process, _CHILD) and parent is not None and runs(parent, _CHILD):
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


def memory_of(server: psutil.Process) -> int:
    """Bytes that the server and its processes hold, what they share counted once. Pages of the model's file are not
    among them: these come and go as the kernel likes."""
    total = 0
    for process in _all(server):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) << 10
    return total


def _threads(server: psutil.Process) -> int:
    """Return threads of the server and the engine process: other processes have one thread each."""
    return sum(item.num_threads() for item in _all(server)[:2])


def attacked(model: Path, constraints: Sequence[Constraint], questions: Mapping[str, str]) -> Outcome:
    """Return the outcome of an attack on `edge serve` with this model."""
    with served(str(model), *OPTIONS) as server:
        return asyncio.run(attack(server.url, psutil.Process(server.process.pid), constraints, questions))


if __name__ == "__main__":
    began = time.monotonic()
    model = Path(sys.argv[1])
    came = attacked(model, hostile_constraints(), SUMS if model.samefile(MODEL_PATH) else FACTS)
    print(json.dumps({**vars(came), "s": time.monotonic() - began}))

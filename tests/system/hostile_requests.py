"""Hostile schemas, bodies and names against `edge serve`, ten at a time beside four chats.

    python -m tests.system.hostile_requests [REQUESTS] [SEED]

starts a server of its own with the bundled model and three that write calls in notations of their own, sends all of
them over loopback, asks /health every 100 ms, and prints what came of it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from edge.models.demo import MODEL_PATH
from tests.cli.test_serve_command import served
from tests.serve.attack import memory_of
from tests.serve.test_call_grammars import BY_NAME
from tests.support.thinking import TEMPLATE, thinker

AT_ONCE, CHATS = 10, 4
WAIT_S, SETTLE_S, HEALTH_S = 120.0, 60.0, 0.1
HEALTH_WAIT_S = 30.0
NOTATIONS = ("gemma", "pythonic", "lfm2")
QUESTION, ANSWER = "What is 3 plus 4?", "3 plus 4 is 7."
Body = bytes | Mapping[str, Any]


@dataclass
class Outcome:
    """Outcome of an attack."""

    statuses: Counter[str] = field(default_factory=Counter)  # of hostile requests
    failures: list[str] = field(default_factory=list)  # answers of 500 and more, and requests without an answer
    worst_health_s: float = 0.0
    health_answers: int = 0
    health_failures: list[str] = field(default_factory=list)
    chats: int = 0  # answered rightly
    fewest_chats: int = 0  # of one of those who chat
    wrong_chats: list[str] = field(default_factory=list)
    grown_bytes: int = 0  # of the server and its processes, afterwards
    slowest: list[tuple[float, str]] = field(default_factory=list)


def _schema(random_: random.Random) -> Any:
    """Return a hostile schema."""
    n, many, deep = random_.choice((5, 22, 60)), random_.choice((50, 3000, 20_000)), random_.choice((20, 90, 180))

    def chain(level: Callable[[Any, int], Any], levels: int = n) -> Any:
        definitions = {f"n{i}": level({"$ref": f"#/$defs/n{i + 1}"}, i) for i in range(levels)}
        definitions[f"n{levels}"] = random_.choice(({"type": "string"}, {"$ref": "#/$defs/n0"}, {"type": "object"}))
        return {"properties": {"a": {"$ref": "#/$defs/n0"}}, "required": ["a"], "$defs": definitions}

    nested: Any = {"type": "integer"}
    for _ in range(deep):
        nested = {"type": "array", "items": nested}
    return random_.choice(
        (
            lambda: chain(lambda r, i: {"anyOf": [r, r]}),
            lambda: chain(lambda r, i: {"type": "object", "anyOf": [r, {**r, "required": [f"x{i}"]}]}),
            lambda: chain(lambda r, i: {"allOf": [r, r]}),
            lambda: chain(lambda r, i: {"oneOf": [r, r]}),
            lambda: chain(lambda r, i: {"type": "object", "properties": {"l": r, "r": r}}),
            lambda: chain(lambda r, i: r, many),
            lambda: {"properties": {"a": nested}},
            lambda: {"properties": {"n" * 1_000_000: nested}},
            lambda: {"properties": {f"p{i}": {"type": "string", "pattern": "a{1,99}"} for i in range(many)}},
            lambda: {
                "properties": {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for i in range(400)},
                "$defs": {"d": {"properties": {f"q{i}": {"type": "integer"} for i in range(many)}}},
            },
            lambda: {"properties": {"a": {"enum": [f"v{i}" for i in range(many)]}}},
            lambda: {"properties": {"a": {"oneOf": [{"const": i} for i in range(many)]}}},
            lambda: {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}},
            lambda: {"properties": {"a": {"type": "string", "pattern": "(" * many}}},
            lambda: {"properties": {"a": {"type": "string", "pattern": "(a|a?){1,99}{1,99}{1,99}"}}},
            lambda: {"properties": {"a": {"minItems": 10**9, "type": "array", "maxItems": 10**18}}},
            lambda: {"properties": {"\x00\x1b]52;\n\u202e": {"type": "string"}}, "required": ["\x00\x1b]52;\n\u202e"]},
            lambda: {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
        )
    )()


def _request(random_: random.Random, models: list[str]) -> tuple[str, Body]:
    """Return a path and a hostile body for it."""
    kind = random_.choice(("schema", "schema", "schema", "body", "name"))
    messages = [{"role": "user", "content": "Go on."}]
    ask: dict[str, Any] = {"model": random_.choice(models), "messages": messages, "max_tokens": 4}
    if kind == "schema":
        schema = _schema(random_)
        count = random_.choice((1, 1, 5, 300))
        if random_.random() < 0.5 or count > 5:
            schema = {"type": "object", **schema} if count < 6 else {"type": "object"}
        strict = random_.random() < 0.5
        function = {"description": "x", "strict": strict}
        functions = [{**function, "name": f"f{i}", "parameters": schema} for i in range(count)]
        tools = [{"type": "function", "function": each} for each in functions]
        format_ = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        own = [{"name": each["name"], "input_schema": schema} for each in functions]
        return random_.choice(
            (
                ("/v1/chat/completions", {**ask, "tools": tools, "tool_choice": "required"}),
                ("/v1/chat/completions", {**ask, "response_format": format_}),
                ("/apply-template", {**ask, "tools": tools, "tool_choice": "required"}),
                ("/v1/messages", {**ask, "tools": own, "tool_choice": {"type": "any"}}),
                ("/v1/messages/count_tokens", {**ask, "tools": own, "tool_choice": {"type": "any"}}),
                (
                    "/v1/responses",
                    {
                        "model": ask["model"],
                        "input": "Go on.",
                        "max_output_tokens": 4,
                        "tools": [{"type": "function", **each} for each in functions],
                        "tool_choice": "required",
                    },
                ),
                ("/api/chat", {**ask, "format": schema, "options": {"num_predict": 4}, "stream": False}),
                ("/completion", {"model": ask["model"], "prompt": "x", "json_schema": schema, "n_predict": 4}),
            )
        )
    path = random_.choice(
        ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/completion", "/tokenize")
    )
    if kind == "name":
        name = random_.choice(
            (
                "../../etc/passwd",
                "\x00",
                "\x1b]52;c;x\x07",
                "\u202e",
                "a" * 100_000,
                "\\..\\x",
                "%2e%2e/",
                "é" * 999,
                "-",
            )
        )
        tool = {"type": "function", "function": {"name": name, "parameters": {}}}
        return path, random_.choice(({**ask, "model": name}, {**ask, "tools": [tool], "tool_choice": "required"}))
    text = json.dumps(ask)
    return path, random_.choice(
        (
            lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 900_000) + b"]}",
            lambda: b'{"messages":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
            lambda: json.dumps({**ask, "messages": [{"role": "user", "content": "x" * 8_000_000}]}).encode(),
            lambda: text.replace("4}", "NaN}").encode(),
            lambda: text.replace("4}", "1e999}").encode(),
            lambda: text.replace("4}", "9" * 100_000 + "}").encode(),
            lambda: text.replace('"max', '"messages": 5, "max').encode(),
            lambda: text.replace("Go on.", "\\ud800").encode(),
            lambda: text.encode().replace(b"Go on.", b"\xff\xfe\x80"),
            lambda: text.encode()[:-5],
            lambda: text.encode("utf-16"),
            lambda: b"",
            lambda: b"\x00" * 1000,
            lambda: b"[" * 30_000_000,
        )
    )()


def _watch_health(url: str, outcome: Outcome, ended: threading.Event) -> None:
    """Ask /health until the end, in a thread of its own."""
    with httpx.Client(base_url=url, timeout=HEALTH_WAIT_S) as client:
        while not ended.wait(HEALTH_S):
            began = time.monotonic()
            try:
                status = client.get("/health").status_code
            except httpx.HTTPError as error:
                status = 0
                outcome.health_failures.append(repr(error))
            outcome.worst_health_s = max(outcome.worst_health_s, time.monotonic() - began)
            outcome.health_answers += status == 200
            if status not in (0, 200):
                outcome.health_failures.append(str(status))


async def _chat(client: httpx.AsyncClient, model: str, outcome: Outcome, ended: asyncio.Event) -> int:
    count = 0
    while not ended.is_set() or not count:
        ask = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
        try:
            response = await client.post("/v1/chat/completions", json=ask)
        except httpx.HTTPError as error:
            outcome.wrong_chats.append(repr(error))
            break
        if response.status_code == 200 and ANSWER in response.text:
            count += 1
        else:
            outcome.wrong_chats.append(response.text[:200])
            break
    return count


async def _send(client: httpx.AsyncClient, path: str, body: Body, limit: asyncio.Semaphore, outcome: Outcome) -> None:
    async with limit:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        began = time.monotonic()
        try:
            response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            status, text = str(response.status_code), response.text
        except httpx.HTTPError as error:
            status, text = type(error).__name__, repr(error)
        outcome.statuses[status] += 1
        if outcome.statuses.total() % 20 == 0:
            print(f"{outcome.statuses.total()} answered, health within {outcome.worst_health_s:.2f} s", file=sys.stderr)
        if not status.isdecimal() or int(status) >= 500:
            outcome.failures.append(f"{path} {content[:100]!r}: {status} {text[:200]}")
        outcome.slowest = sorted([*outcome.slowest, (time.monotonic() - began, f"{path} {content[:80]!r}")])[-3:]


async def _attack(url: str, server: psutil.Process, models: list[str], n: int, seed: int) -> Outcome:
    outcome, ended, stop = Outcome(), asyncio.Event(), threading.Event()
    random_, limit = random.Random(seed), asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        for model in models:  # all are loaded, and have compiled once, before memory is looked at
            tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
            ask = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
            for more in ({"tools": [tool], "tool_choice": "required"}, {}):
                response = await client.post("/v1/chat/completions", json={**ask, **more})
                assert response.status_code == 200, response.text
        before = memory_of(server)
        health = threading.Thread(target=_watch_health, args=(url, outcome, stop))
        health.start()
        try:
            chats = [asyncio.create_task(_chat(client, models[0], outcome, ended)) for _ in range(CHATS)]
            await asyncio.gather(*(_send(client, *_request(random_, models), limit, outcome) for _ in range(n)))
            ended.set()
            counts = await asyncio.gather(*chats)
        finally:
            stop.set()
            health.join(HEALTH_WAIT_S + 1)
        outcome.chats, outcome.fewest_chats = sum(counts), min(counts)
        deadline = time.monotonic() + SETTLE_S
        while True:
            outcome.grown_bytes = memory_of(server) - before
            if outcome.grown_bytes < 64 << 20 or time.monotonic() > deadline:
                return outcome
            await asyncio.sleep(0.5)


def attacked(n: int, seed: int, folder: Path, forms: tuple[str, ...] = NOTATIONS) -> Outcome:
    """Return the outcome of so many hostile requests. folder: for models whose templates have these call formats."""
    paths = [str(MODEL_PATH)]
    for name in forms:
        signs = f"{TEMPLATE}{{# tools tool_calls {' '.join(BY_NAME[name].signs)} #}}"
        paths.append(str(thinker(folder / f"{name}.gguf", signs)))
    with served(*paths, "--requests", "8", "--draft", "off", "--prefix-cache", "0", "--context", "2048") as server:
        names = [Path(path).stem for path in paths]
        return asyncio.run(_attack(server.url, psutil.Process(server.process.pid), names, n, seed))


if __name__ == "__main__":
    requests, its_seed = (int(text) for text in [*sys.argv[1:], "300", "1"][:2])
    with tempfile.TemporaryDirectory() as its_folder, suppress(KeyboardInterrupt):
        print(json.dumps(vars(attacked(requests, its_seed, Path(its_folder))), indent=1))

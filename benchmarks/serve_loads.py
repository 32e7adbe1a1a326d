"""Loads of bench_serve.py: concurrent streams, streams during a long prompt, streams while workers are killed, and a
mixture for minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.serve_clients import Heard, Words, ask
from benchmarks.servers import Server

LATE_S = 30.0  # that an answer may take after a test's time is over


def completion(server: Server, prompt: str, tokens: int, ends: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """A greedy continuation of so many tokens. ends: tokens that must not come, so that it has all of them."""
    body: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
    if ends:
        body["logit_bias"] = {str(token): -100 for token in ends}
    return {"stream": True, "stream_options": {"include_usage": True}, **body}


def chat(server: Server, messages: Sequence[Any], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy answer of at most so many tokens."""
    body = {"model": server.model, "messages": list(messages), "max_tokens": tokens, "temperature": 0, **more}
    return {"stream": True, "stream_options": {"include_usage": True}, **body}


# --- many at once ---


async def at_once(server: Server, bodies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """All of these at once: tokens a second over all of it, and while every one generated; seconds to first tokens."""
    began = time.perf_counter()
    heard = [
        item.check() for item in await asyncio.gather(*(ask(server.address, "/v1/completions", b) for b in bodies))
    ]
    for body, item in zip(bodies, heard, strict=True):
        if item.usage and item.tokens != body["max_tokens"]:
            raise SystemExit(f"{server.name} gave {item.tokens} tokens of {body['max_tokens']}")
    took_s = max(entry.at[-1] for entry in heard) - began
    firsts = sorted(entry.first_s for entry in heard)
    tokens = sum(body["max_tokens"] for body in bodies)
    return {
        "tokens_per_s": tokens / took_s,
        "decode_per_s": steady(heard, [body["max_tokens"] for body in bodies]) or tokens / took_s,
        "first_s": firsts[len(firsts) // 2],
    }


async def in_turn(server: Server, bodies: Sequence[dict[str, Any]], streams: int) -> dict[str, float]:
    """Streams that send one request after another, until none is left: tokens a second while all of them have one, and
    the median time to a first token.
    """
    began, waiting, heard, ends = time.perf_counter(), deque(bodies), list[tuple[Heard, int]](), list[float]()

    async def stream() -> None:
        while waiting:
            body = waiting.popleft()
            answer = (await ask(server.address, "/v1/completions", body)).check()
            heard.append((answer, body["max_tokens"]))
        ends.append(time.perf_counter())

    await asyncio.gather(*(stream() for _ in range(streams)))
    until = min(ends)
    # A piece may have several tokens.
    tokens = sum(n * sum(at <= until for at in answer.at) / len(answer.at) for answer, n in heard)
    return {
        "tokens_per_s": tokens / (until - began),
        "first_s": statistics.median(answer.first_s for answer, _ in heard),
    }


def steady(heard: Sequence[Heard], tokens: Sequence[int]) -> float:
    """Tokens a second while every stream was generating; 0 where there was no such time."""
    begin, end = max(item.at[0] for item in heard), min(item.at[-1] for item in heard)
    if begin >= end:
        return 0.0
    total = 0.0
    for item, n in zip(heard, tokens, strict=True):
        inside = [at for at in item.at if begin <= at <= end]
        if len(inside) < 2:
            return 0.0
        total += (len(inside) - 1) / (inside[-1] - inside[0]) * n / len(item.at)  # a piece may have several tokens
    return total


# --- beside a long prompt ---


async def beside_long(
    server: Server,
    words: Words,
    *,
    streams: int,
    prompt: int,
    tokens: int,
    long: int,
    calm_s: float,
    ends: Sequence[int],
) -> dict[str, float]:
    """Clients that have one answer after the other, so many at any time, and then a long prompt beside them."""
    over, heard = asyncio.Event(), []

    async def client() -> None:
        while not over.is_set():
            first = Heard(time.perf_counter())
            heard.append(first)
            await ask(
                server.address, "/v1/completions", completion(server, words.text(prompt), tokens, ends), heard=first
            )
            first.check()

    clients = [asyncio.ensure_future(client()) for _ in range(streams)]
    await asyncio.sleep(calm_s)
    came = time.perf_counter()
    late = (await ask(server.address, "/v1/completions", completion(server, words.text(long), 2, ends))).check()
    over.set()
    await asyncio.gather(*clients)
    until = late.at[0]
    calm = [item for item in heard if item.at[0] < came]
    baseline = [item for item in heard if item.began < until and item.at[0] >= came]  # began or waited in that time
    return {
        "long_first_s": late.first_s,
        "gap_s": longest_gap(heard, came, until),
        "calm_gap_s": longest_gap(heard, 0.0, came),
        "first_p99_s": percentile([item.first_s for item in baseline], 0.99),
        "calm_first_p99_s": percentile([item.first_s for item in calm], 0.99),
        "requests": float(len(baseline)),
    }


def longest_gap(heard: Sequence[Heard], begin: float, end: float) -> float:
    """Between two pieces of a stream, of which one at least came in that time."""
    pairs = [pair for item in heard for pair in itertools.pairwise(item.at)]
    return max((b - a for a, b in pairs if a < end and b > begin), default=0.0)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that so large a part of them does not exceed; 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


# --- beside long prompts, again and again ---


async def beside_many_long(
    server: Server,
    words: Words,
    *,
    streams: int,
    prompt: int,
    tokens: int,
    long: int,
    seconds: float,
    target_s: float,
    ends: Sequence[int],
) -> dict[str, float]:
    """Clients that have one answer after the other, and one more with a long prompt after the other: which part of the
    gaps between pieces of answers was within a target, and when the long prompts' first tokens came."""
    until, heard, late = time.perf_counter() + seconds, list[Heard](), list[Heard]()

    async def client(n_prompt: int, n_tokens: int, to: list[Heard]) -> None:
        while time.perf_counter() < until:
            body = completion(server, words.text(n_prompt), n_tokens, ends)
            to.append((await ask(server.address, "/v1/completions", body)).check())

    began = time.perf_counter()
    await asyncio.gather(client(long, 2, late), *(client(prompt, tokens, heard) for _ in range(streams)))
    took_s = time.perf_counter() - began
    gaps = [b - a for item in heard for a, b in itertools.pairwise(item.at)]
    return {
        "within": sum(gap <= target_s for gap in gaps) / len(gaps),
        "gap_p50_s": percentile(gaps, 0.5),
        "gap_p95_s": percentile(gaps, 0.95),
        "gap_p99_s": percentile(gaps, 0.99),
        "long_first_s": percentile([item.first_s for item in late], 0.5),
        "first_s": percentile([item.first_s for item in heard], 0.5),
        "long_prompts": float(len(late)),
        "tokens_per_s": sum(item.tokens for item in heard) / took_s,
    }


# --- while workers are killed ---


async def questions_for(
    server: Server, target: Sequence[Sequence[Any]], tokens: int, streams: int, seconds: float
) -> list[tuple[int, Heard]]:
    """So many streams at any time, one question after the other: (number of the question, what came)."""
    deadline = time.monotonic() + seconds
    numbers = itertools.cycle(range(len(target)))
    results: list[tuple[int, Heard]] = []

    async def client() -> None:
        while time.monotonic() < deadline:
            number = next(numbers)
            body = chat(server, target[number], tokens)
            heard = await ask(server.address, "/v1/chat/completions", body, limit_s=seconds + LATE_S)
            results.append((number, heard))
            if heard.error:
                await asyncio.sleep(0.2)  # a server that is gone is not asked thousands of times

    await asyncio.gather(*(client() for _ in range(streams)))
    return results


# --- a mixture ---


class Mixture:
    """Clients of many kinds, and what came of them."""

    def __init__(self, server: Server, words: Words, target: Sequence[Sequence[Any]], context: int, seed: int) -> None:
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()  # as they should
        self.wrong: list[str] = []  # what did not
        self._server, self._words, self._asked, self._context = server, words, target, context
        self._random = random.Random(seed)

    async def go_on(self, clients: int, deadline: float) -> None:
        """So many clients until time.monotonic() is that."""
        kinds: list[Callable[[], Any]] = [
            *(self.stream, self.stream, self.stream, self.completed, self.dropped),
            *(self.whole, self.messages, self.constrained, self.long, self.too_long, self.malformed),
        ]

        async def client() -> None:
            while time.monotonic() < deadline:
                await self._one(self._random.choice(kinds))

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _one(self, kind: Callable[[], Any]) -> None:
        name = kind.__name__
        self.begun[name] += 1
        wrong = await kind()
        if wrong:
            self.wrong.append(f"{name}: {wrong}")
        else:
            self.ended[name] += 1

    async def _chat(self, tokens: int = 64, **more: Any) -> Heard:
        body = chat(self._server, self._random.choice(self._asked), tokens, **{"temperature": 0.8, **more})
        return await ask(self._server.address, "/v1/chat/completions", body)

    async def stream(self) -> str:
        """A chat that streams."""
        return whole(await self._chat())

    async def completed(self) -> str:
        """A long text that streams."""
        body = completion(self._server, self._words.text(20), 150)
        return whole(await ask(self._server.address, "/v1/completions", body))

    async def dropped(self) -> str:
        """A client that goes away."""
        body = completion(self._server, self._words.text(20), 200)
        heard = await ask(self._server.address, "/v1/completions", body, pieces=self._random.randrange(1, 20))
        return heard.error

    async def whole(self) -> str:
        """A chat in one piece."""
        return whole(await self._chat(stream=False, stream_options=None))

    async def messages(self) -> str:
        """A chat as Anthropic's API has it."""
        body = {"model": self._server.model, "max_tokens": 64, "stream": True}
        messages = [item for item in self._random.choice(self._asked) if item["role"] != "system"]
        heard = await ask(self._server.address, "/v1/messages", {**body, "messages": messages})
        return heard.error or ("" if heard.status == 200 else f"HTTP {heard.status}")

    async def constrained(self) -> str:
        """An answer that must follow a schema."""
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        return whole(await self._chat(tokens=48, response_format=form))

    async def long(self) -> str:
        """A prompt of most of the context."""
        body = completion(self._server, self._words.text(self._context * 2 // 3), 16)
        return whole(await ask(self._server.address, "/v1/completions", body))

    async def too_long(self) -> str:
        """A prompt of more than the context: refused."""
        body = completion(self._server, self._words.text(self._context * 2), 16)
        heard = await ask(self._server.address, "/v1/completions", body)
        return "" if heard.status == 400 else f"HTTP {heard.status}: {heard.error}"

    async def malformed(self) -> str:
        """A request that is no JSON: refused."""
        heard = await ask(self._server.address, "/v1/chat/completions", b'{"messages": [')
        return "" if heard.status == 400 else f"HTTP {heard.status}: {heard.error}"


def whole(heard: Heard) -> str:
    """Describe what is wrong with an answer; empty where it is all there."""
    if heard.error or heard.finish_reason is None:
        return heard.error or f"it broke off after {len(heard.at)} pieces"
    return ""

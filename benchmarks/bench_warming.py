"""Gain of prefix warming: the first tokens of two clients' turns compared with prompts without any cache; and its cost
for requests that arrive while it computes.

    python benchmarks/bench_warming.py [--only home|agent|foreground] [--model FILE] [--threads 2] [--exact]
        [--json [FILE]] [--tiny]

| section    | question                                                                                           |
| home       | a home assistant, with the time at the beginning of its prompt: how soon is each first token?      |
| agent      | a coding agent, whose history grows by files and results: how soon is each first token?            |
| foreground | how long does a request take while prefixes are computed, compared with a request alone?           |

A trace (`benchmarks/warming_traces.py`) is sent to `edge serve` three times: with --prefix-warming on and the trace's
own pauses; with the prefix cache alone; and, for every fourth prompt, with a key of its own, so that nothing of it is
cached. The second and third time send the messages of the first. The default model is SmolLM2-135M with its trained
weights. Without FILE, --json prints only JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import Figures, Section, bench, parser_of, progress, table
from benchmarks.servers import Server, edge_serve
from benchmarks.warming_traces import TRACES, Trace, TraceTurn
from edge.models.demo import MODEL_PATH
from tests.real.weights import SMOLLM2

ASKED_PART, ASKED_TURNS, ASKED_SLOWER = 1 / 10, 9 / 10, 1.02
ANSWER = 24  # tokens
CONTEXT = 8192
COLD_EVERY = 4  # turns; those between are compared with the prompt before, which is shorter, so less than their own
WARM_UP = "sk-warm-up"
LIMIT_S = 300.0
PROMPT_WORDS, REQUESTS = 60, 24  # of `foreground`
Messages = list[dict[str, Any]]


def main() -> None:
    parser = parser_of(__doc__, SECTIONS, rounds=REQUESTS)
    parser.add_argument("--model", type=Path, help="GGUF file (default: SmolLM2-135M)")
    words = "of a server (default: 2); with fewer than cores, what else runs disturbs less"
    parser.add_argument("--threads", type=int, default=2, help=words)
    words = "nothing that rounds more where steps are cut otherwise: with weights in F32 all answers are the same"
    parser.add_argument("--exact", action="store_true", help=words)
    bench(parser, SECTIONS, prepare)


def prepare(_folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    args.rounds = 2 if args.tiny else args.rounds
    args.model = args.model or (MODEL_PATH if args.tiny else SMOLLM2.path())
    return {"model": args.model.name}


@contextmanager
def serving(folder: Path, args: argparse.Namespace, n_keys: int, *more: str) -> Iterator[Server]:
    """A server with a cache and keys of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = folder / "keys"
    keys.write_text("\n".join([*map(_key, range(n_keys)), WARM_UP]))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    context = 2048 if args.tiny else CONTEXT
    exact = ("--kv-type", "f32", "--flash-attention", "off", "--draft", "off") if args.exact else ()
    options = ("--api-key-file", str(keys), "--prefix-cache", "1GiB", *exact, *more)
    server = edge_serve(args.model, folder, context=context, requests=2, threads=args.threads, more=options)
    server.start()
    try:
        schema = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}
        ready = {"messages": [{"role": "user", "content": "Are you?"}], "max_tokens": 4, "response_format": schema}
        _answer(server, ready, WARM_UP)  # starts what compiles constraints
        yield server
    finally:
        server.stop()


def _key(number: int) -> str:
    return f"sk-{number}"


# --- traces ---


def trace(name: str, folder: Path, args: argparse.Namespace) -> Figures:
    """Each turn of a trace: seconds to its first token, three ways."""
    turns, warming = TRACES[name], ("--prefix-warming", "on")
    if args.tiny:
        turns = Trace("The time is {stamp}.", turns.stamp, turns.tools[:1], [TraceTurn(0, "a"), TraceTurn(0, "b")])
    with serving(folder / "warm", args, 1, *warming) as server:
        chats, warm = _followed(server, turns)
        counters = _counters(server)
    cold = [warm[0]]  # nobody knew it
    with serving(folder / "cold", args, len(chats)) as server:
        for i, chat in enumerate(chats[1:]):
            is_measured = i % COLD_EVERY == 0
            cold.append(_first_token(server, turns, *chat, _key(i), most=1) if is_measured else cold[-1])
            progress(f"turn {i + 2}: {warm[i + 1]['first_s']:.3f} s of {cold[-1]['first_s']:.2f} s cold")
    with serving(folder / "cached", args, 1) as server:
        cached = [_first_token(server, turns, *chat, _key(0)) for chat in chats]
    parts = [w["first_s"] / c["first_s"] for w, c in zip(warm[1:], cold[1:], strict=True)]
    return {
        "turns": [
            {"prompt_tokens": w["tokens"], "cached_tokens": w["cached"], "warm_s": w["first_s"], "cold_s": c["first_s"]}
            | {"cache_alone_s": a["first_s"], "same": w["text"] == a["text"]}
            for w, a, c in zip(warm, cached, cold, strict=True)
        ],
        "turns_within": sum(part <= ASKED_PART for part in parts) / len(parts),
        "cache_alone_within": statistics.mean(
            a["first_s"] <= ASKED_PART * c["first_s"] for a, c in zip(cached[1:], cold[1:], strict=True)
        ),
        **counters,
    }


def _followed(server: Server, turns: Trace) -> tuple[list[tuple[Messages, float, str | None]], list[dict[str, Any]]]:
    """Send a trace in its own time; for each turn its messages, the moment they were sent and the function that is to
    be called, and what came."""
    chats: list[tuple[Messages, float, str | None]] = []
    results: list[dict[str, Any]] = []
    history: Messages = []
    for turn in turns.turns:
        time.sleep(turn.gap_s)
        call = history[-1].get("tool_calls") if history else None
        at = chats[-1][1] if call else time.time()  # the time of a question is that of all it takes to answer it
        message = {"role": "tool", "tool_call_id": call[0]["id"]} if call else {"role": "user"}
        history.append({**message, "content": turn.text})
        chats.append(([*history], at, turn.calls))
        results.append(_first_token(server, turns, *chats[-1], _key(0)))
        progress("turn {}: {tokens} tokens, {cached} cached, {first_s:.3f} s".format(len(chats), **results[-1]))
        history.append(results[-1]["message"])
    return chats, results


def _first_token(
    server: Server, turns: Trace, history: Messages, at: float, calls: str | None, key: str, most: int = 0
) -> dict[str, Any]:
    """Ask; seconds to the first token, and what the answer was. most: tokens of it; 0: the usual."""
    system = {"role": "system", "content": turns.system_at(at)}
    body: dict[str, Any] = {"messages": [system, *history], "max_tokens": ANSWER, "temperature": 0}
    body["tools"] = turns.tools
    if calls is not None:
        body |= {"tool_choice": {"type": "function", "function": {"name": calls}}, "max_tokens": 4 * ANSWER}
    body["max_tokens"] = most or body["max_tokens"]
    return _answer(server, body, key)


def _answer(server: Server, body: dict[str, Any], key: str) -> dict[str, Any]:
    host, port = server.address
    client = httpx.Client(timeout=LIMIT_S)  # takes longer to make than a server to read a request
    began, first_s, text, calls, usage = time.perf_counter(), 0.0, "", [], {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url, headers = f"http://{host}:{port}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    with client, client.stream("POST", url, json=body, headers=headers) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"{server.name}: {event['error']['message']}")
            usage = event.get("usage") or usage
            first_s = first_s or time.perf_counter() - began  # the role comes with the first token
            for choice in event["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if "id" in call:
                        calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                    else:
                        calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls and _is_json(calls[-1]["function"]["arguments"]):
        message["tool_calls"] = calls
    return {
        "first_s": first_s,
        "all_s": time.perf_counter() - began,
        "tokens": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "text": text + "".join(call["function"]["arguments"] for call in calls),
        "message": message,
    }


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _counters(server: Server) -> dict[str, float]:
    host, port = server.address
    text = httpx.get(f"http://{host}:{port}/metrics", headers={"Authorization": f"Bearer {_key(0)}"}).text
    names = ("computed_tokens", "used_tokens", "seconds")
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("edge_")}
    return {f"warming_{name}": values[f"edge_warming_{name}_total"] for name in names}


def trace_text(figures: Figures) -> str:
    rows = []
    for i, turn in enumerate(figures["turns"], 1):
        cold_s, warm_s = turn["cold_s"], turn["warm_s"]
        tokens = [str(i), f"{turn['prompt_tokens']}", f"{turn['cached_tokens']}"]
        times = [f"{cold_s:.2f}", f"{turn['cache_alone_s']:.3f}", f"{warm_s:.3f}", f"1/{cold_s / warm_s:.0f}"]
        rows.append([*tokens, *times, "yes" if turn["same"] else "no"])
    header = ["turn", "tokens", "cached", "cold, s", "prefix cache alone, s", "warmed, s", "of cold", "same answer"]
    return (
        f"{table(header, rows)}\n\nAfter the first, {figures['turns_within']:.0%} of the turns within 1/10 of cold"
        f" (asked: {ASKED_TURNS:.0%}); with the prefix cache alone {figures['cache_alone_within']:.0%}. Computed ahead:"
        f" {figures['warming_computed_tokens']:.0f} tokens in {figures['warming_seconds']:.1f} s, of which"
        f" {figures['warming_used_tokens']:.0f} were used."
    )


# --- foreground ---


def foreground(folder: Path, args: argparse.Namespace) -> Figures:
    """Requests that come while prefixes are computed all the time, and others that come to a server with nothing to
    do, in turns."""
    rng = random.Random(0)
    words = [f"word{n}" for n in range(100, 500)]  # of as many tokens each
    times: dict[str, list[dict[str, Any]]] = {"quiet": [], "warming": []}
    n_words = 20 if args.tiny else PROMPT_WORDS
    with serving(folder / "one", args, 1, "--prefix-warming", "3600") as server:
        host, port = server.address
        for turn in range(args.rounds + 1):
            for side in ("quiet", "warming") if turn % 2 else ("warming", "quiet"):
                text = " ".join(rng.choices(words, k=n_words))
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER, "temperature": 0}
                prefix = None
                with httpx.Client(
                    base_url=f"http://{host}:{port}", headers={"Authorization": f"Bearer {_key(0)}"}, timeout=LIMIT_S
                ) as client:
                    if side == "warming":
                        long = " ".join(rng.choices(words, k=(4 if args.tiny else 12) * n_words))
                        prefix = client.post("/v1/prefixes", json={"prompt": long}).json()["id"]
                    time.sleep(0.4 + rng.random() * 0.2)
                    result = _answer(server, body, _key(0))
                    if prefix is not None:
                        client.delete(f"/v1/prefixes/{prefix}")
                    time.sleep(0.2)  # what the turn itself has computed
                if turn:
                    times[side].append(result)
                    progress(f"round {turn}, {side}: {result['first_s']:.3f} s, {result['all_s']:.3f} s")
    medians = {
        side: {key: statistics.median(result[key] for result in results) for key in ("first_s", "all_s", "cached")}
        for side, results in times.items()
    }
    slower = {key: medians["warming"][key] / medians["quiet"][key] for key in ("first_s", "all_s")}
    best_s = {side: min(result["all_s"] for result in results) for side, results in times.items()}
    return {"medians": medians, "slower": slower, "best_s": best_s, "rounds": args.rounds}


def foreground_text(figures: Figures) -> str:
    names = {"first_s": "first token, s", "all_s": "whole answer, s"}
    rows = []
    for key, name in names.items():
        sides = [f"{figures['medians'][side][key]:.3f}" for side in ("quiet", "warming")]
        rows.append([name, *sides, f"{figures['slower'][key]:.3f}"])
    best = figures["best_s"]
    cached = " and ".join(f"{figures['medians'][side]['cached']:.0f}" for side in ("quiet", "warming"))
    return (
        f"{table(['', 'nothing computed', 'prefixes computed', 'ratio'], rows)}\n\nAsked: {ASKED_SLOWER} at most."
        f" Fastest whole answers: {best['quiet']:.3f} and {best['warming']:.3f} s. Tokens from the cache: {cached}."
    )


SECTIONS = {
    "home": Section(partial(trace, "home"), trace_text),
    "agent": Section(partial(trace, "agent"), trace_text),
    "foreground": Section(foreground, foreground_text),
}

if __name__ == "__main__":
    main()

"""`edge serve` under load: throughput, fairness, restarts, and the answers if workers are killed.

    python benchmarks/bench_serve.py [--only SECTION] [--model FILE] [--minutes 5] [--json [FILE]] [--tiny]
        [--before TREE] [--llama-server PROGRAM] [--llama-batched-bench PROGRAM] [--llama-cpp-python PYTHON]

| section    | question                                                                                          |
| throughput | how many tokens a second do 1, 8 and 16 streams have together?                                    |
| stall      | how much does a new prompt of 2,000 tokens delay 4 running streams?                               |
| targets    | which fraction of their gaps is within --target-itl if such prompts arrive one after the other?   |
| prefix     | how soon is the first token of a prompt that shares a prefix, also after a restart of the server? |
| survive    | 16 streams over two workers, of which one is killed every 20 s: which are lost, or wrong?         |
| soak       | a mixture of requests for --minutes: does memory grow, does every request end correctly?          |

The first three sections compare servers with the same file and the same clients: `edge serve`, llama.cpp's
llama-server, llama-cpp-python's own server, and with --before `edge serve` of another checkout. All servers run at the
same time and are measured in turn; the order changes in each round. The throughput is also compared with an upper
limit: llama.cpp's decode of the same number of rows, by its llama-batched-bench or else by our engine without a server.
The output names each server that is not installed. The default model is a file with TinyLlama-1.1B's shape and random
weights in Q4_0; `survive` and `soak` always take the bundled model, whose answers have a meaning. Without FILE, --json
prints only JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import serve_tables
from benchmarks.bench_distributed import random_model
from benchmarks.harness import Section, alternate, bench, bests, compared, medians, parser_of
from benchmarks.lent_device import Worker
from benchmarks.serve_clients import Heard, Words, ask
from benchmarks.serve_limit import limit
from benchmarks.serve_loads import (
    Mixture,
    at_once,
    beside_long,
    beside_many_long,
    chat,
    completion,
    longest_gap,
    questions_for,
    whole,
)
from benchmarks.servers import (
    HOST,
    LLAMA_CPP_PYTHON,
    LLAMA_SERVER,
    Server,
    edge_serve,
    free_port,
    has_server,
    llama_cpp_python,
    llama_server,
    running,
)
from devices.probe import default_threads
from edge.models.demo import MODEL_PATH
from edge.planning.choice import save_plan
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tools.demo_model.grammar import held_out

LIMIT = "llama.cpp's batched decode"
BACK_S = 1.0  # from a worker's end until it is started again
SAMPLE_S = 1.0  # between two looks at memory


def main() -> None:
    parser = parser_of(__doc__, SECTIONS, rounds=3)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--target-itl", type=float, default=150.0, metavar="MS", help="of targets (default: 150)")
    parser.add_argument("--minutes", type=float, default=5.0, help="of survive, and of soak (default: 5)")
    parser.add_argument(
        "--every", type=float, default=20.0, metavar="S", help="of survive: between kills (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompts and of what soak does (default: 1)")
    parser.add_argument("--before", type=Path, metavar="TREE", help="checkout of an earlier commit to compare with")
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM")
    parser.add_argument("--llama-batched-bench", type=Path, metavar="PROGRAM")
    parser.add_argument("--llama-cpp-python", type=Path, metavar="PYTHON", default=Path(sys.executable))
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    # Streams at once, tokens of their prompts and answers; the long prompt; the shared one and what follows it.
    args.at_once, args.prompt, args.tokens, args.long, args.shared, args.own = (1, 8, 16), 32, 48, 2000, 1000, 20
    args.context, args.requests, args.calm_s, args.streams = 2048, 16, 5.0, 16
    if args.tiny:
        args.at_once, args.prompt, args.tokens, args.long, args.shared, args.own = (1, 2), 8, 6, 150, 100, 8
        args.context, args.requests, args.calm_s, args.streams = 256, 4, 0.2, 4
        args.rounds, args.threads, args.minutes, args.every = 1, 1, 5 / 60, 2.0
    # A random model says the token that ends a text as rarely as any other; the others must not say it.
    random = args.model is None and not args.tiny and args.only not in ("survive", "soak")
    args.model = args.model.resolve() if args.model else random_model(folder) if random else MODEL_PATH
    metadata = GgufFile.open(args.model).metadata
    args.ends = [] if random else [int(metadata["tokenizer.ggml.eos_token_id"])]
    trained = int(metadata[f"{metadata['general.architecture']}.context_length"])
    args.long = min(args.long, trained - 24)  # an answer, and what begins a text, must have room
    return {"threads": args.threads, "model": args.model.name}


def servers_here(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Server], dict[str, str]]:
    """(those that are compared, why the others are not)."""
    sizes = {"context": args.context, "requests": args.requests, "threads": args.threads}
    # Two servers of ours would read each other's prompts from the disk.
    more = () if args.before is None else ("--prefix-cache", "0")
    results, left_out = [edge_serve(args.model, folder, **sizes, more=more)], {}
    if args.before is not None:
        results.append(edge_serve(args.model, folder, **sizes, more=more, tree=args.before))
    if args.llama_server is None:
        left_out[LLAMA_SERVER] = "name the program with --llama-server"
    else:
        results.append(llama_server(args.llama_server, args.model, folder, **sizes))
    if not has_server(args.llama_cpp_python):
        left_out[LLAMA_CPP_PYTHON] = (
            "llama-cpp-python[server] is not installed; --llama-cpp-python names another Python"
        )
    else:
        del sizes["requests"]
        results.append(llama_cpp_python(args.llama_cpp_python, args.model, folder, **sizes))
    return {server.name: server for server in results}, left_out


def warm(server: Server, args: argparse.Namespace) -> None:
    """Have it compute something."""
    asyncio.run(ask(server.address, "/v1/completions", completion(server, "a b c d", 4, args.ends))).check()


# --- throughput ---


def throughput(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """So many streams at once, for each number of them."""
    servers, left_out = servers_here(folder, args)
    words, sizes = Words(args.model, args.seed), (args.prompt, args.tokens, args.threads)
    cases = []
    with running(servers):
        for n in args.at_once:
            # Each round has prompts of its own, the same ones for every server.
            prompts = [[words.text(args.prompt) for _ in range(n)] for _ in range(args.rounds + 1)]
            measures = {name: _streams(server, iter(prompts), args) for name, server in servers.items()}
            if args.before is None:  # a comparison with another checkout needs no limit, which takes most of the time
                measures[LIMIT] = partial(limit, args.llama_batched_bench, args.model, n, *sizes)
            result = alternate(measures, args.rounds)
            sides = list(servers)
            cases.append(
                {
                    "streams": n,
                    "median": medians(result),
                    "best": bests(result),
                    "compared": [
                        row for side in measures if side != sides[0] for row in compared(result, sides[0], side)
                    ],
                    "measured": result,
                }
            )
    by = "llama-batched-bench" if args.llama_batched_bench else "our engine without a server"
    return {"rounds": args.rounds, "prompt": args.prompt, "tokens": args.tokens, "cases": cases, "limit_by": by} | {
        "left_out": left_out
    }


def _streams(server: Server, prompts: Iterator[list[str]], args: argparse.Namespace) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        bodies = [completion(server, prompt, args.tokens, args.ends) for prompt in next(prompts)]
        return asyncio.run(at_once(server, bodies))

    return measure


# --- stall ---


def stall(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Four clients that always have a stream, before a long prompt comes and while it is computed."""
    servers, left_out = servers_here(folder, args)
    sizes = {"streams": 4, "prompt": args.prompt, "tokens": args.tokens, "long": args.long, "calm_s": args.calm_s}
    words = Words(args.model, args.seed)
    with running(servers):
        for server in servers.values():
            warm(server, args)

        def measure(server: Server) -> dict[str, float]:
            return asyncio.run(beside_long(server, words, **sizes, ends=args.ends))

        # Each is warm: every round counts.
        result = alternate({name: partial(measure, item) for name, item in servers.items()}, args.rounds, warm_up=False)
    return {"rounds": args.rounds, **sizes, "median": medians(result), "measured": result, "left_out": left_out}


# --- targets ---


def targets(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Gaps of four clients' answers while long prompts come one after the other, with a target and without."""
    sizes = {"streams": 4, "prompt": args.prompt, "tokens": args.tokens, "long": args.long // 5}
    load = {**sizes, "seconds": 3 * args.calm_s, "target_s": args.target_itl / 1000, "ends": args.ends}
    options = {"context": args.context, "requests": args.requests, "threads": args.threads}
    words, servers = Words(args.model, args.seed), dict[str, Server]()
    for name, more in {"as it is": [], f"with {args.target_itl:g} ms": ["--target-itl", str(args.target_itl)]}.items():
        (folder / name).mkdir()
        servers[name] = edge_serve(args.model, folder / name, **options, more=("--prefix-cache", "0", *more))

    def measure(server: Server) -> dict[str, float]:
        return asyncio.run(beside_many_long(server, words, **load))

    with running(servers):
        for server in servers.values():
            warm(server, args)
        result = alternate({name: partial(measure, item) for name, item in servers.items()}, args.rounds, warm_up=False)
    about = {"rounds": args.rounds, **sizes, "seconds": load["seconds"], "target_ms": args.target_itl}
    return {**about, "median": medians(result), "measured": result}


# --- prefix ---


def prefix(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The first token of prompts that begin alike: the first, the next one, and one after the server began anew."""
    servers, left_out = servers_here(folder, args)
    words = Words(args.model, args.seed)

    def measure(server: Server) -> dict[str, float]:
        shared = words.text(args.shared)
        results: dict[str, float] = {}
        for name in ("first", "second", "restarted"):
            if name == "restarted":
                server.stop()
                results["start_s"] = server.start()
                warm(server, args)
            body = completion(server, f"{shared} {words.text(args.own)}", 2, args.ends)
            heard = asyncio.run(ask(server.address, "/v1/completions", body)).check()
            results |= {f"{name}_s": heard.first_s, f"{name}_cached": float(heard.cached_tokens)}
        return results

    with running(servers):
        for server in servers.values():
            warm(server, args)
        result = alternate({name: partial(measure, item) for name, item in servers.items()}, args.rounds, warm_up=False)
    sizes = {"shared": args.shared, "own": args.own}
    return {"rounds": args.rounds, **sizes, "median": medians(result), "measured": result, "left_out": left_out}


# --- survive ---


def survive(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Answers of three ranks, two of them on workers that are killed in turn, beside those of a quiet server."""
    addresses = [f"{HOST}:{free_port()}" for _ in range(2)]
    workers = [Worker(folder / f"worker-{number}", address) for number, address in enumerate(addresses)]
    devices = [LOCAL, *addresses]
    plan = make_plan(limits(GgufFile.open(MODEL_PATH)), MODEL_PATH.stem, "", devices, stages_of=(1, 1, 1))
    save_plan(folder / "plan.json", plan)
    target = [messages for messages, _ in held_out(8 if args.tiny else 64, seed=args.seed)]
    more = ("--plan", str(folder / "plan.json"))
    server = edge_serve(MODEL_PATH, folder, context=512, requests=args.streams, threads=1, more=more)
    seconds, tokens = args.minutes * 60, 48
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait()
        with running({"": server}):
            alone = [
                asyncio.run(ask(server.address, "/v1/chat/completions", chat(server, item, tokens))).check().text
                for item in target
            ]
            quiet = asyncio.run(questions_for(server, target, tokens, args.streams, min(seconds / 4, args.every)))

            async def disturbed() -> tuple[list[tuple[int, Heard]], list[float]]:
                kills: list[float] = []
                answers = asyncio.ensure_future(questions_for(server, target, tokens, args.streams, seconds))
                end = time.monotonic() + seconds
                while time.monotonic() + args.every / 2 < end:
                    await asyncio.sleep(args.every / 2)
                    worker = workers[len(kills) % 2]
                    kills.append(time.perf_counter())
                    worker.kill()
                    await asyncio.sleep(BACK_S)
                    worker.start()
                    await asyncio.sleep(args.every / 2 - BACK_S)
                return await answers, kills

            heard, kills = asyncio.run(disturbed())
    finally:
        for worker in workers:
            worker.kill()
    return {
        "minutes": args.minutes,
        "streams": args.streams,
        "kills": len(kills),
        "quiet": _judged(quiet, alone, []),
        "disturbed": _judged(heard, alone, kills),
    }


def _judged(results: list[tuple[int, Heard]], alone: list[str], kills: list[float]) -> dict[str, Any]:
    """Count the answers that came, were lost, and are not what the question had alone."""
    lost = [whole(heard) for _, heard in results if whole(heard)]
    wrong = [
        {"question": number, "alone": alone[number], "answer": heard.text}
        for number, heard in results
        if not whole(heard) and heard.text != alone[number]
    ]
    # How long the stream that waited longest got nothing after each kill: from it or from the last token before it.
    gaps = [longest_gap([heard for _, heard in results], at, at + 5) for at in kills]
    return {
        "answers": len(results),
        "lost": len(lost),
        "lost_because": sorted(set(lost))[:10],
        "wrong": len(wrong),
        "wrong_are": wrong[:10],
        "paused_s": {"median": statistics.median(gaps), "most": max(gaps)} if gaps else {},
    }


# --- soak ---


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A mixture of requests, and the memory of all processes of the server."""
    context, requests = 1024, 8  # which they share: those that need more together wait, or are computed again
    server = edge_serve(MODEL_PATH, folder, context=context // requests, requests=requests, threads=args.threads)
    target = [messages for messages, _ in held_out(64, seed=args.seed)]
    rows: list[dict[str, float]] = []
    with running({"": server}):
        mixture = Mixture(server, Words(MODEL_PATH, args.seed), target, context, args.seed)

        async def all_of_it() -> None:
            began = time.monotonic()
            clients = asyncio.ensure_future(mixture.go_on(12, began + args.minutes * 60))
            while not clients.done():
                begun = float(sum(mixture.begun.values()))
                rows.append({"at_s": time.monotonic() - began, "rss_bytes": resident(server), "begun": begun})
                await asyncio.wait([clients], timeout=SAMPLE_S)
            await clients

        asyncio.run(all_of_it())
        processes = len(server.processes())
    after = rows[len(rows) // 5 :]  # the first fifth warms caches
    return {
        "minutes": args.minutes,
        "begun": dict(mixture.begun),
        "ended": dict(mixture.ended),
        "wrong": len(mixture.wrong),
        "wrong_are": mixture.wrong[:20],
        "processes": processes,
        "rss_bytes": {"after a fifth": after[0]["rss_bytes"], "most": max(row["rss_bytes"] for row in rows)}
        | {"at the end": rows[-1]["rss_bytes"]},
        "samples": rows,
    }


def resident(server: Server) -> float:
    """Bytes of all its processes together."""
    total = 0.0
    for process in server.processes():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


SECTIONS = {
    "throughput": Section(throughput, serve_tables.throughput),
    "stall": Section(stall, serve_tables.stall),
    "targets": Section(targets, serve_tables.targets),
    "prefix": Section(prefix, serve_tables.prefix),
    "survive": Section(survive, serve_tables.survive),
    "soak": Section(soak, serve_tables.soak),
}

if __name__ == "__main__":
    main()

"""Replicas: throughput beside one device and stages, lost replicas, a light client beside a heavy one, and labs.

    python benchmarks/bench_replicas.py [--only throughput|kills|fair|lab] [--model FILE] [--rounds 5] [--far-cores 1]
        [--kills 200] [--settings 20 | --numbers N [N ...]] [--seed 1] [--json [FILE]] [--tiny]

| section    | question                                                                                            |
| throughput | tokens per second of 8 streams on one device, on the worker, on two stages, and on two replicas     |
| kills      | conversations over two replicas, of which one loses its worker or its process at random moments:    |
|            | how many answers are lost or wrong, and how many turns find the prefix of their conversation?        |
| fair       | time to the first token of a client with single short requests, alone and beside a client that      |
|            | always has twice as many long requests as the server answers at the same time                       |
| lab        | predicted and measured tokens per second of plans with replicas, and of their strongest rivals,     |
|            | served by 3 to 8 sleeping devices                                                                   |

This device and the worker have one core each. `throughput` uses the file, `kills` and `fair` the bundled model, whose
answers have a meaning. Two replicas should reach 1.6 times one device, or 0.9 of the sum of two unequal ones. `fair`
should stay below 1.3. In `lab`, devices and links take several times as long as they should (`--stretch`), so that this
machine's own work does not count.
Figures do not count if a process waited for a core for more than a tenth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench_distributed import random_model
from benchmarks.harness import EDGE, Section, alternate, bench, compared, medians, parser_of, ratio_text, table
from benchmarks.lent_device import Worker, cpu_group, pin
from benchmarks.replicas_lab import lab, lab_text
from benchmarks.serve_clients import Heard, Words, ask, get
from benchmarks.serve_loads import chat, completion, in_turn, percentile, whole
from benchmarks.servers import HOST, Server, free_port, running
from edge.models.demo import MODEL_PATH
from edge.planning.choice import save_plan
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from tools.demo_model.grammar import held_out

STREAMS, REQUESTS = 8, 4  # streams, and requests of each
RETRY_S = 10.0  # interval at which a server starts a lost replica again
_LOADED_S = 120.0


def main() -> None:
    sections = {
        "throughput": Section(throughput, throughput_text),
        "kills": Section(kills, kills_text),
        "fair": Section(fair, fair_text),
        "lab": Section(lab, lab_text),
    }
    parser = parser_of(__doc__, sections, rounds=5)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    parser.add_argument("--far-cores", type=float, default=1.0, help="share of the worker's core in `throughput`")
    parser.add_argument("--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--settings", type=int, default=20, help="of labs (default: 20)")
    parser.add_argument("--numbers", type=int, nargs="+", help="only these settings of labs (from 0)")
    parser.add_argument("--stretch", type=float, default=4.0, help="of the times of labs (default: 4)")
    parser.add_argument("--seed", type=int, default=1)
    bench(parser, sections, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    if args.tiny:
        args.rounds, args.kills = 1, 2
    random_file = args.model is None and not args.tiny and args.only in (None, "throughput")
    args.model = args.model or (random_model(folder) if random_file else MODEL_PATH)
    return {"model": args.model.name}


def plans(model: Path, address: str) -> dict[str, Plan]:
    """Return the plans that are compared."""
    cut = partial(make_plan, limits(ModelFile.open(model)), model.stem, "")
    own, far = cut([LOCAL], "pipeline", [1]), cut([LOCAL, address], "pipeline", [0, 1])
    return {
        "one device": own,
        "the worker": far,
        "stages": cut([LOCAL, address], "pipeline", [1, 1]),
        "replicas": replace(own, replicas=(far,)),
    }


def serve(model: Path, plan: Plan, folder: Path, name: str, *more: str) -> Server:
    """Return a server on the first core that runs a plan."""
    save_plan(folder / f"{name}.json", plan)
    options = ("--threads", "1", "--prefix-cache", "0", "--draft", "off", "--context", "8192", *more)
    where = ("--plan", str(folder / f"{name}.json"))
    return Server(
        name,
        lambda port: ["taskset", "-c", "0", *EDGE, "serve", str(model), "--port", str(port), *options, *where],
        folder / f"{name}.log",
    )


@contextmanager
def far_worker(folder: Path, cores: float = 1.0) -> Iterator[tuple[Worker, str]]:
    """Yield a worker on the second core, and its address. cores: share of the core."""
    address = f"{HOST}:{free_port()}"
    worker = Worker(folder / "worker", address)
    with cpu_group() if cores < 1 else nullcontext() as group:
        started(worker)
        try:
            if group is not None:
                group.limit_cpu(cores)
                assert worker.process is not None
                for process in (worker.process.pid, *(child.pid for child in children(worker))):
                    group.add(process)
            yield worker, address
        finally:
            worker.end()


def children(worker: Worker) -> list[psutil.Process]:
    """Return the processes that a worker has started."""
    assert worker.process is not None
    return psutil.Process(worker.process.pid).children(recursive=True)


def started(worker: Worker) -> None:
    """Start a worker on the second core."""
    worker.start()
    worker.wait()
    assert worker.process is not None
    for process in (psutil.Process(worker.process.pid), *children(worker)):
        with suppress(psutil.NoSuchProcess):
            pin(process.pid, (psutil.cpu_count() or 1) - 1)


async def status_of(server: Server) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((await get(server.address, "/v1/cluster"))[1])["models"][0]
    return state


# --- throughput ---


def throughput(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each plan. Only one server runs at a time, since each has a model in memory."""
    tokens = 4 if args.tiny else 64
    with far_worker(folder, args.far_cores) as (_, address):

        def measure(name: str, plan: Plan) -> dict[str, float]:
            server = serve(args.model, plan, folder, name.replace(" ", "-"), "--requests", str(STREAMS))
            with running({name: server}):
                wait_for(server, len(plan.copies))
                words = Words(args.model)

                def load(requests: int) -> dict[str, float]:
                    """Return the figures of so many requests a stream, whose prompts are not cached."""
                    n = STREAMS * requests
                    bodies = [completion(server, words.text(24), tokens, ignore_eos=True) for _ in range(n)]
                    return asyncio.run(in_turn(server, bodies, STREAMS))

                load(1)
                return load(1 if args.tiny else REQUESTS)

        sides = {name: partial(measure, name, plan) for name, plan in plans(args.model, address).items()}
        result = alternate(sides, args.rounds, warm_up=False)
    rows = [row for name in ("stages", "replicas") for row in compared(result, name, "one device")]
    rates = {name: median["tokens_per_s"] for name, median in medians(result).items()}
    of_sum = rates["replicas"] / (rates["one device"] + rates["the worker"])
    return {"median": medians(result), "compared": rows, "of_sum": of_sum, "rounds": result}


def wait_for(server: Server, n_replicas: int) -> None:
    """Wait until all replicas of a server are loaded. Raises SystemExit after two minutes."""
    deadline = time.monotonic() + _LOADED_S
    while time.monotonic() < deadline:
        devices = asyncio.run(status_of(server)).get("devices", ())
        if len({device.get("replica", 0) for device in devices}) == n_replicas:
            return
        time.sleep(0.1)
    raise SystemExit(f"{server.name} has not loaded {n_replicas} replicas in {_LOADED_S:g} s")


def throughput_text(figures: dict[str, Any]) -> str:
    ratios = {row["side"]: ratio_text(row) for row in figures["compared"] if row["figure"] == "tokens_per_s"}
    rows = [
        [name, f"{median['tokens_per_s']:.1f}", f"{median['first_s']:.2f}", ratios.get(name, "1")]
        for name, median in figures["median"].items()
    ]
    rates = table(["plan", "tokens/s of 8 streams", "first token, s", "of one device"], rows)
    return f"{rates}\n\nReplicas have {figures['of_sum']:.2f} of the sum of both devices; asked: 0.9."


# --- kills ---


def kills(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return counts of answers and turns, while the far replica loses its worker or its process."""
    random_ = random.Random(args.seed)
    questions = [messages for messages, _ in held_out(6 if args.tiny else 32, seed=args.seed)]
    with far_worker(folder) as (worker, address):
        plan = plans(MODEL_PATH, address)["replicas"]
        server = serve(MODEL_PATH, plan, folder, "kills", "--requests", "4")
        with running({"": server}):
            wait_for(server, 2)
            alone = [asyncio.run(_answer(server, messages)).check().text for messages in questions]
            outcome = asyncio.run(_disturbed(server, worker, questions, alone, args.kills, random_))
    return outcome


async def _answer(server: Server, messages: Sequence[Any]) -> Heard:
    return await ask(server.address, "/v1/chat/completions", chat(server, messages, 48))


async def _disturbed(
    server: Server, worker: Worker, questions: Sequence[Any], alone: Sequence[str], n_kills: int, random_: random.Random
) -> dict[str, Any]:
    lost, wrong, turns, cached, n_answers = list[str](), 0, 0, 0, 0
    stop = asyncio.Event()

    async def client(number: int) -> None:
        """Ask questions, and go on with conversations."""
        nonlocal wrong, turns, cached, n_answers
        at = number
        while not stop.is_set():
            at = (at + 5) % len(questions)
            messages = list(questions[at])
            for turn in range(3):
                heard = await _answer(server, messages)
                n_answers += 1
                if problem := whole(heard):
                    lost.append(problem)
                    break
                if turn:
                    turns += 1
                    cached += heard.cached_tokens > 0
                else:
                    wrong += heard.text != alone[at]
                messages += [{"role": "assistant", "content": heard.text}, questions[at][-1]]

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    for kill in range(n_kills):
        await asyncio.sleep(random_.uniform(0.2, 1.0))
        if random_.random() < 0.5:
            await asyncio.to_thread(worker.kill)
            await asyncio.to_thread(started, worker)
        else:
            children = [p for p in server.processes() if "edge.serve.engine.child" in " ".join(p.cmdline())]
            with suppress(psutil.NoSuchProcess, IndexError):
                random_.choice(children).kill()
        deadline = time.monotonic() + RETRY_S * 3
        while time.monotonic() < deadline:
            devices = (await status_of(server)).get("devices", ())
            if len({device.get("replica", 0) for device in devices}) == 2:
                break
            await asyncio.sleep(0.1)
        if kill % 20 == 19:
            print(f"{kill + 1} kills, {n_answers} answers, {len(lost)} lost, {wrong} wrong", flush=True)
    stop.set()
    await asyncio.gather(*clients)
    return {
        "kills": n_kills, "answers": n_answers, "lost": len(lost), "reasons": lost[:5], "wrong": wrong,
        "turns": turns, "turns_with_prefix": cached,
    }  # fmt: skip


def kills_text(figures: dict[str, Any]) -> str:
    share = figures["turns_with_prefix"] / max(1, figures["turns"])
    rows = [[str(figures[key]) for key in ("kills", "answers", "lost", "wrong")] + [f"{share:.0%}"]]
    return table(["kills", "answers", "lost", "wrong", "later turns with a cached prefix"], rows)


# --- fair ---


def fair(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the times to the first token of the light client."""
    n, requests = (3, 2) if args.tiny else (40, 8)
    options = ("--requests", str(requests), "--api-key", "light", "--api-key", "heavy")
    server = serve(MODEL_PATH, plans(MODEL_PATH, f"{HOST}:1")["one device"], folder, "fair", *options)
    words = Words(MODEL_PATH, args.seed)
    with running({"": server}):

        async def light() -> list[float]:
            firsts = []
            for _ in range(n):
                body = {**completion(server, words.text(24), 8, ignore_eos=True), "model": "any"}
                firsts.append((await ask(server.address, "/v1/completions", body, key="light")).check().first_s)
            return firsts

        async def both() -> list[float]:
            async def heavy() -> None:
                while True:
                    body = {**completion(server, words.text(24), 128, ignore_eos=True), "model": "any"}
                    await ask(server.address, "/v1/completions", body, key="heavy")

            clients = [asyncio.create_task(heavy()) for _ in range(2 * requests)]
            await asyncio.sleep(2.0)
            try:
                return await light()
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

        asyncio.run(light())
        alone, shared = asyncio.run(light()), asyncio.run(both())
    return {name: {"p50_s": statistics.median(firsts), "p95_s": percentile(firsts, 0.95)}
            for name, firsts in (("alone", alone), ("beside", shared))}  # fmt: skip


def fair_text(figures: dict[str, Any]) -> str:
    rows = [[name, *(f"{figures[name][key] * 1e3:.0f}" for key in ("p50_s", "p95_s"))] for name in ("alone", "beside")]
    ratio = figures["beside"]["p95_s"] / figures["alone"]["p95_s"]
    return table(["light client", "median, ms", "p95, ms"], rows) + f"\n\nbeside / alone, p95: {ratio:.2f}"


if __name__ == "__main__":
    main()

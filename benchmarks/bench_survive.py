"""Devices are lost while they answer: whether every answer is that of an undisturbed run, and how long it paused.

    python benchmarks/bench_survive.py [--kills 100] [--seed 1] [--only stress|pause] [--spare N] [--json [FILE]]
        [--tiny]

stress: questions to the bundled model on this device and two or three workers, in stages, shards and both. In each
answer, at a random token, a random worker is lost in a random way: its engine process is killed or stands still, its
daemon is killed, or all of it stands still, as where a host vanishes. The answer must have the tokens of one device.

pause: the same on a model of TinyLlama's shape, one worker of which all is killed, after a prompt of so many
tokens: seconds until it is said, and until the next token. Beside it, what computing the history takes on this device.

--spare: in `stress`, be ready for the loss of N devices. In `pause`, every other round is ready for that of the worker;
what a token takes while keys and values are copied is compared, too.

--tiny: see that it works; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from lent_device import ROOT, worker

sys.path.insert(0, str(ROOT))

from edge.demo import MODEL_PATH
from edge.demo.grammar import held_out
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.sequence import Session
from edge.models import synth
from edge.models.presets import SHAPES
from edge.planning.deployed import Placement, deployed
from edge.tasks import Steps
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support.workers import is_fork_server

GREEDY = SamplingParams(temperature=0)
OPTIONS = EngineOptions(threads=1, context=512, batch=64)
STAGES = {2: ((1, 1, 1), (3,), (1, 2)), 3: ((1, 1, 1, 1), (4,), (2, 2), (1, 2, 1))}  # ranks of each, by workers
TOKENS = 96  # before a kill, of `pause`
ANSWERS_EACH = 6  # of one deployment, at most: a daemon that was killed comes back with the next one


@dataclass
class Lent:
    """A worker that may be lost."""

    address: str
    pid: int

    def engines(self) -> list[psutil.Process]:
        """Its engine processes."""
        there = psutil.Process(self.pid).children(recursive=True)
        return [process for process in there if not is_fork_server(process)]

    def lose(self, how: str) -> None:
        """Make it fail in one of WAYS."""
        daemon = psutil.Process(self.pid)
        children = self.engines()
        if how in ("kill process", "stop process", "stop all"):
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL if how == "kill process" else signal.SIGSTOP)
        if how == "kill daemon":
            daemon.kill()
        elif how == "stop all":
            daemon.suspend()

    def back(self) -> None:
        """Let what stands still go on."""
        with suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(self.pid)
            for process in (daemon, *self.engines()):
                process.resume()


WAYS = ("kill process", "stop process", "kill daemon", "stop all")


@dataclass
class Heard(Steps):
    """When somebody was said to be lost, and what was said."""

    at: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)
        if "going on with" in line:
            self.at.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("stress", "pause"), help="one experiment (default: both)")
    parser.add_argument("--kills", type=int, default=100, help="answers with a loss (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of what is lost, how and when (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of the pause (default: 5)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the pause's history (default: 64)")
    parser.add_argument("--spare", type=int, default=0, help="losses that are prepared for (default: 0)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all figures; alone: print them")
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    args = parser.parse_args()
    if args.tiny:
        args.kills, args.rounds, args.prompt_tokens, args.spare = 2, 1, 20, 1
    stolen_s = psutil.cpu_times().steal
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    with tempfile.TemporaryDirectory(prefix="edge-survive-") as folder:
        for name in ("CACHE", "STATE", "CONFIG"):
            os.environ[f"XDG_{name}_HOME"] = str(Path(folder) / name.lower())
        if args.only != "pause":
            result["stress"] = stress(args, Path(folder))
        if args.only != "stress":
            result["pause"] = pause(args, Path(folder))
    result["steal_s"] = psutil.cpu_times().steal - stolen_s
    text = json.dumps(result, indent=1)
    if args.json == "-":
        print(text)
    else:
        show(result)
        if args.json:
            Path(args.json).write_text(text + "\n")
    if result.get("stress", {}).get("wrong"):
        raise SystemExit(1)


def stress(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Answers with a loss in each: how many were right, and seconds until the next token, by the way of the loss."""
    rng = random.Random(args.seed)
    questions = [messages[-1]["content"] for messages, _ in held_out(40, seed=7)]
    with Engine(MODEL_PATH, OPTIONS) as single:
        wanted = {question: answer(single, question, {})[0] for question in questions}
    long_enough = [question for question in questions if len(wanted[question]) >= 4]
    paused: dict[str, list[float]] = {way: [] for way in WAYS}
    noticed: dict[str, list[float]] = {way: [] for way in WAYS}
    wrong, done, number = [], 0, 0
    while done < args.kills:
        number += 1
        ranks = rng.choice(STAGES[rng.choice(tuple(STAGES))])
        with (
            lent(folder / f"round-{number}", sum(ranks) - 1) as workers,
            running(MODEL_PATH, workers, ranks, min(args.spare, len(workers))) as (
                engine,
                heard,
            ),
        ):
            for _ in range(ANSWERS_EACH):
                there = [one for one in workers if psutil.pid_exists(one.pid) and one.engines()]
                if not there or done >= args.kills:
                    break
                victim, way, question = rng.choice(there), rng.choice(WAYS), rng.choice(long_enough)
                at, before = rng.randrange(1, len(wanted[question]) - 1), len(heard.at)
                tokens, times = answer(engine, question, {at: lambda: victim.lose(way)})  # noqa: B023
                victim.back()
                done += 1
                if tokens != wanted[question]:
                    wrong.append({"ranks": ranks, "way": way, "at": at, "question": question})
                paused[way].append(times[at] - times[at - 1])
                noticed[way] += [one - times[at - 1] for one in heard.at[before : before + 1]]
    return {
        "answers": done,
        "wrong": wrong,
        "paused_s": {way: spread(values) for way, values in paused.items() if values},
        "noticed_s": {way: spread(values) for way, values in noticed.items() if values},
    }


def pause(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds from a kill to the next token of two ranks that become one, and what a prefill takes there."""
    path = MODEL_PATH
    if not args.tiny:
        path = folder / "model.gguf"
        synth.synthesize(path, SHAPES["tinyllama-1.1b"], "q4_0", "q8_0")
    prompt = [10 + (7 * i * i) % 1000 for i in range(args.prompt_tokens)]
    options = replace(OPTIONS, context=max(OPTIONS.context or 0, args.prompt_tokens + TOKENS + 8))
    prefills: list[float] = []
    with Engine(path, options) as single:
        for _ in range(args.rounds + 1):  # the first is the warm-up
            began = time.perf_counter()
            Session(single).prefill(prompt)
            prefills.append(time.perf_counter() - began)
    kinds = {"without": 0, **({"with a spare": 1} if args.spare else {})}
    found: dict[str, dict[str, list[float]]] = {
        kind: {"noticed_s": [], "next_token_s": [], "token_s": []} for kind in kinds
    }
    for number in range(args.rounds):
        for kind, spare in kinds.items():
            with (
                lent(folder / f"pause-{number}-{spare}", 1) as workers,
                running(path, workers, (1, 1), spare, options) as (engine, heard),
            ):
                session = Session(engine)
                session.prefill(prompt)
                engine.answered([])
                for i in range(TOKENS):
                    began = time.perf_counter()
                    session.step(11 + i)
                    found[kind]["token_s"].append(time.perf_counter() - began)
                began = time.perf_counter()
                workers[0].lose("kill process")
                workers[0].lose("kill daemon")
                session.step(11)
                found[kind]["next_token_s"].append(time.perf_counter() - began)
                found[kind]["noticed_s"].append(heard.at[0] - began)
    return {
        "model": path.stem if args.tiny else "tinyllama-1.1b",
        "prompt_tokens": args.prompt_tokens,
        "prefill_s": spread(prefills[1:]),
        **{kind: {name: spread(values) for name, values in rows.items()} for kind, rows in found.items()},
        "token_mean_s": {kind: statistics.mean(rows["token_s"]) for kind, rows in found.items()},
    }


def answer(engine: TextEngine, question: str, at: dict[int, Callable[[], None]]) -> tuple[list[int], list[float]]:
    """The greedy answer's tokens, and when each came. at: what happens when so many are there."""
    tokens, times = [], []
    for response in Chat(engine).ask(question, GREEDY, max_tokens=32):
        if response.token_id is not None:
            tokens.append(response.token_id)
            times.append(time.perf_counter())
            at.get(len(tokens), lambda: None)()
    return tokens, times


@contextmanager
def lent(folder: Path, n: int) -> Iterator[list[Lent]]:
    """So many workers."""
    with ExitStack() as stack:
        started = [stack.enter_context(worker(folder / str(i))) for i in range(n)]
        workers = [Lent(*one) for one in started]
        try:
            yield workers
        finally:
            for one in workers:
                one.back()


@contextmanager
def running(
    path: Path, workers: list[Lent], ranks: tuple[int, ...], spare: int, options: EngineOptions = OPTIONS
) -> Iterator[tuple[TextEngine, Heard]]:
    """The model on this device and workers, so many ranks a stage. spare: losses that are prepared for."""
    devices = [LOCAL, *(one.address for one in workers)]
    plan = make_plan(limits(GgufFile.open(path)), path.stem, "", devices, stages_of=ranks)
    heard = Heard()
    with deployed(path, Placement(tuple(devices[1:]), plan, spare=spare), options, steps=heard) as model:
        yield model.engine, heard


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "best": ordered[0],
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['machine']}; the host took {result['steal_s']:.1f} s")
    if "stress" in result:
        found = result["stress"]
        ways = Counter({way: row["n"] for way, row in found["paused_s"].items()})
        print(f"{found['answers']} answers with a loss in each ({dict(ways)}): {len(found['wrong'])} wrong")
        for way, row in found["paused_s"].items():
            seen = found["noticed_s"].get(way)
            said = f"said after {seen['median']:.2f} s (p99 {seen['p99']:.2f})" if seen else ""
            print(f"  {way:13} next token after {row['median']:.2f} s (p99 {row['p99']:.2f})  {said}")
        for one in found["wrong"]:
            print(f"  wrong: {one}")
    if "pause" in result:
        row = result["pause"]
        print(f"{row['model']}, {row['prompt_tokens']} tokens held: prefill {row['prefill_s']['median']:.2f} s here")
        for kind in row["token_mean_s"]:
            paused = row[kind]["next_token_s"]
            print(
                f"  {kind}: the next token came {paused['median']:.2f} s after a kill (best {paused['best']:.2f}), said"
                f" after {row[kind]['noticed_s']['median']:.2f} s; before, a token took"
                f" {1e3 * row['token_mean_s'][kind]:.2f} ms (median {1e3 * row[kind]['token_s']['median']:.2f})"
            )


if __name__ == "__main__":
    main()

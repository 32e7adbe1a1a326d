"""Loss of devices during answers: is every answer that of an undisturbed run, and how long is the pause?

    python benchmarks/bench_survive.py [--kills 100] [--seed 1] [--only stress|pause] [--json [FILE]]
        [--round N] [--tiny]

stress: questions to the bundled model on this device and two to four workers, in stages, shards and both. During each
answer, at a random moment, a random worker fails in one of the ways of `losses.py`. The answer must have the tokens of
one device. A round is one deployment with up to six answers. An error is printed at once, with the command that repeats
its round: --seed N --round N. Runs with different seeds may be made at the same time.

pause: the same with a model of TinyLlama's shape and one worker, which is killed after a prompt of a given length:
seconds until the loss is reported, and until the next token; also the time that this device needs to compute the
history again.

--tiny: see that the benchmark works; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import Section, bench, parser_of, table
from benchmarks.losses import LosableWorker, losable_workers, possible_ways
from edge.deployment.deploy import deploy
from edge.deployment.deployed import DeployedModel
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.models import synth
from edge.models.demo import MODEL_PATH
from edge.models.synth import SHAPES
from edge.planning.choice import PlanChoice
from edge.profiling.cluster import Cluster
from edge.tasks import Steps
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tools.demo_model.grammar import held_out

GREEDY = SamplingParams(temperature=0)
OPTIONS = EngineOptions(threads=1, context=512, batch=64)
STAGES = {  # ranks of each, by workers
    2: ((1, 1, 1), (3,), (1, 2)),
    3: ((1, 1, 1, 1), (4,), (2, 2), (1, 2, 1)),
    4: ((1, 1, 1, 1, 1), (5,), (2, 3), (1, 2, 2)),
}
TOKENS = 96  # before a kill, of `pause`
ANSWERS_EACH = 6  # of one deployment, at most: a daemon that was killed comes back with the next one
LATER_S = 0.005  # after a token or the question, at most, something happens: so it may come in the middle of a step
HANGS_S = 30.0  # without a token: too long, whatever happened
SAY_EVERY = 50  # answers


@dataclass
class Heard(Steps):
    """When a loss was noticed, when it was said who goes on, and all that was said."""

    noticed_at: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)
        if "going on with" in line:
            self.at.append(time.perf_counter())

    def notice(self, engine: TextEngine) -> None:
        """Hear when this engine, which survives losses, looks for another one."""
        use: Any = engine.states.use  # which looks for it
        recovered = use._recovered

        def hear(error: Exception) -> TextEngine:
            self.noticed_at.append(time.perf_counter())
            result: TextEngine = recovered(error)
            return result

        use._recovered = hear


class Later:
    """Something that happens to a worker in a thread of its own, a moment after it is called."""

    def __init__(self, victim: LosableWorker, way: str, after_s: float) -> None:
        self.at: float | None = None  # when it has happened
        self._victim, self._way, self._after_s = victim, way, after_s
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="loss")

    def __call__(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Return when it has happened; its error where it could not."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        time.sleep(self._after_s)
        try:
            began = time.perf_counter()
            self._victim.lose(self._way)
            self.at = began
        except Exception as error:
            self._failed = error


def main() -> None:
    parser = parser_of(__doc__, SECTIONS, rounds=5)
    parser.add_argument("--kills", type=int, default=100, help="answers with a loss (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of what is lost, how and when (default: 1)")
    parser.add_argument("--round", type=int, help="of `stress`, this one alone")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the pause's history (default: 64)")
    result = bench(parser, SECTIONS, prepare)
    if result.get("stress", {}).get("wrong"):
        raise SystemExit(1)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    if args.tiny:
        args.kills, args.rounds, args.prompt_tokens = 4, 1, 20
    return {}


def stress(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Answers in which something happens: how many were wrong, and seconds until that was noticed and until the next
    token, by what happened."""
    questions = [messages[-1]["content"] for messages, _ in held_out(40, seed=7)]
    with Engine(MODEL_PATH, OPTIONS) as single:
        expected = {question: answer(single, question, {})[0] for question in questions}
    expected = {question: tokens for question, tokens in expected.items() if len(tokens) >= 4}
    ways = possible_ways(folder)
    results: list[dict[str, Any]] = []
    for number in count() if args.round is None else [args.round]:
        for row in one_round(args, number, folder / f"round-{number}", expected, ways):
            results.append(row)
            if row["wrong"]:
                print(f"wrong: {row}; again: --only stress --seed {args.seed} --round {number}", file=sys.stderr)
            if len(results) % SAY_EVERY == 0:
                print(f"{len(results)} answers, {sum(bool(row['wrong']) for row in results)} wrong", file=sys.stderr)
            if args.round is None and len(results) >= args.kills:
                break
        else:
            continue
        break
    return {
        "answers": len(results),
        "wrong": [row for row in results if row["wrong"]],
        "ways": {way: summary([row for row in results if row["way"] == way]) for way in ways},
    }


def one_round(
    args: argparse.Namespace, number: int, folder: Path, expected: dict[str, list[int]], ways: list[str]
) -> Iterator[dict[str, Any]]:
    """The answers of one deployment. Its number and the seed say what happens."""
    rng = random.Random(f"{args.seed} {number}")
    ranks = rng.choice(STAGES[rng.choice(tuple(STAGES))])
    order = list(ways)
    random.Random(f"{args.seed} block {number // len(ways)}").shuffle(order)
    with (
        losable_workers(folder, sum(ranks) - 1, ways) as workers,
        running(MODEL_PATH, workers, ranks) as (model, heard),
    ):
        heard.notice(model.engine)
        for i in range(ANSWERS_EACH):
            way, question = order[(number + i) % len(order)], rng.choice(list(expected))
            at, after_s = rng.randrange(len(expected[question]) - 2), rng.uniform(0, LATER_S)
            chosen = rng.random()
            there = [worker for worker in workers if worker.is_there and worker.address in model.plan.devices]
            if not there:
                break
            victim = there[int(chosen * len(there))]
            loss = Later(victim, way, after_s)
            row: dict[str, Any] = {
                "round": number,
                "ranks": ranks,
                "way": way,
                "worker": workers.index(victim),
                "question": question,
                "at": at,
            }
            for known in (heard.noticed_at, heard.at, heard.lines):
                known.clear()
            wrong, tokens, times = "", [], []
            try:
                tokens, times = answer(model.engine, question, {at: loss})
            except Exception as error:
                traceback.print_exc()
                wrong = f"{type(error).__name__}: {error}"
            loss.wait()
            victim.back()
            row |= measured(loss.at or 0.0, times, heard)
            if not wrong and tokens != expected[question]:
                wrong = f"token {first_other(tokens, expected[question])} is another"
            if not wrong and row.get("paused_s", 0) > HANGS_S:
                wrong = f"no token for {row['paused_s']:.0f} s"
            yield {**row, "wrong": wrong, "said": list(heard.lines)}
            if wrong:
                break


def measured(lost_at: float, times: list[float], heard: Heard) -> dict[str, float]:
    """Seconds after something happened: noticed_s, said_s; paused_s, the longest wait for a token from then on."""
    results = {"noticed_s": heard.noticed_at, "said_s": heard.at}
    # What came before has another cause: a link that broke in the answer before this one, and was not needed then.
    row = {
        name: min(later) - lost_at for name, at in results.items() if (later := [item for item in at if item > lost_at])
    }
    tokens_at = [lost_at, *(item for item in times if item > lost_at)]
    if len(tokens_at) > 1:
        row["paused_s"] = max(after - before for before, after in pairwise(tokens_at))
    return row


def first_other(tokens: list[int], expected: list[int]) -> int:
    """The number of the first token that is another one, from 0 on; what one lacks is another."""
    same = [token == other for token, other in zip(tokens, expected, strict=False)]
    return same.index(False) if False in same else len(same)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the rounds of one way."""
    figures = {name: [row[name] for row in rows if name in row] for name in ("noticed_s", "said_s", "paused_s")}
    return {
        "answers": len(rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        **{name: spread(values) for name, values in figures.items() if values},
    }


def pause(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
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
            Slot(single).prefill(prompt)
            prefills.append(time.perf_counter() - began)
    results: dict[str, list[float]] = {"noticed_s": [], "next_token_s": [], "token_s": []}
    for number in range(args.rounds):
        with (
            losable_workers(folder / f"pause-{number}", 1, ["kill process"]) as workers,
            running(path, workers, (1, 1), options) as (model, heard),
        ):
            scheduler = Scheduler(model.engine, slots=1, keep=True)
            scheduler.add(Request(prompt, TOKENS + 2, GREEDY, ends=False))
            next_token(scheduler)
            for _ in range(TOKENS):
                began = time.perf_counter()
                next_token(scheduler)
                results["token_s"].append(time.perf_counter() - began)
            began = time.perf_counter()
            workers[0].lose("kill process")
            workers[0].lose("kill daemon")
            next_token(scheduler)
            results["next_token_s"].append(time.perf_counter() - began)
            results["noticed_s"].append(heard.at[0] - began)
    return {
        "model": path.stem if args.tiny else "tinyllama-1.1b",
        "prompt_tokens": args.prompt_tokens,
        "prefill_s": spread(prefills[1:]),
        **{name: spread(values) for name, values in results.items()},
        "token_mean_s": statistics.mean(results["token_s"]),
    }


def next_token(scheduler: Scheduler) -> None:
    """Step until the only request has another token."""
    while not scheduler.step():
        pass


def answer(engine: TextEngine, question: str, at: dict[int, Callable[[], None]]) -> tuple[list[int], list[float]]:
    """The greedy answer's tokens, and when each came. at: what happens when so many are there, 0: when it is asked."""
    tokens, times = [], []
    at.get(0, lambda: None)()
    for response in Chat(engine).ask(question, GREEDY, max_tokens=32):
        if response.token_id is not None:
            tokens.append(response.token_id)
            times.append(time.perf_counter())
            at.get(len(tokens), lambda: None)()
    return tokens, times


@contextmanager
def running(
    path: Path, workers: list[LosableWorker], ranks: tuple[int, ...], options: EngineOptions = OPTIONS
) -> Iterator[tuple[DeployedModel, Heard]]:
    """The model on this device and workers, so many ranks a stage."""
    devices = [LOCAL, *(worker.address for worker in workers)]
    plan = make_plan(limits(GgufFile.open(path)), path.stem, "", devices, stages_of=ranks)
    heard = Heard()
    choice = PlanChoice(path, plan, "as the plan says")
    with (
        Cluster(devices[1:], needs_all=True) as cluster,
        deploy(choice, cluster, options, steps=heard) as model,
    ):
        yield model, heard


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "best": ordered[0],
    }


def stress_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for way, row in r["ways"].items():
        times = (row.get(name) for name in ("noticed_s", "said_s", "paused_s"))
        cells = [f"{item['median']:.2f}, {item['p99']:.2f}" if item else "" for item in times]
        lines.append([way, str(row["answers"]), str(row["wrong"]), *cells])
    header = ["", "answers", "wrong", "noticed after, s: median, p99", "said after", "next token after"]
    said = f"{r['answers']} answers in which something happened: {len(r['wrong'])} wrong."
    return "\n\n".join([said, table(header, lines), *(f"wrong: {item}" for item in r["wrong"])])


def pause_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    paused, noticed, token = (r[name] for name in ("next_token_s", "noticed_s", "token_s"))
    cells = [f"{paused['median']:.2f}", f"{paused['best']:.2f}", f"{noticed['median']:.2f}"]
    cells += [f"{1e3 * r['token_mean_s']:.2f}", f"{1e3 * token['median']:.2f}"]
    header = ["next token after a kill, s", "best", "said after, s", "a token before, ms: mean", "median"]
    current = f"{r['model']}, {r['prompt_tokens']} tokens held: prefill {r['prefill_s']['median']:.2f} s here.\n\n"
    return current + table(header, [cells])


SECTIONS = {"stress": Section(stress, stress_text), "pause": Section(pause, pause_text)}

if __name__ == "__main__":
    main()

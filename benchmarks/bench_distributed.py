"""Speed of one model on two devices compared with one device. Each device is a process that is bound to one core.

    python benchmarks/bench_distributed.py [--only SECTION] [--model FILE] [--json [FILE]] [--tiny]

| section  | question                                                                                           |
| speed    | are two ranks with one thread each as fast as one process with two threads?                        |
| unequal  | what does a second device with half or a third of a core gain, for several ways to divide a model? |
| pipeline | are two stages with four requests in flight as fast as two processes with a whole model each?      |
| load     | how soon does a plan answer if the workers already have their slices?                              |

Rank 0 runs on this machine's first core, and the worker, a real `edge worker`, on the second. All sides of a section
are loaded at the same time and measured in turn; the order changes in each round, and the first round does not count.
Ratios are ratios of medians; the tables also show the smallest and the largest ratio of all rounds. `unequal` needs
root. The default model is a file with TinyLlama-1.1B's shape and random weights in Q4_0. Without FILE, --json prints
only JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import distributed_tables
from benchmarks.harness import EDGE, ROOT, LeftOut, Section, alternate, bench, compared, medians, parser_of
from benchmarks.lent_device import busy, cpu_group, pin, worker
from benchmarks.processes import sides
from devices.lab.control_group import NoGroups
from edge.models import synth
from edge.models.demo import MODEL_PATH
from edge.models.synth import SHAPES

SIDE = Path(__file__).with_name("distributed_side.py")
PROMPT, STEPS = 256, 64  # tokens
REQUESTS, REQUEST_PROMPT, REQUEST_TOKENS = 4, 32, 64
LOADS = 5
OPTIONS = {"threads": 1, "context": 1024, "batch": 512}
PARTS_OF_A_CORE = (  # and what is asked of shares by measured speed there, beside rank 0 alone
    ("half a core", 1 / 2, {"decode_s": ">= 1.25", "prefill_tokens_per_s": ">= 1.3"}),
    ("a third of a core", 1 / 3, {"decode_s": ">= 1", "prefill_tokens_per_s": ">= 1"}),
)
PERIODS_US = (5_000, 10_000)
LOAD_S = 300.0  # what loads may take at most
LEAD_S = 0.3  # until processes that are to begin together do so


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    args.cores = cores(args.tiny)
    args.model = args.model.resolve() if args.model else MODEL_PATH if args.tiny else random_model(folder)
    return {"model": args.model.name}


def cores(tiny: bool) -> tuple[int, int]:
    """The cores of the two devices."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not usable or (len(usable) < 2 and not tiny):
        raise SystemExit(f"two devices need a core each, and Linux to keep to it; {len(usable)} can be given here")
    return usable[0], usable[min(1, len(usable) - 1)]


def random_model(folder: Path) -> Path:
    path = folder / "tinyllama-1.1b-q4_0.gguf"
    synth.synthesize(path, SHAPES["tinyllama-1.1b"], "q4_0")
    return path


def size(args: argparse.Namespace, prompt: int, steps: int) -> dict[str, int]:
    return {"prompt": 16, "steps": 4} if args.tiny else {"prompt": prompt, "steps": steps}


# --- speed ---


def speed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Two ranks over TCP and over gRPC beside one process, of two threads and of one."""
    rounds = 1 if args.tiny else args.rounds or 7
    sizes = size(args, PROMPT, STEPS)
    first, two = args.cores
    transports = ("tcp", "grpc")
    where = {"two threads": [first, two], "one thread": [first], **{kind: [first] for kind in transports}}
    model = {"name": "engine", "model": str(args.model)}
    with worker(folder / "worker") as (address, pid), sides(where, SIDE) as some:
        for side, threads in (("two threads", 2), ("one thread", 1)):
            some.at(side, "load", LOAD_S, **model, options={**OPTIONS, "threads": threads})
        for kind in transports:
            plan = some.at(kind, "deploy", LOAD_S, **model, worker=address, core=two, options=OPTIONS, transport=kind)
        pin(pid, two)  # gRPC links go through the worker itself, which is a part of its device
        idle = busy(0.2 if args.tiny else 2.0)

        def measure(side: str) -> Callable[[], dict[str, float]]:
            return lambda: some.at(side, "speed", name="engine", **sizes)

        for kind in transports:
            measure(kind)()
            some.at(kind, "times", name="engine")  # and forget them: the first are no rule
        result = alternate({side: measure(side) for side in where}, rounds)
        steps = {kind: some.at(kind, "times", name="engine") for kind in transports}
    return {
        "rounds": rounds,
        **sizes,
        "plan": plan["summary"],
        "idle_cores": idle,
        "median": medians(result),
        "compared": [
            *compared(result, "tcp", "two threads", {"decode_s": ">= 0.93", "prefill_tokens_per_s": ">= 0.97"}),
            *compared(result, "grpc", "two threads", {"decode_s": ">= 0.72"}),
            *compared(result, "tcp", "one thread", {"decode_s": ">= 1.4"}),
            *compared(result, "grpc", "one thread"),
            *compared(result, "two threads", "one thread"),
        ],
        "ranks": steps,
        "measured": result,
    }


# --- unequal ---


def unequal(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A worker with a part of a core: equal shares, shares by measured speed, and given ones, beside rank 0 alone."""
    rounds = 1 if args.tiny else args.rounds or 3
    sizes = size(args, 128, 48)
    first, two = args.cores
    provided = {"equal": [1.0, 1.0], "3:1": [3.0, 1.0], "5:1": [5.0, 1.0]}
    names = ("alone", "measured", *provided)
    model = {"name": "engine", "model": str(args.model)}
    cases: list[dict[str, Any]] = []
    try:
        cpu_group().close()
    except NoGroups as error:
        raise LeftOut(f"{error}; be root") from error
    with (
        cpu_group() as group,
        worker(folder / "worker", group) as (address, pid),
        sides({name: [first] for name in names}, SIDE) as some,
    ):
        pin(pid, two)
        there = {**model, "worker": address, "core": two, "options": OPTIONS}
        some.at("alone", "load", LOAD_S, **model, options=OPTIONS)
        plans = {name: some.at(name, "deploy", LOAD_S, **there, shares=shares) for name, shares in provided.items()}
        for words, part, expected in PARTS_OF_A_CORE:
            for period_us in PERIODS_US[-1:] if args.tiny else PERIODS_US:
                group.limit_cpu(part, period_us)
                if cases:
                    some.at("measured", "drop", name="engine")
                plans["measured"] = some.at("measured", "deploy", LOAD_S, **there, measure=True)
                taken_part = [name for name in names if name != "5:1" or part < 0.5]
                idle = busy(0.2 if args.tiny else 1.0)
                throttled = group.throttled()

                def measure(side: str) -> Callable[[], dict[str, float]]:
                    return lambda: some.at(side, "speed", name="engine", **sizes)

                result = alternate({side: measure(side) for side in taken_part}, rounds)
                target = {"measured": expected, "equal": dict.fromkeys(expected, "< 1")}
                cases.append(
                    {
                        "device": words,
                        "period_us": period_us,
                        "idle_cores": idle,
                        "throttled_periods": group.throttled() - throttled,
                        "parts": {name: plan["parts"] for name, plan in plans.items() if name in taken_part},
                        "median": medians(result),
                        "compared": [
                            row for side in taken_part[1:] for row in compared(result, side, "alone", target.get(side))
                        ],
                        "measured": result,
                    }
                )
    return {"rounds": rounds, **sizes, "cases": cases}


# --- pipeline ---


def pipeline(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Two stages with four requests on their way, beside two processes that have a whole model each."""
    rounds = 1 if args.tiny else args.rounds or 5
    prompt, tokens = (8, 24) if args.tiny else (REQUEST_PROMPT, REQUEST_TOKENS)
    first, two = args.cores
    model = str(args.model)
    alone = ("first", "second")
    with (
        worker(folder / "worker") as (address, pid),
        sides({"stages": [first], "first": [first], "second": [two]}, SIDE) as some,
    ):
        plan = some.at(
            "stages",
            "deploy",
            LOAD_S,
            name="4",
            model=model,
            worker=address,
            core=two,
            options={**OPTIONS, "sequences": REQUESTS},
            parallel="pipeline",
        )
        pin(pid, two)
        for n in (1, 2):
            for side in alone:
                some.at(side, "load", LOAD_S, name=str(n), model=model, options={**OPTIONS, "sequences": n})
        idle = busy(0.2 if args.tiny else 2.0)

        together, each = "two stages", "two stages, a step for each request"
        one_request, two_requests = "two processes, a request each", "two processes, two requests each"
        steps = {}

        def run(names: Sequence[str], requests: int, one_each: bool = False) -> Callable[[], dict[str, float]]:
            def measure() -> dict[str, float]:
                target = {
                    "name": str(requests),
                    "requests": requests,
                    "prompt": prompt,
                    "tokens": tokens,
                    "one_each": one_each,
                    "at": time.monotonic() + LEAD_S,
                }
                stamps = some.each("generate", dict.fromkeys(names, target))
                if "stages" in names:  # of the last round
                    steps[each if one_each else together] = some.at("stages", "times", name="4")
                return {"tokens_per_s": steady([times for side in names for times in stamps[side]])}

            return measure

        result = alternate(
            {
                together: run(["stages"], REQUESTS),
                each: run(["stages"], REQUESTS, one_each=True),
                one_request: run(alone, 1),
                two_requests: run(alone, 2),
            },
            rounds,
        )
    return {
        "rounds": rounds,
        "requests": REQUESTS,
        "prompt": prompt,
        "tokens": tokens,
        "plan": plan["summary"],
        "idle_cores": idle,
        "median": medians(result),
        "compared": [
            *compared(result, together, one_request, {"tokens_per_s": ">= 0.93"}),
            *compared(result, each, one_request),
            *compared(result, together, two_requests),
            *compared(result, two_requests, one_request),
        ],
        "ranks": steps,
        "measured": result,
    }


def steady(stamps: Sequence[Sequence[float]]) -> float:
    """Tokens a second while every request was generating; each one's own rate in that time, summed."""
    begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    total = 0.0
    for times in stamps:
        inside = [t for t in times if begin <= t <= end]
        if len(inside) < 2:  # so few tokens that the others had none in the same time
            inside = list(times)
        total += (len(inside) - 1) / (inside[-1] - inside[0])
    return total


# --- load ---


def load(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Two ranks over TCP, whose slices are in place, from reaching the worker to the first token."""
    rounds = 1 if args.tiny else args.rounds or LOADS
    first, two = args.cores
    plan = folder / "plan.json"
    with worker(folder / "worker") as (address, pid), sides({"owner": [first]}, SIDE) as some:
        pin(pid, two)

        def bring_up() -> dict[str, float]:
            result: dict[str, float] = some.at(
                "owner",
                "bring_up",
                LOAD_S,
                model=str(args.model),
                worker=address,
                core=two,
                options=OPTIONS,
                plan_file=str(plan),
            )
            return result

        outcome = alternate({"owner": bring_up}, rounds)["owner"]
        chat = alternate({"chat": lambda: {"wall_s": chat_seconds(args.model, plan)}}, rounds)["chat"]
    return {
        "repeats": rounds,
        "median_s": {part: statistics.median(item[part] for item in outcome) for part in outcome[0]},
        "most_s": {part: max(item[part] for item in outcome) for part in outcome[0]},
        "asked_s": 2.0,
        "chat_wall_s": statistics.median(item["wall_s"] for item in chat),
        "measured": {"owner": outcome, "chat": chat},
    }


def chat_seconds(model: Path, plan: Path) -> float:
    """The whole process of a chat of one token on a saved plan."""
    command = [*EDGE, "chat", str(model), "--plan", str(plan), "-p", "hi", "--max-tokens", "1"]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOAD_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - began


SECTIONS = {
    "speed": Section(speed, distributed_tables.speed),
    "unequal": Section(unequal, distributed_tables.unequal),
    "pipeline": Section(pipeline, distributed_tables.pipeline),
    "load": Section(load, distributed_tables.load),
}

if __name__ == "__main__":
    main()

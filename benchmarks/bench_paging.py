"""Paged weights compared with the disk's own speed, with llama.cpp's mapped files, and with models that fit in memory.

    python benchmarks/bench_paging.py [--only SECTION] [--work DIR] [--large] [--json [FILE]]

| section   | question                                                                                        |
| limit     | in a memory group as large as the budget: is the process never killed, and as fast as the disk? |
| mmap      | under the same limit, how much faster is a token than with llama.cpp's own mapped file?         |
| keeps-up  | if the disk keeps up, how much slower is paging than a resident model with the same kernels?    |
| experts   | with half of a mixture of experts in memory, how much slower is a token, by the routers' skew?  |
| path      | how fast is the disk, by the memory that receives the data and by concurrent computation?       |
| predicted | how far off is the planner's prediction of a token, over ten budgets of memory?                 |

A side of `limit` and `mmap` is a new process in each round, with a memory group of its own (Linux and root); all caches
are dropped before it, and the disk's O_DIRECT bandwidth is measured before and after it. The sides of `keeps-up` and
`experts` stay loaded and are measured in turn. `predicted` measures this device once for each model, as `edge plan`
does, and runs each budget in a process of its own, for about five minutes in all. Its models are 16 of the 32 layers of
llama-3.1-8b, and 12 of the 48 layers of qwen3-30b-a3b with a smaller vocabulary. Model files have random weights; they
are written to DIR (15 GB; --large adds 40 GB for a 70B shape), and later runs use them again.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import disk_path, paging_tables
from benchmarks.harness import (
    GIB,
    MIB,
    LeftOut,
    Section,
    alternate,
    bench,
    compared,
    medians,
    parser_of,
    progress,
    steal_s,
)  # fmt: skip
from benchmarks.paging_runs import CONTEXT, DISK_S, PROMPT, RUN_S, SIDE, Models, alone, disk_bounds, half_of, middle
from benchmarks.planted_routers import plant_routers
from benchmarks.processes import Grouped, Ranks, memory_group
from benchmarks.raw_disk import NoDirectReads, RawDisk
from devices.cluster_file import Cluster
from devices.lab.control_group import NoGroups
from edge.llm.options import EngineOptions
from edge.planning.arrange import work_of
from edge.profiling.llm_survey import llm_speeds
from partition.model.file import ModelFile
from partition.predict.speeds import DeviceSpeed, Links
from partition.search.planner import Planner

PREDICTED = (0.3, 0.45, 0.6, 0.8, 1.2)  # of a model's bytes, that the budgets of `predicted` have beside `PROCESS`
PROCESS = 300 * MIB  # of a budget for the process, its KV cache and the windows
PREFILL = 512  # tokens of the prompt over which a pass is shared
KEEPS_UP = 0.4  # of a token's time may the disk take alone: beside cores that compute it is slower


@dataclass(frozen=True)
class Case:
    """A model under a limit."""

    model: str
    limit: int | float  # bytes; or a part of the model's; 0: what half of its weights fit into
    rounds: int
    warm: int  # steps that are not counted
    steps: int
    target: str = ""


LIMIT = [Case("1b", 450 * MIB, 5, 4, 24), Case("8b", 3 * GIB // 2, 3, 2, 8)]
LIMIT_LARGE = [Case("70b", int(3.1 * GIB), 1, 1, 4)]
MMAP = [Case("8b", 0.5, 3, 2, 6, "0.85"), Case("8b", 0.75, 3, 2, 6, "0.85")]
SKEWS = (("none", 0.0, 0.0), ("mild", 0.3, 0.3), ("strong", 0.6, 0.6))  # of rows by rank; of tokens that repeat
MMAP_LARGE = [Case("70b", int(3.1 * GIB), 1, 1, 3, "1.3")]


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--large", action="store_true", help="a 70B shape, too: 40 GB of disk")
    parser.add_argument("--keep", action="store_true", help="do not delete its file from DIR afterwards")
    try:
        bench(parser, SECTIONS, prepare)
    except NoDirectReads as error:
        raise SystemExit(f"{error}; choose a folder on a disk with --work") from error


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Model files, and whether processes can be put into memory groups. Without, only tiny runs have sections about
    limits."""
    work = args.work or folder / "models"
    work.mkdir(parents=True, exist_ok=True)
    args.models, args.grouped = Models(work, args.keep), True
    try:
        memory_group(GIB).close()
    except NoGroups as error:
        args.grouped = False
        return {"without_groups": str(error)}
    return {}


def needs_groups(args: argparse.Namespace) -> None:
    if not args.grouped and not args.tiny:
        raise LeftOut("memory groups are for root")


def cases(usual: list[Case], large: list[Case], args: argparse.Namespace) -> list[Case]:
    if args.tiny:
        return [Case("tiny", 0, 1, 1, 3, usual[0].target)]
    return [*usual, *(large if args.large else [])]


def budget(case: Case, model: Path) -> int:
    """The limit of a case, bytes."""
    if isinstance(case.limit, float):
        return int(case.limit * model.stat().st_size)
    return case.limit or half_of(model)


def one_run(model: Path, options: dict[str, Any], case: Case, disk: RawDisk, args: argparse.Namespace) -> Any:
    """A process under the limit of the case."""
    sizes = {"prompt": 8 if args.tiny else PROMPT, "warm": case.warm, "steps": case.steps}
    limit = budget(case, model) if args.grouped else None
    return alone(model, {"context": CONTEXT, **options}, limit, sizes, disk, 0.2 if args.tiny else DISK_S)


def n_rounds(args: argparse.Namespace, usual: int) -> int:
    return 1 if args.tiny else args.rounds or usual


def at(some: Ranks, side: int, do: str, **arguments: Any) -> Any:
    """Run a method at one of the processes."""
    return some.tell_each(do, [arguments if i == side else None for i in range(some.n)], RUN_S)[side]


# --- limit and mmap ---


def limit(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The budget is the group's limit: what the process took of it, and how near to the disk's speed it came."""
    needs_groups(args)
    rows = []
    for case in cases(LIMIT, LIMIT_LARGE, args):
        model = args.models(case.model)
        options = {"memory": budget(case, model)}
        with RawDisk(model) as disk:
            rounds = [one_run(model, options, case, disk, args) for _ in range(n_rounds(args, case.rounds))]
        rows.append(summary(case, model, rounds))
    return {"cases": rows, "asked_of_bound": ">= 0.9"}


def mmap(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Beside llama.cpp's own way to run what does not fit: a mapped file, of which the kernel keeps what it can."""
    needs_groups(args)
    rows = []
    for case in cases(MMAP, MMAP_LARGE, args):
        model = args.models(case.model)
        sides = {
            "paged": {"memory": budget(case, model), "batch": PROMPT},
            "mapped": {"repack": False, "batch": PROMPT},
        }
        with RawDisk(model) as disk:
            runs = {name: partial(one_run, model, options, case, disk, args) for name, options in sides.items()}
            # Each begins cold, so every round counts.
            rounds = alternate(runs, n_rounds(args, case.rounds), warm_up=False)
        paged, mapped = (summary(case, model, rounds[name]) for name in sides)
        row: dict[str, Any] = {"paged": paged, "mapped": mapped, "asked": case.target}
        if paged["median"] and mapped["median"]:
            ratios = [m["run"]["decode_s"] / p["run"]["decode_s"] for p, m in zip(*rounds.values(), strict=True)]
            row["ratio"] = mapped["median"]["decode_s"] / paged["median"]["decode_s"]
            row["least"], row["most"] = min(ratios), max(ratios)
            if isinstance(case.limit, float) and paged["streamed_bytes"]:  # the less is streamed, the more is asked
                row["asked"] = f">= {float(case.target) * paged['model_bytes'] / paged['streamed_bytes']:.2f}"
            else:
                row["asked"] = f">= {case.target}"
        rows.append(row)
    return {"cases": rows}


def summary(case: Case, model: Path, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One side of a case, over its rounds. median: None where not all rounds came to their end."""
    last = rounds[-1].get("loaded", {})
    streamed = (last.get("paging") or {}).get("streamed_bytes") or 0
    median = middle(rounds)
    setting, bounds = disk_bounds(rounds)
    figures: dict[str, Any] = {
        "model": case.model,
        "model_bytes": model.stat().st_size,
        "limit_bytes": budget(case, model),
        "context": last.get("context"),
        "batch": last.get("batch"),
        "streamed_bytes": streamed,
        "paging": last.get("paging"),
        "memory": last.get("memory"),
        "median": median,
        "disk_gbps": statistics.median(bounds),
        "disk_setting": setting,
        "killed": sum(run["killed"] for run in rounds),
        "failed": [run["failed"] for run in rounds if "failed" in run],
        "rounds": rounds,
    }
    if median and streamed:
        of_bound = [streamed / gbps / 1e9 / run["run"]["decode_s"] for gbps, run in zip(bounds, rounds, strict=True)]
        figures["achieved_gbps"] = streamed / median["decode_s"] / 1e9
        figures["of_bound"] = statistics.median(of_bound)
        figures["of_bound_least"], figures["of_bound_most"] = min(of_bound), max(of_bound)
    if all("group" in run for run in rounds):
        figures["group"] = {
            key: max(run["group"][key] for run in rounds) for key in ("max_usage_bytes", "failcnt", "oom_kills")
        }
    return figures


# --- keeps-up ---


def keeps_up(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Beside the resident model, repacked as the paged weights are: a long prompt with half of the weights streamed,
    and tokens with a budget of 90 % of the model; and with one of which the disk surely keeps up, where that does not.
    """
    model = args.models("tiny" if args.tiny else "8b")
    size = model.stat().st_size
    rounds = n_rounds(args, 3)
    engine = {"context": 2 * PREFILL, "batch": PREFILL}
    steps = {"prompt": 8, "warm": 1, "steps": 3} if args.tiny else {"prompt": PROMPT, "warm": 2, "steps": 16}
    figures: dict[str, Any] = {"rounds": rounds, "model_bytes": size, "asked": "<= 1.1", "cases": []}
    with RawDisk(model) as disk, Ranks(SIDE, 1) as resident:

        def alternating(words: str, part: int, do: str, figure: str, **sizes: int) -> dict[str, Any]:
            """The resident engine and one with so many bytes, measured in turn."""
            with Ranks(SIDE, 1) as paged:
                options = {**(engine if do == "prefill" else {"context": CONTEXT}), "memory": part}
                [loaded] = paged.tell("load", RUN_S, model=str(model), options=options)
                sides = {
                    name: partial(at, some, 0, do, **sizes) for name, some in (("resident", resident), ("paged", paged))
                }
                times = alternate(sides, rounds)
            streamed = (loaded["paging"] or {}).get("streamed_bytes") or 0
            rates = disk.gbps(0.2 if args.tiny else DISK_S)
            case = {
                "words": words,
                "figure": figure,
                "budget_bytes": part,
                "paging": loaded["paging"],
                "memory": loaded["memory"],
                "streamed_bytes": streamed,
                "streamed_share": streamed / size,
                "disk_gbps": max(rates.values()),
                "median": medians(times),
                "measured": times,
            }
            case["needed_gbps"] = streamed / case["median"]["resident"][figure] / 1e9
            only = {name: [{figure: sample[figure]} for sample in samples] for name, samples in times.items()}
            [case["compared"]] = compared(only, "resident", "paged", {figure: "<= 1.1"})
            figures["cases"].append(case)
            return case

        resident.tell("load", RUN_S, model=str(model), options={**engine, "repack": True})
        half, most = (half_of(model, **engine),) * 2 if args.tiny else (int(0.6 * size), int(0.9 * size))
        tokens = 16 if args.tiny else PREFILL
        alternating(f"prefill of {tokens} tokens, 60 % of the model", half, "prefill", "prefill_s", prompt=tokens)
        case = alternating("decode, 90 % of the model", most, "run", "decode_s", **steps)
        can = int(KEEPS_UP * case["disk_gbps"] * 1e9 * case["median"]["resident"]["decode_s"])
        if case["streamed_bytes"] > can:
            more = most + case["streamed_bytes"] - can
            words = f"decode, {more / size:.0%} of the model: the disk takes {KEEPS_UP:.0%} of a token's time"
            alternating(words, more, "run", "decode_s", **steps)
    return figures


# --- experts ---


def experts(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Half of the file's size for all, beside all in memory, with routers that prefer no experts, or some."""
    model = args.models("tiny-moe" if args.tiny else "moe")
    size, rounds, rows = model.stat().st_size, n_rounds(args, 4), []
    part = half_of(model) if args.tiny else size // 2
    steps = {"prompt": 1, "warm": 1, "steps": 2} if args.tiny else {"prompt": 1, "warm": 8, "steps": 20}
    for skew, exponent, repeats in SKEWS:
        plant_routers(model, exponent)
        with RawDisk(model) as disk, Ranks(SIDE, 1) as resident, Ranks(SIDE, 1) as paged:
            loads: tuple[tuple[str, Ranks, dict[str, Any]], ...] = (
                ("resident", resident, {"repack": True}),
                ("paged", paged, {"memory": part}),
            )
            for _, side, options in loads:
                side.tell("load", RUN_S, model=str(model), options={"context": CONTEXT, **options})
            stolen = steal_s()
            runs = {name: partial(at, side, 0, "run", repeats=repeats, **steps) for name, side, _ in loads}
            times = alternate(runs, rounds)
            rates = disk.gbps(0.2 if args.tiny else DISK_S)
        rows.append(
            {
                "skew": skew,
                "median": medians({"paged": times["paged"]})["paged"],
                "resident": medians({"resident": times["resident"]})["resident"],
                "best": min(sample["decode_s"] for sample in times["paged"]),
                "best_resident": min(sample["decode_s"] for sample in times["resident"]),
                "disk_gbps": max(rates.values()),
                "steal_s": steal_s() - stolen,
                "measured": times,
            }
        )
    return {"cases": rows, "budget_bytes": part, "model_bytes": size, "asked_of_resident": ">= 0.75"}


# --- path ---


def path(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The disk's rate, with all that a running model takes from it, one by one."""
    model, resident = (args.models(name) for name in (("tiny", "tiny") if args.tiny else ("8b", "1b")))
    return {"cases": disk_path.measure(model, resident, n_rounds(args, 4), 0.05 if args.tiny else 0.4, args.tiny)}


# --- predicted ---


def predicted(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The planner's seconds of a token beside those of a process with the same budget."""
    rows = []
    for name in ("tiny", "tiny-moe") if args.tiny else ("half-8b", "moe"):
        model = args.models(name)
        if name == "moe":
            plant_routers(model, 0.0)  # the planner takes all experts for chosen alike often
        n_bytes, shares = model.stat().st_size, (0.5, 2.0) if args.tiny else PREDICTED
        budgets = [round(share * n_bytes) + PROCESS for share in shares]
        file, speed = ModelFile.open(model), surveyed(model, min(budgets), args)
        work = work_of(file, EngineOptions(context=CONTEXT), depth=PROMPT)
        for budget in budgets:
            planner = Planner(work, [replace(speed, memory_bytes=budget)], Links(), name, "")
            [placed] = planner.front(("latency",))[0]
            [stage] = planner.predict(placed.plan).stages
            with Grouped(SIDE, None) as side:
                options = {"context": CONTEXT, "batch": PROMPT, "memory": budget, "gpu_layers": 0}
                side.tell("load", RUN_S, model=str(model), options=options)
                # A plan counts on experts that earlier tokens have brought to memory.
                [run] = side.tell("run", RUN_S, prompt=PROMPT, warm=40 if "moe" in name else 1, steps=12)
                side.tell("close")
            row = {"model": name, "budget_bytes": budget, "paged_bytes": stage.paged_bytes}
            rows.append({**row, "predicted_s": placed.objectives[0], "measured_s": run["mean_s"]})
            progress(f"{name}, {budget / MIB:,.0f} MiB: {placed.objectives[0]:.3f} s, measured {run['mean_s']:.3f} s")
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    return {"placements": rows, "median_error": statistics.median(errors), "asked_of_error": "<= 0.15"}


def surveyed(model: Path, memory: int, args: argparse.Namespace) -> DeviceSpeed:
    """This device's speed with a model, as `edge plan --memory` measures it. No digest: slices have random weights."""
    cluster, seconds = Cluster.of_addresses(()), 4.0 if args.tiny else 60.0
    known = llm_speeds(cluster, None, (), ModelFile.open(model), "0" * 64, memory=memory, fresh=True, seconds=seconds)
    return known.speeds[0]


SECTIONS = {
    "limit": Section(limit, paging_tables.limit),
    "mmap": Section(mmap, paging_tables.mmap),
    "keeps-up": Section(keeps_up, paging_tables.keeps_up),
    "experts": Section(experts, paging_tables.experts),
    "path": Section(path, disk_path.text),
    "predicted": Section(predicted, paging_tables.predicted),
}

if __name__ == "__main__":
    main()

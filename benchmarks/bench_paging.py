"""Weights paged through a window, beside the disk's own speed, llama.cpp's mapped files, and models that fit.

    python benchmarks/bench_paging.py [--only limit|mmap|keeps-up|experts|repack] [--work DIR] [--large] [--json [FILE]]

| section  | question                                                                                        |
| limit    | inside a memory group as large as the budget: is it never killed, and as fast as the disk?       |
| mmap     | under the same limit, how much sooner does a token come than from llama.cpp's own mapped file?   |
| keeps-up | where the disk keeps up, what does paging cost beside the resident model with the same kernels?  |
| experts  | of a mixture of experts, how much less is read than by a pager that knows nothing of routing?     |
| repack   | what does it cost to lay weights out for this CPU on their way, and what does it bring?           |

A side of `limit`, `mmap` and `experts` is a process of its own in each round, with a memory group of its own (Linux and
root); all caches are dropped before it, and the disk's O_DIRECT bandwidth is measured before and after. Sides of
`keeps-up` and `repack` stay loaded and are measured in turn. Model files have random weights; they are written to DIR
(8 GB; 25 GB for `experts`, 40 GB more for --large, which adds a 70B shape) and used again where they are there.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paging_tables
from memory_group import Grouped, memory_group
from paging_runs import (
    CONTEXT,
    DISK_S,
    GIB,
    MIB,
    PROMPT,
    RUN_S,
    SIDE,
    Models,
    alone,
    chosen_bytes,
    disk_bounds,
    half_of,
    in_turn,
    middle,
    weight_bytes,
)
from ranks import Ranks
from raw_disk import NoDirectReads, RawDisk
from report import environment, run_section, write_json
from sides import alternate, compared, medians

from devices.lab.control_group import NoGroups

SECTIONS = ("limit", "mmap", "keeps-up", "experts", "repack")
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
    asked: str = ""


LIMIT = [Case("1b", 450 * MIB, 5, 4, 24), Case("8b", 3 * GIB // 2, 3, 2, 8)]
LIMIT_LARGE = [Case("70b", int(3.1 * GIB), 1, 1, 4)]
MMAP = [Case("8b", 0.5, 3, 2, 6, "0.85"), Case("8b", 0.75, 3, 2, 6, "0.85")]
MMAP_LARGE = [Case("70b", int(3.1 * GIB), 1, 1, 3, "1.3")]
EXPERTS = [Case("30b-a3b-skewed", 8 * GIB, 1, 32, 64)]


def main() -> None:
    args = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started, as Ctrl-C does
    wanted = [args.only] if args.only else list(SECTIONS)
    result: dict[str, Any] = {
        **environment(),
        "command": " ".join(["python", "benchmarks/bench_paging.py", *sys.argv[1:]]),
    }
    args.grouped = groups(args, wanted, result)
    if args.json != "-":
        print(paging_tables.head(result), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update({f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "CACHE", "STATE")})
        work = args.work or folder / "models"
        work.mkdir(parents=True, exist_ok=True)
        models = Models(work, args.keep)
        try:
            for section in wanted:
                name = section.replace("-", "_")
                run = partial(globals()[name], models, args)
                result[section] = run_section(section, run, getattr(paging_tables, name), args.json)
        except NoDirectReads as error:
            raise SystemExit(f"{error}; choose a folder on a disk with --work") from error
        finally:
            models.close()
    write_json(result, args.json)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--large", action="store_true", help="a 70B shape, too: 40 GB of disk")
    parser.add_argument("--keep", action="store_true", help="do not delete its file from DIR afterwards")
    parser.add_argument("--rounds", type=int, help="of each case, instead of its own number")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all figures")
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    return parser.parse_args()


def groups(args: argparse.Namespace, wanted: list[str], result: dict[str, Any]) -> bool:
    """Whether processes can be put into memory groups. Sections about limits need them, except in tiny runs."""
    try:
        memory_group(GIB).close()
        return True
    except NoGroups as error:
        needing = [section for section in ("limit", "mmap") if section in wanted]
        if needing and not args.tiny:
            raise SystemExit(f"{needing[0]}: {error}; be root, or choose other sections with --only") from error
        result["without_groups"] = str(error)
        return False


def cases(usual: list[Case], large: list[Case], args: argparse.Namespace, tiny: str = "tiny") -> list[Case]:
    if args.tiny:
        return [Case(tiny, 0, 1, 1, 3, usual[0].asked)]
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


def limit(models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """The budget is the group's limit: what the process took of it, and how near to the disk's speed it came."""
    found = []
    for case in cases(LIMIT, LIMIT_LARGE, args):
        model = models(case.model)
        options = {"memory": budget(case, model)}
        with RawDisk(model) as disk:
            rounds = [one_run(model, options, case, disk, args) for _ in range(n_rounds(args, case.rounds))]
        found.append(summary(case, model, rounds))
    return {"cases": found, "asked_of_bound": ">= 0.9"}


def mmap(models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """Beside llama.cpp's own way to run what does not fit: a mapped file, of which the kernel keeps what it can."""
    found = []
    for case in cases(MMAP, MMAP_LARGE, args):
        model = models(case.model)
        sides = {
            "paged": {"memory": budget(case, model), "batch": PROMPT},
            "mapped": {"repack": False, "batch": PROMPT},
        }
        with RawDisk(model) as disk:
            runs = {name: partial(one_run, model, options, case, disk, args) for name, options in sides.items()}
            rounds = in_turn(runs, n_rounds(args, case.rounds))
        paged, mapped = (summary(case, model, rounds[name]) for name in sides)
        row: dict[str, Any] = {"paged": paged, "mapped": mapped, "asked": case.asked}
        if paged["median"] and mapped["median"]:
            ratios = [m["run"]["decode_s"] / p["run"]["decode_s"] for p, m in zip(*rounds.values(), strict=True)]
            row["ratio"] = mapped["median"]["decode_s"] / paged["median"]["decode_s"]
            row["least"], row["most"] = min(ratios), max(ratios)
            if isinstance(case.limit, float) and paged["streamed_bytes"]:  # the less is streamed, the more is asked
                row["asked"] = f">= {float(case.asked) * paged['model_bytes'] / paged['streamed_bytes']:.2f}"
            else:
                row["asked"] = f">= {case.asked}"
        found.append(row)
    return {"cases": found}


def summary(case: Case, model: Path, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One side of a case, over its rounds. median: None where not all rounds came to their end."""
    last = rounds[-1].get("loaded", {})
    streamed = (last.get("paging") or {}).get("streamed_bytes") or 0
    median = middle(rounds)
    setting, bounds = disk_bounds(rounds)
    found: dict[str, Any] = {
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
        "killed": sum(one["killed"] for one in rounds),
        "failed": [one["failed"] for one in rounds if "failed" in one],
        "rounds": rounds,
    }
    if median and streamed:
        of_bound = [streamed / gbps / 1e9 / one["run"]["decode_s"] for gbps, one in zip(bounds, rounds, strict=True)]
        found["achieved_gbps"] = streamed / median["decode_s"] / 1e9
        found["of_bound"] = statistics.median(of_bound)
        found["of_bound_least"], found["of_bound_most"] = min(of_bound), max(of_bound)
    if all("group" in one for one in rounds):
        found["group"] = {
            key: max(one["group"][key] for one in rounds) for key in ("max_usage_bytes", "failcnt", "oom_kills")
        }
    return found


# --- keeps-up ---


def keeps_up(models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """Beside the resident model, repacked as the paged weights are: a long prompt with half of the weights streamed,
    and tokens with a budget of 90 % of the model; and with one of which the disk surely keeps up, where that does not.
    """
    model = models("tiny" if args.tiny else "8b")
    size = model.stat().st_size
    rounds = n_rounds(args, 3)
    engine = {"context": 2 * PREFILL, "batch": PREFILL}
    steps = {"prompt": 8, "warm": 1, "steps": 3} if args.tiny else {"prompt": PROMPT, "warm": 2, "steps": 16}
    found: dict[str, Any] = {"rounds": rounds, "model_bytes": size, "asked": "<= 1.1", "cases": []}
    with RawDisk(model) as disk, Ranks(SIDE, 1) as resident:

        def beside(words: str, part: int, do: str, figure: str, **sizes: int) -> dict[str, Any]:
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
            only = {name: [{figure: one[figure]} for one in many] for name, many in times.items()}
            [case["compared"]] = compared(only, "resident", "paged", {figure: "<= 1.1"})
            found["cases"].append(case)
            return case

        resident.tell("load", RUN_S, model=str(model), options={**engine, "repack": True})
        half, most = (half_of(model, **engine),) * 2 if args.tiny else (int(0.6 * size), int(0.9 * size))
        tokens = 16 if args.tiny else PREFILL
        beside(f"prefill of {tokens} tokens, 60 % of the model", half, "prefill", "prefill_s", prompt=tokens)
        case = beside("decode, 90 % of the model", most, "run", "decode_s", **steps)
        can = int(KEEPS_UP * case["disk_gbps"] * 1e9 * case["median"]["resident"]["decode_s"])
        if case["streamed_bytes"] > can:
            more = most + case["streamed_bytes"] - can
            words = f"decode, {more / size:.0%} of the model: the disk takes {KEEPS_UP:.0%} of a token's time"
            beside(words, more, "run", "decode_s", **steps)
    return found


# --- experts ---


def experts(models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """What is read for a token, beside a pager that ignores routing: it has to read all experts that do not fit."""
    found = []
    for case in cases(EXPERTS, [], args, "tiny-experts"):
        model = models(case.model)
        with RawDisk(model) as disk:
            options = {"memory": budget(case, model)}
            rounds = [one_run(model, options, case, disk, args) for _ in range(n_rounds(args, case.rounds))]
        row = summary(case, model, rounds)
        row["ignoring_bytes"] = max(0, weight_bytes(model) - budget(case, model))  # as if all of it held weights
        row["chosen_bytes"] = chosen_bytes(model)
        if row["median"] and row["ignoring_bytes"] and "bytes_per_token" in row["median"]:
            row["ratio"] = row["median"]["bytes_per_token"] / row["ignoring_bytes"]
        found.append(row)
    return {"cases": found, "asked": "<= 0.25"}


# --- repack ---


def repack(models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """How fast weights are laid out for this CPU, beside copying and reading them, and how much faster they are then.
    The models are some layers as wide as TinyLlama-1.1B's."""
    rounds, seconds = n_rounds(args, 5), 0.2 if args.tiny else 2.0
    steps = {"prompt": 16, "warm": 1, "steps": 4} if args.tiny else {"prompt": 256, "warm": 4, "steps": 64}
    rows = []
    for kind in ("q4_0", "q4_k"):
        model = models(f"{'tiny' if args.tiny else 'some-layers'}-{kind}")
        with RawDisk(model) as disk:
            read = max(disk.gbps(0.2 if args.tiny else DISK_S).values())
        with Grouped(SIDE, None) as side:
            rates = {
                f"{threads}": side.tell(
                    "repack", model=str(model), weight="blk.0.ffn_gate.weight", threads=threads, seconds=seconds
                )[0]
                for threads in (1, 2)
            }
        with Ranks(SIDE, 2) as some:
            options = [{"context": CONTEXT, "repack": laid_out} for laid_out in (True, False)]
            some.tell_each("load", [{"model": str(model), "options": one} for one in options], RUN_S)
            runs = {name: partial(at, some, i, "run", **steps) for i, name in enumerate(("repacked", "plain"))}
            times = alternate(runs, rounds)
            some.tell("close")
        only = {name: [{k: one[k] for k in ("decode_s", "prefill_s")} for one in many] for name, many in times.items()}
        rows.append(
            {
                "type": kind,
                "rates": rates,
                "read_gbps": read,
                "median": medians(times),
                "compared": compared(only, "repacked", "plain"),
                "measured": times,
            }
        )
    return {"rounds": rounds, "rows": rows}


if __name__ == "__main__":
    main()

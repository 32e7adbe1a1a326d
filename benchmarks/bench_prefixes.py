"""Gain of saving prompts on disk: the first token of a saved prompt compared with computing the prompt again and with
llama-cpp-python's own disk cache; and the speed of reading a state.

    python benchmarks/bench_prefixes.py [--only restart|hybrid|reading] [--model FILE] [--json [FILE]] [--tiny]

| section | question                                                                                               |
| restart | how soon does a restarted engine answer a saved prompt of 1,000 tokens, or one that shares 900 tokens? |
| hybrid  | a model with recurrent layers: how soon is a second prompt answered that shares 1,000 of 1,050 tokens, |
|         | by the same engine and by a restarted one?                                                             |
| reading | how fast is reading the keys and values of 8,000 tokens, compared with the disk and with memory?       |

In `restart` three sides answer the same prompts in turn: this machine, two workers with a core each, and the
llama-cpp-python package with its `LlamaDiskCache`. On a CPU with AMX, the package runs without the AMX kernels, because
some builds crash in them. Each engine is loaded and has computed something before the measurement, and all saved
prompts are read from the disk. The order of the sides changes in each round, and the first round does not count. Root
drops the whole page cache; another user can drop only the saved files. The default model is a file with
TinyLlama-1.1B's shape and random weights in Q4_0. Without FILE, --json prints only JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_distributed import cores, random_model
from benchmarks.harness import Section, alternate, bench, bests, medians, parser_of, table
from benchmarks.lent_device import pin, worker
from benchmarks.processes import sides
from benchmarks.raw_disk import NoDirectReads, RawDisk
from devices.probe import memory_bandwidth_gbps
from edge.models import shapes, synth
from edge.models.demo import MODEL_PATH
from quant.gguf.file import GgufFile

SCRIPT = Path(__file__).with_name("prefixes_side.py")
PROMPT, SHARED, LONG = 1000, 900, 8000  # tokens
LIMIT_S = 600.0  # of a command
RAW_S = 1.0
DISK = "the disk alone, past the page cache"  # the best of several ways to read it
# How long the second first token may take, as a part of the first; and what reading should reach, of the disk.
ASKED = {"this machine": 1 / 20, "two workers": 1 / 10}
ASKED_OF_HYBRID = {"second": 1 / 10, "restarted": 1 / 20}
ASKED_OF_DISK = 0.8


def main() -> None:
    parser = parser_of(__doc__, SECTIONS, rounds=3)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    args.cores = cores(args.tiny)
    args.rounds = 1 if args.tiny else args.rounds
    args.prompt, args.shared, args.long = (100, 70, 200) if args.tiny else (PROMPT, SHARED, LONG)
    args.model = args.model.resolve() if args.model else MODEL_PATH if args.tiny else random_model(folder)
    return {"model": args.model.name}


# --- restart ---


def restart(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each prompt the first time, again, and another one that begins like it: by a new engine each time."""
    item, two = args.cores
    context = args.prompt + 280 if not args.tiny else 256
    both = {"context": context, "batch": 512 if not args.tiny else 64}
    where = {"this machine": [item, two], "two workers": [item], "llama-cpp-python": [item, two]}
    n_vocab = GgufFile.open(args.model).tensors["token_embd.weight"].shape[1]
    rng = np.random.default_rng(0)
    with worker(folder / "worker") as (address, pid), sides(where, SCRIPT) as some:
        pin(pid, two)
        for side, (kind, more) in {
            "this machine": ("ours", {}),
            "two workers": ("spread", {"worker": address, "core": two}),
            "llama-cpp-python": ("stock", {}),
        }.items():
            options = {**both, "threads": len(where[side])}
            (folder / kind).mkdir()
            some.at(side, "begin", kind=kind, model=str(args.model), folder=str(folder / kind), options=options, **more)
        prompts: dict[int, dict[str, list[int]]] = {}

        def measure(side: str) -> Callable[[], dict[str, float]]:
            turns = iter(range(args.rounds + 1))

            def answers() -> dict[str, float]:
                turn = next(turns)
                if turn not in prompts:
                    tokens = rng.integers(300, n_vocab, args.prompt + args.prompt - args.shared).tolist()
                    prompt = tokens[: args.prompt]
                    prompts[turn] = {
                        "first": prompt,
                        "again": prompt,
                        "shared": [*prompt[: args.shared], *tokens[args.prompt :]],
                    }
                kept_there = [str(folder / "worker" / "cache")]
                result: dict[str, float] = some.at(side, "answers", LIMIT_S, prompts=prompts[turn], folders=kept_there)
                return result

            return answers

        outcome = alternate({side: measure(side) for side in where}, args.rounds)
    rows = []
    for side, rounds in outcome.items():
        first, again, shared = ([entry[f"{name}_s"] for entry in rounds] for name in ("first", "again", "shared"))
        ratios = [a / f for a, f in zip(again, first, strict=True)]
        of_first = statistics.median(shared) / statistics.median(first)
        rows.append(
            {
                "side": side,
                "again_of_first": statistics.median(again) / statistics.median(first),
                "best_again_of_first": min(again) / min(first),
                "least": min(ratios),
                "most": max(ratios),
                "asked": ASKED.get(side),
                "shared_of_first": of_first,
                # What computing the tokens that differ takes, where a prompt's tokens all take alike.
                "shared_of_computing": of_first * args.prompt / rounds[0]["shared_computed"],
            }
        )
    return {
        "rounds": args.rounds,
        "prompt": args.prompt,
        "shared": args.shared,
        "median": medians(outcome),
        "rows": rows,
        "measured": outcome,
    }


def restart_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for row in r["rows"]:
        median = r["median"][row["side"]]
        lines.append(
            [
                row["side"],
                *(f"{median[f'{name}_s']:.3f}" for name in ("first", "again")),
                f"1/{1 / row['again_of_first']:.1f} (1/{1 / row['most']:.1f} to 1/{1 / row['least']:.1f})",
                f"1/{1 / row['best_again_of_first']:.1f}",
                f"at most 1/{1 / row['asked']:.0f}" if row["asked"] else "",
                f"{median['shared_s']:.3f}",
                f"{median['shared_computed']:.0f}",
                f"{row['shared_of_computing']:.2f}",
                f"{median['first_keep_s']:.3f}",
            ]
        )
    header = ["", "first, s", "again, s", "of the first (any round)", "of the bests", "asked"]
    header += [f"{r['shared']} shared, s", "computed, tokens", "of computing just these", "keeping, s"]
    return f"{r['prompt']} prompt tokens, {r['rounds']} rounds. Seconds to the first token.\n\n" + table(header, lines)


# --- hybrid ---


def hybrid(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Prompts that share a beginning: the second of an engine, and the first of one that begins anew."""
    shared, more, rest = (1000, 50, 20) if not args.tiny else (72, 16, 8)
    model = folder / "hybrid.gguf"
    figures: dict[str, Any] = {"layers": 16, "embd": 2048, "ff": 8192, "heads": 32, "kv": 8, "vocab": 65536}
    if args.tiny:
        figures = {"layers": 6, "embd": 64, "ff": 64, "heads": 4, "kv": 2, "vocab": 512}
    synth.synthesize(model, shapes.shape("lfm2", context=4096, **figures), "q4_0")
    options = {"context": shared + 280, "batch": 512 if not args.tiny else 64, "threads": len(args.cores)}
    rng, side = np.random.default_rng(1), "this machine"
    with sides({side: [*args.cores]}, SCRIPT) as some:
        some.at(side, "begin", kind="ours", model=str(model), folder=str(folder / "hybrid"), options=options)

        def measure() -> dict[str, float]:
            tokens = rng.integers(300, figures["vocab"], shared + more + 2 * rest).tolist()
            first, second, third = (
                [*tokens[:shared], *tokens[at : at + n]]
                for at, n in ((shared, more), (shared + more, rest), (shared + more + rest, rest))
            )
            together = some.at(side, "conversation", LIMIT_S, prompts={"first": first, "second": second}, folders=[])
            anew = some.at(side, "answers", LIMIT_S, prompts={"restarted": third}, folders=[])
            return {**together, **anew}

        rounds = alternate({side: measure}, args.rounds)[side]
    medians_ = {name: statistics.median(item[name] for item in rounds) for name in rounds[0]}
    best = {name: min(item[name] for item in rounds) for name in rounds[0]}
    return {
        "rounds": args.rounds,
        "shared": shared,
        "median": medians_,
        "best": best,
        "of_first": {name: medians_[f"{name}_s"] / medians_["first_s"] for name in ASKED_OF_HYBRID},
        "best_of_first": {name: best[f"{name}_s"] / best["first_s"] for name in ASKED_OF_HYBRID},
        "asked": ASKED_OF_HYBRID,
        "measured": rounds,
    }


def hybrid_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [["first", f"{r['median']['first_s']:.3f}", f"{r['median']['first_computed']:.0f}", "", "", ""]]
    for name, target in r["asked"].items():
        seconds, computed = (r["median"][f"{name}_{figure}"] for figure in ("s", "computed"))
        of_first, best = (1 / r[figure][name] for figure in ("of_first", "best_of_first"))
        row = [name, f"{seconds:.3f}", f"{computed:.0f}", f"1/{of_first:.1f}", f"1/{best:.1f}", f"1/{1 / target:.0f}"]
        lines.append(row)
    header = ["prompt", "first token, s", "computed, tokens", "of the first", "of the bests", "asked"]
    return f"Shares {r['shared']} tokens, {r['rounds']} rounds.\n\n" + table(header, lines)


# --- reading ---


def reading(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Keys and values into an empty cache, from the disk and from the page cache, beside the files and the disk."""
    first, two = args.cores
    with sides({"reader": [first, two]}, SCRIPT) as some:
        saved = fill(some, "reader", folder, args)
        alternatives = {
            "state, from disk": lambda: some.at("reader", "read", is_cold=True),
            "files, from disk, 1 thread": lambda: some.at("reader", "files", is_cold=True, threads=1),
            "files, from disk, 2 threads": lambda: some.at("reader", "files", is_cold=True, threads=2),
            "state, from memory": lambda: some.at("reader", "read", is_cold=False),
            "files, from memory, 1 thread": lambda: some.at("reader", "files", is_cold=False, threads=1),
        }
        with ExitStack() as stack:
            try:
                disk = stack.enter_context(RawDisk(args.model))
                alternatives[DISK] = lambda: {"bytes_per_s": 1e9 * max(disk.gbps(0.2 if args.tiny else RAW_S).values())}
            except NoDirectReads as error:
                saved["no_raw_disk"] = str(error)
            result = alternate(alternatives, args.rounds)
    median, best = ({name: item["bytes_per_s"] for name, item in total(result).items()} for total in (medians, bests))
    disk_rate = median.get(DISK, max(rate for name, rate in median.items() if name.startswith("files, from disk")))
    memory = memory_bandwidth_gbps(1) * 1e9
    return {
        **saved,
        "rounds": args.rounds,
        "median": median,
        "best": best,
        "memory_bytes_per_s": memory,
        "of_disk": median["state, from disk"] / disk_rate,
        "best_of_disk": best["state, from disk"] / best.get(DISK, disk_rate),
        "of_memory": median["state, from memory"] / memory,
        "asked_of_disk": ASKED_OF_DISK,
        "measured": result,
    }


def fill(some: Any, side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Have a side keep a long prompt."""
    context = args.long + 192 if not args.tiny else 256
    options = {"context": context, "batch": 512 if not args.tiny else 64, "threads": 1}
    some.at(side, "begin", kind="ours", model=str(args.model), folder=str(folder), options=options)
    saved: dict[str, Any] = some.at(side, "fill", LIMIT_S, tokens=args.long)
    return saved | {"tokens": args.long}


def reading_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [[name, f"{rate / 1e9:.2f}", f"{r['best'][name] / 1e9:.2f}"] for name, rate in r["median"].items()]
    lines.append(["memory, one thread reads", "", f"{r['memory_bytes_per_s'] / 1e9:.2f}"])
    return (
        f"{r['tokens']} tokens, {r['state_bytes'] / 1e6:.1f} MB, {r['rounds']} rounds.\n\n"
        + table(["", "median, GB/s", "best"], lines)
        + f"\n\nFrom disk {r['of_disk']:.2f} of what the disk gives (of the bests {r['best_of_disk']:.2f}; asked:"
        f" {r['asked_of_disk']}); from memory {r['of_memory']:.2f} of memory."
    )


SECTIONS = {
    "restart": Section(restart, restart_text),
    "hybrid": Section(hybrid, hybrid_text),
    "reading": Section(reading, reading_text),
}

if __name__ == "__main__":
    main()

"""A model that changes its quantization with the available memory compared with reloading a file of another size.

    python benchmarks/bench_elastic.py [--only change|follow|chat] [--work DIR] [--model NAME] [--json [FILE]]

| section | question                                                                                          |
| change  | how much sooner is the next token ready than after loading the file of that size?                 |
| follow  | how soon does a process adapt if the limit of its memory group is lowered or raised?              |
| chat    | does `edge chat` complete an answer during such a change, and how long does a token take?         |

Both sides of `change` have the same conversation, which the reloaded model must compute again; caches are dropped
before each measurement. `follow` and `chat` need root and memory groups of version 1. Files are written to DIR: 1b in
q8_0, q4_0 and q2_k and 8b in q3_k and q2_k with random weights, and SmolLM2-135M with its trained weights, quantized to
q8_0, q5_0 and q4_0.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.elastic_chat import CASES, chatted, limit, show_chat
from benchmarks.harness import GIB, MIB, LeftOut, Section, bench, parser_of, table
from benchmarks.paging_runs import MODELS
from benchmarks.processes import Grouped, memory_group
from benchmarks.raw_disk import forget
from devices.lab.control_group import NoGroups
from devices.probe import rss
from edge.models import synth
from edge.quantization.gguf import quantize
from partition.model.file import ModelFile
from quant.gguf.elastic import plan_elastic, write_elastic
from quant.mixes import mix_by_name
from tests.real.weights import SMOLLM2

SIDE = Path(__file__).with_name("elastic_side.py")
HISTORY = 512  # tokens of the conversation
RUN_S = 600.0
MIXES = {"smollm2": ("q8_0", "q5_0", "q4_0"), "8b": ("q3_k", "q2_k")}  # of others:
OTHER_MIXES = ("q8_0", "q4_0", "q2_k")
NAMES = ("tiny", "smollm2", "1b", "8b")
LEAST = 400 * MIB  # of every model but the 8B, which has 1.4 GiB
DOWN_S, UP_S = 3.0, 16.0  # of decoding before the limit is lowered; from then until it has been raised again


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--model", choices=NAMES, help="one model (default: smollm2 and 1b)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Model files."""
    work = args.work or folder / "models"
    work.mkdir(parents=True, exist_ok=True)
    names = ["tiny"] if args.tiny else [args.model] if args.model else ["smollm2", "1b"]
    args.files = {name: files(work, name) for name in names}
    sizes = {name: [path.stat().st_size for path in paths] for name, paths in args.files.items()}
    return {"file_bytes": sizes}


def files(work: Path, name: str) -> list[Path]:
    """The elastic file of a model, and its sizes alone, the largest first."""
    static = [work / f"{name}-{mix}.gguf" for mix in MIXES.get(name, OTHER_MIXES)]
    for path in static:
        if path.exists():
            continue
        mix = path.stem.rpartition("-")[2]
        if name == "smollm2":
            quantize(ModelFile.open(SMOLLM2.path()), path, mix_by_name(mix))
        else:
            synth.synthesize(path, MODELS[name].shape, mix)
    out = work / f"{name}-elastic.gguf"
    if not out.exists():
        write_elastic(plan_elastic([ModelFile.open(path) for path in static], [0.0] * len(static)), out)
    return [out, *static]


def options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    memory, least = (4 * GIB, int(1.4 * GIB)) if name == "8b" else (3 * GIB, LEAST)
    return {
        "memory": memory,
        "least_memory": least,
        "context": 64 if args.tiny else 1024,
        "batch": 64 if args.tiny else 512,
    }


def change(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The next token after a change, and from the file of that size, loaded anew."""
    history, cases = (16 if args.tiny else HISTORY), []
    for name, (path, *static) in args.files.items():
        how = options(name, args)
        alone = {key: value for key, value in how.items() if key != "least_memory"}
        rounds: dict[int, list[dict[str, float]]] = {}
        with Grouped(SIDE, None) as side:
            for _ in range(1 if args.tiny else args.rounds or 3):
                [loaded] = side.tell("load", RUN_S, model=str(path), options=how, says=True)
                side.tell("prompt", RUN_S, n=history)
                side.tell("decode", RUN_S, position=history, n=3)
                changed = {}
                for number in (*range(1, len(static)), *reversed(range(len(static) - 1))):  # down and up again
                    forget(path)
                    free = loaded["whole"][number] * 65 // 64
                    [change_s] = side.tell("give", RUN_S, free=free, position=history)
                    [tokens] = side.tell("decode", RUN_S, position=history, n=4)
                    changed.setdefault(number, []).append({**change_s, "token_s": min(tokens)})
                for number, figures in changed.items():
                    forget(*static)
                    [reload_s] = side.tell("reload", RUN_S, model=str(static[number]), options=alone, history=history)
                    rounds.setdefault(number, []).extend({**figure, "reload_s": reload_s} for figure in figures)
            side.tell("close")
        for number, result in sorted(rounds.items()):
            middle = {key: statistics.median(item[key] for item in result) for key in result[0]}
            cases.append(
                {
                    "model": name,
                    "size": static[number].stem.rpartition("-")[2],
                    **middle,
                    "ratio": middle["longest_s"] / middle["reload_s"],
                }
            )
    return {"cases": cases, "history": history, "asked_ratio": 0.1}


def show_change(result: dict[str, Any]) -> str:
    keys = ("next_s", "longest_s", "changed_s", "token_s", "reload_s")
    lines = [
        [f"{case['model']} to {case['size']}", *(f"{1e3 * case[key]:,.0f}" for key in keys),
         f"{case['ratio']:.3f}"]
        for case in result["cases"]
    ]  # fmt: skip
    header = (
        "",
        "next token, ms",
        "longest token, ms",
        "changed after, ms",
        "a token then, ms",
        f"loaded anew, {result['history']} tokens computed again, ms",
        "longest token to that",
    )
    return table(header, lines)


def follow(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Lower and raise the limit of a process that decodes."""
    needs_groups()
    cases = [followed(name, path, args) for name, (path, *_) in args.files.items()]
    return {"cases": cases, "asked_down_s": 1.0, "asked_up_s": 10.0}


def needs_groups() -> None:
    try:
        with memory_group(GIB) as group:
            if not any(folder.parent.name == "memory" for folder in group.folders):
                raise LeftOut("memory groups of version 1 are needed")
    except NoGroups as error:
        raise LeftOut(f"memory groups are for root: {error}") from error


def followed(name: str, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    position, how = (16 if args.tiny else HISTORY), options(name, args)
    high = how["memory"] + GIB
    samples: list[tuple[float, int]] = []
    times: dict[str, float] = {}
    with memory_group(high) as group, (process := Grouped(SIDE, group)) as side:
        [loaded] = side.tell("load", RUN_S, model=str(path), options=how)
        side.tell("prompt", RUN_S, n=position)
        whole, memory = loaded["whole"], next(f for f in group.folders if f.parent.name == "memory")
        target = (whole[-1] + whole[-2]) // 2
        low = high - (min(loaded["room"], high) - target)
        pid, over = int((memory / "cgroup.procs").read_text().split()[0]), threading.Event()

        def lower_and_raise() -> None:
            while not over.is_set():
                now = time.monotonic()
                samples.append((now, rss(pid)))
                if "low" not in times and now > began + DOWN_S:
                    times["low"] = now
                if "low" in times and "holds" not in times and limit(memory, low):
                    times["holds"] = time.monotonic()
                if "raised" not in times and "low" in times and now > times["low"] + DOWN_S:
                    limit(memory, high)
                    times["raised"] = now
                time.sleep(0.01)

        began = time.monotonic()
        thread = threading.Thread(target=lower_and_raise)
        thread.start()
        [tokens] = side.tell("run", RUN_S, position=position, seconds=2 * DOWN_S + UP_S)
        over.set()
        thread.join()
        side.tell("close")
        killed = "oom_kill 0" not in (memory / "memory.oom_control").read_text()
    before = max(current for at, current in samples if at < times["low"])
    down = before - (whole[0] - whole[-1]) * 9 // 10
    return {
        "model": name,
        "killed": killed or process.killed,
        "tokens": len(tokens),
        "rss_bytes": [before, min(current for at, current in samples if at > times["low"]), samples[-1][1]],
        "down_s": next((at for at, current in samples if at > times["low"] and current <= down), 1e9) - times["low"],
        "holds_s": times.get("holds", 1e9) - times["low"],
        "up_s": next((t["at"] for t in tokens if t["at"] > times["raised"] and t["size"] == 0), 1e9) - times["raised"],
        "longest_s": max(token["took_s"] for token in tokens),
    }


def show_follow(result: dict[str, Any]) -> str:
    lines = [
        [case["model"], str(case["killed"]), *(f"{n / MIB:,.0f}" for n in case["rss_bytes"]),
         *(f"{case[key]:.2f}" for key in ("down_s", "holds_s", "up_s", "longest_s"))]
        for case in result["cases"]
    ]  # fmt: skip
    header = (
        "",
        "killed",
        "MiB before",
        "lowered",
        "raised",
        "memory down, s",
        "limit holds, s",
        "up, s",
        "longest token, s",
    )
    return table(header, lines)


def chat(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Lower and raise the limit of a chat in the middle of its answer."""
    needs_groups()
    cases = [chatted(name, path, CASES[name]) for name, (path, *_) in args.files.items() if name in CASES]
    return {"cases": cases, "asked_down_s": 1.0, "asked_up_s": 10.0}


SECTIONS = {
    "change": Section(change, show_change),
    "follow": Section(follow, show_follow),
    "chat": Section(chat, show_chat),
}

if __name__ == "__main__":
    main()

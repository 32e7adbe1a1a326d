"""What the product does while a neighbour takes all cores in bursts, beside what it could do in the same bursts.

    python benchmarks/bench_bursts.py [--only links|chat] [--sessions 20] [--json [FILE]] [--tiny]

links: `edge bench --workers` as a person runs it, in fresh sessions that remember no measurement, beside the same with
`--transport tcp` and equal shares. With equal shares and any link, too, which shows the choice of the link alone. All
sides of a session meet the same bursts, and take turns in going first. Asked: the median decode is at least 0.95 of
TCP's with equal shares, and no session ends on a link slower than TCP.

chat: `edge chat -p` on the bundled model, in bursts and in quiet, in turns. Asked: a token takes at most twice as long.

--tiny: see that it works; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bursts import Neighbour, bursts
from lent_device import EDGE, ROOT, worker
from report import steal_s

sys.path.insert(0, str(ROOT))
SESSION_S = 600.0  # for one command, at most; the neighbour ends then, too
ASKED = 0.95
BESIDE = "tcp, equal shares"


@dataclass(frozen=True)
class Machine:
    """What the experiments run on."""

    folder: Path
    model: Path
    addresses: tuple[str, ...]  # of workers
    neighbour: Neighbour

    def run(self, seed: int | None, *arguments: str) -> dict[str, Any]:
        """A command with --json in the bursts of a seed, or in none, by a user who has measured nothing yet: what it
        printed, and `steal_s`, seconds that the host took from all cores meanwhile, and `took_s`."""
        shutil.rmtree(self.folder / "state", ignore_errors=True)  # slices stay
        env = {**os.environ, **{f"XDG_{kind.upper()}_HOME": str(self.folder / kind) for kind in ("cache", "state")}}
        with bursts(seed, self.neighbour, SESSION_S) if seed is not None else nullcontext():
            began, stolen_s = time.perf_counter(), steal_s()
            done = subprocess.run([*EDGE, *arguments, "--json"], env=env, capture_output=True, text=True,
                                  timeout=SESSION_S, cwd=ROOT)  # fmt: skip
            took_s, stolen_s = time.perf_counter() - began, steal_s() - stolen_s
        if done.returncode:
            raise SystemExit(f"edge {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found | {"steal_s": stolen_s, "took_s": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(EXPERIMENTS), help="one experiment (default: all)")
    parser.add_argument("--sessions", type=int, default=20, help="fresh ones, of each side (default: 20)")
    parser.add_argument("--workers", type=int, default=2, help="beside this device, of one thread each (default: 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the first session's bursts (default: 1)")
    parser.add_argument("--burst-ms", type=float, nargs=2, default=(10, 500), metavar=("LEAST", "MOST"))
    parser.add_argument("--rest-ms", type=float, nargs=2, default=(10, 500), metavar=("LEAST", "MOST"))
    parser.add_argument("--model", type=Path, help="GGUF (default: random weights of TinyLlama's shape)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all figures; alone: print them")
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    args = parser.parse_args()
    if args.tiny:
        args.sessions, args.workers, args.burst_ms, args.rest_ms = 1, 1, (5, 20), (50, 100)
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "bursts_ms": args.burst_ms,
        "rests_ms": args.rest_ms,
    }
    neighbour = Neighbour(*(ms / 1e3 for ms in (*args.burst_ms, *args.rest_ms)))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = _model(args, folder)
        addresses = [stack.enter_context(worker(folder / f"w{i}"))[0] for i in range(args.workers)]
        machine = Machine(folder, model, tuple(addresses), neighbour)
        for title, experiment in EXPERIMENTS.items():
            if args.only in (None, title):
                result[title] = experiment(machine, args)
                if args.json not in (None, "-"):
                    Path(args.json).write_text(json.dumps(result, indent=1))
    if args.json == "-":
        print(json.dumps(result))


def links(machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """How `edge bench --workers` decodes, beside TCP with equal shares."""
    sizes = ("16", "12", "1") if args.tiny else ("32", "48", "3")
    how = [f"--{name}={n}" for name, n in zip(("prompt-tokens", "gen-tokens", "repeats"), sizes, strict=True)]
    common = ("bench", str(machine.model), "--workers", ",".join(machine.addresses), "--threads", "1", *how)
    equal = ("--parallel", "tensor", "--shares", ",".join(["1"] * (len(machine.addresses) + 1)))
    sides = {"as it is": (), "equal shares": equal, BESIDE: (*equal, "--transport", "tcp")}
    show = args.json != "-"
    if show:
        print("| session | side | ms a token | links | steal, s | took, s | plan |")
        print("| ---: | --- | ---: | --- | ---: | ---: | --- |")
    rows: list[dict[str, Any]] = []
    for session in range(args.sessions):
        first = session % len(sides)
        for name in [*sides][first:] + [*sides][:first]:
            found = machine.run(args.seed + session, *common, *sides[name])
            row = {
                "session": session,
                "side": name,
                "decode_ms": found["decode_ms_median"],
                "links": [link["kind"] for link in found["links"]],
                "changes": found["link_changes"],
                "steal_s": found["steal_s"],
                "took_s": found["took_s"],
                "why": found["why"],
            }
            rows.append(row)
            if show:
                _show(row)
    compared = [_compared(rows, name) for name in sides if name != BESIDE]
    if show:
        _conclude(compared, sum(row["steal_s"] for row in rows))
    return {"rows": rows, "compared": compared}


def chat(machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """What a token of the bundled model takes in bursts, beside what it takes in quiet."""
    asked = ("chat", "-p", "Tell me all that you know about devices.", "--temperature", "0", "--seed", "1")
    rows = []
    for session in range(args.sessions):
        found = {name: machine.run(seed, *asked) for name, seed in (("quiet", None), ("bursts", args.seed + session))}
        rows.append({f"{name}_tpot_ms": 1e3 * of["timing"]["tpot_s"] for name, of in found.items()})
    quiet, busy = (statistics.median(row[f"{name}_tpot_ms"] for row in rows) for name in ("quiet", "bursts"))
    if args.json != "-":
        print("\n| chat | median, ms a token | least | most | of quiet |\n| --- | ---: | ---: | ---: | ---: |")
        for name, median in (("quiet", quiet), ("bursts", busy)):
            values = [row[f"{name}_tpot_ms"] for row in rows]
            print(f"| {name} | {median:.2f} | {min(values):.2f} | {max(values):.2f} | {median / quiet:.2f} |")
        print("\nAsked: at most 2.")
    return {"rows": rows, "quiet_ms": quiet, "bursts_ms": busy, "ratio": busy / quiet}


def _compared(rows: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """How many times as fast a side decodes as TCP with equal shares, in the same bursts."""
    ours, others = ([row for row in rows if row["side"] == name] for name in (side, BESIDE))
    ms, beside_ms = ([row["decode_ms"] for row in some] for some in (ours, others))
    ratios = [b / a for a, b in zip(ms, beside_ms, strict=True)]
    return {
        "side": side,
        "median_ms": statistics.median(ms),
        "best_ms": min(ms),
        "beside_median_ms": statistics.median(beside_ms),
        "beside_best_ms": min(beside_ms),
        "ratio": statistics.median(beside_ms) / statistics.median(ms),
        "best_ratio": min(beside_ms) / min(ms),
        "least": min(ratios),
        "most": max(ratios),
        "stayed_slower": sum(ratio < ASKED and "grpc" in row["links"] for ratio, row in zip(ratios, ours, strict=True)),
    }


def _show(row: dict[str, Any]) -> None:
    cells = (row["session"] + 1, row["side"], f"{row['decode_ms']:.1f}", ", ".join(row["links"]))
    print(f"| {' | '.join(map(str, cells))} | {row['steal_s']:.1f} | {row['took_s']:.0f} | {row['why']} |", flush=True)
    for change in row["changes"]:
        print(f"|  |  |  |  |  |  | {change} |", flush=True)


def _conclude(compared: list[dict[str, Any]], stolen_s: float) -> None:
    print("\n| side | median, ms | of tcp | by session | best, ms | of tcp | ended on a slower link |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for of in compared:
        ranges = f"{of['least']:.2f} to {of['most']:.2f}"
        cells = (of["side"], f"{of['median_ms']:.1f}", f"{of['ratio']:.3f}", ranges, f"{of['best_ms']:.1f}")
        print(f"| {' | '.join(cells)} | {of['best_ratio']:.3f} | {of['stayed_slower']} |")
    beside = compared[0]
    print(f"| {BESIDE} | {beside['beside_median_ms']:.1f} | 1 |  | {beside['beside_best_ms']:.1f} | 1 |  |")
    print(f"\nAsked: {ASKED} of tcp at the median, and 0 sessions on a slower link. Steal: {stolen_s:.1f} s in all.")


def _model(args: argparse.Namespace, folder: Path) -> Path:
    if args.model is not None:
        return Path(args.model)
    from edge.demo import MODEL_PATH

    if args.tiny:
        return Path(MODEL_PATH)
    from edge.models import synth
    from edge.models.presets import SHAPES

    path = folder / "tinyllama.gguf"
    synth.synthesize(path, SHAPES["tinyllama-1.1b"])
    return path


EXPERIMENTS = {"links": links, "chat": chat}


if __name__ == "__main__":
    main()

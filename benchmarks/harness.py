"""The harness of all benchmarks: arguments, sections, alternating sides, medians, bests, ratios, steal time, tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from edge.version import version

ROOT = Path(__file__).parents[1]
EDGE = [sys.executable, "-m", "apps.cli"]
MIB, GIB = 1 << 20, 1 << 30
STDOUT = "-"  # as the name of a file: print the figures as JSON, and nothing else

# Benchmarks start workers from a process with threads of gRPC, whose handlers of a fork sometimes stop the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

Figures = dict[str, Any]
Rounds = dict[str, list[dict[str, float]]]  # by side, what was measured in each round


class LeftOut(Exception):
    """A section that this machine, or this user, cannot run."""


@dataclass(frozen=True)
class Section:
    """One question of a benchmark: how it is measured, and how its figures are shown."""

    run: Callable[[Path, argparse.Namespace], Figures]  # in a folder of its own
    text: Callable[[Figures], str]  # as Markdown


# --- a whole benchmark ---


def parser_of(doc: str | None, sections: Iterable[str] = (), rounds: int | None = None) -> argparse.ArgumentParser:
    """The arguments that benchmarks share. rounds: the default; None: each section has its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sections:
        parser.add_argument("--only", choices=list(sections), help="one section (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"of each comparison (default: {rounds or 'its own'})"
    )
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help="write all figures; alone: print them")
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    return parser


def bench(
    parser: argparse.ArgumentParser,
    sections: Mapping[str, Section] | Section,
    prepare: Callable[[Path, argparse.Namespace], Figures] = lambda folder, args: {},
) -> Figures:
    """Run the sections that are asked for, show their figures, and write them.

    prepare: what comes first, with a folder that is deleted in the end; what it returns joins the figures. A benchmark
    with one question is a Section; its figures stand at the top.
    """
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started, as Ctrl-C does
    result: Figures = {**environment(), "command": " ".join(["python", *sys.argv])}
    if args.json != STDOUT:
        print(f"{result['machine']}; {result['versions']}.\n\n```sh\n{result['command']}\n```\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="edge-bench-") as name:
        folder = Path(name)
        os.environ.update({f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "CACHE", "STATE")})
        result |= prepare(folder, args)
        if isinstance(sections, Section):
            result |= run_section("", partial(sections.run, folder, args), sections.text, args.json)
        else:
            for section in [args.only] if args.only else sections:
                run, text = partial(sections[section].run, folder / section, args), sections[section].text
                (folder / section).mkdir(exist_ok=True)
                try:
                    result[section] = run_section(section, run, text, args.json)
                except LeftOut as error:
                    if not args.tiny:
                        raise SystemExit(f"{section}: {error}; choose other sections with --only") from error
                    result.setdefault("left_out", {})[section] = str(error)
    write_json(result, args.json)
    return result


def environment() -> dict[str, str]:
    """The machine, and the versions that figures depend on."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,"
        f" {psutil.virtual_memory().total / GIB:.1f} GiB",
        "versions": f"{platform.system()} {platform.release()}, Python {platform.python_version()},"
        f" llama-cpp-python {version('llama-cpp-python')}",
    }


def steal_s() -> float:
    """Seconds that the host has taken from all cores since it started; 0 where it does not say."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def run_section(name: str, run: Callable[[], Figures], text: Callable[[Figures], str], to: str | None) -> Figures:
    """The figures of one section, with `took_s` and `steal_s`; its table is printed unless JSON is."""
    began, stolen_s = time.monotonic(), steal_s()
    figures = run()
    figures |= {"took_s": time.monotonic() - began, "steal_s": steal_s() - stolen_s}
    if to != STDOUT:
        title = f"## {name}\n\n" if name else ""
        took = "Took {took_s:.0f} s; the host took {steal_s:.1f} s of all cores meanwhile.\n"
        print(f"{title}{text(figures)}\n\n{took.format(**figures)}", flush=True)
    return figures


def write_json(result: Figures, to: str | None) -> None:
    """Write all figures to a file, or print them; nothing where `to` is None."""
    if to == STDOUT:
        print(json.dumps(result))
    elif to:
        Path(to).write_text(json.dumps(result, indent=1))


# --- sides that are compared ---


def alternate(measures: Mapping[str, Callable[[], dict[str, float]]], rounds: int, warm_up: bool = True) -> Rounds:
    """Return the figures of each side in each round. The sides take turns in going first. warm_up: a first round is
    not counted."""
    results: Rounds = {name: [] for name in measures}
    names = list(measures)
    for turn in range(rounds + warm_up if names else 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            measured = measures[name]()
            numbers = [f"{key} {value:.4g}" for key, value in measured.items() if isinstance(value, int | float)]
            progress(f"round {turn}, {name}: {', '.join(numbers)}")
            if turn or not warm_up:
                results[name].append(measured)
    return results


def medians(result: Rounds) -> dict[str, dict[str, float]]:
    """The median of each figure, by side."""
    return {
        side: {key: statistics.median(item[key] for item in rounds) for key in rounds[0]}
        for side, rounds in result.items()
    }


def bests(result: Rounds) -> dict[str, dict[str, float]]:
    """The best of each figure, by side: the least time, the largest rate."""
    return {
        side: {key: (min if _is_time(key) else max)(item[key] for item in rounds) for key in rounds[0]}
        for side, rounds in result.items()
    }


def compared(result: Rounds, side: str, baseline: str, target: Mapping[str, str] | None = None) -> list[Figures]:
    """Return how many times as fast `side` is, figure by figure: the ratio of the medians, and the median, the least
    and the most of the ratios of single rounds. asked: the target of the ratio."""
    rows = []
    for key in result[side][0]:
        a, b = ([item[key] for item in result[name]] for name in (side, baseline))
        if _is_time(key):  # the shorter, the faster
            a, b = b, a
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        rows.append(
            {
                "side": side,
                "beside": baseline,
                "figure": key,
                "ratio": statistics.median(a) / statistics.median(b),
                "median_ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "asked": (target or {}).get(key, ""),
            }
        )
    return rows


def _is_time(key: str) -> bool:
    return key.endswith("_s") and not key.endswith("_per_s")


# --- showing ---


def progress(text: str) -> None:
    """Show a figure as soon as it is measured, beside the results: a run that is cut short tells something."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is words, the others figures."""
    padded = [[*line, *[""] * (len(header) - len(line))] for line in lines]
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *padded]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def ratio_text(row: Mapping[str, Any], digits: int = 3) -> str:
    """A row of `compared`: the ratio of medians, and the least and the largest of any round."""
    return f"{row['ratio']:.{digits}f} ({row['least']:.{digits}f} to {row['most']:.{digits}f})"

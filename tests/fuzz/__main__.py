"""Feeds damaged inputs of one kind to all that reads them, by the million.

    python -m tests.fuzz --kind gguf --count 1000000 --seed 7 [--first 250000] [--found FOLDER]
    python -m tests.fuzz --kind gguf FILE ...

Kinds: gguf, onnx, frames, states, messages. An input depends on kind, seed and number alone; --first goes on
where an earlier run ended. Inputs are read in a process of its own, as native code reads some of them: where it dies,
hangs, takes too much memory or raises what is no error for people, the input is written to --found and the next process
goes on behind it. FILES are fed again, one by one. Exit code 1 where something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from edge.errors import EdgeError
from tests.fuzz.fuzz_frames import rss_mib
from tests.fuzz.kinds import KINDS, Kind

HANG_S = 60.0  # for one input, on a busy machine
MEMORY_BYTES = 4 << 30  # of address space that a process takes in addition
GROWTH_MIB = 64.0  # of a process, from its first thousand inputs on
MOST_FOUND = 20  # then something is wrong with all
EACH = 100_000  # inputs of a process


@dataclass
class FuzzResult:
    """Outcome of many inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    took_s: float = 0.0
    most_mib: float = 0.0


def input_of(kind: Kind, seed: int, number: int) -> bytes:
    """The input of a number."""
    return kind.make(random.Random(seed << 40 | number))


def fed(kind: Kind, data: bytes) -> str:
    """ "accepted", "refused", or what else came of it, which is a finding."""
    try:
        kind.feed(data)
    except EdgeError:
        return "refused"
    except Exception:
        return traceback.format_exc()
    return "accepted"


def run(name: str, count: int, seed: int, first: int = 0, folder: Path | None = None) -> FuzzResult:
    """Feed so many; findings are written to a folder."""
    result, number, stop = FuzzResult(), first, first + count
    began = time.monotonic()
    while number < stop and len(result.findings) < MOST_FOUND:
        number = _process(name, seed, number, min(number + EACH, stop), result, folder)
    result.took_s = time.monotonic() - began
    return result


def _process(name: str, seed: int, first: int, stop: int, result: FuzzResult, folder: Path | None) -> int:
    """Inputs from `first` on, in a process of its own: the number of the next."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    at = context.Value("q", first)
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="edge-fuzz-", dir=_memory_disk()) as own:
        child = context.Process(target=_work, args=(name, seed, first, stop, at, theirs, own))  # type: ignore[attr-defined]
        child.start()
        theirs.close()
        before, looked = -1, time.monotonic()
        said: tuple[Counter[str], str, float] | None = None
        while said is None:
            try:
                if ours.poll(1.0):
                    said = ours.recv()
            except EOFError:
                break
            if at.value != before:
                before, looked = at.value, time.monotonic()
            elif time.monotonic() - looked > HANG_S:
                child.kill()
        child.join()
    if said is None:
        outcomes, what, mib = Counter[str](), f"the process ended with {child.exitcode}", 0.0
        outcomes["not counted"] = at.value - first
    else:
        outcomes, what, mib = said
    result.outcomes += outcomes
    result.most_mib = max(result.most_mib, mib)
    if not what:
        return stop
    result.findings.append(_kept(name, seed, at.value, what, folder))
    return at.value + 1


def _work(
    name: str,
    seed: int,
    first: int,
    stop: int,
    at: Synchronized[int],
    out: multiprocessing.connection.Connection,
    own: str,
) -> None:
    """In the process: feed inputs, and say what came of them when one is a finding, or at the end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    kind, outcomes, early_mib = KINDS[name](Path(own)), Counter[str](), 0.0
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    what = ""
    for number in range(first, stop):
        at.value = number
        outcome = fed(kind, input_of(kind, seed, number))
        if outcome not in ("accepted", "refused"):
            what = outcome
            break
        outcomes[outcome] += 1
        if number == first + 1000:
            early_mib = rss_mib()
    mib = rss_mib()
    if early_mib and mib - early_mib > GROWTH_MIB:
        what = what or f"memory grew from {early_mib:.0f} to {mib:.0f} MiB"
    out.send((outcomes, what, mib))
    out.close()
    sys.stdout.flush()
    os._exit(0)  # native code may have left threads


def _kept(name: str, seed: int, number: int, what: str, folder: Path | None) -> str:
    """Write a finding's input to a folder; what is said of it."""
    with tempfile.TemporaryDirectory() as own:
        data = input_of(KINDS[name](Path(own)), seed, number)
    at = ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{sha256(data).hexdigest()[:8]}"
        path.write_bytes(data)
        at = f" ({path})"
    return f"{name}, seed {seed}, number {number}{at}: {what}"


def _memory_disk() -> str | None:
    """A folder in memory: files that are read once need no disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def summary(name: str, seed: int, first: int, result: FuzzResult) -> str:
    """One line."""
    n = sum(result.outcomes.values()) + len(result.findings)
    parts = ", ".join(f"{count:,} {what}" for what, count in sorted(result.outcomes.items()))
    return (
        f"{name}: {n:,} inputs of seed {seed} from number {first} on in {result.took_s:,.0f} s"
        f" ({n / max(result.took_s, 1e-9):,.0f}/s): {parts}; {len(result.findings)} findings; at most"
        f" {result.most_mib:.0f} MiB"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed damaged inputs of one kind.")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--found", type=Path, help="folder for inputs that are findings")
    parser.add_argument("files", nargs="*", type=Path, help="inputs to feed again")
    args = parser.parse_args()
    if args.files:
        with tempfile.TemporaryDirectory() as own:
            kind = KINDS[args.kind](Path(own))
            outcomes = [fed(kind, path.read_bytes()) for path in args.files]
        print(*(f"{path}: {outcome}" for path, outcome in zip(args.files, outcomes, strict=True)), sep="\n")
        sys.exit(any(outcome not in ("accepted", "refused") for outcome in outcomes))
    result = run(args.kind, args.count, args.seed, args.first, args.found)
    print(*result.findings, sep="\n", end="\n" if result.findings else "")
    print(summary(args.kind, args.seed, args.first, result))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(bool(result.findings))


if __name__ == "__main__":
    main()

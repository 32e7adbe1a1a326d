"""Run `edge chat` with a memory range in a memory group whose limit is lowered and raised during its answer."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import EDGE, GIB, MIB, ROOT, progress, table
from benchmarks.processes import memory_group
from devices.probe import rss

LIMIT_S = 300.0  # of a whole chat
SAMPLE_S = 0.01
QUESTION = "Write on, and do not stop."


@dataclass(frozen=True)
class Case:
    """A chat: its memory, bytes, and tokens of its answer: in all, and after how many the limit falls and rises."""

    most: int
    least: int
    tokens: int
    lowered_at: int
    raised_at: int


CASES = {
    "tiny": Case(400 * MIB, 135 * MIB, 4000, 500, 1000),
    "1b": Case(3 * GIB, 400 * MIB, 300, 60, 90),
    "8b": Case(4 * GIB, int(1.4 * GIB), 100, 30, 38),
}


@dataclass
class Followed:
    """Samples and times of a chat, seconds of a monotonic clock."""

    samples: list[tuple[float, int]] = field(default_factory=list)  # (time, bytes in memory)
    pieces: list[float] = field(default_factory=list)  # when text came
    times: dict[str, float] = field(default_factory=dict)  # lowered, holds, raised


def limit(group: Path, n_bytes: int) -> bool:
    """Ask for a limit, and set it if what is in memory allows that."""
    (group / "memory.soft_limit_in_bytes").write_text(str(n_bytes))
    for name in ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        with suppress(OSError):  # more is in memory, or it has to be the other first
            (group / name).write_text(str(n_bytes))
    return int((group / "memory.limit_in_bytes").read_text()) // MIB == n_bytes // MIB


def chatted(name: str, path: Path, case: Case) -> dict[str, Any]:
    """Return the figures of a chat with a model."""
    options = {
        "max-tokens": case.tokens, "memory": f"{case.least}B..{case.most}B", "context": 1024, "when-full": "shift",
        "draft": "off", "prefix-cache": 0, "temperature": 0,
    }  # fmt: skip
    command = [*EDGE, "chat", str(path), "-p", QUESTION, "--allow-repetition"]
    command += [part for option, value in options.items() for part in (f"--{option}", str(value))]
    seen, over = Followed(), threading.Event()
    with memory_group(case.most) as group:
        folder = next(f for f in group.folders if f.parent.name == "memory")
        child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=group.add
        )
        assert child.stdout is not None
        watch = threading.Thread(target=_lower_and_raise, args=(folder, child.pid, case, seen, over))
        end = threading.Timer(LIMIT_S, child.kill)
        try:
            watch.start()
            end.start()
            while os.read(child.stdout.fileno(), 1 << 16):
                seen.pieces.append(time.monotonic())
            code = child.wait()
        finally:
            over.set()
            end.cancel()
            child.kill()
            child.wait()
            child.stdout.close()
            watch.join()
        kills = group.memory_report()["oom_kills"]
    progress(f"{name}: {len(seen.pieces)} pieces, {seen.times}")
    return {"model": name, "least_bytes": case.least, "most_bytes": case.most, "exit": code, "kills": kills,
            **_figures(seen, case)}  # fmt: skip


def _lower_and_raise(group: Path, pid: int, case: Case, seen: Followed, over: threading.Event) -> None:
    times = seen.times
    while not over.wait(SAMPLE_S):
        with suppress(ProcessLookupError, OSError):
            seen.samples.append((time.monotonic(), rss(pid)))
        if "lowered" not in times and len(seen.pieces) >= case.lowered_at:
            times["lowered"] = time.monotonic()
        if "lowered" in times and "holds" not in times and limit(group, case.least):
            times["holds"] = time.monotonic()
        if "holds" in times and "raised" not in times and len(seen.pieces) >= case.raised_at:
            limit(group, case.most)
            times["raised"] = time.monotonic()


def _figures(seen: Followed, case: Case) -> dict[str, Any]:
    """Return what `show_chat` shows. Seconds that never came are infinite."""
    lowered, holds, raised = (seen.times.get(name, math.inf) for name in ("lowered", "holds", "raised"))
    before = max((n for at, n in seen.samples if at < lowered), default=0)
    low = max((n for at, n in seen.samples if holds <= at < raised), default=0)
    after = max((n for at, n in seen.samples if at > raised), default=0)
    down = next((at for at, n in seen.samples if at > lowered and n <= case.least), math.inf)
    up = next((at for at, n in seen.samples if at > raised and n >= before - (before - low) // 20), math.inf)
    gaps = [(second, second - first) for first, second in pairwise(seen.pieces)]

    def between(start: float, end: float) -> list[float]:
        return [seconds for at, seconds in gaps if start < at <= end] or [math.nan]

    return {
        "pieces": len(seen.pieces),
        "rss_bytes": [before, low, after],
        "down_s": down - lowered,
        "holds_s": holds - lowered,
        "up_s": up - raised,
        "token_s": [statistics.median(between(*ends)) for ends in ((0, lowered), (holds, raised), (up, math.inf))],
        "longest_s": [max(between(*ends)) for ends in ((lowered, raised), (raised, math.inf))],
    }


def show_chat(result: dict[str, Any]) -> str:
    lines = [
        [case["model"], str(case["exit"]), str(case["kills"]), *(f"{n / MIB:,.0f}" for n in case["rss_bytes"]),
         *(f"{case[key]:.2f}" for key in ("down_s", "holds_s", "up_s")), *(f"{1e3 * s:,.0f}" for s in case["token_s"]),
         *(f"{1e3 * s:,.0f}" for s in case["longest_s"])]
        for case in result["cases"]
    ]  # fmt: skip
    header = ("", "exit code", "kills", "MiB before", "lowered", "raised", "memory down, s", "limit holds, s", "up, s",
              "ms a token before", "lowered", "raised", "longest token, down", "up")  # fmt: skip
    return table(header, lines)

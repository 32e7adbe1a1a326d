"""A neighbour that takes cores away in bursts. Seeded: the sides of a comparison meet the same ones.

Bursts, and the rests between them, last for a random time between two bounds. All cores are taken at once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_LEAD_S = 0.2  # from the start of the last process to the first rest


@dataclass(frozen=True)
class Neighbour:
    """How long bursts and rests last, in seconds."""

    least_s: float = 0.010
    most_s: float = 0.500
    rest_least_s: float = 0.010
    rest_most_s: float = 0.500

    def schedule(self, seed: int) -> Iterator[tuple[float, float]]:
        """(rest, burst) again and again, without end; the same for a seed."""
        chance = random.Random(seed)
        while True:
            yield chance.uniform(self.rest_least_s, self.rest_most_s), chance.uniform(self.least_s, self.most_s)


@contextmanager
def bursts(seed: int, neighbour: Neighbour, limit_s: float) -> Iterator[None]:
    """Let every core be taken in bursts until the end of the block, or for `limit_s` at most."""
    bounds = (neighbour.least_s, neighbour.most_s, neighbour.rest_least_s, neighbour.rest_most_s)
    command = [sys.executable, __file__, str(seed), str(limit_s), *map(str, bounds)]
    children: list[subprocess.Popen[str]] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            children.append(subprocess.Popen([*command, str(core)], **pipes))  # type: ignore[call-overload]
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise SystemExit("the neighbour does not start")
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{time.monotonic() + _LEAD_S}\n")
            child.stdin.flush()
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.communicate()


def main() -> None:
    """Take one core, as the parent says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    for name in ("limit_s", "least_s", "most_s", "rest_least_s", "rest_most_s"):
        parser.add_argument(name, type=float)
    parser.add_argument("core", type=int)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.sched_setaffinity(0, {args.core})
    print("ready", flush=True)
    now = float(sys.stdin.readline())
    end = now + args.limit_s
    neighbour = Neighbour(args.least_s, args.most_s, args.rest_least_s, args.rest_most_s)
    for rest_s, burst_s in neighbour.schedule(args.seed):
        if now + rest_s + burst_s > end:
            return
        time.sleep(max(0.0, now + rest_s - time.monotonic()))
        now += rest_s + burst_s
        while time.monotonic() < now:
            pass


if __name__ == "__main__":
    main()

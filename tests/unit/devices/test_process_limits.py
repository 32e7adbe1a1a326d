"""Test the limits of a process: memory that its threads have freed is held only once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

MIB = 1 << 20
THREADS = 6
# Each arena of glibc reserves 64 MiB of addresses, and the stack of a thread 8 MiB.
PROGRAM = f"""
import sys, threading
from pathlib import Path
from devices.processes.limits import share_one_arena

def reserved():
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

if sys.argv[1] == "one":
    share_one_arena()
before, all_there = reserved(), threading.Barrier({THREADS} + 1)

def allocate():
    kept = [bytes(100_000) for _ in range(20)]
    all_there.wait()
    all_there.wait()

threads = [threading.Thread(target=allocate) for _ in range({THREADS})]
for thread in threads:
    thread.start()
all_there.wait()
print(reserved() - before)
all_there.wait()
"""


@pytest.mark.parametrize("arenas", ["one", "each its own"])
def test_threads_share_one_arena(arenas: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arenas], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert (int(done.stdout) < THREADS * 8 * MIB + 64 * MIB) == (arenas == "one")

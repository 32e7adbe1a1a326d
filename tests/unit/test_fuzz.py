"""A few rounds of each kind of damaged input, and what many rounds found. `python -m tests.fuzz` goes on for as long as
one likes."""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from edge.errors import EdgeError
from tests.fuzz.__main__ import fed, input_of
from tests.fuzz.kinds import KINDS, Kind
from tests.support import ROOT, TESTS
from tests.support.thorough import some

# By kind; frames are beside these, for a fuzzer that learns.
CORPUS = sorted(path for path in (TESTS / "corpus").glob("*/*") if path.parent.name in KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_found_in_a_few_rounds(name: str, tmp_path: Path) -> None:
    outcomes = Counter[str]()
    with closing(KINDS[name](tmp_path)) as kind:
        for number in range(some(200, 20_000)):
            outcome = fed(kind, input_of(kind, 1, number))
            assert outcome in ("accepted", "refused"), f"number {number}: {outcome}"
            outcomes[outcome] += 1
        first = [input_of(kind, 1, number) for number in range(30)]
    (tmp_path / "again").mkdir()
    with closing(KINDS[name](tmp_path / "again")) as kind:
        assert first == [input_of(kind, 1, number) for number in range(30)]
    assert min(outcomes["accepted"], outcomes["refused"]) > 0, outcomes


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_was_found_is_refused(path: Path, tmp_path: Path) -> None:
    with closing(KINDS[path.parent.name](tmp_path)) as kind:
        assert fed(kind, path.read_bytes()) == "refused"


class Deadly(Kind):
    """Inputs of which some end the process."""

    def make(self, chance: random.Random) -> bytes:
        return chance.randbytes(1)

    def feed(self, data: bytes) -> None:
        if data[0] < 40:
            raise ZeroDivisionError("no error for people")
        if data[0] < 80:
            os.kill(os.getpid(), signal.SIGKILL)
        if data[0] < 160:
            raise EdgeError("refused")


DEADLY = """
import sys
from tests.fuzz import __main__ as fuzz
from tests.unit.test_fuzz import Deadly
fuzz.KINDS["deadly"] = lambda folder: Deadly()
sys.argv[1:] = ["--kind", "deadly", "--count", "30", "--found", sys.argv[1]]
fuzz.main()
"""


def test_what_ends_the_process_is_told_and_kept(tmp_path: Path) -> None:
    """The next inputs are fed by another process."""
    command = [sys.executable, "-c", DEADLY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    inputs = {number: input_of(Deadly(), 0, number)[0] for number in range(30)}
    assert done.returncode == 1, done.stderr
    for number, first in inputs.items():
        assert (f"number {number} (" in done.stdout) == (first < 80)
    assert done.stdout.count("ZeroDivisionError: no error for people") == sum(n < 40 for n in inputs.values()) > 0
    assert done.stdout.count("the process ended with -9") == sum(40 <= n < 80 for n in inputs.values()) > 0
    assert "deadly: 30 inputs of seed 0 from number 0 on" in done.stdout
    assert {path.read_bytes()[0] for path in tmp_path.iterdir()} == {n for n in inputs.values() if n < 80}

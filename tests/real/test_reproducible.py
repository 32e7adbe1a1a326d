"""With --reproducible the same command gives the same answer each time, also where a device is lost in the middle."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.deployments import own_folders
from tests.support.helpers import run_edge, start_edge
from tests.support.thorough import some
from tests.support.workers import Worker, worker

RUNS = some(1, 20)  # of each kind
TOKENS, LONG = 48, 16  # the prompt and the answer are on both sides of 256 cells, where threads begin to matter
PROMPT = "Go on with this story. " + "The keeper climbed the stairs of the lighthouse and lit the lamp. " * LONG
ASKED = ("--reproducible", "--temperature", "0", "--context", "512", "--threads", "1", "--max-tokens", str(TOKENS))
KEPT_BYTES = 12  # of an answer, that were read before a device is lost


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")


def plan(item: Worker, parallel: str) -> tuple[str, ...]:
    return ("--workers", item.address, "--parallel", parallel, "--shares", "1,1")


def chat(model: Path, *args: str) -> str:
    """The answer of a run that nothing disturbs."""
    done = run_edge("chat", model, "-p", PROMPT, *ASKED, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def disturbed(model: Path, lose: Callable[[], None], after: int, *args: str) -> str:
    """The answer of a run in which something is lost after so many bytes of it."""
    with start_edge("chat", str(model), "-p", PROMPT, *ASKED, *args) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        text = process.stdout.read(after)
        lose()
        text += process.stdout.read()
        said = process.stderr.read().decode()
        assert process.wait() == 0, said
    assert "going on with" in said
    return text.decode()


def kill_engine(item: Worker) -> None:
    for child in item.children():
        child.kill()


def moments() -> Iterator[int]:
    """Bytes of the answer after which a device is lost."""
    rng = random.Random(34)
    while True:
        yield rng.randrange(1, 2 * KEPT_BYTES)


def test_one_device(smollm2: Path) -> None:
    assert len({chat(smollm2) for _ in range(1 + RUNS)}) == 1


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_a_loss_changes_no_token(smollm2: Path, tmp_path: Path, parallel: str) -> None:
    after, answers = moments(), set()
    with worker(tmp_path / "one", "--threads", "1") as first:
        for _ in range(RUNS):
            answers.add(chat(smollm2, *plan(first, parallel)))
            answers.add(disturbed(smollm2, lambda: kill_engine(first), next(after), *plan(first, parallel)))
    for _ in range(RUNS):
        with worker(tmp_path / "two", "--threads", "1") as two:
            answers.add(disturbed(smollm2, two.kill, next(after), *plan(two, parallel)))
    assert len(answers) == 1, answers

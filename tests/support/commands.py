"""Run `edge chat` and `edge bench` on two workers to their end, in this process."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from apps import cli
from tests.support.deployments import own_folders
from tests.support.helpers import until
from tests.support.workers import Worker, worker

ASKED = ("--threads", "1", "-p", "What is 27 plus 38?", "--temperature", "0", "--context", "256", "--json")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

Two = tuple[Worker, Worker]
Answer = tuple[int, str, str]  # exit code, standard output, standard error
Run = Callable[..., Answer]
Chat = Callable[..., dict[str, Any]]


def main(*args: str | Path) -> int:
    """The exit code of a command line, with nothing on standard input."""
    with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nothing)
        return cli.main([str(arg) for arg in args])


@contextmanager
def two_workers(folder: Path) -> Iterator[Two]:
    """Two on loopback; the second lends its first core and no GPU."""
    borrowed = ("--gpu-layers", "0", *(("--affinity", str(CORES[0])) if CORES else ()))
    with ExitStack() as stack:
        first = stack.enter_context(worker(folder / "one", "--threads", "1", "--name", "one"))
        yield first, stack.enter_context(worker(folder / "two", "--threads", "1", "--name", "two", *borrowed))


@contextmanager
def runs(capsys: pytest.CaptureFixture[str], two: Two) -> Iterator[Run]:
    """Runs a command line. No session may be left at the end."""

    def run(*args: str | Path) -> Answer:
        capsys.readouterr()
        code = main(*args)
        return code, *capsys.readouterr()

    yield run
    for item in two:
        if item.process.poll() is None:
            until(lambda: not item.children(), "the end of all sessions")  # noqa: B023


def chats(run: Run) -> Chat:
    """Asks, and returns the object that `edge chat --json` prints; it must succeed."""

    def chat(*args: str | Path) -> dict[str, Any]:
        code, out, error = run("chat", *ASKED, *args)
        assert code == 0, error
        said: dict[str, Any] = json.loads(out)
        return said

    return chat


def runner(capsys: pytest.CaptureFixture[str], name: str) -> Run:
    """Runs the command of this name with one thread."""

    def run(*args: str | Path) -> Answer:
        capsys.readouterr()
        code = main(name, *args, "--threads", "1")
        return code, *capsys.readouterr()

    return run


def said(run: Run, *args: str | Path) -> dict[str, Any]:
    """Return the object that `--json` prints; it must succeed."""
    code, out, error = run(*args, "--json")
    assert code == 0, error
    result: dict[str, Any] = json.loads(out)
    return result


# Fixtures of files that share two workers: import all four.


@pytest.fixture(name="two", scope="module")
def shared_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Two workers for the tests of a file."""
    with two_workers(tmp_path_factory.mktemp("workers")) as both:
        yield both


@pytest.fixture(name="own", autouse=True, scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of what this device keeps."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("own")
        own_folders(patch, folder)
        yield folder


@pytest.fixture(name="run")
def run_command(capsys: pytest.CaptureFixture[str], two: Two) -> Iterator[Run]:
    """Runs a command line."""
    with runs(capsys, two) as run:
        yield run


@pytest.fixture(name="chat")
def ask(run: Run) -> Chat:
    """Asks, and returns the object that is printed."""
    return chats(run)


def workers(*some: Worker) -> str:
    """For --workers."""
    return ",".join(item.address for item in some)


def assert_refused(answer: Answer, code: int, *words: str) -> None:
    """One line on standard error, and nothing on standard output."""
    assert answer[0] == code, answer
    assert answer[1] == ""
    assert re.fullmatch(r"edge [a-z]+: [^\n]+\n", answer[2]), answer[2]
    for word in words:
        assert word in answer[2]

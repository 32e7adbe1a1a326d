"""Run `edge` like a user: as a process, with or without a terminal; or run it in this process."""

import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any, TextIO

import pexpect
import psutil
import pytest
from pexpect import fdpexpect

from apps import cli
from devices.processes.forking import ForkedProcess, ForkServer, available
from edge.profiling.doctor.findings import OK, Verdict
from tests.support import ENGINE, FORKED_COMMAND, ROOT
from tests.support.foreground import lead_terminal
from tests.support.namespaces import Host
from tests.support.thorough import THOROUGH

EDGE = (sys.executable, "-m", "apps.cli")
# Says when the command begins: before, it is the interpreter that starts, and answers signals in its own way.
_EDGE_THAT_TELLS = "import os, sys, apps.cli; os.write(int(sys.argv.pop(1)), b'!'); sys.exit(apps.cli.main())"
ENDLESS = "root ::= [a-z] root"  # a grammar no text completes: any model goes on until it is stopped
TIMEOUT_S = 60  # of any wait: only against a hang

# prompt_toolkit asks terminals to mark pasted text when, and only when, it is ready to read a line.
READY = "\x1b[?2004h"

# Variables that are of the terminal the tests run on; COLUMNS and LINES are also set by pytest-xdist.
_OF_OTHER_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")


fork_server = ForkServer(FORKED_COMMAND, "tests.support.often_imported")

# Lines of progress of a command that was really started, on a slow machine; forked ones print none.
_PROGRESS = re.compile(r"[A-Z][^:]*: (begun|.*, \d+ %)")


def run_edge(
    *args: str | Path,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_S,
    preexec: Callable[[], None] | None = None,
    on: Host | None = None,
    only_env: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end, without a terminal. `env` is added to the environment. stdin: has to fit into a pipe,
    64 KiB. preexec: called in its process before it becomes the command. only_env: with nothing of this
    process's environment."""
    environment = {**({} if only_env else os.environ), **(env or {})}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with _pipe_of(stdin) as text:
            process = begin(args, environment, (text, out, errors), preexec, on)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(["edge", *map(str, args)], code, out.read(), without_progress(errors.read()))


def without_progress(text: str) -> str:
    """Return what a command said on standard error, without lines of progress of a slow machine."""
    return "".join(line for line in text.splitlines(keepends=True) if not _PROGRESS.match(line))


def begin(
    args: Sequence[str | Path],
    env: Mapping[str, str],
    streams: Sequence[IO[Any]],
    preexec: Callable[[], None] | None = None,
    on: Host | None = None,
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Start the command with these as its standard input, output and error; a fourth is told when the command begins,
    with a byte. preexec: called in its process before it becomes the command. on: a host other than this one.

    It is forked from a process that has imported its modules, which takes half a second of CPU hundreds of times. With
    EDGE_THOROUGH=1 it is started as people start it.
    """
    words = [str(arg) for arg in args]
    if available() and not THOROUGH and preexec is None:
        server = on.fork_server if on else fork_server
        return server.start([json.dumps({**env}), *words], [stream.fileno() for stream in streams])
    stdin, out, errors, *logs = streams
    command = (sys.executable, "-c", _EDGE_THAT_TELLS, str(logs[0].fileno())) if logs else EDGE
    return subprocess.Popen(
        [*(on.under if on else ()), *command, *words],
        cwd=ROOT,
        env=env,
        stdin=stdin,
        stdout=out,
        stderr=errors,
        pass_fds=[stream.fileno() for stream in logs],
        preexec_fn=preexec or _in_foreground,
    )


class OwnEngines:
    """Starts engine processes of this device, as a fork server of its own would."""

    def start(self, arguments: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        return fork_server.start([json.dumps({**os.environ}), ENGINE, os.getcwd(), *arguments], descriptors)


def _pipe_of(stdin: str) -> TextIO:
    """A pipe that holds the text: something that can be waited for, as `edge chat` does."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as text:
        text.write(stdin)
    return os.fdopen(read)


def edge_here(*args: str | Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Return what `run_edge` does, without a process: for what a command says, where nothing of a process is tested.

    stdin: has to fit into a pipe, 64 KiB.
    """
    out, errors = io.StringIO(), io.StringIO()
    with _pipe_of(stdin) as text, redirect_stdout(out), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", text)
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as ended:  # of argparse
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(["edge", *map(str, args)], code, out.getvalue(), errors.getvalue())


def start_edge(*args: str | Path) -> "subprocess.Popen[bytes]":
    """Start the command with pipes as its output."""
    return subprocess.Popen(
        [*EDGE, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )


def run_chat(*args: str | Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """`edge chat` on one thread, in this process."""
    return edge_here("chat", "--threads", "1", *args, stdin=stdin)


def chat_json(*args: str | Path, run: Callable[..., "subprocess.CompletedProcess[str]"] = run_chat) -> dict[str, Any]:
    """The object `edge chat --json` prints; it must succeed. run: how."""
    done = run(*args, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def assert_one_line_error(done: "subprocess.CompletedProcess[str]", code: int, *words: str) -> None:
    """The command failed with `code`, and said why in one line on standard error that holds all `words`."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"edge[^\n]*: [^\n]+\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr


def heed_interrupts() -> None:
    """For a child: react to SIGINT, also where the tests run in the background of a shell that ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _in_foreground() -> None:
    heed_interrupts()
    lead_terminal()


def until(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `condition()` holds. Asking takes a quarter of a processor at most: others wait, too."""
    deadline, began = time.monotonic() + timeout_s, time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(max(0.01, min(3 * (now - began), 0.1)))
        began = time.monotonic()


def stand_still(pid: int) -> None:
    """Stop a process, and return when it is. Until then its other threads may go on."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "a process that stands still")


def calls(work: Callable[[], object]) -> int:
    """Count the functions that `work()` calls: its cost, the same on a busy machine as on an idle one."""
    n = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return n


class Terminal:
    """`edge chat` on a pseudo-terminal of its own."""

    def __init__(self, *args: str | Path, state: Path, under: Sequence[str] = ()) -> None:
        """under: a command that runs it, such as a shell."""
        words = ["chat", "--threads", "1", *map(str, args)]
        env = {
            **{name: value for name, value in os.environ.items() if name not in _OF_OTHER_TERMINALS},
            "TERM": "xterm",
            "XDG_STATE_HOME": str(state),
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers where the cursor is
        }
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        with os.fdopen(theirs, "r+b", buffering=0) as end:
            streams = {"stdin": end, "stdout": end, "stderr": end}
            self.process = (
                subprocess.Popen([*under, *EDGE, *words], cwd=ROOT, env=env, preexec_fn=_in_foreground, **streams)  # type: ignore[call-overload]
                if under
                else begin(words, env, (end, end, end))
            )
        self._shown = fdpexpect.fdspawn(ours, encoding="utf-8", timeout=TIMEOUT_S)

    def ready(self) -> str:
        """Wait for the prompt; what was shown before it."""
        self._shown.expect_exact(READY)
        return str(self._shown.before)

    def type(self, keys: str) -> None:
        """Press keys."""
        self._shown.send(keys)

    def enter(self, line: str) -> None:
        """Type a line and send it."""
        self.type(line + "\r")

    def sees(self, pattern: str) -> str:
        """Wait for a regular expression; everything that was shown up to and with it."""
        self._shown.expect(pattern)
        return str(self._shown.before) + str(self._shown.after)

    def attributes(self) -> list[Any]:
        """The attributes of the terminal, as `termios` has them."""
        return termios.tcgetattr(self._shown.fileno())

    def ends(self) -> int:
        """Wait for the end; the exit code."""
        self._shown.expect(pexpect.EOF)
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """End the process whatever it does."""
        self.process.kill()
        self.process.wait()
        self._shown.close()


def assert_verdict(verdict: Verdict, level: str, *words: str) -> None:
    """The level of a finding, and words of what there is and what to do. What is not ok says what to do."""
    assert verdict.level == level, verdict
    assert bool(verdict.advice) == (level != OK), verdict
    for word in words:
        assert word in verdict.seen + verdict.advice, verdict

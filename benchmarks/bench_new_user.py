"""A new user's first five minutes: install edge, ask it once, start a lab, ask over the lab, see a front of plans.

    python -m benchmarks.bench_new_user [--wheels FOLDER] [--load 2] [--rounds 1] [--json [FILE]] [--tiny]

| step        | from the start of the command to                                                                |
|-------------|-------------------------------------------------------------------------------------------------|
| environment | the end of `python -m venv`                                                                     |
| wheels      | the end of `pip install`, with the wheels of the folder and an empty cache of pip               |
| token       | the first character of the answer of `edge chat -p hi`                                          |
| lab         | the end of `edge lab up docs/example-lab.toml`                                                  |
| distributed | the first character of the answer of `edge chat -p hi --workers ...` as a pipeline of 3 devices |
| picture     | the existence of the page of `edge pareto --workers ... --html FILE`                            |

Every round runs all steps in this order, without load and then beside busy loops. Each has a home of its own, so that
nothing is remembered. Without `--wheels` the present environment is used, and nothing is installed. `--json` also has
the processor time of each command, and the lines that it printed to standard error, with the seconds since its start.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import resource
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import EDGE, ROOT, Figures, Section, bench, parser_of, progress, table
from benchmarks.processes import loops

PROMPT = ["-p", "hi"]
TINY_LAB = '[[device]]\nname = "pi"\ncpu = 1\nmemory = "1GiB"\n'
# Seconds without load and beside it. A sum of steps has one limit.
LIMITS_S = {"install": (60, 90), "token": (3, 6), "distributed": (10, 20), "picture": (20, 60)}
STEPS = {
    "environment": "`python -m venv`",
    "wheels": "`pip install`",
    "install": "both",
    "token": "first token of `edge chat -p hi`",
    "lab": "`edge lab up`",
    "lab_token": "first token of `edge chat --workers`",
    "distributed": "both",
    "picture": "page of `edge pareto --workers`",
}
_STEP_S = 900.0  # time limit of each command
_POLL_S = 0.02
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def main() -> None:
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels that `make wheels` wrote (default: none)")
    parser.add_argument("--load", type=int, default=2, metavar="N", help="busy loops of the second runs (default: 2)")
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> Figures:
    """Return the seconds of each step, by the number of busy loops, and their limits."""
    runs = []
    for turn in range(1 if args.tiny else args.rounds):
        for n in (0,) if args.tiny else (0, args.load):
            home = folder / f"home-{turn}-{n}"
            home.mkdir()
            average = os.getloadavg()[0]
            with loops(n, len(STEPS) * _STEP_S):
                user = NewUser(home)
                user.everything(args)
            runs.append(
                {"loops": n, "load_average": average, "seconds": user.seconds, "cpu_s": user.cpu_s, "said": user.said}
            )
    return {"runs": runs, "limits_s": LIMITS_S}


@dataclass
class NewUser:
    """The steps of one user, whose home is empty at first."""

    home: Path
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    cpu_s: dict[str, float] = field(default_factory=dict)  # processor time of each command, to its end
    said: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # standard error: seconds, line
    edge: list[str] = field(default_factory=lambda: EDGE)
    folder: Path = ROOT  # in which commands run

    def everything(self, args: argparse.Namespace) -> None:
        """Run all steps in order. SystemExit if one fails or exceeds its time limit."""
        if args.wheels:
            self.install(args.wheels.resolve())
        self.step("token", [*self.edge, "chat", *PROMPT], shows_text)
        with self.lab(args.tiny) as workers:
            pipeline = ["--parallel", "pipeline"]
            self.step("lab_token", [*self.edge, "chat", *PROMPT, *workers, *pipeline], shows_text)
            self.seconds["distributed"] = self.seconds["lab"] + self.seconds["lab_token"]
            page = self.home / "front.html"
            survey = ["--survey-seconds", "0"] if args.tiny else []
            command = [*self.edge, "pareto", *workers, *survey, "--html", str(page)]
            self.step("picture", command, lambda shown: page.exists())

    def install(self, wheels: Path) -> None:
        """Make an environment and install edge in it, from its wheel or else from this tree."""
        edge = "edge-runtime" if list(wheels.glob("edge_runtime-*.whl")) else str(ROOT)
        programs = self.home / "venv" / "bin"
        self.folder = self.home
        self.step("environment", [sys.executable, "-m", "venv", str(self.home / "venv")])
        pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        self.step("wheels", [*pip, "--only-binary", "llama-cpp-python", "--find-links", str(wheels), edge])
        self.seconds["install"] = self.seconds["environment"] + self.seconds["wheels"]
        self.edge = [str(programs / "edge")]

    @contextmanager
    def lab(self, tiny: bool) -> Iterator[list[str]]:
        """Start a lab for the time of a block. Yields the options that make a command use it."""
        file = ROOT / "docs" / "example-lab.toml"
        if tiny:
            file = self.home / "lab.toml"
            file.write_text(TINY_LAB)
        try:
            options: list[str] = json.loads(self.step("lab", [*self.edge, "lab", "up", str(file), "--json"]))["options"]
            yield options
        finally:
            subprocess.run(
                [*self.edge, "lab", "down"],
                env=self.env,
                cwd=self.folder,
                capture_output=True,
                timeout=_STEP_S,
                check=False,
            )

    @property
    def env(self) -> dict[str, str]:
        """Variables of a user who has just logged in."""
        own = {f"XDG_{kind}_HOME" for kind in ("CONFIG", "CACHE", "STATE", "DATA")} | {"PYTHONPATH"}
        return {name: value for name, value in os.environ.items() if name not in own} | {"HOME": str(self.home)}

    def step(self, name: str, command: Sequence[str], happened: Callable[[bytes], bool] | None = None) -> str:
        """Run a command to its end, and keep the seconds until something happened, or else until its end.

        happened: receives the standard output so far. Returns the standard output. SystemExit if the command fails,
        or if it ends before anything happened.
        """
        before_s = _children_s()
        run = Run(command, self.env, self.folder)
        seconds, code = run.until(happened)
        self.cpu_s[name] = _children_s() - before_s
        self.said[name] = run.said
        if code or seconds is None:
            lines = "\n".join(line for _, line in run.said[-20:])
            raise SystemExit(f"{' '.join(command)} ended with {code} after {run.took_s:.1f} s: {lines}")
        self.seconds[name] = seconds
        progress(f"{name}: {seconds:.2f} s; processor time {self.cpu_s[name]:.2f} s")
        return run.shown.decode()


def _children_s() -> float:
    """Return the processor time of all child processes that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shows_text(shown: bytes) -> bool:
    """True if a terminal shows anything but spaces."""
    return bool(_ESCAPE.sub(b"", shown).strip())


class Run:
    """One command, whose standard output is a terminal and whose standard error is a pipe."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.shown = b""
        self.said: list[tuple[float, str]] = []
        self._terminal, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)

    @property
    def took_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def until(self, happened: Callable[[bytes], bool] | None) -> tuple[float | None, int | None]:
        """Return the seconds until something happened, None if nothing did, and the exit code, None if the time
        limit ended the command."""
        seconds: float | None = None
        try:
            while self._process.poll() is None and self.took_s < _STEP_S:
                self._read()
                if seconds is None and happened is not None and happened(self.shown):
                    seconds = self.took_s
            ended_s = self.took_s
            self._read()
            if seconds is None and (happened is None or happened(self.shown)):
                seconds = ended_s
            return seconds, self._process.poll()
        finally:
            with suppress(ProcessLookupError):
                if self._process.poll() is None:
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()
            os.close(self._terminal)

    def _read(self) -> None:
        """Read everything that the command wrote, and wait a moment if it wrote nothing."""
        assert self._process.stderr is not None
        error, wait_s = self._process.stderr.fileno(), _POLL_S
        while ready := select.select([self._terminal, error], [], [], wait_s)[0]:
            some = {}
            for file in ready:
                try:
                    some[file] = os.read(file, 1 << 16)
                except OSError:  # Linux: no process has the terminal open any more
                    some[file] = b""
            self.shown += some.get(self._terminal, b"")
            lines = some.get(error, b"").decode(errors="replace").splitlines()
            self.said += [(round(self.took_s, 3), line) for line in lines]
            if not any(some.values()):
                time.sleep(wait_s)
                return
            wait_s = 0.0


def text(r: Figures) -> str:
    """Return the result as Markdown."""
    header, rows = ["step"], [[words] for words in STEPS.values()]
    for column, n in enumerate(dict.fromkeys(run["loops"] for run in r["runs"])):
        some = [run for run in r["runs"] if run["loops"] == n]
        average = statistics.mean(run["load_average"] for run in some)
        header += [f"{n} loops (load average {average:.1f}), s", "limit, s"]
        for row, step in zip(rows, STEPS, strict=True):
            row += _figure([run["seconds"][step] for run in some if step in run["seconds"]], LIMITS_S.get(step), column)
    return table(header, rows)


def _figure(seconds: Sequence[float], limits: tuple[float, float] | None, column: int) -> list[str]:
    """Return the median and the limit as texts. A median above its limit is bold."""
    if not seconds:
        return ["", ""]
    median, limit = statistics.median(seconds), limits[column] if limits else None
    shown = f"{median:.2f}"
    return [f"**{shown}**" if limit and median > limit else shown, f"{limit:g}" if limit else ""]


if __name__ == "__main__":
    main()

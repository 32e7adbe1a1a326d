"""Ctrl-C and SIGTERM end every command soon, at any moment, without a traceback and with nothing left behind."""

import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile

import psutil
import pytest

from apps import cli
from edge import ending
from edge.models.demo import MODEL_PATH
from tests.support import ROOT
from tests.support.helpers import begin
from tests.support.onnx_files import samples, small_model, vectors  # noqa: F401 (a fixture)
from tests.support.thorough import each_once, some

MOMENTS = some(1, 12)  # for each command and signal
ENDS_S = 10.0  # beside busy neighbours; alone it takes 0.7 s at most
ENDLESS = ("--max-tokens", "100000", "--context", "4096")
ONE_THREAD = ("--threads", "1")

# Each with the seconds that it takes at most on a quiet machine: moments are drawn from these.
COMMANDS: dict[str, tuple[float, tuple[str, ...]]] = {
    "chat": (1.5, ("chat", "MODEL", "-p", "hi", *ENDLESS)),
    "chat-memory": (1.5, ("chat", "MODEL", "-p", "hi", "--memory", "200MiB", *ENDLESS)),
    "chat-workers": (1.5, ("chat", "MODEL", "-p", "hi", "--workers", "SILENT")),
    "bench": (3.0, ("bench", "MODEL", "--repeats", "20", *ONE_THREAD)),
    "bench-onnx": (2.0, ("bench", "ONNX")),
    "info": (1.0, ("model", "info", "MODEL")),
    "synth": (2.0, ("model", "synth", "OUT/a.gguf", "--shape", "tinyllama-1.1b")),
    "pull": (1.5, ("model", "pull", "some/repository:q4_k_m")),
    "quantize-size": (5.0, ("quantize", "MODEL", "OUT/a.gguf", "--size", "4MiB", *ONE_THREAD)),
    "quantize-type": (1.5, ("quantize", "MODEL", "OUT/a.gguf", "--type", "q4_k_m", "--report", *ONE_THREAD)),
    "quantize-onnx": (3.0, ("quantize", "ONNX", "OUT/a.onnx", "--type", "int8")),
    "kernels": (2.0, ("quantize", "--kernels")),
    "imatrix": (3.0, ("imatrix", "MODEL", "README.md", "--output", "OUT/a.gguf", *ONE_THREAD)),
    "evaluate": (3.0, ("evaluate", "MODEL", "MODEL", *ONE_THREAD)),
    "run": (1.5, ("run", "ONNX", "--input", "ARRAYS", "--repeats", "100000")),
    "plan": (3.0, ("plan", "MODEL")),
    "pareto": (4.0, ("pareto", "MODEL", "--png", "OUT/a.png", "--html", "OUT/a.html", "--measure", "2")),
    "devices": (2.0, ("devices", "SILENT")),
    "probe": (3.0, ("devices", "probe")),
    "link": (2.0, ("link", "local", "SILENT")),
    "cluster": (0.5, ("cluster", "init")),
    "worker": (1.0, ("worker", "--listen", "127.0.0.1:0")),
}


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("name", "number"), each_once(COMMANDS, (signal.SIGINT, signal.SIGTERM)))
def test_a_signal_ends_a_command_at_any_moment(
    name: str, number: int, tmp_path: Path, silent: str, source: Path
) -> None:
    longest_s, arguments = COMMANDS[name]
    arrays = samples(source.with_name("x.npz"), x=vectors(1))
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    for folder in (out, temporary):
        folder.mkdir()
    provided = {"MODEL": str(MODEL_PATH), "ONNX": str(source), "SILENT": silent, "ARRAYS": str(arrays)}
    command = [provided.get(argument, argument.replace("OUT", str(out))) for argument in arguments]
    before = set(tmp_path.iterdir())
    draw = random.Random(f"{name} {number}")
    for _ in range(MOMENTS):
        rmtree(tmp_path / "home" / "config", ignore_errors=True)  # a cluster is made once
        code, error, took_s = ended(command, number, draw.random() * longest_s, tmp_path, f"http://{silent}")
        print(f"{name}: {took_s:.2f} s")
        assert "Traceback" not in error
        assert code in (0, 128 + number, -number), error
        for file in out.iterdir():  # whole, or not there
            assert not file.name.startswith("."), file
            file.unlink()
        assert list(temporary.iterdir()) == []
    assert {path for path in tmp_path.iterdir() if path.name != "home"} == before


def ended(command: list[str], number: int, after_s: float, folder: Path, hub: str) -> tuple[int, str, float]:
    """(exit code, standard error, seconds from the signal to the end) of a command that gets a signal."""
    home = folder / "home"
    env = {
        **os.environ,
        "TMPDIR": str(folder / "temporary"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "HF_ENDPOINT": hub,
        "HF_HOME": str(home / "hub"),
    }
    read, write = os.pipe()
    with open(os.devnull, "r+b") as nothing, TemporaryFile() as errors, os.fdopen(read, "rb") as begun:
        with os.fdopen(write, "wb") as ending:
            process = begin(command, env, (nothing, nothing, errors, ending))
        try:
            # Before, it is the interpreter that starts, and answers signals in its own way.
            assert begun.read(1) == b"!"
            with suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
            children: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):  # it may have ended just now
                children = psutil.Process(process.pid).children(recursive=True)
            began = time.monotonic()
            process.send_signal(number)
            code = process.wait(ENDS_S)
            took_s = time.monotonic() - began
            assert psutil.wait_procs(children, ENDS_S)[1] == []
            errors.seek(0)
            return code, errors.read().decode(), took_s
        finally:
            process.kill()
            process.wait()


def test_an_error_that_a_signal_caused_in_native_code_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing a native module turns KeyboardInterrupt into ImportError."""
    monkeypatch.setattr(ending, "_ended_by_signals", True)
    monkeypatch.setattr(ending, "_NOTED_S", 0)
    assert not ending.signalled()
    noted = threading.Event()
    noted.set()
    monkeypatch.setattr(ending, "_signalled", noted)
    monkeypatch.setattr(cli, "build_parser", lambda *_: 1 / 0)
    assert cli.main(["chat"]) == cli.EXIT_INTERRUPTED  # type: ignore[attr-defined]
    noted.clear()
    assert cli.main(["chat"]) == cli.EXIT_BUG  # type: ignore[attr-defined]


def test_what_is_worth_being_written_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal does not wait for it."""
    ends: queue.Queue[tuple[int, float]] = queue.Queue()
    monkeypatch.setattr(ending, "_end", lambda number, after_s: ends.put((number, after_s)))
    monkeypatch.setattr(ending, "_ended_by_signals", True)
    monkeypatch.setattr(ending, "_signalled", threading.Event())
    with ending.grace(7.0):
        for after_s in (7.0, ending.GRACE_S):
            ending.end_soon(signal.SIGINT)
            assert ends.get(timeout=ENDS_S) == (signal.SIGINT, after_s)
    monkeypatch.setattr(ending, "_signalled", threading.Event())
    ending.end_soon(signal.SIGTERM)
    assert ends.get(timeout=ENDS_S) == (signal.SIGTERM, ending.GRACE_S)


def test_a_signal_that_a_program_handled_does_not_end_the_process_later() -> None:
    """The watching thread reads the signal only when the main thread waits, because it does not get the lock before."""
    program = """
import os, signal, sys
from edge import ending
sys.setswitchinterval(1000)
ending.end_by_signals()
with ending.signals_are_for_the_program():
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(ending.signalled())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0

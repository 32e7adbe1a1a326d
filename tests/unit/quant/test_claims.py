"""Test two commands that would write one file: the second is refused before it does anything."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps import cli
from devices.files import claim
from edge.models.demo import MODEL_PATH
from tests.support.helpers import ROOT

HOLD = "import sys, pathlib, devices.files as files; print(files.claim(pathlib.Path(sys.argv[1])), flush=True)"
Holder = Iterator["subprocess.Popen[str]"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "out.gguf"


@pytest.fixture
def other(out: Path) -> Holder:
    """Another process that writes `out`, until its standard input ends."""
    command = [sys.executable, "-c", f"{HOLD}; sys.stdin.read()", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process


@pytest.mark.parametrize(
    "command",
    [
        ("model", "synth", "{out}", "--shape", "llama-3.1-8b"),
        ("quantize", "{model}", "{out}", "--type", "q4_0"),
        ("imatrix", "{model}", "{text}", "--output", "{out}"),
    ],
)
def test_the_second_is_refused_in_one_line(
    command: tuple[str, ...],
    out: Path,
    other: "subprocess.Popen[str]",
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("three words here")
    code = cli.main([part.format(out=out, model=MODEL_PATH, text=text) for part in command])
    error = capsys.readouterr().err
    assert code == 2, error
    assert f"another edge command is writing {out}; wait for it, or give another name to write to\n" in error
    assert not out.exists()
    other.communicate()  # it ends, and with it its claim
    assert claim(out)
    assert claim(out)  # its own is no other's
    assert claim(out.with_name("another"))

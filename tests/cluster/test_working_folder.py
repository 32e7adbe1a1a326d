"""Test processes that start in a folder with a json.py or a numpy.py of the user: they do not import these files."""

import subprocess
import sys
from pathlib import Path

import pytest

from devices.processes.interpreter import module_command
from edge.cluster.session import RemoteSession
from edge.models.demo import MODEL_PATH
from edge.quantization.gguf import quantize
from edge.text.templates.template import ChatTemplate
from partition.model.file import ModelFile
from quant.mixes import mix_by_name
from tests.support.workers import SECRET, served

HOSTILE = "raise SystemExit(__file__ + ' was imported')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with files named like modules that every process imports."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("json", "numpy", "runpy", "socket", "typing", "edge"):
        (hostile / f"{name}.py").write_text(HOSTILE)
    monkeypatch.chdir(hostile)
    return hostile


def test_the_folder_is_hostile() -> None:
    done = subprocess.run([sys.executable, "-m", "edge.text.templates.child"], capture_output=True, text=True)
    assert "was imported" in done.stderr


def test_a_module_gets_its_arguments_and_nothing_of_the_folder(folder: Path) -> None:
    done = subprocess.run([*module_command("apps.cli", "--version")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("edge ")


def test_templates_quantizing_and_sessions_work_in_such_a_folder(tmp_path: Path) -> None:
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "hello"}]) == "hello"
    written = quantize(ModelFile.open(MODEL_PATH), tmp_path / "small.gguf", mix_by_name("q8_0"), threads=1)
    assert written.n_bytes == (tmp_path / "small.gguf").stat().st_size
    with served(tmp_path) as remote, RemoteSession(remote, 0, 1, SECRET) as session:
        session.unload()

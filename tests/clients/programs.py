"""Programs of others: where each comes from, in which version, and what runs it.

A set of Python packages that can be installed together has a virtual environment below `.venv-clients`, with the
versions that `requirements/SET.txt` pins. A package of npm has a folder there. Nothing is installed where edge is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = ROOT / ".venv-clients"
INSTALL_S, END_S = 1800, 30
NODE = "node@22.23.3"  # programs that need a newer one than many machines have


@dataclass(frozen=True)
class Client:
    """A client: its packages, and the script that makes it do its tasks."""

    script: Sequence[str]
    requirements: str = ""  # a set of Python packages, whose interpreter runs the script
    version: str = ""  # the version of Python that the set needs; empty: this interpreter's version
    npm: str = ""
    model: str = ""  # name of the model that the client asks; empty: the model under test
    unanswered: Sequence[str] = field(default=())  # paths that the client can do without

    @property
    def python(self) -> Path:
        """The interpreter that runs the script."""
        return PLACE / self.requirements / "bin" / "python" if self.requirements else Path(sys.executable)

    @property
    def programs(self) -> list[Path]:
        """Folders of programs that the client needs."""
        folders = [_folder(self.npm) / "node_modules" / ".bin", _folder(NODE) / "node_modules" / "node" / "bin"]
        return folders if self.npm else [self.python.parent]

    def may_fail(self, path: str) -> bool:
        """True if the client can do without an answer from this path."""
        return path.partition("?")[0] in self.unanswered


def _agent(name: str, package: str, model: str = "smollm2") -> Client:
    return Client(("use_agent.py", name), npm=package, model=model)


CLIENTS = {
    "openai": Client(("use_openai.py",), "agents"),
    "anthropic": Client(("use_anthropic.py",), "agents"),
    "litellm": Client(("use_litellm.py",), "agents"),
    "langchain-openai": Client(("use_langchain.py", "openai"), "agents"),
    "langchain-anthropic": Client(("use_langchain.py", "anthropic"), "agents"),
    "instructor": Client(("use_instructor.py",), "agents"),
    "pydantic-ai": Client(("use_pydantic_ai.py",), "agents"),
    "openai-agents": Client(("use_openai_agents.py",), "agents"),
    "smolagents": Client(("use_smolagents.py",), "agents"),
    "llama-index": Client(("use_llama_index.py",), "llama_index"),
    "llm": Client(("use_llm.py",), "agents"),
    "aider": Client(("use_aider.py",), "aider"),
    "codex": _agent("codex", "@openai/codex@0.171.0"),
    "opencode": _agent("opencode", "opencode-ai@1.18.33"),
    "qwen-code": _agent("qwen-code", "@qwen-code/qwen-code@0.24.4"),
    "cline": _agent("cline", "cline@3.0.65"),
    "guidellm": Client(("use_guidellm.py",), "guidellm"),
    "open-webui": Client(("use_open_webui.py",), "open_webui"),
    "home-assistant": Client(("use_home_assistant.py",), "home_assistant", "3.13"),
    "triton-http": Client(
        ("use_triton.py", "http"),
        "triton",
        unanswered=tuple(f"/v2/models/{name}/infer" for name in ("mixed", "mixed/versions/2", "nobody")),
    ),
    "triton-grpc": Client(("use_triton.py", "grpc"), "triton"),
    "continue": _agent("continue", "@continuedev/cli@1.5.47"),
}


def installed(name: str) -> None:
    """Install the missing packages of a client."""
    client = CLIENTS[name]
    if client.requirements:
        _python_set(client.requirements, client.version)
    if client.npm:
        for package in (NODE, client.npm):
            _npm_package(package)


def _interpreter(version: str) -> str:
    """Return a Python of this version from the search path or from pyenv. SystemExit if neither has it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python{version}")]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], capture_output=True, timeout=END_S).returncode == 0:
            return str(candidate)
    raise SystemExit(f"no Python {version} on the search path or in {pyenv}: install it")


def _python_set(name: str, version: str) -> None:
    folder, pins = PLACE / name, HERE / "requirements" / f"{name}.txt"
    mark, digest = folder / "installed", hashlib.sha256(pins.read_bytes()).hexdigest()
    if not mark.exists() or mark.read_text() != digest:
        print(f"installing {pins.name} in {folder}", file=sys.stderr)
        interpreter = _interpreter(version) if version else sys.executable
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_S)
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--requirement", str(pins)], check=True, timeout=INSTALL_S)
        mark.write_text(digest)


def _folder(package: str) -> Path:
    return PLACE / "npm" / package.strip("@").replace("/", "-")


def _npm_package(package: str) -> None:
    folder = _folder(package)
    if not (folder / "installed").exists():
        print(f"installing {package} in {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
        cache = ["--cache", str(folder / "cache")]
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *cache, package]
        subprocess.run(npm, cwd=folder, check=True, timeout=INSTALL_S)
        shutil.rmtree(folder / "cache", ignore_errors=True)
        (folder / "installed").touch()

"""Eleven clients that others wrote, each against `edge serve`: what they can do, in a table. `make clients` runs this.

    python tests/clients/run.py [CLIENT ...] [--model FILE]

Each set of clients that can be installed together has a virtual environment below `.venv-clients`, with the versions
that `requirements/SET.txt` pins. Nothing of them is installed where edge is. Exit code 1 where a client fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENVS = ROOT / ".venv-clients"
INSTALL_S, CLIENT_S, END_S = 1200, 600, 30
CHECKS = ("hello", "stream", "tools", "structured", "thoughts")
# Name: the set of requirements, and what runs.
CLIENTS: dict[str, tuple[str, Sequence[str]]] = {
    "openai": ("agents", ("use_openai.py",)),
    "anthropic": ("agents", ("use_anthropic.py",)),
    "litellm": ("agents", ("use_litellm.py",)),
    "langchain-openai": ("agents", ("use_langchain.py", "openai")),
    "langchain-anthropic": ("agents", ("use_langchain.py", "anthropic")),
    "instructor": ("agents", ("use_instructor.py",)),
    "pydantic-ai": ("agents", ("use_pydantic_ai.py",)),
    "openai-agents": ("agents", ("use_openai_agents.py",)),
    "smolagents": ("agents", ("use_smolagents.py",)),
    "llama-index": ("llama_index", ("use_llama_index.py",)),
    "llm": ("agents", ("use_llm.py",)),
    "aider": ("aider", ("use_aider.py",)),
}


def python_of(name: str) -> Path:
    """The interpreter of a set of requirements, which are installed where they are not yet."""
    folder, pins = VENVS / name, HERE / "requirements" / f"{name}.txt"
    python, mark = folder / "bin" / "python", folder / "installed"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if not mark.exists() or mark.read_text() != digest:
        print(f"installing {pins.name} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_S)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--requirement", str(pins)], check=True, timeout=INSTALL_S)
        mark.write_text(digest)
    return python


@contextmanager
def serving(model: str | None) -> Iterator[tuple[str, str]]:
    """`edge serve` on a free port: its address, and the model's name. Beside it there is a model `thinker`."""
    command = [sys.executable, "-m", "apps.cli", "serve", "--port", "0", "--prefix-cache", "0"]
    provided = [model] if model else [str(ROOT / "edge" / "demo" / "edge-demo-q8_0.gguf")]
    with ExitStack() as stack:
        thinker = Path(stack.enter_context(TemporaryDirectory())) / "thinker.gguf"
        make = "import sys, pathlib, tests.support.thinking as t; t.thinker(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", make, str(thinker)], cwd=ROOT, check=True, timeout=END_S)
        every = [*command, *provided, str(thinker)]
        server = stack.enter_context(subprocess.Popen(every, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address, "the server did not start"
            yield address[0], Path(provided[0]).stem
        finally:
            server.terminate()
            server.wait(END_S)


def told_of(name: str, url: str, model: str) -> dict[str, tuple[bool, str]]:
    """Return the outcome of each check of a client."""
    requirements, arguments = CLIENTS[name]
    command = [str(python_of(requirements)), str(HERE / arguments[0]), *arguments[1:]]
    environment = {**os.environ, "EDGE_URL": url, "EDGE_MODEL": model}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLIENT_S)
    except subprocess.TimeoutExpired:
        return {"": (False, f"it took more than {CLIENT_S} s")}
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if not lines:
        return {"": (False, done.stderr.strip()[-300:])}
    return {line["check"]: (line["ok"], line["reply"]) for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description="Try clients of others against `edge serve`.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--model", help="a GGUF file (default: the bundled model)")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in CLIENTS]:
        parser.error(f"there is no client {unknown[0]}; there are {', '.join(CLIENTS)}")
    failed = False
    with serving(args.model) as (url, model):
        print(f"{'':20} {'  '.join(f'{check:10}' for check in CHECKS)}")
        for name in args.clients or CLIENTS:
            response = told_of(name, url, model)
            cells = ["-" if item not in response else "yes" if response[item][0] else "FAILED" for item in CHECKS]
            print(f"{name:20} {'  '.join(f'{cell:10}' for cell in cells)}", flush=True)
            for check, (ok, words) in response.items():
                if not ok:
                    failed = True
                    print(f"    {check or name}: {words}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

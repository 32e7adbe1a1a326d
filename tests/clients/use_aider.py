"""aider, the command, in a repository of its own."""

import os
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL, command, main, said

folder = tempfile.mkdtemp()
AIDER = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}", "--yes-always"]
QUIET = [
    "--no-check-update",
    "--no-analytics",
    "--no-show-model-warnings",
    "--no-gitignore",
    "--no-pretty",
    "--map-tokens",
    "0",
]
ENVIRONMENT = {**os.environ, "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none", "HOME": folder}


def answer_of(*more: str) -> str:
    response = command(
        [*AIDER, *QUIET, *more, "--message", "/ask What is a list? One sentence."], env=ENVIRONMENT, cwd=folder
    )
    assert "Tokens:" in response, response[-300:]  # it tells them after an answer
    return said(response.rpartition("Tokens:")[0][-60:])


def hello() -> str:
    command(["git", "init", "--quiet"], cwd=folder)
    return answer_of("--no-stream")


main({"hello": hello, "stream": lambda: answer_of("--stream")})

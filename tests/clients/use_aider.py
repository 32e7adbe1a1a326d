"""aider, the command, in a repository of its own."""

import os
import sys
import tempfile
from pathlib import Path

from agent_calls import SCRIPT
from common import MODEL, URL, command, main, said

folder = Path(tempfile.mkdtemp())
AIDER = [str(Path(sys.executable).with_name("aider")), "--yes-always"]
QUIET = ["--no-check-update", "--no-analytics", "--no-show-model-warnings", "--no-gitignore", "--no-pretty"]
ENVIRONMENT = {**os.environ, "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none", "HOME": str(folder)}


def session(model: str, *more: str, **options: str) -> str:
    """Return the output of aider. AssertionError if it did not get an answer."""
    response = command([*AIDER, *QUIET, "--model", f"openai/{model}", *more], env=ENVIRONMENT, cwd=folder, **options)
    assert "Tokens:" in response, response[-300:]  # aider counts the tokens of each answer
    return response


def answer_of(option: str) -> str:
    response = session(MODEL, option, "--map-tokens", "0", "--message", "/ask What is a list? One sentence.")
    return said(response.rpartition("Tokens:")[0][-60:])


def hello() -> str:
    command(["git", "init", "--quiet"], cwd=folder)
    for name in ("user.name", "user.email"):
        command(["git", "config", name, "client@example.org"], cwd=folder)
    return answer_of("--no-stream")


def edits() -> str:
    """Two turns that each edit a file and commit it, and a third turn without an edit, in one session."""
    notes = folder / "notes.txt"
    notes.write_text("The ship leaves at noon.\n")
    marks = [mark for mark in SCRIPT if mark.startswith("aider ")]
    questions = [*(f"Correct the notes. [{mark}]" for mark in marks), "Thank you."]
    response = session("script", "--edit-format", "diff", "--no-fancy-input", notes.name, input="\n".join(questions))
    assert response.count("Tokens:") == len(questions), response[-600:]
    assert notes.read_text() == "The ship leaves at two.\n", notes.read_text()
    commits = command(["git", "log", "--format=%h", "--", notes.name], cwd=folder).split()
    assert len(commits) > len(marks), commits
    return f"{len(questions)} turns, {len(commits)} commits"


main({"hello": hello, "stream": lambda: answer_of("--stream"), "edits": edits})

"""An agent that edits code, as its package installs it: a session of several turns, in a home and a folder of its own.

    python tests/clients/use_agent.py NAME    # with EDGE_URL, EDGE_MODEL, and HOME: a folder of its own

The session is answered by the model `script` (tests/support/script_model.py), so its turns call tools. The check
`hello` asks EDGE_MODEL, whose context must hold the agent's own instructions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_calls import END, SCRIPT
from common import MODEL, URL, main, said

TURN_S = 600
HOME = Path(os.environ["HOME"])
FOLDER = HOME / "project"


@dataclass(frozen=True)
class Agent:
    """Set-up of an agent for a model, and the commands that ask it: the first turn, and each further turn if it can."""

    first: Sequence[str]
    further: Sequence[str]
    files: Callable[[str], Mapping[str, str]] = lambda model: {}  # by their paths below the home
    environment: Callable[[str], Mapping[str, str]] = lambda model: {}
    before: Sequence[str] = ()  # a command, to which the model's name is added


def _codex(model: str) -> Mapping[str, str]:
    provider = f'[model_providers.edge]\nname = "edge"\nbase_url = "{URL}/v1"\nwire_api = "responses"\n'
    retries = "request_max_retries = 0\nstream_max_retries = 0\n"
    return {".codex/config.toml": f'model = "{model}"\nmodel_provider = "edge"\n{provider}{retries}'}


def _opencode(model: str) -> Mapping[str, str]:
    limit = {"context": 131072, "output": 4096}
    options = {"baseURL": f"{URL}/v1", "apiKey": "none"}
    models = {model: {"name": model, "limit": limit}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "edge", "options": options, "models": models}
    config = {"provider": {"edge": provider}, "model": f"edge/{model}", "autoupdate": False, "share": "disabled"}
    return {".config/opencode/opencode.json": json.dumps(config)}


def _continue(model: str) -> Mapping[str, str]:
    entry = {"name": model, "provider": "openai", "model": model, "apiBase": f"{URL}/v1", "apiKey": "none"}
    entry |= {"roles": ["chat"], "capabilities": ["tool_use"], "defaultCompletionOptions": {"contextLength": 131072}}
    return {"config.yaml": json.dumps({"name": "edge", "version": "1.0.0", "schema": "v1", "models": [entry]})}


AGENTS = {
    "codex": Agent(
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        ["codex", "exec", "resume", "--last", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        _codex,
    ),
    "opencode": Agent(
        ["opencode", "run", "--auto"],
        ["opencode", "run", "--auto", "--continue"],
        _opencode,
        lambda model: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    ),
    "qwen-code": Agent(
        ["qwen", "--auth-type", "openai", "--yolo", "-p"],
        ["qwen", "--auth-type", "openai", "--yolo", "--continue", "-p"],
        lambda model: {".qwen/settings.json": json.dumps({"privacy": {"usageStatisticsEnabled": False}})},
        lambda model: {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_MODEL": model},
    ),
    "continue": Agent(
        ["cn", "--config", str(HOME / "config.yaml"), "--auto", "-p"],
        ["cn", "--config", str(HOME / "config.yaml"), "--auto", "--resume", "-p"],
        _continue,
        lambda model: {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_ALLOW_ANONYMOUS_TELEMETRY": "0"},
    ),
    "cline": Agent(
        ["cline", "--auto-approve", "true", "--json"],
        [],  # `--id` goes on with a session on a terminal alone
        before=["cline", "auth", "--provider", "openai", "--apikey", "none", "--baseurl", f"{URL}/v1", "--modelid"],
    ),
}
NAME = sys.argv[1]
AGENT = AGENTS[NAME]


def run(command: Sequence[str], model: str) -> str:
    """Return what a command printed. AssertionError if it fails or takes too long."""
    environment = {**os.environ, "TERM": "dumb", "CI": "1", "LANG": "C.UTF-8", **AGENT.environment(model)}
    run = subprocess.run(
        command, cwd=FOLDER, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TURN_S
    )
    if os.environ.get("EDGE_TRACE"):
        print(command, run.returncode, run.stdout, run.stderr, sep="\n", file=sys.stderr)
    assert run.returncode == 0, f"exit code {run.returncode}: {(run.stderr + run.stdout)[-300:]}"
    return run.stdout


def set_up(model: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "notes.txt").write_text("The ship leaves at noon.\n")
    for path, text in AGENT.files(model).items():
        place = HOME / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    if AGENT.before:
        run([*AGENT.before, model], model)


def hello() -> str:
    set_up(MODEL)
    return said(run([*AGENT.first, "What is in notes.txt? Answer in one sentence."], MODEL)[-60:])


def tools() -> str:
    """Two turns, each with calls whose results go back, and a third without."""
    set_up("script")
    marks = [mark for mark in SCRIPT if mark.startswith(f"{NAME} ")]
    questions = [*(f"Look at the notes. [{mark}]" for mark in marks), "Thank you."]
    if not AGENT.further:
        questions = [" ".join(questions)]  # calls follow each other in one turn
    answers: list[str] = []
    for question in questions:
        answers.append(run([*(AGENT.further if answers else AGENT.first), question], "script"))
        assert END in answers[-1], answers[-1][-300:]
    return f"{len(answers)} turns, {sum(len(SCRIPT[mark]) for mark in marks)} calls"


main({"hello": hello, "tools": tools})

"""Answers of the model `script` to agents: calls of their tools or a text, selected by a mark in the question."""

from __future__ import annotations

from typing import Any

# The script model's answer after the results of calls.
END = "The script has no more for this turn."
_READ = "cat notes.txt"


def _edit(old: str, new: str) -> str:
    """Return an answer that makes aider replace a line of the notes."""
    return f"notes.txt\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


SCRIPT: dict[str, list[tuple[str, dict[str, Any]]] | str] = {
    "codex 0": [("exec_command", {"cmd": _READ})],
    "codex 1": [("exec_command", {"cmd": "ls"}), ("exec_command", {"cmd": _READ, "yield_time_ms": 1000})],
    "opencode 0": [("bash", {"command": _READ, "description": "Read the notes"})],
    "opencode 1": [("glob", {"pattern": "*.txt"}), ("bash", {"command": "ls", "description": "List files"})],
    "qwen-code 0": [("run_shell_command", {"command": _READ, "is_background": False})],
    "qwen-code 1": [("glob", {"pattern": "*.txt"}), ("run_shell_command", {"command": "ls", "is_background": False})],
    "continue 0": [("Bash", {"command": _READ})],
    "continue 1": [("List", {"dirpath": "."}), ("Read", {"filepath": "notes.txt"})],
    "cline 0": [("run_commands", {"commands": [_READ]})],
    "cline 1": [("run_commands", {"commands": ["ls"]}), ("search_codebase", {"queries": ["ship"]})],
    "home-assistant 0": [("HassTurnOn", {"name": "Fan"})],
    "home-assistant 1": [("HassTurnOff", {"name": "Lamp"}), ("HassTurnOn", {"name": "Heater"})],
    "aider 0": _edit("The ship leaves at noon.", "The ship leaves at one."),
    "aider 1": _edit("The ship leaves at one.", "The ship leaves at two."),
}

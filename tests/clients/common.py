"""Tasks of every client, and a server for them: `edge serve` with a small model, on a free port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("EDGE_URL", "")  # of the server, without /v1
MODEL = os.environ.get("EDGE_MODEL", "")
QUESTION = "What is the weather in Oslo? Answer in one sentence."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
Check = Callable[[], str]


def follows(value: Any) -> str:
    """That a value follows SCHEMA, in a few words. AssertionError where it does not."""
    value = json.loads(value) if isinstance(value, str) else value
    assert set(value) == {"city", "days"}, value
    assert value["city"] in ("Rome", "Oslo"), value
    assert value["days"] in (1, 2, 3), value
    return json.dumps(value)


def said(text: Any) -> str:
    """That there is a text, in a few words."""
    assert isinstance(text, str), text
    assert text.strip(), "an empty answer"
    return repr(text.strip()[:50])


def streamed(pieces: list[str]) -> str:
    """That a text came in pieces."""
    assert len([piece for piece in pieces if piece]) > 1, pieces
    return f"{len(pieces)} pieces"


def main(checks: dict[str, Check]) -> int:
    """Do what is asked for, each apart: a line of JSON for each. EDGE_CHECKS: names of the only ones to do."""
    only = os.environ.get("EDGE_CHECKS", " ".join(checks)).split()
    for name, check in checks.items():
        if name not in only:
            continue
        try:
            response = {"check": name, "ok": True, "reply": check()}
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            response = {"check": name, "ok": False, "reply": " ".join(words.split())[:400]}
            if "--trace" in sys.argv:
                traceback.print_exc()
        print(json.dumps(response), flush=True)
    return 0


def command(arguments: list[str], **more: Any) -> str:
    """Return the output of a command. AssertionError with its last words where it fails."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, **more)
    assert done.returncode == 0, (done.stderr or done.stdout)[-300:]
    return done.stdout

"""What to do with a plan that was picked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def use(kind: str, point: Mapping[str, Any], saved: Path | None) -> str:
    """How to run it, in one line."""
    told = f"picked {point['id']}: {point['label']}"
    if saved is None:
        return f"{told}; --save FILE writes the plan"
    model = shlex.quote(point["model"])
    command = f"edge chat {model}" if kind == "llm" else f"edge run {model}"
    return f"{told}; saved. Next: {command} --plan {shlex.quote(str(saved))}"

"""Profile of a browser's page, as the bridge stores it for the daemon and the engine processes of the page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from devices.files import write_whole
from devices.profile import MAX_TEXT
from edge.errors import EngineError

PAGE_VARIABLE = "EDGE_PAGE"  # environment variable with the page's folder
_FILE = "profile.json"
MAX_THREADS = 64
MAX_MEMORY = 3900 << 20  # bytes that a 32-bit WebAssembly program can address, without the stack and the library
_IOS_MEMORY = 1500 << 20  # more ends a tab on iPhones and iPads
_USUAL_MEMORY = 1 << 30  # if the page does not report its memory


@dataclass(frozen=True)
class PageProfile:
    """Properties of a page's device. None: unknown."""

    agent: str  # browser and system
    threads: int
    memory_bytes: int  # bytes that a model may take
    battery_percent: float | None = None
    plugged: bool | None = None
    memory_bytes_per_s: float | None = None  # this and the next: measured by the page
    flops: float | None = None

    @classmethod
    def from_hello(cls, hello: dict[str, Any]) -> PageProfile:
        """Return the profile in a page's first event, within sensible limits."""
        agent = hello.get("agent")
        agent = "".join(c if c.isprintable() else "?" for c in agent if c)[:MAX_TEXT] if isinstance(agent, str) else ""
        reported = _number(hello.get("memory_bytes"))
        memory = _USUAL_MEMORY if reported is None else int(reported)
        if any(name in agent for name in ("iPhone", "iPad", "iOS")):
            memory = min(memory, _IOS_MEMORY)
        battery, charging = _number(hello.get("battery")), hello.get("charging")
        isolated = hello.get("isolated") is True
        return cls(
            agent=agent or "a browser",
            threads=max(1, min(MAX_THREADS, int(_number(hello.get("threads")) or 1))) if isolated else 1,
            memory_bytes=max(64 << 20, min(MAX_MEMORY, memory)),
            battery_percent=None if battery is None else round(100 * min(1.0, battery), 1),
            plugged=charging if isinstance(charging, bool) else None,
        )

    @classmethod
    def load(cls, folder: Path) -> PageProfile:
        """Return the profile in a page's folder. Raises EngineError if there is none, because the page was closed."""
        try:
            return cls(**json.loads((folder / _FILE).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise EngineError(f"the browser's page is closed: {error}") from error

    def save(self, folder: Path) -> None:
        """Store the profile in a page's folder."""
        write_whole(folder / _FILE, json.dumps(asdict(self)).encode())


def _number(value: Any) -> float | None:
    """Return a number of a page that is at least 0 and not absurd, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15
    return float(value) if is_number else None

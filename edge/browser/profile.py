"""Profile of a browser's page, as the bridge stores it for the daemon and the engine processes of the page."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from devices.files import write_whole
from edge.errors import EngineError

PAGE_VARIABLE = "EDGE_PAGE"  # environment variable with the page's folder
_FILE = "profile.json"
_MOST_AGENT = 500  # characters of a User-Agent text
# Most browsers name others, too, so the order matters.
_BROWSERS = (
    ("Edg", "Edge"), ("OPR", "Opera"), ("SamsungBrowser", "Samsung Internet"), ("(?:FxiOS|Firefox)", "Firefox"),
    ("(?:CriOS|Chrome)", "Chrome"), ("Version", "Safari"),
)  # fmt: skip
_SYSTEMS = ("Android", "iPhone", "iPad", "Windows", "CrOS", "Mac OS X", "Linux")
MAX_THREADS = 64
RUNTIME_BYTES = 64 << 20  # bytes of llama.cpp in WebAssembly, its stack and its graphs
MAX_MEMORY = 3900 << 20  # bytes that a 32-bit WebAssembly program can address, without the stack and the library
_IOS_MEMORY = 1500 << 20  # more ends a tab on iPhones and iPads
_USUAL_MEMORY = 1 << 30  # if the page does not report its memory


@dataclass(frozen=True)
class PageProfile:
    """Properties of a page's device. None: unknown."""

    browser: str  # such as "Chrome 140"
    system: str  # such as "Android"
    threads: int
    memory_bytes: int  # bytes that a model may take
    battery_percent: float | None = None
    plugged: bool | None = None
    memory_bytes_per_s: float | None = None  # this and the next: measured by the page
    flops: float | None = None
    round_trip_s: float | None = None  # this and the next: measured between the bridge and the page
    bytes_per_s: float | None = None

    @classmethod
    def from_hello(cls, hello: dict[str, Any]) -> PageProfile:
        """Return the profile in a page's first event, within sensible limits."""
        agent = str(hello.get("agent"))[:_MOST_AGENT]
        system = next((name for name in _SYSTEMS if name in agent), "an unknown system")
        reported = _number(hello.get("memory_bytes"))
        memory = _USUAL_MEMORY if reported is None else int(reported)
        if system in ("iPhone", "iPad"):
            memory = min(memory, _IOS_MEMORY)
        battery, charging = _number(hello.get("battery")), hello.get("charging")
        isolated = hello.get("isolated") is True
        return cls(
            browser=_browser(agent),
            system={"Mac OS X": "macOS", "CrOS": "ChromeOS"}.get(system, system),
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


def _browser(agent: str) -> str:
    """Return the name and the version of a browser from its User-Agent text."""
    for pattern, name in _BROWSERS:
        if match := re.search(pattern + r"/v?(\d{1,5})", agent):
            return f"{name} {match[1]}"
    return "a browser"


def _number(value: Any) -> float | None:
    """Return a number of a page that is at least 0 and not absurd, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15
    return float(value) if is_number else None

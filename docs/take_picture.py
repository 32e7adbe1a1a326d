"""Take a picture of a conversation in a terminal (tmux) and save it as docs/chat.svg.

    python docs/take_picture.py

Needs tmux. The answers are the bundled model's own, greedy: the picture only changes when the model or the chat does.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 92, 44
DEADLINE_S = 30.0
QUESTIONS = (
    "Hello! What can you do?",
    "What is 27 plus 38?",
    "How do I start a worker?",
    "/stats",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as state:
        tmux = Tmux(f"{sys.executable} -m apps.cli chat --temperature 0", {"XDG_STATE_HOME": state})
        try:
            for question in QUESTIONS:
                tmux.wait_for_prompt()
                tmux.type(question)
            tmux.wait_for_prompt()
            screen = tmux.screen()
        finally:
            tmux.close()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip()))
    # Without rich's links to fonts on the web: whoever looks at a page should not fetch from elsewhere.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="edge chat"), flags=re.DOTALL)
    Path(__file__).with_name("chat.svg").write_text(picture)


class Tmux:
    """One program in a terminal of its own."""

    def __init__(self, command: str, environment: dict[str, str]) -> None:
        settings = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        self._call("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), *settings, command)

    def type(self, text: str) -> None:
        """Type a line, and press Enter once it is on the screen."""
        self._call("send-keys", "-l", text)
        self._wait_for_last_line(f"> {text}")
        self._call("send-keys", "Enter")

    def wait_for_prompt(self) -> None:
        """Until the last line that is not empty is a prompt with nothing typed."""
        self._wait_for_last_line(">")

    def _wait_for_last_line(self, expected: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            filled = [line.strip() for line in self._call("capture-pane", "-p").split("\n") if line.strip()]
            if filled and filled[-1] == expected:
                return
            time.sleep(0.1)
        raise SystemExit(f"no {expected!r} after {DEADLINE_S:.0f} s; the screen shows: {filled}")

    def screen(self) -> str:
        return self._call("capture-pane", "-p", "-e")

    def close(self) -> None:
        self._call("kill-session")

    def _call(self, *arguments: str) -> str:
        command = ["tmux", "-L", "edge-picture", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


if __name__ == "__main__":
    main()

"""An answer on a terminal while it is generated: its thought dimmed and then folded, its text as Markdown."""

from __future__ import annotations

import time
from contextlib import ExitStack

from rich.console import Console
from rich.live import Live
from rich.text import Text

from apps.show.markdown import REDRAW_EVERY_S, MarkdownStream
from quant.text import printable

LINES = 6  # number of last lines of a thought that are shown while it is generated


class AnswerStream:
    """Context manager that prints an answer; pass each piece to `push`.

    The end of the block prints the pieces that are still open, also after Ctrl-C. `thought` is the whole thought.
    """

    def __init__(self, console: Console, hint: str = "") -> None:
        """hint: text that explains how to show a folded thought."""
        self.thought = ""
        self._console, self._hint = console, hint
        self._began = self._drawn = 0.0
        self._live: Live | None = None  # display of a thought that is being generated
        self._text: MarkdownStream | None = None
        self._stack = ExitStack()

    def push(self, text: str, thought: str = "") -> None:
        """Print the next piece."""
        text, thought = printable(text, lines=True), printable(thought, lines=True)
        if thought:
            self._think(thought)
        if text:
            self._fold()
            if self._text is None:
                self._text = self._stack.enter_context(MarkdownStream(self._console))
            self._text.push(text)

    def _think(self, thought: str) -> None:
        if self._text is not None:  # the thought continues after text, which was already printed
            self.thought += thought
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._began = time.monotonic()
        self.thought += thought
        if time.monotonic() >= self._drawn + REDRAW_EVERY_S:
            self._live.update(self._tail(), refresh=True)
            self._drawn = time.monotonic()

    def _tail(self) -> Text:
        width = max(1, self._console.width)
        lines = Text(self.thought[-LINES * width * 2 :], style="dim").wrap(self._console, width)
        return Text("\n").join(lines[-LINES:])

    def _fold(self) -> None:
        """Replace the thought by one line."""
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()
            self._live = None
            words = f"thought for {time.monotonic() - self._began:.1f} s{self._hint}"
            self._console.print(Text(words, style="dim"), soft_wrap=True)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._fold()
        self._stack.close()

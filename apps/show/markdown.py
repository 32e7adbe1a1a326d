"""Markdown that arrives in pieces, on a terminal: finished blocks are printed once, the last block is redrawn."""

from __future__ import annotations

import io
import itertools
import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

REDRAW_EVERY_S = 0.05
DRAWING_SHARE = 0.1  # limit of time spent on drawing: a long code block takes longer to draw than a token to compute

# Text that looks like HTML is shown unchanged: a model that writes <think> or vector<int> means the characters.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class MarkdownStream:
    """Context manager that prints a stream of Markdown; pass each piece to `push`.

    The end of the block prints open Markdown blocks, also after Ctrl-C.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ""  # text of blocks that may still change
        self._printed_any = False
        self._draw_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def push(self, text: str) -> None:
        """Print the next piece of text."""
        self._open += text
        began = time.monotonic()
        if began < self._draw_at:
            return
        boundary = finished_length(self._open)
        if boundary:
            self._print(self._open[:boundary])
            self._open = self._open[boundary:]
        self._live.update(_Rendered(self._open, gap=self._printed_any, cut=True), refresh=True)
        now = time.monotonic()
        self._draw_at = now + max(REDRAW_EVERY_S, (now - began) / DRAWING_SHARE)

    def _print(self, text: str) -> None:
        for block in split_blocks(text):
            self._console.print(_Rendered(block, gap=self._printed_any))
            self._printed_any = True

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(Text(""))
        self._live.stop()
        if self._open.strip():
            self._print(self._open)


def finished_length(text: str) -> int:
    """Return how many characters of `text` belong to blocks that later text cannot change: all but the last block."""
    whole_lines = text[: text.rfind("\n") + 1]  # a "#" at the end may become a heading, or "#1"
    return sum(len(block) for block in split_blocks(whole_lines)[:-1])


def split_blocks(text: str) -> list[str]:
    """Return the blocks of `text`, which is their concatenation."""
    lines = io.StringIO(text, newline="").readlines()  # str.splitlines also splits at characters that Markdown ignores
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    cuts = [0, *starts[1:], len(lines)]
    return ["".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]


class _Markdown(Markdown):
    """rich's Markdown with the parser of this module."""

    def __init__(self, text: str) -> None:
        super().__init__("")
        self.markup, self.parsed = text, _PARSER.parse(text)


class _Rendered:
    """Rendered Markdown without blank lines around it. cut: only its last lines, because a long block hides its end."""

    def __init__(self, text: str, *, gap: bool, cut: bool = False) -> None:
        self._text, self._gap, self._cut = text, gap, cut

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Markdown(self._text), options.update(height=None), pad=False)
        while lines and _is_blank(lines[0]):
            del lines[0]
        while lines and _is_blank(lines[-1]):
            del lines[-1]
        if self._gap and not (lines and _is_empty(lines[0])):  # the border of a code block is a gap already
            lines.insert(0, [])
        for line in lines[-max(1, console.height - 2) :] if self._cut else lines:
            yield from line
            yield Segment.line()


def _is_empty(line: list[Segment]) -> bool:
    return not any(s.text.strip() for s in line)


def _is_blank(line: list[Segment]) -> bool:
    # A coloured background is visible: the border of a code block has one.
    return _is_empty(line) and not any(s.style is not None and s.style.bgcolor is not None for s in line)

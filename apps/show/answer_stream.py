"""Answer on a terminal as it comes: its thought dim and folded once it is over, then its text as Markdown,
whose finished blocks are printed for good and the last one redrawn."""

from __future__ import annotations

import io
import itertools
import time
from contextlib import ExitStack
from types import TracebackType

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

LINES = 6  # of a thought, the last ones, that are shown while it comes
REDRAW_EVERY_S = 0.05
DRAWING_SHARE = 0.1  # of the time, at most: a long code block takes longer to draw than a token to compute

# Text like HTML is shown unchanged: a model that writes <think> or vector<int> means the characters.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class MarkdownStream:
    """Context manager that prints a stream of Markdown; `push` text as it comes. Its end prints open blocks, also after
    Ctrl-C."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ""  # text of blocks that may still change
        self._printed_any = False
        self._draw_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def push(self, text: str) -> None:
        """Show more text."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.update(Text(""))
        self._live.stop()
        if self._open.strip():
            self._print(self._open)


def finished_length(text: str) -> int:
    """Return how many characters of `text` belong to blocks that further text cannot change: all but the last block."""
    whole_lines = text[: text.rfind("\n") + 1]  # a "#" at the end may become a heading, or "#1"
    return sum(len(block) for block in split_blocks(whole_lines)[:-1])


def split_blocks(text: str) -> list[str]:
    """Return `text` cut before each block but the first."""
    lines = io.StringIO(text, newline="").readlines()  # str.splitlines would also cut where Markdown does not
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    cuts = [0, *starts[1:], len(lines)]
    return ["".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]


class _Markdown(Markdown):
    """rich's Markdown with the parser of this module."""

    def __init__(self, text: str) -> None:
        super().__init__("")
        self.markup, self.parsed = text, _PARSER.parse(text)


class _Rendered:
    """Rendered Markdown without blank lines around it, or its last lines: a long block would hide its own end."""

    def __init__(self, text: str, *, gap: bool, cut: bool = False) -> None:
        self._text, self._gap, self._cut = text, gap, cut

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Markdown(self._text), options.update(height=None), pad=False)
        while lines and _is_blank(lines[0]):
            del lines[0]
        while lines and _is_blank(lines[-1]):
            del lines[-1]
        if self._gap and not (lines and _is_empty(lines[0])):  # the border of code is a gap already
            lines.insert(0, [])
        for line in lines[-max(1, console.height - 2) :] if self._cut else lines:
            yield from line
            yield Segment.line()


def _is_empty(line: list[Segment]) -> bool:
    return not any(s.text.strip() for s in line)


def _is_blank(line: list[Segment]) -> bool:
    # A coloured background is visible: code has a border of it.
    return _is_empty(line) and not any(s.style is not None and s.style.bgcolor is not None for s in line)


class AnswerStream:
    """Context manager that prints an answer; `push` parts as they come. Its end prints what is open, also after Ctrl-C.
    `thought` is all that was thought."""

    def __init__(self, console: Console, hint: str = "") -> None:
        """hint: how to see a thought that was folded."""
        self.thought = ""
        self._console, self._hint = console, hint
        self._began = self._drawn = 0.0
        self._live: Live | None = None  # while a thought comes
        self._text: MarkdownStream | None = None
        self._stack = ExitStack()

    def push(self, text: str, thought: str = "") -> None:
        """Show more."""
        if thought:
            self._think(thought)
        if text:
            self._fold()
            if self._text is None:
                self._text = self._stack.enter_context(MarkdownStream(self._console))
            self._text.push(text)

    def _think(self, thought: str) -> None:
        if self._text is not None:  # it goes on behind text, which is not taken back
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
        """Return the last lines of the thought."""
        width = max(1, self._console.width)
        lines = Text(self.thought[-LINES * width * 2 :], style="dim").wrap(self._console, width)
        return Text("\n").join(lines[-LINES:])

    def _fold(self) -> None:
        """Leave one line in place of the thought."""
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()
            self._live = None
            words = f"thought for {time.monotonic() - self._began:.1f} s{self._hint}"
            self._console.print(Text(words, style="dim"), soft_wrap=True)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._fold()
        self._stack.close()

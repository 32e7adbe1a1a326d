"""Test that Markdown in pieces is rendered like the whole text."""

import io
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown

from apps.show.markdown import MarkdownStream, finished_length

PARSER = MarkdownIt().enable("table")
BLOCKS = (
    "A paragraph with **bold** words and `code`,\non two lines.",
    "# A heading",
    "Another heading\n---",
    "- one\n- two\n\n  still two\n- three",
    "1. first\n2. second",
    "```python\nfor i in range(3):\n\n    print(i)\n```",
    "    indented code",
    "> quoted\nand more of it",
    "| a | b |\n| - | - |\n| 1 | 2 |",
    "* * *",
    "form\x0cfeed, line\u2028separator",
)
documents = st.lists(st.sampled_from(BLOCKS), max_size=6).map("\n\n".join)
# Anything that could begin or continue a block, except definitions of links, which reach back over all blocks.
noise = st.text(st.sampled_from("ab1.)-*#>`|=+ \t\n\r\x0c\u2028<:\\"), max_size=60)


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """A document, cut anywhere."""
    text = draw(documents)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def shown(*texts: str) -> str:
    """Return the screen after pushing `texts`."""
    out = io.StringIO()
    with patch("apps.show.markdown.REDRAW_EVERY_S", 0), MarkdownStream(Console(file=out, width=60)) as stream:
        for text in texts:
            stream.push(text)
    return out.getvalue()


def rendered(text: str) -> str:
    """Return what rich makes of the whole."""
    out = io.StringIO()
    Console(file=out, width=60).print(Markdown(text))
    return out.getvalue()


def lines(screen: str) -> list[str]:
    """The lines with something in them: rich puts an empty one around some kinds of blocks."""
    return [line.rstrip() for line in screen.split("\n") if line.strip()]


@given(pieces())
def test_pieces_look_like_the_whole(parts: list[str]) -> None:
    assert lines(shown(*parts)) == lines(rendered("".join(parts)))


@given(noise, noise)
def test_no_further_text_changes_finished_blocks(text: str, more: str) -> None:
    n = finished_length(text)
    finished, rest = text[:n], text[n:]
    assert PARSER.render(finished) + PARSER.render(rest + more) == PARSER.render(text + more)


@given(documents)
def test_all_but_the_last_block_is_finished(text: str) -> None:
    rest = text[finished_length(text + "\n") :]
    assert len([token for token in PARSER.parse(rest) if token.level == 0 and token.nesting >= 0]) <= 1


def test_one_empty_line_between_blocks() -> None:
    screen = shown("Before.\n\n", "- item\n\n", "## Heading\n\n", "| a |\n| - |\n| 1 |\n\n", "After.")
    seen = [line.strip().replace("━━━", "─") for line in screen.split("\n")]  # rich's rulers differ with its version
    assert seen == ["Before.", "", "• item", "", "Heading", "", "a", "─", "1", "", "After.", ""]


def test_what_is_open_is_shown_before_it_is_finished() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, height=20, force_terminal=True)
    with patch("apps.show.markdown.REDRAW_EVERY_S", 0), MarkdownStream(console) as stream:
        stream.push("Hello")
        assert "Hello" in out.getvalue()


def test_an_exception_leaves_what_was_said_on_the_screen() -> None:
    out = io.StringIO()
    try:
        with MarkdownStream(Console(file=out)) as stream:
            stream.push("So far")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert out.getvalue().rstrip() == "So far"


def test_a_block_longer_than_the_terminal_shows_its_end() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, height=10, force_terminal=True, color_system=None)
    with patch("apps.show.markdown.REDRAW_EVERY_S", 0), MarkdownStream(console) as stream:
        stream.push("```\n" + "".join(f"line {i}\n" for i in range(50)))
        assert "line 49" in out.getvalue()
        assert "line 10" not in out.getvalue()


def test_what_looks_like_html_is_shown() -> None:
    screen = shown("<think>\nreasoning\n</think>\n\n", "A `vector<int>`, a vector<int> and <div>.")
    for text in ("<think>", "reasoning", "</think>", "vector<int>", "<div>"):
        assert text in screen


def test_drawing_takes_a_small_share_of_the_time() -> None:
    """However long a block is: the pause after a redraw follows what the redraw cost."""
    clock, drawn = [0.0], []

    def slow(*_: object, **__: object) -> None:
        drawn.append(clock[0])
        clock[0] += 1.0

    with patch("apps.show.markdown.time.monotonic", lambda: clock[0]):
        stream = MarkdownStream(Console(file=io.StringIO()))
        with patch.object(stream._live, "update", slow):
            for _ in range(1000):
                stream.push("word ")
                clock[0] += 0.1
    assert 5 < len(drawn) < 15  # a second each, of about a hundred

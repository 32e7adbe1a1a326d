"""Standard output of commands: one JSON object, or tables. Tables are rich on a terminal and aligned text elsewhere.

Values may come from other machines, so control characters are removed.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from quant.text import printable

_LEAST = 8  # letters of a word that a narrow column leaves together


def print_json(values: Mapping[str, Any], *, escaped: bool = True) -> int:
    """Print the object of a command's --json on one line; return the exit code of success.

    escaped: use ASCII only. Otherwise ASCII is used only if standard output cannot show the text.
    """
    text = json.dumps(values, ensure_ascii=escaped)
    if not escaped and not _can_show(text):
        text = json.dumps(values)
    print(text)
    return 0


def _can_show(text: str) -> bool:
    """Return whether standard output can encode the text and, if it is a terminal, obeys none of its characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return text.isprintable() or not sys.stdout.isatty()


def print_table(title: str, rows: Sequence[tuple[str, str]], notes: Iterable[str] = ()) -> None:
    """Print `title`, rows of (name, value) below it, and then notes."""
    if sys.stdout.isatty():
        print_note(title)
        _print_rich(["", ""], rows, show_header=False)
    else:
        width = max(len(name) for name, _ in rows)
        print(printable(title))
        for name, value in rows:
            print(f"  {name:<{width}}  {printable(value)}")
    print_notes(notes)


def print_columns(
    names: Sequence[str], rows: Sequence[Sequence[str]], whole: Collection[str] = (), notes: Iterable[str] = ()
) -> None:
    """Print rows under the column names, and then notes.

    On a narrow terminal values are broken into lines, but not those of columns in `whole`. If a terminal is too narrow
    for a readable table, each row is a paragraph.
    """
    rows = [[printable(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(names, rows, whole)
    else:
        widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
        for row in (names, *rows):
            print("  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip())
    print_notes(notes)


def _print_rich(
    names: Sequence[str], rows: Sequence[Sequence[str]], whole: Collection[str] = (), *, show_header: bool = True
) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console, table = Console(), Table(show_header=show_header)
    if show_header and _least_width(names, rows, whole) > console.width:
        for first, *others in rows:
            values = ", ".join(f"{name} {value}" for name, value in zip(names[1:], others, strict=True) if value)
            console.print(Text(f"{names[0]} {first}" if values else first, style="bold"))
            if values:
                console.print(Padding(Text(values), (0, 0, 0, 2)))
        return
    for name in names:
        table.add_column(name, no_wrap=name in whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row))
    console.print(table)


def _least_width(names: Sequence[str], rows: Sequence[Sequence[str]], whole: Collection[str]) -> int:
    """Return the width of a table that is still readable: lines break between words, or after 8 letters."""
    width = 1
    for name, *values in zip(names, *rows, strict=True):
        cells = (name, *values)
        parts = cells if name in whole else (word[:_LEAST] for cell in cells for word in cell.split())
        width += 3 + max(map(len, parts))
    return width


def figure(value: float | None, form: str) -> str:
    """Return a number in this format, or "-" for None."""
    return "-" if value is None else format(value, form)


def print_notes(notes: Iterable[str]) -> None:
    """Print sentences, each on its own line."""
    for note in notes:
        print_note(note)


def print_note(text: str) -> None:
    """Print a sentence. On a terminal it is broken between words."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console().print(Text(printable(text)))
    else:
        print(printable(text))

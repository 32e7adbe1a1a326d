"""Standard output of commands: one JSON object, or tables. Tables are rich on a terminal and aligned text elsewhere.

Values may come from other machines, so control characters are removed.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from quant.text import printable


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

    On a narrow terminal values are broken into lines. Columns in `whole` are broken only if nothing else is left.
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
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=show_header)
    for name in names:
        table.add_column(name, no_wrap=name in whole)
    for row in rows:
        table.add_row(*(Text(printable(value)) for value in row))
    Console().print(table)


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

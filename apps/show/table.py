"""Standard output of commands: one JSON object, or tables, which are rich on a terminal and aligned text elsewhere.

Values may come from other machines.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quant.text import printable


def print_json(values: Mapping[str, Any], *, escaped: bool = True) -> int:
    """Print the object of a command's --json on one line, in ASCII where it is `escaped`; the exit code of success."""
    print(json.dumps(values, ensure_ascii=escaped))
    return 0


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print `title` and, below it, `rows` of (name, value)."""
    if sys.stdout.isatty():
        print_note(title)
        _print_rich(["", ""], rows, show_header=False)
        return
    width = max(len(name) for name, _ in rows)
    print(printable(title))
    for name, value in rows:
        print(f"  {name:<{width}}  {printable(value)}")


def print_columns(names: Sequence[str], rows: Sequence[Sequence[str]], whole: Collection[str] = ()) -> None:
    """Print rows of as many values as there are `names`, under them. On a narrow terminal values are broken into lines;
    those of the columns `whole` only where nothing else is left to break."""
    rows = [[printable(value) for value in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(names, rows, whole)
        return
    widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    for row in (names, *rows):
        print("  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip())


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


def print_note(text: str) -> None:
    """Print a sentence, on a terminal broken between words."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        Console().print(Text(printable(text)))
    else:
        print(printable(text))

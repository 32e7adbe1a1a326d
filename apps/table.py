"""Names and values in two columns: a rich table on a terminal, aligned plain text elsewhere. On stdout."""

import sys
from collections.abc import Sequence


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print `title` and, below it, `rows` of (name, value)."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        Console().print(Text(title), table, sep="\n")
        return
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")

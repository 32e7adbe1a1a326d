"""Test the tables of commands on terminals of several widths."""

import re
import sys

import pytest

from apps.show.table import print_columns

NAMES = ("model", "type", "size", "memory", "tokens/s", "first token", "weights", "run")
ROWS = (
    ("smollm2-135m", "q4_1", "92.1 MiB", "382 MiB", "126", "0.253 s", "resident", "edge chat smollm2-135m"),
    ("-- above 10 s --", *[""] * 7),
    ("qwen3-4b", "q8_0", "3.98 GiB", "4.74 GiB", "3.17", "8.60 s", "paged", "edge chat unsloth/Qwen3-4B-GGUF:q8_0"),
)


@pytest.mark.parametrize(("columns", "is_table"), [(40, False), (80, False), (160, True)])
def test_every_value_is_readable_at_every_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, is_table: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_columns(NAMES, ROWS, whole=("model", "type", "run"))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    shown = " ".join("\n".join(lines).split())
    assert [word for row in ROWS for cell in row for word in cell.split() if word not in shown] == []
    assert ("│" in shown) == is_table

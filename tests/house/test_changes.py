"""Changes take few files, and those that docs/architecture.md names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.house.test_house import FILES
from tests.support import ROOT

MOST = 4
TABLE = (ROOT / "docs" / "architecture.md").read_text().partition("## A change")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", TABLE, re.MULTILINE))
del ROWS["a new"]

# One that is there: how it is written, and the file of its own.
THERE = {
    "sampler": ("xtc_probability", ""),
    "wire type": ("'q8'", ""),
    "architecture": ("'granitehybrid'", "partition/architectures/recurrent.py"),
    "endpoint": ("DetokenizeRequest", "edge/serve/apis/tokens.py"),
    "objective": ("'energy'", ""),
    "draft source": ("'ngram'|NgramDrafts", "edge/speculate/ngrams.py"),
    "collective": (r"'star'|\b_star\b", ""),
    "device kind": ("'gtx-1650'", ""),
}


def is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a text alone: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def has(pattern: str, path: Path) -> bool:
    """Return whether the code of a file has a pattern; only what has it as it is written is taken apart."""
    written = pattern.replace("'", "['\"]")
    return bool(re.search(written, path.read_text())) and bool(re.search(pattern, code(path)))


@cache
def code(path: Path) -> str:
    """A file without comments and docstrings, its texts in single quotes."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [item for item in node.body if not is_text(item)]
    return ast.unparse(tree)


def named(row: str) -> list[str]:
    """The files and folders that a row names; a bare file is beside the one before it."""
    results: list[str] = []
    for name in re.findall(r"`([\w/.]+)`", ROWS[row]):
        results.append(name if "/" in name else f"{results[-1].rpartition('/')[0]}/{name}")
    return results


def test_the_table_has_the_eight() -> None:
    assert ROWS.keys() == THERE.keys()


@pytest.mark.parametrize("row", THERE)
def test_its_files_exist_and_one_of_its_kind_is_in_no_others(row: str) -> None:
    names = named(row)
    assert all((ROOT / name).exists() for name in names), names
    pattern, own = THERE[row]
    holding = {str(path.relative_to(ROOT)) for path in FILES if has(pattern, path)}
    others = holding - {own}
    assert others <= {*names}, others - {*names}
    assert 0 < len(holding) <= MOST

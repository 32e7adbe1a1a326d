"""Plain English for the demonstration model: the docstrings of the Python standard library."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = ("test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "site-packages", "__pycache__")


def documents() -> list[str]:
    """One text for each documented module, ordered by path: the same for a given version of Python."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or any(part in SKIPPED for part in parts):
            continue
        text = "\n\n".join(_docstrings(path))
        if text:
            texts.append(f"{'.'.join(parts)}\n\n{text}\n")
    return texts


def _docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file: the module's own, then each class's and function's after its name."""
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if doc:
                yield doc if isinstance(node, ast.Module) else f"{node.name}: {doc}"

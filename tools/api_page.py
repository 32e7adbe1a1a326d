"""Write docs/api.md from the signatures and docstrings of what `import edge` offers: `make pages`.

It reads the source, so that signatures stand as they are written, whatever Python runs it.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import edge

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
_HEAD = """# Python API: reference

`make pages` makes this page from the docstrings; a test holds that it is up to date.
[python.md](python.md) has examples.
"""
_WIDTH = 100  # a longer signature gets a line for each parameter

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The whole page: functions, classes, then errors."""
    nodes = {name: (_node(module, name), _source(module)) for module, names in edge._HOMES.items() for name in names}
    functions: list[str] = []
    classes: list[str] = []
    errors: list[str] = []
    others: list[str] = []
    for name, (node, source) in sorted(nodes.items()):
        if isinstance(node, ast.ClassDef):
            is_error = issubclass(getattr(edge, name), BaseException)
            (errors if is_error else classes).append(_class(node, source, short=is_error))
        elif isinstance(node, Function):
            functions.append(f"### {name}\n\n{_code(_signature(node))}\n\n{_doc(node)}")
        else:
            others.append(f"### {name}\n\n{_code(_text(node))}")
    sections = {"Functions": functions, "Classes": classes, "Types": others, "Errors": errors}
    texts = ["\n\n".join([f"## {title}", *parts]) for title, parts in sections.items() if parts]
    return "\n\n".join([_HEAD.rstrip(), *texts]) + "\n"


def _source(module: str) -> list[str]:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text().splitlines()


def _node(module: str, name: str) -> ast.stmt:
    """The statement that defines a name in the module it comes from."""
    for node in ast.parse("\n".join(_source(module))).body:
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node
    raise LookupError(f"edge/__init__.py says that {name} comes from {module}; it is not defined there")


def _class(node: ast.ClassDef, source: list[str], short: bool) -> str:
    """A class: its constructor or fields, its docstring, its public methods and properties."""
    bases = [_text(base) for base in node.bases if not _text(base).startswith(("Protocol", "Generic"))]
    head = f"### {node.name}\n\n"
    if short:
        return f"{head}A kind of `{bases[0]}`. {_doc(node)}" if bases else f"{head}{_doc(node)}"
    built = next((m for m in node.body if isinstance(m, Function) and m.name == "__init__"), None)
    lines = [f"{head}{_doc(node)}"]
    if built is not None:
        lines.insert(0, f"{head}{_code(_signature(built, node.name, skip=1))}")
        lines[1] = _doc(node) + (f"\n\n{_doc(built)}" if _doc(built) else "")
    fields = [m for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)]
    rows = [_field(f, source) for f in fields if not _text(f.target).startswith("_")]
    methods = [m for m in node.body if isinstance(m, Function) and not m.name.startswith("_")]
    rows += [_method(m) for m in methods if not any(_text(d).endswith(".setter") for d in m.decorator_list)]
    return "\n\n".join([*lines, *(["\n".join(rows)] if rows else [])])


def _field(node: ast.AnnAssign, source: list[str]) -> str:
    """One field of a dataclass, with the comment behind it."""
    comment = re.search(r"  # (.+)$", source[(node.end_lineno or node.lineno) - 1])
    default = f" = {_text(node.value)}" if node.value is not None else ""
    text = f"- `{_text(node.target)}: {_text(node.annotation)}{default}`"
    return f"{text}: {comment[1]}" if comment else text


def _method(node: Function) -> str:
    decorators = {_text(d) for d in node.decorator_list}
    if decorators & {"property", "functools.cached_property", "cached_property"}:
        shown = f"{node.name}: {_text(node.returns)}" if node.returns else node.name
    else:
        shown = _signature(node, skip=0 if "staticmethod" in decorators else 1).replace("\n", " ")
        shown = re.sub(r"\( +", "(", re.sub(r", +\)", ")", re.sub(r" +", " ", shown)))
    doc = _doc(node).replace("\n\n", " ").replace("\n", " ")
    return f"- `{shown}`: {doc}" if doc else f"- `{shown}`"


def _signature(node: Function, name: str = "", skip: int = 0) -> str:
    """As it is written. skip: parameters at the front that a caller does not give."""
    provided = node.args
    plain = [*provided.posonlyargs, *provided.args]
    defaults = [None] * (len(plain) - len(provided.defaults)) + list(provided.defaults)
    parts = [_parameter(a, d) for a, d in list(zip(plain, defaults, strict=True))[skip:]]
    if provided.vararg:
        parts.append(f"*{_parameter(provided.vararg, None)}")
    elif provided.kwonlyargs:
        parts.append("*")
    parts += [_parameter(a, d) for a, d in zip(provided.kwonlyargs, provided.kw_defaults, strict=True)]
    if provided.kwarg:
        parts.append(f"**{_parameter(provided.kwarg, None)}")
    returns = f" -> {_text(node.returns)}" if node.returns and not name else ""
    name = name or node.name
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= _WIDTH else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = f"{argument.arg}: {_text(argument.annotation)}" if argument.annotation else argument.arg
    if default is None:
        return text
    return f"{text} = {_text(default)}" if argument.annotation else f"{text}={_text(default)}"


def _text(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", '"')


def _doc(node: ast.ClassDef | Function) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


if __name__ == "__main__":
    PAGE.write_text(page())

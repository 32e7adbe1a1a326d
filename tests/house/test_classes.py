"""Classes are small, and none only passes calls on to another object."""

import ast
from functools import cache
from pathlib import Path

from tests.house.test_house import PACKAGES
from tests.support import ROOT

MOST_MEMBERS = 35  # methods and attributes
MOST_PASSED_ON = 5  # calls that go to another object unchanged


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """Each class of the product, as "file:Class"."""
    results = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.endswith("_pb2.py"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    results.append((f"{path.relative_to(ROOT)}:{node.name}", node))
    return results


def members(cls: ast.ClassDef) -> set[str]:
    """Methods, and attributes of the class and of its objects."""
    result = set()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            result.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            result.add(node.target.id)
        elif isinstance(node, ast.Assign):
            result |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for inner in ast.walk(cls):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            result.add(inner.attr)
    return result


def passes_on(method: ast.FunctionDef) -> bool:
    """Return whether a method calls one of the same name of an attribute, with its own parameters alone."""
    body = [node for node in method.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    called = value.func if isinstance(value, ast.Call) else value
    if not (
        isinstance(called, ast.Attribute) and called.attr == method.name and isinstance(called.value, ast.Attribute)
    ):
        return False
    words = {arg.arg for arg in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    passed = [*value.args, *(keyword.value for keyword in value.keywords)] if isinstance(value, ast.Call) else []
    return all(
        isinstance(item, ast.Name | ast.Starred) and (isinstance(item, ast.Starred) or item.id in words)
        for item in passed
    )


def test_no_class_has_more_than_35_methods_and_attributes() -> None:
    sizes = {name: len(members(cls)) for name, cls in classes()}
    assert not {name: size for name, size in sizes.items() if size > MOST_MEMBERS}


def test_no_wrapper_passes_on_more_than_five_calls_unchanged() -> None:
    passed = {
        name: sum(isinstance(node, ast.FunctionDef) and passes_on(node) for node in cls.body) for name, cls in classes()
    }
    assert not {name: count for name, count in passed.items() if count > MOST_PASSED_ON}


def test_the_checks_see_what_they_are_for(tmp_path: Path) -> None:
    [cls] = ast.parse(
        "class A:\n"
        "    x: int\n"
        "    y = 1\n"
        "    def __init__(self, b):\n        self.b = b\n        b.c = 2\n"
        "    def f(self, n, *, m=1):\n        '''Say.'''\n        return self.b.f(n, m=m)\n"
        "    def g(self, n):\n        return self.b.g(n + 1)\n"
        "    def h(self):\n        return self.b.other()\n"
        "    @property\n    def p(self):\n        return self.b.p\n"
    ).body
    assert isinstance(cls, ast.ClassDef)
    assert members(cls) == {"x", "y", "b", "__init__", "f", "g", "h", "p"}
    assert [node.name for node in cls.body if isinstance(node, ast.FunctionDef) and passes_on(node)] == ["f", "p"]

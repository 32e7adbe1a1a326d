"""The list of seeded faults stays true: each can still be planted, and the tests that should notice it are there."""

import ast
from functools import cache

import pytest

from tests.faults.plant import ROOT, Fault, faults

ALL = faults()


def test_every_fault_has_a_name_of_its_own() -> None:
    assert len({fault.id for fault in ALL}) == len(ALL)


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.id)
def test_a_fault_can_be_planted_and_noticed(fault: Fault) -> None:
    sound = _text(fault.file)
    planted = fault.planted_in(sound)
    assert planted != sound
    ast.parse(planted)
    assert fault.harm
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert name in _functions(path) if name else (ROOT / path).exists()


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def _functions(path: str) -> set[str]:
    """Those of the file itself, and of its classes: no others are tests."""
    bodies = [ast.parse(_text(path)).body]
    bodies += [node.body for node in bodies[0] if isinstance(node, ast.ClassDef)]
    return {node.name for body in bodies for node in body if isinstance(node, ast.FunctionDef)}

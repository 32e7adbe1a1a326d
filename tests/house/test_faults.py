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
    sound = (ROOT / fault.file).read_text()
    planted = fault.planted_in(sound)
    assert planted != sound
    ast.parse(planted)
    assert fault.harm
    assert fault.tests or fault.missed
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert name in _functions(path) if name else (ROOT / path).exists()


@cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

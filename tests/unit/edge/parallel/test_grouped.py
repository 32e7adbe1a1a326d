"""Steps of groups: the error of one is raised once, and the next one is as if it had not been."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from edge.parallel.grouped import GroupedEngine


class Group:
    """An engine whose steps of one token fail."""

    failed = None
    batch, context = 8, 64
    shape = SimpleNamespace(n_vocab=3)

    def __init__(self) -> None:
        self.is_clear = False

    def submit(self, tokens: Any, *_: Any, **__: Any) -> None:
        if len(tokens) == 1:
            raise EngineError("one token is too few")

    def collect(self) -> Any:
        return np.ones((1, 3), np.float32)

    def kv_clear(self) -> None:
        self.is_clear = True

    def end(self) -> None: ...


def test_the_error_of_a_step_is_collected_once() -> None:
    groups: Any = [Group(), Group()]
    engine = GroupedEngine(groups, 2)
    try:
        for n in (1, 2):
            engine.submit([0] * n, np.arange(n), np.zeros(n, int), np.ones(n, np.int8))
        with pytest.raises(EngineError, match="one token is too few"):
            engine.collect()
        assert engine.uncollected == 1
        assert engine.collect().shape == (1, 3)
        assert engine.uncollected == 0
    finally:
        engine.end()
        engine.wait()


def test_a_decode_of_either_group_leaves_nothing_to_be_collected() -> None:
    """Also one that gives no logits."""
    groups: Any = [Group(), Group()]
    engine = GroupedEngine(groups, 2)
    try:
        for sequence in (0, 1, 0):
            assert not engine.decode([0, 0], 0, sequence=sequence, outputs="none").size
            assert engine.uncollected == 0
    finally:
        engine.end()
        engine.wait()


def test_all_groups_forget_what_they_hold() -> None:
    groups: Any = [Group(), Group()]
    engine = GroupedEngine(groups, 2)
    try:
        engine.kv_clear()
        assert [group.is_clear for group in groups] == [True, True]
    finally:
        engine.end()
        engine.wait()

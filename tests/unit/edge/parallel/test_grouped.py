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
    shape = SimpleNamespace(n_vocab=3)

    def submit(self, tokens: Any, *_: Any, **__: Any) -> None:
        if len(tokens) == 1:
            raise EngineError("one token is too few")

    def collect(self) -> Any:
        return np.ones((1, 3), np.float32)

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

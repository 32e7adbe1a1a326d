"""Threads of builds without OpenMP: a pool for each context, which grows and ends with it."""

from typing import Any

import pytest

from edge.llama import thread_pool
from edge.llama.thread_pool import ThreadPool
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH


@pytest.fixture
def open_pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that this build needs pools, and list the open ones."""
    pools: list[int] = []
    procedure = thread_pool._procedure

    def recorded(name: bytes, *types: Any) -> Any:
        function = procedure(name, *types)

        def new(params: Any) -> int:
            pools.append(function(params))
            return pools[-1]

        def free(pool: int) -> None:
            pools.remove(pool)
            function(pool)

        return new if name == b"ggml_threadpool_new" else free

    monkeypatch.setattr(thread_pool, "needs_pool", lambda: True)
    monkeypatch.setattr(thread_pool, "_procedure", recorded)
    return pools


def test_an_engine_with_a_pool_gives_the_same_logits(open_pools: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(300, 320))
    with Engine(MODEL_PATH, EngineOptions(threads=2, context=128)) as engine:
        assert len(open_pools) == 1
        with_pool = engine.decode(tokens, 0).copy()
    assert open_pools == []
    monkeypatch.setattr(thread_pool, "needs_pool", lambda: False)
    with Engine(MODEL_PATH, EngineOptions(threads=2, context=128)) as engine:
        assert open_pools == []
        assert (engine.decode(tokens, 0) == with_pool).all()


def test_a_pool_grows_and_never_shrinks(open_pools: list[int]) -> None:
    attached: list[int] = []
    pool = ThreadPool(attached.append)
    pool.use(1)  # the computing thread is enough
    assert attached == []
    for threads in (2, 3, 2, 3):
        pool.use(threads)
    assert len(attached) == 2
    assert open_pools == attached  # a decode of another thread may still use the first one
    pool.close()
    assert open_pools == []
    pool.close()  # once more changes nothing


def test_a_build_with_openmp_has_no_pool(open_pools: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "needs_pool", lambda: False)
    pool = ThreadPool(open_pools.append)
    pool.use(4)
    assert open_pools == []

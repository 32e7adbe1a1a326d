"""The logits of a model spread over ranks, and its KV cache after every operation, are those of one device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge.cluster.llm_ranks import Exchange
from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.models.demo import MODEL_PATH
from tests.conftest import Synthetic
from tests.support.deployments import (
    EXACT,
    OPTIONS,
    QUESTIONS,
    Floats,
    deployed,
    deviations,
    pipeline,
    questions,
    stages,
    tensor,
)
from tests.support.thorough import each_once, some
from tests.support.workers import Worker
from transport.choice import ALGORITHMS

CLOSE = {"gemma": 1e-3, "gemma2": 1e-3, "gemma3": 1e-3}  # llama.cpp looks GELU up in a table of 16-bit floats
CLOSE_ELSE = 1e-5
TOKENS = [5, 300, 17, 401, 88, 260, 33, 499]
SHIFT = {"llama"}  # llama.cpp ends the process where it shifts a model whose layers all have a window, or none


# Logits.


@pytest.mark.parametrize(
    ("arch", "how"),
    each_once(
        ["llama", "gemma2", "gemma3", "gpt-oss"],
        [
            tensor(1, 1),
            tensor(1, 1, 2),
            pipeline(1, 1),
            stages(1, 2),
            stages(2, 1),
            pipeline(0, 1),
            pipeline(0, 1, 1),
            tensor(0, 1, 1),
        ],
    ),
)
def test_logits_of_exact_sums(one_worker: Worker, synthetic: Synthetic, arch: str, how: dict[str, Any]) -> None:
    path = synthetic(arch, "f32")
    exact = how.get("parallel") == "pipeline"
    close = 0.0 if exact else CLOSE.get(arch, CLOSE_ELSE)
    with deployed(one_worker, path, how, EXACT) as deployment, Engine(path, EXACT) as single:
        engine = deployment.engine
        whole = single.decode(TOKENS, 0, outputs="all").copy()
        result = engine.decode(TOKENS, 0, outputs="all")
        assert result.shape == (len(TOKENS), 512)
        assert deviations(result, whole) <= close
        assert (
            engine.decode(TOKENS[:3], 8, outputs="none").size == single.decode(TOKENS[:3], 8, outputs="none").size == 0
        )
        for position in range(11, 15):
            row = engine.decode([position], position)
            assert row.shape == (512,)
            assert deviations(row, single.decode([position], position)) <= close
        for top in (1, 5, 40, 500, 512, 9999):
            assert engine.kv_remove(0, 8)
            full = engine.decode([7], 8).copy()
            assert engine.kv_remove(0, 8)
            engine.decode([400], 8)
            assert engine.kv_remove(0, 8)
            largest_of(engine.decode([7], 8, top=top), full, top)
        engine.kv_clear()
        every = engine.decode(TOKENS, 0, outputs="all").copy()
        engine.kv_clear()
        for row, full in zip(engine.decode(TOKENS, 0, outputs="all", top=3), every, strict=True):
            largest_of(row, full, 3)


def largest_of(row: Floats, full: Floats, top: int) -> None:
    """The largest logits are there, with their values, and what else is there is true."""
    known = np.isfinite(row)
    np.testing.assert_array_equal(row[known], full[known])
    top = min(top, len(full))
    assert set(np.argsort(row)[-top:]) == set(np.argsort(full)[-top:])


def test_every_algorithm_of_the_sums_gives_the_same_bits(one_worker: Worker) -> None:
    results = {}
    for algorithm in (*list(ALGORITHMS)[-some(2, len(ALGORITHMS)) :], "auto"):
        with deployed(one_worker, MODEL_PATH, tensor(1, 1, 1), OPTIONS, Exchange(algorithm=algorithm)) as deployment:
            prompt = questions(QUESTIONS)[-1].prompt
            results[algorithm] = np.stack(
                [deployment.engine.decode(prompt, 0), deployment.engine.decode([5], len(prompt))]
            ).tobytes()
    assert len(set(results.values())) == 1


@pytest.mark.parametrize(("wire", "transport"), each_once(["f16", "q8"], ["tcp", "grpc"]))
def test_sums_may_cross_as_something_smaller(
    one_worker: Worker, synthetic: Synthetic, wire: str, transport: str
) -> None:
    most = {"f16": 0.05, "q8": 0.5}[wire]
    path = synthetic("llama", "f32")
    exchange = Exchange(wire=wire, transport=transport)
    with deployed(one_worker, path, tensor(1, 1), EXACT, exchange) as deployment, Engine(path, EXACT) as single:
        assert CLOSE_ELSE < deviations(deployment.engine.decode(TOKENS, 0), single.decode(TOKENS, 0)) < most
        (link,) = deployment.engine.group.links.values()
        assert link.kind == transport
        deployment.engine.times(clear=True)
        deployment.engine.decode([3], 8, top=1)
        sent = deployment.engine.times()[0]["decode"].sent_bytes.median
    with deployed(one_worker, path, tensor(1, 1), EXACT) as deployment:
        deployment.engine.decode([3], 0, top=1)
        assert sent < deployment.engine.times()[0]["decode"].sent_bytes.median


@pytest.mark.parametrize("wire", ["f16", "q8"])
def test_states_between_stages_may_be_smaller_too(one_worker: Worker, synthetic: Synthetic, wire: str) -> None:
    path = synthetic("llama", "f32")
    how = stages(1, 2)
    with deployed(one_worker, path, how, EXACT, Exchange(wire=wire)) as deployment, Engine(path, EXACT) as single:
        for position in (0, 8):
            error = deviations(deployment.engine.decode(TOKENS, position), single.decode(TOKENS, position))
            assert CLOSE_ELSE < error < {"f16": 0.05, "q8": 0.5}[wire]
        deployment.engine.times(clear=True)
        deployment.engine.decode([3], 16)
        state = deployment.engine.times()[0]["decode"].sent_bytes.median
        assert state < 2 * (4 * 128 + 40)  # to two ranks


# The KV cache.


@pytest.mark.parametrize(
    ("arch", "how"), each_once(["llama", "gemma3", "gpt-oss"], [tensor(1, 2), pipeline(1, 1), stages(1, 2)])
)
def test_operations_on_the_cache_come_in_order(
    one_worker: Worker, synthetic: Synthetic, arch: str, how: dict[str, Any]
) -> None:
    path = synthetic(arch, "f32")
    options = replace(EXACT, sequences=3)
    close = 0.0 if how.get("parallel") == "pipeline" else CLOSE.get(arch, CLOSE_ELSE)
    with deployed(one_worker, path, how, options) as deployment, Engine(path, options) as single:
        single.stages = deployment.engine.stages
        result, expected = (operations(engine, arch in SHIFT) for engine in (deployment.engine, single))
    for mine, theirs in zip(result, expected, strict=True):
        assert deviations(mine, theirs) <= close
    plain, *_, again = expected
    np.testing.assert_array_equal(plain, again)


def operations(engine: Any, shifts: bool) -> list[Floats]:
    """Logits after one operation and another."""
    results = [engine.decode(TOKENS, 0).copy()]
    engine.kv_copy(0, 1)
    results.append(engine.decode([9, 9], 8, sequence=0).copy())
    results.append(engine.decode([7], 8, sequence=1).copy())
    assert engine.kv_remove(0, 8)
    results.append(engine.decode([7], 8, sequence=0).copy())
    engine.kv_copy(0, 2, 0, 4)
    results.append(engine.decode(TOKENS[4:6], 4, sequence=2).copy())
    assert [engine.kv_last(s) for s in range(3)] == [8, 8, 5]
    if shifts:
        assert engine.kv_remove(0, 2, 5)
        engine.kv_shift(0, 5, -1, -3)
        assert engine.kv_last(0) == 5
        results.append(engine.decode([3], 6).copy())
        results.append(engine.decode([4], 7).copy())  # the graph without a shift again
        engine.kv_shift(2, 0, -1, 3)
        engine.kv_shift(0, 0, -1, 1)
    assert engine.kv_remove(1, 0, -1)
    assert engine.kv_last(1) == -1
    rows = [engine.kv_last(0) + 1, engine.kv_last(2) + 1]
    engine.submit([8, 9], np.array(rows), np.array([0, 2]), np.ones(2, np.int8))
    if engine.stages > 1:
        engine.submit([6], np.array([rows[1] + 1]), np.array([2]), np.zeros(1, np.int8))
        engine.submit([1], np.array([rows[0] + 1]), np.array([0]), np.ones(1, np.int8))
    assert engine.uncollected == engine.stages
    results.extend(engine.collect().copy() for _ in range(engine.stages))
    assert engine.uncollected == 0
    engine.kv_clear()
    assert engine.kv_last(0) == engine.kv_last(2) == -1
    results.append(engine.decode(TOKENS, 0).copy())
    return results


def test_a_shift_that_is_refused_changes_nothing(one_worker: Worker, synthetic: Synthetic) -> None:
    path = synthetic("gemma3", "f32")
    with deployed(one_worker, path, pipeline(1, 1), EXACT) as deployment, Engine(path, EXACT) as single:
        for engine in (deployment.engine, single):
            engine.decode(TOKENS, 0)
            assert engine.kv_remove(0, 7)
            with pytest.raises(EngineError, match="window"):
                engine.kv_shift(0, 4, -1, -1)
            with pytest.raises(EngineError, match="sequences are from 0 to 0, not 300"):
                engine.kv_remove(300, 0)
            assert engine.kv_last(0) == 6
        np.testing.assert_array_equal(deployment.engine.decode([9], 7), single.decode([9], 7))

"""Routes: every way to compute a model gives the predictions that one pass over the text gives, each in its place."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.quantization.divergence import Chunks, Summary, log_probabilities
from edge.quantization.evaluate import common_chunks
from edge.quantization.route_comparison import RouteComparison, RouteFigures, compare_routes
from edge.quantization.routes import Predict, at_once, drafted, from_prefix_cache, one_by_one, streams
from edge.quantization.standard_routes import answer_routes, local_route, options_for, setting_routes
from edge.quantization.text_file import BUNDLED, read_text
from partition.model.file import ModelFile

SIZE = 40
# In F32: rows of other passes give nearly the same, and a row in the wrong place does not.
OPTIONS = options_for(EngineOptions(threads=1, kv_type="f32", flash_attention="off"), SIZE)
# Difference of log-probabilities. A pass of one row has kernels of its own, and trained weights amplify last bits: 0.02
# with AVX-512 VNNI, 0.09 with AVX2. A row that is out of place is off by whole nats.
NEAR = 0.2
NEAR_MEAN = 4e-4  # mean divergence of a route


@pytest.fixture(scope="module")
def chunks() -> Chunks:
    return common_chunks([ModelFile.open(MODEL_PATH)], read_text(BUNDLED), SIZE, 3)


def predicted(predict: Predict, chunks: Chunks, options: EngineOptions = OPTIONS) -> np.ndarray:
    """The logits of every scored place; each must come once."""
    with Engine(MODEL_PATH, options) as engine:
        result = np.full((len(chunks), chunks.scored, engine.model.n_vocab), np.nan, np.float32)
        for i, place, row in predict(engine, chunks):
            assert np.isnan(result[i, place]).all()
            result[i, place] = row
    assert not np.isnan(result).any()
    return result


@pytest.mark.parametrize(
    "predict", [at_once, one_by_one, drafted(8), streams(8), streams(2)],
    ids=["at once", "one by one", "drafted", "streams", "streams in turn"],
)  # fmt: skip
def test_each_gives_every_prediction(predict: Predict, chunks: Chunks) -> None:
    wide = replace(OPTIONS, context=8 * SIZE, sequences=8, outputs=32)
    result = predicted(predict, chunks, wide)
    with Engine(MODEL_PATH, OPTIONS) as engine:
        for i in range(len(chunks)):
            expected = log_probabilities(engine, chunks.inputs(i))
            shifted = result[i] - np.log(np.exp(result[i]).sum(axis=1, keepdims=True))
            assert np.abs(shifted - expected).max() < NEAR


def test_a_prompt_that_was_not_kept_is_no_route(chunks: Chunks) -> None:
    with pytest.raises(EngineError, match="the prompt was not stored on disk"):
        predicted(from_prefix_cache, chunks)


def test_all_of_them_beside_one_device(chunks: Chunks) -> None:
    first = local_route(MODEL_PATH, OPTIONS)
    result = compare_routes(
        first,
        first,
        setting_routes(MODEL_PATH, OPTIONS),
        answer_routes(OPTIONS, partial(Engine, MODEL_PATH)),
        chunks,
        2048,
    )
    values = result.to_json()
    assert [row["setting"] for row in values["routes"]] == [False, *[True] * 4, *[False] * 3]
    assert values["scored_tokens"] == len(chunks) * chunks.scored
    assert values["routes"][0]["mean_divergence"] == values["routes"][0]["one_device"]["mean_divergence"] == 0
    assert values["routes"][1]["route"] == "flash attention on"
    assert values["routes"][1]["one_device"]["mean_divergence"] > 0
    assert max(row["one_device"]["mean_divergence"] for row in values["routes"]) < NEAR_MEAN
    assert "the same on 1 thread" in [
        setting_route.name for setting_route in setting_routes(MODEL_PATH, replace(OPTIONS, threads=2))
    ]


def summary(mean: float) -> Summary:
    return Summary(3, 2.0, 0.1, mean, mean, mean, mean, 1.0)


def test_the_spread_is_the_largest_of_the_settings() -> None:
    means = {"one device": 0.0, "a": 0.002, "b": 0.004, "2 ranks": 0.006}
    result = RouteComparison([RouteFigures(name, summary(0.01), summary(mean)) for name, mean in means.items()], 2)
    assert result.spread == 0.004
    assert [row[-1] for row in result.rows()] == ["-", "0.50", "1.00", "1.50"]
    nothing = RouteComparison([RouteFigures(name, summary(0.01), summary(0.0)) for name in "xyz"], 1)
    assert nothing.in_spreads(nothing.results[2]) == 0

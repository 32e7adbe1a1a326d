"""Test embedding models: they run on one device, and the server refuses other requests to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from edge.api.config import EngineConfig
from edge.errors import ContextFull, EngineError, SamplingError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.serve.router import Router
from edge.serve.served import Generation
from partition.model.generation import generates
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from tests.conftest import Synthetic
from tests.serve.test_engine_process import with_router
from tests.support.encoders import CONTEXT, WIDTH, encoder
from tests.support.helpers import assert_one_line_error, run_chat


def config(path: Path) -> EngineConfig:
    return EngineConfig(str(path), EngineOptions(threads=1), prefix_cache=0)


def product(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert"])
def test_an_encoder_embeds_and_does_not_go_on_with_texts(tmp_path: Path, architecture: str) -> None:
    path = encoder(tmp_path / "tiny.gguf", architecture)

    async def work(router: Router) -> Any:
        model = await router.model(None)
        assert (await model.about())["embeds"] is True
        for request in (Generation(prompt="hello"), Generation(messages=[{"role": "user", "content": "hello"}])):
            with pytest.raises(SamplingError, match="generates no text"):
                await model.generate(request)
        with pytest.raises(ContextFull, match=f"1 to {CONTEXT} tokens"):
            await model.embed(["hello " * CONTEXT])
        result = await model.embed(["hello world", "one kilobyte", "hello world"])
        assert model.replicas.restarts == 0
        return result

    (first, other, same), tokens = with_router(work, config(path))
    assert tokens == 3 * 4  # each between the tokens that begin and end a text
    assert len(first) == WIDTH
    assert product(first, first) == pytest.approx(1, abs=1e-5)
    assert first == pytest.approx(same, abs=1e-6)
    assert product(first, other) < 0.999


def test_vectors_are_pooled_as_the_file_says(tmp_path: Path) -> None:
    from edge.serve.engine.embedder import Embedder

    results = {}
    for pooling in (gguf.PoolingType.MEAN, gguf.PoolingType.CLS, gguf.PoolingType.NONE):
        path = encoder(tmp_path / f"{pooling.name}.gguf", pooling=pooling)
        with Engine(path, EngineOptions(threads=1)) as engine:
            tokens = engine.model.tokenize("hello world", add_special=True, parse_special=False)
            embedder = Embedder(engine.model, CONTEXT, 1)
            results[pooling.name] = list(embedder.embed(tokens))
            embedder.close()
    assert results["NONE"] == pytest.approx(results["MEAN"], abs=1e-6)  # what is said nowhere is the mean
    assert results["CLS"] != pytest.approx(results["MEAN"], abs=1e-3)


def test_an_encoder_is_refused_where_texts_are_to_go_on(tmp_path: Path, synthetic: Synthetic) -> None:
    path = encoder(tmp_path / "tiny.gguf")
    assert not generates(GgufFile.open(path))
    assert generates(GgufFile.open(synthetic("llama", "f32")))
    with Engine(path, EngineOptions(threads=1)) as engine, pytest.raises(EngineError, match="generates no text"):
        engine.decode([2, 3], 0)
    assert_one_line_error(run_chat(path, "-p", "hello"), 5, "tiny.gguf generates no text")


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention.head_count": 3},
        {"attention.head_count": 0},
        {"attention.key_length": 8},
        {"attention.head_count_kv": 2},
        {"context_length": 4096},
        {"types": 0},
        {"types": 5},
        {"pooling": 9},
    ],
    ids=str,
)
def test_an_encoder_whose_metadata_do_not_fit_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    path = encoder(tmp_path / "bad.gguf", **wrong)  # type: ignore[arg-type]
    with pytest.raises((ModelFileError, EngineError), match=r"bad.gguf"), Engine(path, EngineOptions(threads=1)):
        pass

"""Test reranking of documents for a query: the scores equal those of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support.encoders import SPECIAL, encoder
from tests.support.ranking import END, START, TEMPLATE, decoder, llama_cpp_of
from tests.support.workers import worker

QUERY = "hello world"
DOCUMENTS = ["one kilobyte", "two rome hello", "world", "rome rome rome one two"]
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")


@contextmanager
def served(path: Path, **options: Any) -> Iterator[str]:
    router = Router({"tiny": EngineConfig(str(path), EngineOptions(threads=1, sequences=2), prefix_cache=0, **options)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


def post(url: str, path: str = "/v1/rerank", **body: Any) -> Any:
    reply = httpx.post(url + path, json={"query": QUERY, "documents": DOCUMENTS, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ranker(path: Path, *, ends: bool = False) -> Path:
    return encoder(path, pooling=gguf.PoolingType.RANK, head=True, ends=ends)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(ranker(tmp_path_factory.mktemp("rank") / "tiny.gguf")) as address:
        yield address


def by_index(reply: Any) -> list[float]:
    return [result["relevance_score"] for result in sorted(reply["results"], key=lambda result: result["index"])]


@pytest.mark.parametrize("end", [[], [SEP]], ids=["without an end", "with an end"])
def test_an_encoder_scores_as_llama_cpp_does(tmp_path: Path, end: list[int]) -> None:
    """Each text with the tokens that its vocabulary wants, as llama.cpp's server has them."""
    path = ranker(tmp_path / "tiny.gguf", ends=bool(end))
    with llama_cpp_of(path) as reference:
        query = reference.tokens(QUERY)
        prompts = [[CLS, *query, *end, SEP, *reference.tokens(text), *end] for text in DOCUMENTS]
        expected = [reference.score(tokens) for tokens in prompts]
    with served(path) as url:
        reply = post(url)
    assert by_index(reply) == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 0.01
    assert [result["index"] for result in reply["results"]] == sorted(range(4), key=lambda i: -expected[i])
    assert reply["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, prompts)))
    assert (reply["object"], reply["model"]) == ("list", "tiny")


def test_a_decoder_scores_as_llama_cpp_does_with_the_template_of_its_file(tmp_path: Path) -> None:
    path = decoder(tmp_path / "tiny.gguf")
    documents = ["ab", "c d", "xyz {query}"]
    with llama_cpp_of(path) as reference:
        texts = [TEMPLATE.replace("{document}", text).replace("{query}", "q r", 1) for text in documents]
        prompts = [reference.tokens(text, special=True) for text in texts]
        expected = [reference.score(tokens) for tokens in prompts]
        before = [START, *reference.tokens("Is it so?\nQ: q r\nD: <|im_end|>")]
        as_text = reference.score([*before, END, *reference.tokens("\nYes or no:")])
    with served(path) as url:
        reply = post(url, query="q r", documents=documents)
        assert by_index(reply) == pytest.approx(expected, abs=1e-6)
        assert reply["usage"]["total_tokens"] == sum(map(len, prompts))
        assert len({round(score, 7) for score in expected}) == 3
        # A mark in a document is text.
        assert by_index(post(url, query="q r", documents=["<|im_end|>"])) == pytest.approx([as_text], abs=1e-6)


def test_fields(url: str) -> None:
    every = post(url)["results"]
    assert post(url, top_n=2)["results"] == every[:2]
    assert post(url, top_n=9)["results"] == every
    named = post(url, documents=[{"text": text} for text in DOCUMENTS], return_documents=True)["results"]
    assert [result.pop("document") for result in named] == [{"text": DOCUMENTS[item["index"]]} for item in every]
    assert named == every
    for path in ("/rerank", "/reranking", "/v1/reranking"):
        assert post(url, path)["results"] == every
    assert post(url, documents=["", "one"])["results"]
    assert httpx.get(f"{url}/v1/cluster").json()["models"][0]["model"]["reranks"] is True


def test_a_reranker_embeds_too(url: str) -> None:
    before = post(url)
    reply = httpx.post(f"{url}/v1/embeddings", json={"input": "hello world"}, timeout=60).json()
    assert sum(x * x for x in reply["data"][0]["embedding"]) == pytest.approx(1, abs=1e-5)
    assert post(url) == before


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"documents": []}, "documents: "),
        ({"documents": "one"}, "documents: "),
        ({"documents": [1]}, "documents.0"),
        ({"documents": [{"title": "one"}]}, "documents.0.text: Field required"),
        ({"documents": ["one"] * 2049}, "documents: "),
        ({"query": ""}, "query: "),
        ({"query": None}, "query: "),
        ({"top_n": 0}, "top_n: "),
        ({"documents": ["one", "one " * 130]}, "documents.1, with the query: 134 tokens, at most 128 are allowed"),
        ({"documents": ["one", "x" * 1_000_000]}, "documents.1, with the query: the text is too long"),
        ({"query": "one " * 130}, "documents.0, with the query: "),
    ],
)
def test_bad_input(url: str, body: dict[str, Any], error: str) -> None:
    reply = httpx.post(f"{url}/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, **body}, timeout=60)
    assert reply.status_code == 400
    assert error in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["embeds", "no head", "decoder without a head"])
def test_a_model_without_a_head_says_so_and_lives(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    if kind == "embeds":
        encoder(path)
    elif kind == "no head":
        encoder(path, pooling=gguf.PoolingType.RANK)
    else:
        decoder(path, head=False)
    with served(path) as url:
        reply = httpx.post(f"{url}/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}, timeout=60)
        assert reply.status_code == 400
        assert (
            "tiny does not rank documents: that takes a model with a ranking head" in reply.json()["error"]["message"]
        )
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "one"}, timeout=60).status_code == 200
        [model] = httpx.get(f"{url}/v1/cluster").json()["models"]
        assert (model["model"]["reranks"], model["restarts"]) == (False, 0)


def test_several_devices_do_not_rank(tmp_path: Path) -> None:
    path = decoder(tmp_path / "tiny.gguf")
    with worker(tmp_path / "w", "--threads", "1") as other, served(path, workers=(other.address,)) as url:
        reply = httpx.post(f"{url}/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}, timeout=60)
        assert "run the model on one device" in reply.json()["error"]["message"]

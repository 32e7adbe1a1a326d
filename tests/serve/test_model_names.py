"""Test model names in requests: spellings of a served name, the only model of a server, and unknown names."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.api.config import EngineConfig
from edge.errors import UnknownModel
from edge.serve.app import create_app
from edge.serve.model_names import matching
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from edge.serve.served import ServedModel
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

HUB = "bartowski/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf"
TWO = {"Qwen3-4B": EngineConfig("a.gguf"), "qwen2.5-coder": EngineConfig("b.gguf"), HUB: EngineConfig("c.gguf")}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


class OneModel(ScriptedModels):
    """One scripted model, whose name in requests is read as the product reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._router = Router({self.scripted.name: EngineConfig("none")})

    def resolve(self, name: str | None) -> str:
        return self._router.resolve(name)

    async def model(self, name: str | None) -> ServedModel:
        return await super().model(self.resolve(name))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(OneModel(), ServeOptions())) as address:
        yield address


@pytest.mark.parametrize(
    ("request_name", "served"),
    [
        (None, "Qwen3-4B"),
        ("", "Qwen3-4B"),
        (" \n", "Qwen3-4B"),
        (":latest", "Qwen3-4B"),
        ("Qwen3-4B", "Qwen3-4B"),
        ("qwen3-4b", "Qwen3-4B"),
        (" QWEN3-4B ", "Qwen3-4B"),
        ("Qwen3-4B.gguf", "Qwen3-4B"),
        ("qwen3-4b.GGUF:latest", "Qwen3-4B"),
        ("openai/qwen2.5-coder", "qwen2.5-coder"),
        ("litellm/openai/Qwen2.5-Coder", "qwen2.5-coder"),
        ("/models/qwen2.5-coder.gguf", "qwen2.5-coder"),
        ("C:\\models\\qwen2.5-coder.gguf", "qwen2.5-coder"),
        ("someone/Coder-GGUF:qwen2.5-coder.gguf", "qwen2.5-coder"),
        (f"hf.co/{HUB}", HUB),
        ("https://huggingface.co/bartowski/Qwen3-4B-GGUF", HUB),
        ("https:/huggingface.co/bartowski/Qwen3-4B-GGUF/resolve/main/Qwen3-4B-Q4_K_M.gguf", HUB),
        ("Qwen3-4B-Q4_K_M", HUB),
    ],
)
def test_spelling_of_a_served_name_stands_for_its_model(request_name: str | None, served: str) -> None:
    assert Router(TWO).resolve(request_name) == served


@pytest.mark.parametrize("n_characters", [499, 500, 501])
def test_names_of_up_to_500_characters_are_looked_at_closely(n_characters: int) -> None:
    served = "m" * n_characters
    assert matching(served, [served]) == [served]
    assert matching(served.upper(), [served]) == ([served] if n_characters <= 500 else [])


@pytest.mark.parametrize(
    "request_name", ["gpt-4o", "Qwen3", "4B", "qwen3-4b:7b", "a" * 1_000_000, "/" * 900 + "x", "a/" * 300]
)
def test_unknown_name_among_several_models_lists_the_names(request_name: str) -> None:
    with pytest.raises(UnknownModel, match=r"there is no model .* here; there are Qwen3-4B, qwen2\.5-coder") as refusal:
        Router(TWO).resolve(request_name)
    assert len(str(refusal.value)) < 500


def test_names_that_differ_in_case_stand_for_themselves_and_another_case_for_neither() -> None:
    router = Router({"Demo": EngineConfig("a"), "demo": EngineConfig("b")})
    for request_name in ("Demo", "demo", "Demo.gguf", "demo:latest", "openai/Demo"):
        assert router.resolve(request_name) == ("Demo" if "Demo" in request_name else "demo")
    with pytest.raises(UnknownModel, match="several models; write one of Demo, demo"):
        router.resolve("DEMO")


def test_server_that_is_to_fetch_models_does_not_answer_for_one_that_it_lacks() -> None:
    with pytest.raises(UnknownModel):
        Router({"demo": EngineConfig("a")}, any_name=False).resolve("llama3")


@given(st.text(max_size=40), st.sets(st.text("aAb:/. ", min_size=1, max_size=6), min_size=1, max_size=5))
def test_served_name_always_stands_for_itself_alone(request_name: str, names: set[str]) -> None:
    for name in names:
        assert matching(name, names) == [name]
    assert set(matching(request_name, names)) <= names


@pytest.mark.parametrize(
    "name", ["", "gpt-4o", "SCRIPTED", "scripted.gguf", "scripted:latest", "anthropic/claude", None]
)
def test_only_model_answers_under_any_name_and_says_its_own(url: str, name: str | None) -> None:
    paths = {
        "/v1/chat/completions": ASK,
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": ASK,
        "/v1/embeddings": {"input": "Hi"},
        "/v1/rerank": {"query": "Hi", "documents": ["a"]},
        "/completion": {"prompt": "Hi"},
        "/api/chat": {**ASK, "stream": False},
        "/api/generate": {"prompt": "Hi", "stream": False},
        "/api/embed": {"input": "Hi"},
    }
    for path, body in paths.items():
        response = httpx.post(url + path, json={**body, "model": name})
        assert (response.status_code, response.json()["model"]) == (200, "scripted"), path
    for path in ("/tokenize", "/apply-template", "/v1/messages/count_tokens"):
        body = {**ASK, "content": "Hi", "model": name}
        assert httpx.post(url + path, json=body).status_code == 200, path
    assert httpx.post(url + "/api/show", json={"model": name or "any"}).status_code == 200
    if name:
        assert httpx.get(f"{url}/v1/models/{name}").json()["id"] == "scripted"
        assert httpx.get(f"{url}/props", params={"model": name}).json()["model_alias"] == "scripted"


def test_stream_says_the_served_name(url: str) -> None:
    with httpx.stream("POST", url + "/v1/chat/completions", json={**ASK, "model": "gpt-4o", "stream": True}) as stream:
        assert '"model":"scripted"' in stream.read().decode()

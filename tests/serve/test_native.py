"""Test the paths and forms of llama.cpp's server, as its clients use them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edge.serve.apis import native
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.serve.scripted import Scripted, ScriptedModels
from tests.serve.serving import events_of, serving

KEY = "sk-key"


@pytest.fixture(scope="module")
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture(scope="module")
def url(models: ScriptedModels) -> Iterator[str]:
    with serving(create_app(models, ServeOptions())) as address:
        yield address


@pytest.fixture
def model(models: ScriptedModels) -> Scripted:
    models.scripted = Scripted()
    return models.scripted


def post(url: str, path: str = "/completion", **body: Any) -> Any:
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_completion(url: str, model: Scripted) -> None:
    reply = post(url, prompt="Hi", n_predict=5)
    assert (reply["content"], reply["stop"], reply["stop_type"], reply["model"]) == (
        "Hello",
        True,
        "limit",
        "scripted",
    )
    assert (reply["tokens_predicted"], reply["tokens_evaluated"], reply["tokens_cached"]) == (5, 7, 3)
    assert reply["tokens"] == []
    assert "completion_probabilities" not in reply
    assert post(url, "/completions", prompt="Hi")["stop_type"] == "eos"
    model.stop_string = "."
    stopped = post(url, prompt="Hi")
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", ".")


def test_what_is_left_out_is_as_llama_server_has_it(url: str, model: Scripted) -> None:
    post(url, prompt="Hi", seed=-1, n_predict=-1)
    post(url, prompt="Hi", temperature=0, top_k=1, seed=5, max_tokens=3, logit_bias=[[5, False], [6, -1.5]])
    usual, request = model.requests
    assert usual.sampling == {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
    assert (usual.max_tokens, usual.logprobs, usual.prompt) == (None, None, "Hi")
    assert request.sampling == {
        "temperature": 0, "top_p": 0.95, "top_k": 1, "min_p": 0.05, "seed": 5, "logit_bias": {5: -1e6, 6: -1.5},
    }  # fmt: skip
    assert request.max_tokens == 3
    post(url, prompt="Hi", seed=2**32 - 1)
    assert "seed" not in model.requests[-1].sampling
    post(url, prompt="Hi", json_schema={"type": "object"})
    assert model.requests[-1].sampling["json_schema"] == '{"type": "object"}'


def test_a_stream_ends_with_what_the_response_tells(url: str, model: Scripted) -> None:
    reply = httpx.post(f"{url}/completion", json={"prompt": "Hi", "stream": True, "n_predict": 3}, timeout=60).text
    assert "[DONE]" not in reply
    assert "event:" not in reply
    *pieces, last = events_of(reply)
    assert [(piece["content"], piece["stop"]) for piece in pieces] == [("H", False), ("e", False), ("l", False)]
    assert (last["content"], last["stop"], last["tokens_predicted"]) == ("", True, 3)


def test_probabilities_and_tokens(url: str, model: Scripted) -> None:
    reply = post(url, prompt="Hi", n_predict=2, n_probs=1)
    assert reply["tokens"] == [72, 101]
    first = reply["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (72, "H", [72], -0.5)
    assert first["top_logprobs"] == [{"id": 1, "token": "\ufffd", "bytes": [255], "logprob": -9999.0}]
    reply = post(url, prompt="Hi", n_predict=2, return_tokens=True)
    assert (reply["tokens"], "completion_probabilities" in reply) == ([72, 101], False)


def test_several_prompts_are_a_list(url: str, model: Scripted) -> None:
    reply = post(url, prompt=["a", "b"], n_predict=1, n_cmpl=2)
    assert [(item["index"], item["content"]) for item in reply] == [(0, "H"), (1, "H"), (2, "H"), (3, "H")]
    assert [item.prompt for item in model.requests] == ["a", "a", "b", "b"]


def test_timings_are_of_the_request(url: str, model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(10.0, 2.0)  # the request comes, its first token, its end: two seconds each
    monkeypatch.setattr(native, "_clock", lambda: next(ticks))
    timings = post(url, prompt="Hi", n_predict=5)["timings"]
    assert timings == {
        "cache_n": 3, "prompt_n": 4, "prompt_ms": 2000, "prompt_per_token_ms": 500, "prompt_per_second": 2,
        "predicted_n": 5, "predicted_ms": 2000, "predicted_per_token_ms": 400, "predicted_per_second": 2.5,
    }  # fmt: skip


def test_embeddings(url: str, model: Scripted) -> None:
    usual = [{"index": 0, "embedding": [[0.6, 0.8]]}, {"index": 1, "embedding": [[0.6, 0.8]]}]
    assert post(url, "/embedding", content=["a", "b"]) == usual
    assert post(url, "/embeddings", input=["a", "b"]) == usual


def test_paths_without_a_version(url: str, model: Scripted) -> None:
    ask = {"messages": [{"role": "user", "content": "Hi"}]}
    assert post(url, "/chat/completions", **ask)["choices"][0]["message"]["content"] == model.says
    assert post(url, "/responses", input="Hi")["object"] == "response"
    assert httpx.get(f"{url}/models").json() == httpx.get(f"{url}/v1/models").json()
    assert httpx.get(f"{url}/v1/health").json() == httpx.get(f"{url}/health").json()
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert {"/completion", "/completions", "/chat/completions", "/models", "/embedding", "/v1/health"} <= set(paths)


def test_they_need_the_key_that_the_others_need() -> None:
    with serving(create_app(ScriptedModels(), ServeOptions(api_keys=(KEY,)))) as url:
        for path in ("/completion", "/completions", "/chat/completions", "/responses", "/embedding", "/embeddings"):
            assert httpx.post(url + path, json={}).status_code == 401, path
            assert httpx.post(url + path, json={}, headers={"x-api-key": KEY}).status_code == 400, path
        assert httpx.get(f"{url}/models").status_code == 401
        assert httpx.get(f"{url}/v1/health").status_code == 200


def test_an_answer_of_the_engine(server: str) -> None:
    request = {"prompt": "One kilobyte", "n_predict": 4, "temperature": 0, "n_probs": 2}
    reply = post(server, **request)
    assert reply["content"] == "".join(item["token"] for item in reply["completion_probabilities"])
    tokens = post(server, "/tokenize", content="One kilobyte", add_special=True)["tokens"]
    assert post(server, **{**request, "prompt": tokens})["content"] == reply["content"]
    forbidden = post(server, **request, logit_bias=[[reply["tokens"][0], False]])
    assert forbidden["tokens"][0] != reply["tokens"][0]


def test_what_is_told_back_is_short(url: str, model: Scripted) -> None:
    """Fields that nobody knows, and long ones, would come back with each answer."""
    reply = post(url, "/completion", prompt="Hi", temperature=0.5, junk="x" * 999, grammar='root ::= "a"')
    settings = reply["generation_settings"]
    assert settings["temperature"] == 0.5
    assert not {"junk", "grammar", "prompt"} & settings.keys()

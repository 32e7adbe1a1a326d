"""Test LoRA adapters over HTTP: selected by id, by model name, and as a default that changes without a reload."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

import edge
from edge.api.config import EngineConfig
from edge.errors import EngineError
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router, _needs_room
from edge.weights.adapter import Scales
from tests.serve.serving import events_of, serving
from tests.support.adapters import write_adapter

PROMPT = "What is 27 plus 38?"
SETS: tuple[Scales, ...] = ((), (1.0, 0.0), (0.0, 0.5), (0.5, 0.5))
N_TOKENS = 6


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("a")
    files = [
        write_adapter(folder / f"{name}.gguf", MODEL_PATH, seed=i, size=0.3) for i, name in enumerate(("up", "down"))
    ]
    return [f"{files[0]}:0", f"{files[1]}:0.5"]


@pytest.fixture(scope="module")
def answers(lora: list[str]) -> dict[Scales, str]:
    """The answer that each set gives to the prompt on this device."""
    with edge.load(threads=1, sequences=4, lora=lora) as model:
        texts = {}
        for scales in SETS:
            named = dict(zip(("up", "down"), scales, strict=False))
            answer = model.generate(PROMPT, edge.SamplingParams(temperature=0), max_tokens=N_TOKENS, adapters=named)
            texts[scales] = "".join(response.text for response in answer)
    assert len(set(texts.values())) == len(SETS)
    return texts


@pytest.fixture(scope="module")
def url(lora: list[str]) -> Iterator[str]:
    options = EngineOptions(threads=1, sequences=4, lora=lora)
    router = Router({"demo": EngineConfig(str(MODEL_PATH), options, prefix_cache=0)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


def ask(url: str, path: str = "/completion", **how: Any) -> Any:
    limit = "n_predict" if path == "/completion" else "max_tokens"
    body = {"prompt": PROMPT, "temperature": 0, limit: N_TOKENS, "allow_repetition": True, **how}
    response = httpx.post(url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_request_has_its_own(url: str, answers: dict[Scales, str]) -> None:
    for scales in (*SETS, *SETS):
        lora = [{"id": i, "scale": scale} for i, scale in enumerate(scales) if scale]
        assert ask(url, lora=lora)["content"] == answers[scales], scales


def test_an_adapter_is_a_model(url: str, answers: dict[Scales, str]) -> None:
    """With its scale of the command line, or 1 where that is 0; the model itself has the default."""
    for name, scales in (("up", SETS[1]), ("down", SETS[2]), ("demo", SETS[2]), (None, SETS[2])):
        answer = ask(url, "/v1/completions", model=name)
        assert answer["choices"][0]["text"] == answers[scales], name
        assert answer["model"] == (name or "demo")
    listed = {model["id"]: model for model in httpx.get(f"{url}/v1/models").json()["data"]}
    assert list(listed) == ["demo", "up", "down"]
    assert [httpx.get(f"{url}/v1/models").json()[key] for key in ("first_id", "last_id")] == ["demo", "down"]
    assert (listed["up"]["parent"], Path(listed["up"]["root"]).name) == ("demo", "up.gguf")
    assert "parent" not in listed["demo"]
    assert httpx.get(f"{url}/v1/models/down").json() == listed["down"]
    response = httpx.get(f"{url}/v1/models/sideways")
    assert response.status_code == 404
    assert "there are demo, up, down" in response.text
    assert httpx.post(f"{url}/tokenize", json={"content": "Hi", "model": "up"}).json()["tokens"]


def test_chats_have_them_too(url: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    plain, changed = (
        httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": messages, "temperature": 0, "max_tokens": 8, "model": name, "stream": True},
            timeout=120,
        )
        for name in ("demo", "up")
    )
    texts = [
        "".join(event["choices"][0]["delta"].get("content") or "" for event in events_of(item.text) if event["choices"])
        for item in (plain, changed)
    ]
    assert texts[0] != texts[1]


def test_the_default_changes_without_a_reload(url: str, answers: dict[Scales, str]) -> None:
    before = httpx.get(f"{url}/lora-adapters").json()
    assert [(item["id"], Path(item["path"]).name, item["scale"]) for item in before] == [
        (0, "up.gguf", 0.0),
        (1, "down.gguf", 0.5),
    ]
    for scales in ((1.0, 0.0), (), (0.5, 0.5), (0.0, 0.5)):
        new = [{"id": i, "scale": scale} for i, scale in enumerate(scales) if scale]
        assert httpx.post(f"{url}/lora-adapters", json=new).json() == {"success": True}
        assert ask(url)["content"] == answers[scales]
        assert [item["scale"] for item in httpx.get(f"{url}/lora-adapters").json()] == list(scales or (0.0, 0.0))
    assert ask(url, lora=[])["content"] == answers[()]
    [status] = httpx.get(f"{url}/v1/cluster").json()["models"]
    assert status["restarts"] == 0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"lora": [{"id": 2, "scale": 1.0}]}, "there is no adapter 2; ids are from 0 to 1"),
        ({"lora": [{"id": 0, "scale": 1.0}], "model": "up"}, "lora and the model 'up' both select adapters"),
        ({"lora": [], "model": "up"}, "lora and the model 'up' both select adapters"),
        ({"lora": [{"id": -1, "scale": 1.0}]}, "greater than or equal to 0"),
        ({"lora": [{"id": 0, "scale": 1e9}]}, "less than or equal to 1000000"),
        ({"lora": [{"id": 0}]}, "scale"),
        ({"lora": {"up": 1.0}}, "valid array"),
        ({"model": "sideways"}, "there is no model 'sideways' here; there are demo, up, down"),
    ],
)
def test_what_is_refused(url: str, how: dict[str, Any], words: str) -> None:
    response = httpx.post(f"{url}/completion", json={"prompt": PROMPT, "n_predict": 1, **how}, timeout=60)
    assert response.status_code in (400, 404, 422)
    assert words in response.text
    if "lora" in how and "model" not in how:
        response = httpx.post(f"{url}/lora-adapters", json=how["lora"])
        assert response.status_code in (400, 422)
        assert words in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/embedding", {"content": "Hi", "model": "up"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
    ],
)
def test_vectors_are_of_models_alone(url: str, path: str, body: dict[str, Any]) -> None:
    """They are computed without adapters."""
    response = httpx.post(url + path, json={"model": "up", **body}, timeout=60)
    assert response.status_code == 400
    assert "'up' is an adapter, which this endpoint does not support; name a model" in response.text


def test_adapters_count_in_the_room_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are unloaded for all that it takes."""
    (tmp_path / "large.gguf").write_bytes(bytes(1 << 22))
    router = Router({"demo": EngineConfig(str(MODEL_PATH), EngineOptions(lora=[str(tmp_path / "large.gguf")]))})
    for more in (1, -1):
        need = 1.2 * (MODEL_PATH.stat().st_size + (1 << 22)) + more
        monkeypatch.setattr(psutil, "virtual_memory", lambda need=need: SimpleNamespace(available=need))
        assert _needs_room(router.configs["demo"], router.adapters("demo"), router.memory) == (more < 0)


def test_a_name_means_one_model_or_adapter(lora: list[str], tmp_path: Path) -> None:
    config = EngineConfig(str(MODEL_PATH), EngineOptions(lora=[str(tmp_path / "demo.gguf")]))
    with pytest.raises(EngineError, match="'demo' is the name of two adapters or models"):
        Router({"demo": config})


def test_a_model_without_any() -> None:
    router = Router({"demo": EngineConfig(str(MODEL_PATH), EngineOptions(threads=1), prefix_cache=0)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as url:
        assert httpx.get(f"{url}/lora-adapters").json() == []
        assert httpx.post(f"{url}/lora-adapters", json=[]).json() == {"success": True}
        response = httpx.post(f"{url}/completion", json={"prompt": PROMPT, "lora": [{"id": 0, "scale": 1.0}]})
        assert response.status_code == 400
        assert "this model has none: serve with --lora" in response.text

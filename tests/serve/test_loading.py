"""Test loading and unloading models by request, and the list of downloads."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from edge.api.config import EngineConfig
from edge.errors import HubError
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.models.wheels import Progress
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving

WAIT_S = 120.0
CONFIG = EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=1), prefix_cache=0)


@contextmanager
def client_of(**router: Any) -> Iterator[httpx.Client]:
    models = Router({"demo": CONFIG}, **router)
    with (
        serving(create_app(models, ServeOptions()), at_end=models.close) as address,
        httpx.Client(base_url=address, timeout=WAIT_S) as client,
    ):
        yield client


def state(client: httpx.Client) -> str:
    return str(client.get("/v1/models").json()["data"][0]["status"]["value"])


def test_models_are_loaded_and_unloaded_unless_they_are_in_use() -> None:
    with client_of() as client:
        assert state(client) == "unloaded"
        for path in ("/v1/models/load", "/models/load"):
            assert client.post(path, json={"model": "demo"}).json() == {"success": True, "model": "demo"}
            assert state(client) == "loaded"
        request = {"messages": [{"role": "user", "content": "Count."}], "stream": True, "max_tokens": 2000}
        with client.stream("POST", "/v1/chat/completions", json={**request, "ignore_eos": True}) as answer:
            next(answer.iter_lines())
            refused = client.post("/v1/models/unload", json={"model": "demo"})
            assert (refused.status_code, state(client)) == (429, "loaded")
            assert "answers a request" in refused.json()["error"]["message"]
        for path in ("/v1/models/unload", "/models/unload"):  # the second time it is not there
            while client.post(path, json={"model": "demo"}).status_code == 429:  # the answer is just ending
                pass
            assert state(client) == "unloaded"


def test_downloads_are_listed_and_cancelled_and_the_next_one_goes_on() -> None:
    may_end, begun = threading.Event(), threading.Event()

    def fetch(name: str, progress: Progress) -> EngineConfig:
        if name == "gone":
            raise HubError("there is none")
        while not may_end.wait(0.01):
            progress(5, 20)
            begun.set()
        return CONFIG

    with client_of(fetch=fetch) as client:
        name = "owner/name:<b>file.gguf"
        with client.stream("POST", "/api/pull", json={"model": name}) as first:
            lines = first.iter_lines()
            next(lines)
            assert begun.wait(WAIT_S)
            pulls = client.get("/v1/pulls").json()
            assert pulls == {
                "object": "list", "allowed": True, "data": [{"model": name, "completed": 5, "total": 20}],
            }  # fmt: skip
            with client.stream("POST", "/api/pull", json={"model": name}) as second:  # waits for the same download
                own = second.iter_lines()
                shown = [json.loads(next(own)) for _ in range(2)]
                assert (shown[1]["completed"], shown[1]["total"]) == (5, 20)
                assert client.delete(f"/v1/pulls/{name}").json() == {"model": name, "cancelled": True}
                for ended in (lines, own):
                    assert "was cancelled" in json.loads(list(ended)[-1])["error"]
        assert client.get("/v1/pulls").json()["data"] == []
        assert client.delete(f"/v1/pulls/{name}").status_code == 404
        may_end.set()
        assert client.post("/api/pull", json={"model": name, "stream": False}).json() == {"status": "success"}
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["demo", name]
        assert client.post("/api/pull", json={"model": "gone", "stream": False}).status_code == 404


def test_server_without_downloads_says_so() -> None:
    with client_of() as client:
        assert client.get("/v1/pulls").json() == {"object": "list", "allowed": False, "data": []}
        assert "--allow-pull" in client.post("/api/pull", json={"model": "x", "stream": False}).json()["error"]

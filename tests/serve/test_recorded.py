"""Test recorded requests of real clients (`make clients ARGS="--record FOLDER"`): each is answered, whole and streamed.

In `recorded` personal details are replaced, and long texts are cut in their middle; no field is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support.script_model import script_model

RECORDED = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "recorded").glob("*.json"))
}
SEEN = '{"title": "I saw it"}'  # what the model says if the last message of the prompt has the mark
MARK = " [seen]"
WITHOUT_ANSWER = "/v1/messages/count_tokens"
WITHOUT_TEMPLATE = "/v1/completions"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = script_model(tmp_path_factory.mktemp("models") / "script.gguf", {"seen": SEEN}, context=1 << 16)
    options = EngineOptions(threads=1, sequences=2, context=1 << 16)
    router = Router({"script": EngineConfig(str(path), options, prefix_cache=0)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as url:
        yield url


def marked(body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a request, with a mark behind the last text of its last message."""
    body = json.loads(json.dumps(body))
    key = next(key for key in ("messages", "input", "prompt") if key in body)
    if isinstance(body[key], str):
        body[key] += MARK
        return body
    place = body[key][-1]
    name = "output" if "output" in place else "content"
    while not isinstance(place[name], str):
        place = [part for part in place[name] if {"text", "content"} & part.keys()][-1]
        name = "text" if "text" in place else "content"
    place[name] += MARK
    return body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request_is_answered_and_its_last_text_is_in_the_prompt(
    address: str, name: str, stream: bool
) -> None:
    request = RECORDED[name]
    body = {**marked(request["body"]), "stream": stream}
    if not stream:
        body.pop("stream_options", None)  # a client that does not stream sends none
    reply = httpx.request(
        request["method"], address + request["path"], headers=request["headers"], json=body, timeout=120
    )
    assert reply.status_code == 200, reply.text
    assert '"error":{' not in reply.text.replace(" ", "")  # nor does a stream fail midway
    if WITHOUT_ANSWER in request["path"]:
        assert reply.json()["input_tokens"] > 100  # of its tools
    elif isinstance(choice := request["body"].get("tool_choice"), dict):  # a call that must be made
        assert choice["function"]["name"] in reply.text
    elif request["path"] != WITHOUT_TEMPLATE:
        assert "I saw it" in reply.text


def test_requests_of_ten_clients_and_of_each_api_are_recorded() -> None:
    clients = {request["client"].split()[0] for request in RECORDED.values()}
    assert len(clients) >= 10, clients
    paths = {request["path"].partition("?")[0] for request in RECORDED.values()}
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_small_and_name_nobody(name: str) -> None:
    path = Path(__file__).parent / "recorded" / f"{name}.json"
    assert path.stat().st_size < 60_000
    assert not any(word in path.read_text() for word in ("/root", "/work/", "/tmp/"))

"""Pictures and sounds in requests, by the official clients: synthetic models and projectors behind a real server."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig, MediaUrls
from edge.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support import projectors
from tests.support.multimodal import png, wav

OPTIONS = {"threads": 1, "sequences": 2, "context": 1024}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
CHAT = "/v1/chat/completions"
URLS: dict[str, MediaUrls] = {"non_causal": "all", "audio": "public"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    configs = {"blind": EngineConfig(str(MODEL_PATH), OPTIONS, prefix_cache=0)}
    for kind in ("mrope", "audio", "non_causal"):
        text, projector = projectors.write(kind, folder)
        configs[kind] = EngineConfig(
            str(text), OPTIONS, prefix_cache=0, mmproj=str(projector), media_urls=URLS.get(kind, "")
        )
    router = Router(configs)
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text(data)}", "detail": "high"}}


def ask(server: str, *parts: dict[str, Any], model: str = "mrope", **more: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], **GREEDY, **more}
    return httpx.post(server + CHAT, json=body, timeout=120)


def test_a_picture_in_each_api_is_the_same_prompt(server: str) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    data = png()
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as openai:
        content: Any = [picture(data), {"type": "text", "text": "What is it?"}]
        chat = openai.chat.completions.create(
            model="mrope", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=4
        )
        url = f"data:image/png;base64,{text(data)}"
        items: Any = [{"role": "user", "content": [
            {"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]}]  # fmt: skip
        response = openai.responses.create(model="mrope", input=items, temperature=0, max_output_tokens=4)
    with Anthropic(base_url=server, api_key="none", max_retries=0) as anthropic:
        source: Any = {"type": "base64", "media_type": "image/png", "data": text(data)}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        message = anthropic.messages.create(
            model="mrope",
            messages=[{"role": "user", "content": blocks}],
            max_tokens=4,
            extra_body={"temperature": 0},
        )
    assert chat.usage is not None
    assert response.usage is not None
    answer = chat.choices[0].message.content
    assert answer == response.output_text == getattr(message.content[0], "text", None)
    assert chat.usage.prompt_tokens == response.usage.input_tokens
    without = ask(server).json()["usage"]["prompt_tokens"]
    assert chat.usage.prompt_tokens > without + 12  # rows of the picture, and the tokens around it


def test_a_picture_is_computed_once_and_told_from_others(server: str) -> None:
    first, again, other = (ask(server, picture(png(seed))).json() for seed in (7, 7, 8))
    details = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, again, other)]
    assert details[1] == first["usage"]["prompt_tokens"] - 1
    assert details[2] < details[1] - 12
    assert again["choices"] == first["choices"]


def test_a_sound(server: str) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": text(wav()), "format": "wav"}}
    assert ask(server, sound, model="audio").json()["usage"]["prompt_tokens"] > 375
    assert "takes no sounds" in ask(server, sound).json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (picture(b"no picture"), "damaged"),
        (picture(png()[:99]), "damaged"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is no picture"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is no picture"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "fetches nothing"),
        ({"type": "image_url"}, "needs image_url"),
        ({"type": "video_url"}, "is not taken"),
    ],
)
def test_what_is_no_picture_is_an_error_of_the_request(server: str, part: dict[str, Any], words: str) -> None:
    reply = ask(server, part)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_tokens_of_pictures_are_not_counted_before_they_are_encoded(server: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": text(png())}
    body = {"model": "mrope", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    reply = httpx.post(f"{server}/v1/messages/count_tokens", json=body, timeout=60)
    assert (reply.status_code, "once it is encoded" in reply.json()["error"]["message"]) == (400, True)


def test_a_model_without_a_projector_says_so(server: str) -> None:
    reply = ask(server, picture(png()), model="blind")
    assert reply.status_code == 400
    assert "--mmproj" in reply.json()["error"]["message"]


def test_a_url_is_fetched_where_that_is_allowed(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{files.server_port}"
            fetched, lost = (
                ask(server, {"type": "image_url", "image_url": {"url": f"{url}/{name}.png"}}, model="non_causal")
                for name in ("a", "b")
            )
        finally:
            files.shutdown()
            thread.join()
    assert fetched.json()["choices"] == ask(server, picture(png()), model="non_causal").json()["choices"]
    assert (lost.status_code, "cannot be fetched" in lost.json()["error"]["message"]) == (400, True)

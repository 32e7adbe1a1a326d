"""Test pictures and sounds in requests of the official clients: synthetic models on a real server."""

from __future__ import annotations

import base64
import http.server
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig, MediaUrls
from edge.errors import MediaError
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.engine import downloads
from edge.serve.engine.downloads import Downloads, is_public
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support import projectors
from tests.support.helpers import TIMEOUT_S, edge_here
from tests.support.multimodal import png, wav

OPTIONS = EngineOptions(threads=1, sequences=2, context=1024)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
CHAT = "/v1/chat/completions"
HELD, LET_GO = threading.Event(), threading.Event()  # a request for /held has come; it may be answered
HELD_EACH, LET_ALL_GO = threading.Semaphore(0), threading.Event()  # the same of /each, for each
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
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is not a picture"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is not a picture"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "fetching from URLs is off"),
        ({"type": "image_url"}, "needs image_url"),
        ({"type": "video_url"}, "is not supported"),
    ],
)
def test_what_is_no_picture_is_an_error_of_the_request(server: str, part: dict[str, Any], words: str) -> None:
    reply = ask(server, part)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_base64_may_be_in_lines_and_a_url_in_capitals(server: str) -> None:
    url = "DATA:image/png;name=a.png;BASE64," + base64.encodebytes(png()).decode()
    assert ask(server, at(url)).json()["choices"] == ask(server, picture(png())).json()["choices"]


def test_tokens_of_pictures_are_not_counted_before_they_are_encoded(server: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": text(png())}
    body = {"model": "mrope", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    reply = httpx.post(f"{server}/v1/messages/count_tokens", json=body, timeout=60)
    assert (reply.status_code, "until they are encoded" in reply.json()["error"]["message"]) == (400, True)


def test_a_model_without_a_projector_says_so(server: str) -> None:
    reply = ask(server, picture(png()), model="blind")
    assert reply.status_code == 400
    assert "--mmproj" in reply.json()["error"]["message"]


def turns_with(content: Any) -> Iterator[list[dict[str, Any]]]:
    """Conversations with this content in a tool's result, and in an earlier question."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    yield [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": content}]
    answer = {"role": "assistant", "content": "A cat."}
    yield [{"role": "user", "content": content}, answer, {"role": "user", "content": "Sure?"}]


def test_a_picture_that_is_not_in_the_question_becomes_a_line_without_a_projector(server: str) -> None:
    def n_tokens(messages: list[dict[str, Any]]) -> int:
        body = {"model": "blind", "messages": messages, **GREEDY}
        reply = httpx.post(server + CHAT, json=body, timeout=120).json()
        prompt = httpx.post(f"{server}/apply-template", json=body, timeout=120).json()["prompt"]
        assert "[a picture that this model cannot see]" in prompt
        return int(reply["usage"]["prompt_tokens"])

    for own, same in zip(
        turns_with([picture(png()), {"type": "text", "text": "Look."}]),
        turns_with("[a picture that this model cannot see]Look."),
        strict=True,
    ):
        assert n_tokens(own) == n_tokens(same)
    assert ask(server, picture(png()), model="blind").status_code == 400


@pytest.mark.parametrize("url", ["data:image/png;base64,bm8gcGljdHVyZQ==", "http://127.0.0.1:1/a.png", "nothing"])
def test_a_damaged_picture_that_is_not_in_the_question_becomes_a_line(server: str, url: str) -> None:
    for messages, fewer in zip(turns_with([at(url), picture(png())]), turns_with([picture(png())]), strict=True):
        body = {"model": "mrope", "messages": messages, **GREEDY}
        reply = httpx.post(server + CHAT, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        rest = httpx.post(server + CHAT, json={**body, "messages": fewer}, timeout=120).json()["usage"]["prompt_tokens"]
        assert rest < reply.json()["usage"]["prompt_tokens"] < rest + 60  # the line, and the picture behind it
    assert ask(server, at(url)).status_code == 400


def test_pictures_by_the_client_of_ollama(server: str) -> None:
    from ollama import Client, ResponseError

    options = {"temperature": 0, "num_predict": 4}
    with Client(server, timeout=120) as ollama:
        question: Any = [{"role": "user", "content": "What is it?", "images": [png()]}]
        chat = ollama.chat("mrope", question, options=options)
        [*_, streamed] = ollama.chat("mrope", question, options=options, stream=True)
        generated = ollama.generate("mrope", "What is it?", images=[png()], options=options)
        expected = ask(server, picture(png())).json()
        assert chat.message.content == generated.response == expected["choices"][0]["message"]["content"]
        counts = [reply.prompt_eval_count for reply in (chat, streamed, generated)]
        assert counts == 3 * [expected["usage"]["prompt_tokens"]]
        two = ollama.generate("mrope", "What is it?", images=[png(), png(2)], options=options)
        assert two.prompt_eval_count > counts[0] + 12
        for model, words, more in (
            ("mrope", "damaged", {"images": [b"nothing"]}),
            ("mrope", "not possible with raw or suffix", {"images": [png()], "raw": True}),
            ("blind", "--mmproj", {"images": [png()]}),
        ):
            with pytest.raises(ResponseError, match=words) as error:
                ollama.generate(model, "What is it?", **more)
            assert error.value.status_code == 400
        able = {
            name: set(ollama.show(name).capabilities or ()) & {"vision", "audio"}
            for name in ("blind", "mrope", "audio")
        }
        assert able == {"blind": set(), "mrope": {"vision"}, "audio": {"audio"}}


def test_pictures_of_more_tokens_than_a_prompt_may_have_are_not_all_encoded(server: str) -> None:
    reply = ask(server, *(picture(png(seed)) for seed in range(100, 140)))
    assert reply.status_code == 400
    assert re.search(r"^1\d of 40 pictures and sounds have \d+ tokens already", reply.json()["error"]["message"])


def test_edge_chat_sends_pictures_to_a_server(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.wav").write_bytes(wav())
    question = ("-p", "What is it?", "--temperature", "0", "--max-tokens", "4")
    for file, model in (("a.png", "mrope"), ("a.wav", "audio")):
        counts = [
            json.loads(edge_here("chat", model, "--url", server, *question, *more, "--json").stdout)["usage"][
                "prompt_tokens"
            ]
            for more in ((), ("--image", str(tmp_path / file)))
        ]
        assert counts[1] > counts[0] + 12
    done = edge_here("chat", "mrope", "--url", server, *question, "--image", str(tmp_path / "a.wav"))
    assert done.returncode
    assert "takes no sounds" in done.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with a picture, and with answers that never end or lead elsewhere."""

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/a.png":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(png())
            elif self.path.startswith("/to?"):
                self.send_response(302)
                self.send_header("Location", self.path[4:])
                self.end_headers()
            elif self.path == "/held":
                HELD.set()
                LET_GO.wait(TIMEOUT_S)
                self.send_error(404)
            elif self.path == "/each":
                HELD_EACH.release()
                LET_ALL_GO.wait(TIMEOUT_S)
                self.send_error(404)
            elif self.path == "/slow":  # a little now and then, each soon enough
                with suppress(OSError):
                    while not ends.wait(0.05):
                        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: " if self.request_version else b"x")
                        self.request_version = ""
            else:
                self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    ends = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        ends.set()
        served.shutdown()
        thread.join()


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_url_is_fetched_where_that_is_allowed(server: str, files: str) -> None:
    expected = ask(server, picture(png()), model="non_causal").json()["choices"]
    for path in ("/a.png", "/to?/a.png", f"/to?{files}/to?/a.png"):
        assert ask(server, at(files + path), model="non_causal").json()["choices"] == expected
    lost = ask(server, at(f"{files}/b.png"), model="non_causal")
    assert (lost.status_code, "cannot be fetched" in lost.json()["error"]["message"]) == (400, True)
    inside = ask(server, at(f"{files}/a.png"), model="audio")
    assert (inside.status_code, "local network" in inside.json()["error"]["message"]) == (400, True)


def test_a_picture_does_not_wait_for_the_url_of_another(server: str, files: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, server, at(f"{files}/held"), model="non_causal")
        try:
            assert HELD.wait(TIMEOUT_S)
            assert ask(server, picture(png()), model="non_causal").status_code == 200
            assert not slow.done()
        finally:
            LET_GO.set()
        assert "answers 404" in slow.result(TIMEOUT_S).json()["error"]["message"]


def test_slow_urls_keep_no_picture_of_others_waiting(server: str, files: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(ask, server, at(f"{files}/each"), model="non_causal") for _ in range(8)]
        try:
            assert all(HELD_EACH.acquire(timeout=TIMEOUT_S) for _ in slow)
            assert ask(server, picture(png()), model="non_causal").status_code == 200
            assert ask(server, at(f"{files}/a.png"), model="non_causal").status_code == 200
            assert not any(request.done() for request in slow)
        finally:
            LET_ALL_GO.set()
        assert {request.result(TIMEOUT_S).status_code for request in slow} == {400}


def test_file_that_nobody_waits_for_is_not_fetched_to_its_end(files: str) -> None:
    gone = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(Downloads("all", gone.is_set).get, f"{files}/slow")
        gone.set()
        with pytest.raises(MediaError, match="cannot be fetched"):
            fetching.result(downloads.TOTAL_S / 2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/to?file:///etc/passwd", "not an http or https URL"),
        ("/to?ftp://127.0.0.1/a.png", "not an http or https URL"),
        ("/to?" * (downloads.MOST_REDIRECTS + 1) + "/a.png", f"redirects more than {downloads.MOST_REDIRECTS} times"),
        ("/to?" * 20 + "/a.png", f"redirects more than {downloads.MOST_REDIRECTS} times"),
        ("/b.png", "answers 404"),
    ],
)
def test_where_a_url_leads_is_bounded(path: str, words: str, files: str) -> None:
    with pytest.raises(MediaError, match=words):
        Downloads("all").get(files + path)


@pytest.mark.parametrize("n_redirects", range(downloads.MOST_REDIRECTS + 1))
def test_as_many_redirects_as_are_allowed_are_followed(n_redirects: int, files: str) -> None:
    assert Downloads("all").get(f"{files}{'/to?' * n_redirects}/a.png") == png()


def test_a_redirect_into_this_network_is_refused(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = files.rpartition(":")[2]
    monkeypatch.setattr(downloads, "is_public", lambda address: address == "127.0.0.1")
    assert Downloads("public").get(f"{files}/a.png") == png()
    with pytest.raises(MediaError, match=r"127\.0\.0\.2 is in this server's local network"):
        Downloads("public").get(f"{files}/to?http://127.0.0.2:{port}/a.png")


def test_files_of_a_request_have_so_much_time_together(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "TOTAL_S", 0.5)
    own = Downloads("all")
    for path in ("/slow", "/slow", "/a.png"):
        with pytest.raises(MediaError, match=r"took longer than 0\.5 s"):
            own.get(files + path)
    assert Downloads("all").get(f"{files}/a.png") == png()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:192.168.1.1", False),
        ("64:ff9b::a01:203", False),
        ("2002:a01:203::", False),
        ("fec0::1", False),
        ("64:ff9b:1::a01:203", False),
        ("::127.0.0.1", False),
    ],
)
def test_addresses_of_the_internet(address: str, public: bool) -> None:
    assert is_public(address) == public

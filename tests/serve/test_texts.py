"""Test that texts that cannot fit are refused by their length, and that memory of large requests is freed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edge.errors import ContextFull, EngineGone
from edge.llama.llama import Model
from edge.models.demo import MODEL_PATH
from edge.serve.apis.tokens import MOST_CHARACTERS, MOST_TOKENS
from edge.serve.engine import child
from edge.serve.engine.loop import ServingLoop
from edge.serve.engine.texts import Tokenizer
from edge.serve.http import bodies
from quant.gguf.file import GgufFile

WORD = "word "
FILE = GgufFile.open(MODEL_PATH)


class Counting:
    """A model that notes how much it had to tokenize."""

    def __init__(self, model: Model) -> None:
        self._model, self.lengths = model, list[int]()

    def tokenize(self, text: str, **options: Any) -> list[int]:
        self.lengths.append(len(text))
        return self._model.tokenize(text, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = Model(MODEL_PATH, vocabulary_only=True)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def vocabulary() -> list[str]:
    return list(FILE.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]


def test_what_certainly_is_too_long_is_not_tokenized(model: Model, vocabulary: list[str]) -> None:
    counting = Counting(model)
    texts = Tokenizer(counting, FILE)  # type: ignore[arg-type]
    longest = max(len(token.encode()) for token in vocabulary)
    with pytest.raises(ContextFull, match=rf"{100 * longest + 5} bytes.*at most 100 are allowed"):
        texts.tokenize("x" * (100 * longest + 5), 100)
    with pytest.raises(ContextFull, match="bytes"):
        texts.check_messages([{"role": "user", "content": "x" * (60 * longest)}] * 2, 100)
    assert counting.lengths == []
    texts.check_messages([{"role": "user", "content": "x" * (50 * longest)}, {"role": "user", "content": None}], 100)


def test_of_what_may_be_too_long_the_beginning_is_tokenized(model: Model, vocabulary: list[str]) -> None:
    counting = Counting(model)
    texts = Tokenizer(counting, FILE)  # type: ignore[arg-type]
    with pytest.raises(ContextFull, match=r"more than \d+ tokens, and at most 1000 are allowed"):
        texts.tokenize(WORD * 5000, 1000)
    assert counting.lengths == [8000]
    assert len(texts.tokenize(WORD * 1500, 1000)) >= 1500  # hardly too long: whoever asks tells need and have


def test_a_long_text_of_few_tokens_has_them(model: Model, vocabulary: list[str]) -> None:
    words = [token[1:] for token in vocabulary if token[:1] == "\u0120" and token[1:].isalpha() and token.isprintable()]
    text = f" {max(words, key=len)}" * 300  # "\u0120" is a space there
    tokens = model.tokenize(text, add_special=True, parse_special=False)
    assert len(text) > 8 * len(tokens) > 0, "else this shows nothing"
    assert Tokenizer(model, FILE).tokenize(text, len(tokens)) == tokens


def test_long_texts_over_http(server: str) -> None:
    long = WORD * (MOST_CHARACTERS // len(WORD) + 1)
    response = httpx.post(f"{server}/tokenize", json={"content": long}, timeout=120)
    assert response.status_code == 400
    assert f"at most {MOST_CHARACTERS} characters" in response.json()["error"]["message"]
    assert httpx.post(f"{server}/detokenize", json={"tokens": [1] * (MOST_TOKENS + 1)}, timeout=120).status_code == 400
    ask = {"messages": [{"role": "user", "content": long}]}
    counted = httpx.post(f"{server}/v1/messages/count_tokens", json=ask, timeout=120)
    assert counted.status_code == 400
    for path, body in (
        ("/v1/chat/completions", ask),
        ("/v1/completions", {"prompt": long}),
        ("/v1/embeddings", {"input": [WORD, long]}),
    ):
        refused = httpx.post(server + path, json=body, timeout=120)
        assert refused.status_code == 400, path
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "too long" in error["message"]


_FREED = """
import psutil
from devices.processes.limits import give_back_memory
rss = psutil.Process().memory_info
small = [bytes(1000) for _ in range(200_000)]
held = small[::20]  # keeps the pages around it in use, and the end of the heap
del small
before = rss().rss
give_back_memory()
print(before - rss().rss)
"""


def test_freed_memory_is_given_back() -> None:
    freed = int(subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True).stdout)
    glibc = sys.platform == "linux"
    assert freed > 50_000_000 if glibc else freed >= -1_000_000


def test_an_engine_process_gives_back_what_large_requests_took(monkeypatch: pytest.MonkeyPatch) -> None:
    provided: list[str] = []
    monkeypatch.setattr(child, "give_back_memory", lambda: provided.append("back"))

    class Loop:
        def ask(self, what: str, arguments: Any) -> int:
            return len(arguments["text"])

    response: list[Any] = []
    for length in (10, 2 << 20):
        line = json.dumps({"id": 1, "do": "tokenize", "with": {"text": "x" * length}}).encode()
        child._answer(child._message(line), Loop(), response.append)  # type: ignore[arg-type]
    assert (response, provided) == ([{"id": 1, "result": 10}, {"id": 1, "result": 2 << 20}], ["back"])


@pytest.mark.parametrize("has_ended", [False, True])
def test_errors_of_an_engine_that_has_ended_are_not_those_of_requests(has_ended: bool) -> None:
    class Loop:
        def __init__(self) -> None:
            self.has_ended = has_ended

        def ask(self, what: str, arguments: Any) -> int:
            raise ValueError("closed")

    response: list[Any] = []
    child._answer({"id": 1, "do": "render", "is_large": False}, Loop(), response.append)  # type: ignore[arg-type]
    assert [message["error"]["message"] for message in response] == ([] if has_ended else ["closed"])


def test_an_engine_has_ended_before_it_closes_what_requests_use() -> None:
    closed = list[bool]()

    def loop_of(failed: Exception | None) -> ServingLoop:
        loop = ServingLoop.__new__(ServingLoop)
        used: Any = SimpleNamespace(close=lambda: closed.append(loop.has_ended), run=lambda: None)
        loop.has_ended, loop._engine = False, SimpleNamespace(failed=failed)  # type: ignore[assignment]
        loop._warming, loop._scheduler = SimpleNamespace(warmer=used), used  # type: ignore[assignment]
        loop._inputs = loop._embedder = used
        loop._jobs = SimpleNamespace(take=lambda is_busy: False)  # type: ignore[assignment]
        return loop

    loop_of(None).run()
    assert closed == [True] * 4
    closed.clear()
    with pytest.raises(ValueError, match="lost"):
        loop_of(EngineGone("it ended"))._fail(ValueError("lost"))
    assert closed == [True]


def test_a_server_gives_back_what_large_bodies_took(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        provided = asyncio.Event()
        monkeypatch.setattr(bodies, "GIVE_BACK_S", 0.0)
        monkeypatch.setattr(bodies, "give_back_memory", provided.set)
        room = bodies.BodyRoom(100)
        await room.take(60)
        await room.take(40)
        room.give(40)
        await asyncio.sleep(0)
        assert not provided.is_set()  # what is read still needs it
        room.give(60)
        await asyncio.wait_for(provided.wait(), 60)

    asyncio.run(scenario())

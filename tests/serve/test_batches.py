"""Batches by OpenAI's official client: answered while nobody else asks, encrypted, and not lost with the server."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.demo import MODEL_PATH
from edge.errors import EngineGone
from edge.serve.app import create_app
from edge.serve.batches import runner as runner_module
from edge.serve.batches import store as store_module
from edge.serve.batches.lines import answered_line, read_lines
from edge.serve.batches.runner import TRIES, BatchRunner
from edge.serve.batches.store import LASTS_S, WINDOW_S, Batch, BatchStore
from edge.serve.http.errors import BadRequest, NotThere
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from edge.serve.server import _Server, uvicorn_config
from tests.serve.scripted import Scripted, ScriptedModels
from tests.serve.serving import serving
from tests.support.helpers import until

if TYPE_CHECKING:
    from openai import OpenAI

NAME = MODEL_PATH.stem
CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    default = {"messages": [{"role": "user", "content": custom_id}]} if url == CHAT else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**default, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    router = Router({NAME: EngineConfig(str(MODEL_PATH), {"threads": 1, "sequences": 4}, prefix_cache=0)})
    with serving(create_app(router, ServeOptions(batches=folder)), at_end=router.close) as address:
        yield address


def results(openai: OpenAI, file_id: str | None) -> dict[str | None, Any]:
    """The lines of a file, by their ids."""
    if file_id is None:
        return {}
    lines = map(json.loads, openai.files.content(file_id).text.splitlines())
    return {each["custom_id"]: each for each in lines}


def answered(openai: OpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    """The batch, once it has ended."""
    file = openai.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    until(lambda: openai.batches.retrieve(batch.id).status == "completed", "the end of the batch")
    return openai.batches.retrieve(batch.id)


def test_the_answers_are_those_of_single_requests(openai: OpenAI, folder: Path) -> None:
    greedy: Any = {"model": NAME, "temperature": 0, "max_tokens": 12}
    questions = [f"What is {n} plus 38?" for n in range(20, 26)]
    content = jsonl(*(line(question, **greedy) for question in questions))
    batch = answered(openai, content)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 6, 0)
    assert batch.error_file_id is None
    lines = results(openai, batch.output_file_id)
    assert list(lines) == questions
    for question in questions:
        alone = openai.chat.completions.create(messages=[{"role": "user", "content": question}], **greedy)
        response = lines[question]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    stored = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not [word for word in (b"plus 38", b"custom_id", b"lines.jsonl", b"choices") if word in stored]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("endpoint", "body", "key"),
    [
        ("/v1/completions", {"prompt": "One kilobyte", "max_tokens": 3}, "choices"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}, "output"),
        ("/v1/embeddings", {"input": ["one text", "another"]}, "data"),
    ],
)
def test_each_endpoint(openai: OpenAI, server: str, endpoint: str, body: Any, key: str) -> None:
    body = {"model": NAME, "temperature": 0, **body}
    batch = answered(openai, jsonl(line("it", endpoint, **body)), endpoint)
    got = results(openai, batch.output_file_id)["it"]["response"]["body"]
    alone = httpx.post(server + endpoint, json=body).json()
    assert got.keys() == alone.keys()
    if endpoint == "/v1/embeddings":
        assert [item["index"] for item in got["data"]] == [0, 1]
        assert got["data"][1]["embedding"] == pytest.approx(alone["data"][1]["embedding"], abs=1e-6)
        assert got["usage"] == alone["usage"]
    elif endpoint == "/v1/completions":
        assert got["choices"] == alone["choices"]
    assert got[key]


def test_broken_lines_are_lines_of_the_error_file(openai: OpenAI) -> None:
    content = jsonl(
        line("good", max_tokens=1),
        b"{",
        b"[1]",
        b"",
        {**line("elsewhere"), "url": "/v1/completions"},
        line("good"),
        {"custom_id": 7},
        {**line("no body"), "body": None},
        line("any model", model="gone"),  # the one model that is served answers by any name
        line("wrong field", temperature="hot"),
        line("streams", stream=True),
        b"[" * 100_000,
        b"\xff\xfe",
    )
    batch = answered(openai, content)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 2, 10)
    assert sorted(results(openai, batch.output_file_id)) == ["any model", "good"]
    errors = [json.loads(text) for text in openai.files.content(batch.error_file_id).text.splitlines()]
    by_id = {error["custom_id"]: error for error in errors}
    assert [error["error"]["message"].partition(":")[0] for error in errors if error["error"]] == [
        f"line {n}" for n in (2, 3, 5, 6, 7, 8, 12, 13)
    ]
    assert by_id["elsewhere"]["error"]["code"] == "invalid_line"
    statuses = {name: by_id[name]["response"]["status_code"] for name in ("wrong field", "streams")}
    assert statuses == {"wrong field": 400, "streams": 400}
    assert "temperature" in by_id["wrong field"]["response"]["body"]["error"]["message"]


def test_files_are_listed_given_and_deleted(openai: OpenAI) -> None:
    from openai import NotFoundError

    content = b'{"a": "\xc3\xa4"}\r\n--x\n\x00\xff' * 3  # what is no JSON stays as it is, too
    file = openai.files.create(
        file=("mine.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (file.filename, file.bytes, file.purpose, file.status) == ("mine.jsonl", len(content), "batch", "processed")
    assert file.expires_at == file.created_at + 7200
    assert openai.files.content(file.id).content == content
    assert openai.files.retrieve(file.id) == file
    listed = openai.files.list(limit=1)
    assert (listed.data, listed.has_more) == ([file], True)
    assert file.id not in [other.id for other in openai.files.list(after=file.id)]
    assert openai.files.delete(file.id).deleted
    with pytest.raises(NotFoundError):
        openai.files.retrieve(file.id)


def test_what_cannot_be_done_is_refused_in_words(openai: OpenAI, server: str) -> None:
    from openai import BadRequestError, NotFoundError

    file = openai.files.create(file=("x.jsonl", b"\n \n"), purpose="batch")

    def create(file_id: str, endpoint: Any = CHAT) -> Any:
        return openai.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")

    refused: list[tuple[Any, str, Any]] = [
        (BadRequestError, "purpose", lambda: openai.files.create(file=("x", b"x"), purpose="vision")),
        (BadRequestError, "has 0", lambda: create(file.id)),
        (BadRequestError, "one of", lambda: create(file.id, "/v1/moderations")),
        (NotFoundError, "no file", lambda: create("x")),
        (NotFoundError, "no batch", lambda: openai.batches.retrieve("x")),
        (BadRequestError, "limit", lambda: openai.files.list(limit=0)),
    ]
    for kind, words, ask in refused:
        with pytest.raises(kind, match=words):
            ask()
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    for headers, body in (
        (kind, b"--x\r\n"),
        (kind, b""),
        ({}, b"{}"),
        ({"Content-Type": "multipart/form-data"}, b"--x"),
    ):
        assert httpx.post(f"{server}/v1/files", content=body, headers=headers).status_code == 400


@pytest.mark.parametrize(
    "part",
    [
        b"form-data; name=file; filename*\r\n\r\nx",
        b"form-data; name*=x\r\n\r\nx",
        b'form-data; name="file"; ' + b"(" * 5000 + b"\r\n\r\nx",
        b'form-data; name="file"\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y\r\n\r\nx',
        b"\xff\xfe\x00",
        b'form-data; name="a"\r\n\r\na\r\n--x\r\nContent-Disposition: ' * 100_000,
    ],
)
def test_broken_forms_are_refused_or_kept_as_they_are(server: str, part: bytes) -> None:
    body = b"--x\r\nContent-Disposition: " + part + b"\r\n--x--\r\n"
    response = httpx.post(
        f"{server}/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert response.status_code == 400, response.text


def test_a_file_is_kept_byte_by_byte(openai: OpenAI) -> None:
    content = bytes(range(256)) + b"\r\n--\n\r\r\n"
    file = openai.files.create(file=("Fragen für heute.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes) == ("Fragen für heute.jsonl", len(content))
    assert openai.files.content(file.id).content == content


# --- with a model that says what a test wrote down ---


class Place:
    """A store in a folder, and a server's runner of it; what a test needs to have them answer."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_000_000.0
        self.folder, self.models = folder, ScriptedModels()

    @property
    def model(self) -> Scripted:
        return self.models.scripted

    def store(self) -> BatchStore:
        store = BatchStore(self.folder, lambda: self.now)
        store.load()
        return store

    def batch(self, store: BatchStore, *lines: Any, owner: str = "me") -> Batch:
        file = store.add_file(owner, "x.jsonl", "batch", jsonl(*lines))
        return store.add_batch(file, "its prompts", CHAT, len(lines), None, LASTS_S)

    def run(self, store: BatchStore, *, until_ended: Batch | None = None, meanwhile: Any = None) -> None:
        async def run() -> None:
            runner = BatchRunner(store, self.models, again_s=0)
            runner.start()
            try:
                if meanwhile is not None:
                    await meanwhile(runner)
                while until_ended is not None and not until_ended.ended:
                    await asyncio.sleep(0.01)
            finally:
                await runner.close()

        asyncio.run(run())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(runner_module, "LOOK_S", 0.01)
    return Place(tmp_path / "batches")


def output(store: BatchStore, batch: Batch, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(text) for text in store.content(store.file(batch.owner, file_id)).splitlines()]


async def some(place: Place, n: int) -> None:
    while len(place.model.requests) < n:
        await asyncio.sleep(0.01)


def test_requests_are_in_the_background_and_prompts_stay_apart(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, line("a"), line("b"))
    place.run(store, until_ended=batch)
    assert {(generation.background, generation.namespace) for generation in place.model.requests} == {
        (True, "its prompts")
    }


def test_an_interrupted_batch_goes_on_with_the_next_server(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, line("a"), b"{", line("b"), line("c"))

    async def stop_after_the_first(runner: BatchRunner) -> None:
        while len(batch.done) < 2:
            await asyncio.sleep(0.01)
        place.model.waits = True

    place.model.waits = False
    first = store.note

    def note(*arguments: Any, **more: Any) -> None:
        first(*arguments, **more)
        place.model.waits = len(batch.done) >= 2  # the others are never answered here

    store.note = note  # type: ignore[method-assign]
    place.run(store, meanwhile=stop_after_the_first)
    n_before, done = len(place.model.requests), dict(batch.done)
    assert 2 <= len(done) < 4
    [path] = place.folder.glob("batch_*")
    with path.open("ab") as file:
        file.write(b"half a record")
    place.model.waits = False

    again = place.store()
    [restored] = again.batches("me")
    assert (restored.id, restored.done, restored.status) == (batch.id, done, "in_progress")
    place.run(again, until_ended=restored)
    assert restored.status == "completed"
    assert len(place.model.requests) - n_before == 4 - len(done)  # what was answered is not asked again
    assert [each["custom_id"] for each in output(again, restored, restored.output_file_id)] == ["a", "b", "c"]
    assert len(output(again, restored, restored.error_file_id)) == 1
    place.now += 1
    place.batch(again, line("d"))
    place.now += 1
    newest = place.batch(again, line("e"))
    third = place.store()  # ended ones are there, too
    assert third.batches("me")[0].id == newest.id
    ended = third.batches("me")[-1]
    assert ended.to_json() == restored.to_json()


def test_who_asks_another_model_goes_first(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, line("a"))

    async def ask(runner: BatchRunner) -> None:
        place.model.waits = True
        await some(place, 1)
        place.models.other_is_busy = True
        await place.model.answers[0].cancelled.wait()
        place.model.waits = False
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert len(place.model.requests) == 1  # none meanwhile
        place.models.other_is_busy = False

    place.run(store, until_ended=batch, meanwhile=ask)
    assert (batch.status, len(place.model.requests)) == ("completed", 2)


def test_a_batch_is_cancelled(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, *(line(str(n)) for n in range(20)))
    place.model.waits = True

    async def cancel(runner: BatchRunner) -> None:
        await some(place, 1)
        await runner.do(store.move, batch, "cancelling")

    place.run(store, until_ended=batch, meanwhile=cancel)
    assert batch.status == "cancelled"
    assert all(answer.cancelled.is_set() for answer in place.model.answers)
    errors = output(store, batch, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert (len(errors), batch.failed, batch.output_file_id) == (20, 20, None)


def test_a_batch_that_ends_meanwhile_keeps_its_results(place: Place) -> None:
    """A cancellation may wait for the store while the batch ends."""
    store = place.store()
    batch = place.batch(store, line("a"))
    place.run(store, until_ended=batch)
    with pytest.raises(BadRequest, match="is completed"):
        store.cancel(batch)
    assert (batch.status, place.store().batches("me")[0].status) == ("completed", "completed")


def test_a_model_that_makes_room_for_others_fails_no_request(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, line("a"))
    models, n_begun = place.models, 0

    async def model(name: str | None) -> Scripted:
        nonlocal n_begun
        n_begun += 1
        models.other_is_busy = n_begun <= TRIES
        if models.other_is_busy:
            asyncio.get_running_loop().call_later(0.02, setattr, models, "other_is_busy", False)
            raise EngineGone("another one needs the memory")
        return models.scripted

    models.model = model  # type: ignore[method-assign]
    place.run(store, until_ended=batch)
    assert (batch.status, batch.failed, n_begun) == ("completed", 0, TRIES + 1)


def test_models_of_a_batch_answer_one_after_the_other(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, *(line(f"{model}{n}", model=model) for n in range(6) for model in "ab"))
    running: list[str | None] = []
    together = set()

    async def model(name: str | None) -> Scripted:
        running.append(name)
        for _ in range(5):
            await asyncio.sleep(0)
            together.add(frozenset(running))
        running.remove(name)
        return place.model

    place.models.model = model  # type: ignore[method-assign]
    place.models.resolve = lambda name: name or "a"  # type: ignore[method-assign]
    place.run(store, until_ended=batch)
    assert (batch.status, batch.failed) == ("completed", 0)
    assert together == {frozenset("a"), frozenset("b")}


def test_a_server_that_ends_stops_batches_before_engines(place: Place) -> None:
    """Else they would load their models again."""
    closed: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self._name = name

        async def close(self) -> None:
            closed.append(self._name)

    parts: Any = (Part("engines"), Part("batches"))

    async def end() -> None:
        server = _Server(uvicorn_config(create_app(place.models, ServeOptions()), ServeOptions()), *parts)
        server.should_exit = True
        await server.serve([])

    asyncio.run(end())
    assert closed == ["batches", "engines"]


def test_a_batch_expires_and_files_are_removed(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, line("a"), line("b"))
    place.model.waits = True

    async def wait(runner: BatchRunner) -> None:
        await some(place, 1)
        place.now += WINDOW_S

    place.run(store, until_ended=batch, meanwhile=wait)
    assert batch.status == "expired"
    assert {each["error"]["code"] for each in output(store, batch, batch.error_file_id)} == {"batch_expired"}
    place.now += LASTS_S - 1
    store.sweep()
    assert len(store.batches()) == 1
    assert [file.purpose for file in store.files("me")] == ["batch_output"]  # the input was older
    place.now += 2
    store.sweep()
    assert (store.batches(), store.files("me"), list(place.folder.glob("*.sealed"))) == ([], [], [])


def test_a_request_that_fails_for_now_is_tried_again(place: Place) -> None:
    store = place.store()
    batch = place.batch(store, line("a"))
    place.model.refuses = EngineGone("it ended")
    place.run(store, until_ended=batch)
    assert batch.failed == 1
    [error] = output(store, batch, batch.error_file_id)
    assert error["response"]["status_code"] == 503

    batch = place.batch(store, line("a"))

    async def recover(runner: BatchRunner) -> None:
        place.model.refuses = None

    place.run(store, until_ended=batch, meanwhile=recover)
    assert (batch.failed, batch.status) == (0, "completed")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_input_ends_the_batch(place: Place, is_there: bool) -> None:
    store = place.store()
    batch = place.batch(store, line("a"))
    [path] = place.folder.glob("file-*")
    damaged = path.read_bytes()[:-1]
    path.unlink()
    if is_there:
        path.write_bytes(damaged)
    place.run(store, until_ended=batch)
    assert (batch.status, batch.output_file_id) == ("failed", None)


def test_files_of_one_key_are_not_those_of_another(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from openai import BadRequestError, NotFoundError, OpenAI

    options = ServeOptions(api_keys=("one", "two"), shared_prefixes=True, batches=place.folder)
    with serving(create_app(place.models, options)) as address:
        with (
            OpenAI(base_url=f"{address}/v1", api_key="one", max_retries=0) as first,
            OpenAI(base_url=f"{address}/v1", api_key="two", max_retries=0) as two,
        ):
            batch = answered(first, jsonl(line("a")))
            for ask in (two.files.retrieve, two.files.content, two.files.delete):
                with pytest.raises(NotFoundError):
                    ask(batch.output_file_id)
            for act in (two.batches.retrieve, two.batches.cancel):
                with pytest.raises(NotFoundError):
                    act(batch.id)
            assert not two.files.list().data
            assert not two.batches.list().data
            assert len(first.files.list().data) == 2
            assert [listed.id for listed in first.batches.list()] == [batch.id]
            monkeypatch.setattr(store_module, "MAX_FILES", 6)  # half of them are there
            with pytest.raises(BadRequestError, match="no more may be"):
                first.files.create(file=("x", b"x"), purpose="batch")
            assert two.files.create(file=("x", b"x"), purpose="batch")
        assert httpx.get(f"{address}/v1/files").status_code == 401


def test_rooms_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.store()
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "MAX_BYTES", 100)
        with pytest.raises(BadRequest, match="101 more have no room"):
            store.add_file("me", "x", "batch", b"x" * 101)
        patch.setattr(store_module, "MAX_FILES", 0)
        with pytest.raises(BadRequest, match="no more may be"):
            store.add_file("me", "x", "batch", b"")
    assert not store.files("me")
    monkeypatch.setattr(store_module, "MAX_RESULT_BYTES", 10)
    batch = place.batch(store, line("a"))
    place.run(store, until_ended=batch)
    [error] = output(store, batch, batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("a", "no_room")
    waiting = place.batch(store, line("b"))
    with pytest.raises(BadRequest, match="needs this file"):
        store.delete_file("me", waiting.input_file_id)
    with pytest.raises(NotThere):
        store.file("you", waiting.input_file_id)


@pytest.mark.parametrize(("bound", "n", "size"), [("MAX_FILES", 8, 1), ("MAX_BYTES", 8000, 700)])
def test_no_key_fills_the_room_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, n: int, size: int
) -> None:
    """Each leaves as much as it takes; a key that is the only one has all of it."""

    def fill(store: BatchStore, owner: str) -> int:
        """Return how many files there is room for."""
        for count in range(9):
            try:
                store.add_file(owner, "x", "batch", b"x" * size)
            except BadRequest:
                return count
        return 9

    monkeypatch.setattr(store_module, bound, n)
    assert fill(BatchStore(tmp_path / "alone"), "me") == 8
    shared = BatchStore(tmp_path / "shared", has_keys=True)
    assert [fill(shared, owner) for owner in ("me", "you", "them")] == [4, 2, 1]


def test_a_record_that_has_no_room_leaves_the_others_readable(place: Place) -> None:
    """Also those that come behind it once there is room."""
    store = place.store()
    batch = place.batch(store, line("a"), line("b"))
    store.note(batch, 1, answered_line("a", 200, {}), answered=True)
    [path] = place.folder.glob("batch_*")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.note(batch, 2, answered_line("b", 200, {}), answered=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert batch.done == {1: True}
    store.note(batch, 2, answered_line("b", 200, {}), answered=True)
    store.end(batch, "completed")
    assert [each["custom_id"] for each in output(store, batch, batch.output_file_id)] == ["a", "b"]


def test_a_batch_that_cannot_be_answered_ends_and_the_next_is(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that was not expected."""
    store = place.store()
    broken, place.now = place.batch(store, line("a")), place.now + 1
    batch = place.batch(store, line("b"))

    def read(content: bytes, endpoint: str) -> Any:
        if b'"a"' in content:
            raise ValueError("nobody expected this")
        return read_lines(content, endpoint)

    monkeypatch.setattr(runner_module, "read_lines", read)
    place.run(store, until_ended=batch)
    assert (broken.status, batch.status) == ("failed", "completed")


@pytest.mark.parametrize("what", ["note", "move", "end"])
def test_batches_go_on_once_a_full_disk_has_room(place: Place, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    store = place.store()
    batch, failures = place.batch(store, line("a"), line("b")), 3
    work = getattr(store, what)

    def failing(*arguments: Any, **more: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("no space left on device")
        work(*arguments, **more)

    async def wait(runner: BatchRunner) -> None:
        while not batch.ended:
            assert runner._task is not None
            assert not runner._task.done()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(store, what, failing)
    place.run(store, meanwhile=wait)
    assert batch.status == "completed"
    assert failures < 0
    assert {line["custom_id"] for line in output(store, batch, batch.output_file_id)} == {"a", "b"}


def test_a_batch_whose_end_is_not_written_ends_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.store()
    batch, failures = place.batch(store, line("a"), line("b")), 1
    write = store._sealed.write

    def failing(name: str, records: Any) -> None:
        nonlocal failures
        if name == batch.id and failures:
            failures -= 1
            raise OSError("no space left on device")
        write(name, records)

    monkeypatch.setattr(store._sealed, "write", failing)
    place.run(store, until_ended=batch)
    assert failures == 0
    after = place.store()
    [on_disk] = after.batches()
    assert on_disk.status == "completed"
    assert [file.id for file in after.files("me") if file.purpose == "batch_output"] == [on_disk.output_file_id]


def copied_before(monkeypatch: pytest.MonkeyPatch, place: Place, what: Any, name: str, nth: int) -> Path:
    """A folder as the next server finds it where this one ends before the nth of such calls."""
    work, copy, calls = getattr(what, name), place.folder.with_name("copy"), list[Any]()

    def copying(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == nth:
            shutil.copytree(place.folder, copy)
        return work(*arguments, **more)

    monkeypatch.setattr(what, name, copying)
    return copy


@pytest.mark.parametrize(("name", "nth"), [("note", 2), ("end", 1), ("write", 2)])
def test_a_batch_has_expired_also_where_its_server_ended_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    """It has each result once, and nothing is answered late, whatever the clock says then."""
    store = place.store()
    batch, place.model.waits, began = place.batch(store, line("a"), line("b")), True, place.now
    copy = copied_before(monkeypatch, place, store._sealed if name == "write" else store, name, nth)

    async def wait(runner: BatchRunner) -> None:
        await some(place, 1)
        place.now += WINDOW_S

    place.run(store, until_ended=batch, meanwhile=wait)
    monkeypatch.undo()
    place.folder, place.now, place.model.waits, n_asked = copy, began, False, len(place.model.requests)
    again = place.store()
    [restored] = again.batches()
    assert not restored.ended
    place.run(again, until_ended=restored)
    assert (restored.status, len(place.model.requests)) == ("expired", n_asked)
    errors = output(again, restored, restored.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]
    assert [file.id for file in again.files("me") if file.purpose == "batch_output"] == [restored.error_file_id]


def test_a_batch_that_expired_is_not_cancelled(place: Place) -> None:
    """Also before its lines say so; cancelled before, it has expired all the same."""
    store = place.store()
    batch = place.batch(store, line("a"))
    store.expire(batch)
    with pytest.raises(BadRequest, match=f"{batch.id} is expired"):
        store.cancel(batch)
    store.move(batch, "cancelling")
    place.run(store, until_ended=batch)
    assert (batch.status, place.model.requests) == ("expired", [])


def test_results_are_there_once_where_a_server_ended_before_it_told_of_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.store()
    batch = place.batch(store, line("a"))
    copy = copied_before(monkeypatch, place, store._sealed, "write", 2)
    place.run(store, until_ended=batch)
    monkeypatch.undo()
    place.folder = copy
    again = place.store()
    [restored] = again.batches()
    assert not restored.ended
    place.run(again, until_ended=restored)
    assert restored.status == "completed"
    assert [file.id for file in again.files("me") if file.purpose == "batch_output"] == [restored.output_file_id]
    assert [each["custom_id"] for each in output(again, restored, restored.output_file_id)] == ["a"]


def test_an_error_that_nobody_waits_for_is_not_said_to_be_lost(place: Place) -> None:
    """As of a full disk while a server ends."""
    contexts: list[Any] = []

    def fails() -> None:
        raise OSError("no room")

    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
        working = asyncio.create_task(BatchRunner(place.store(), place.models).do(fails))
        await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        del working
        gc.collect()

    asyncio.run(cancel())
    assert contexts == []


def test_who_is_cancelled_leaves_the_store_once_its_work_is_done(place: Place) -> None:
    """Two records at once would have one number, and what is behind the second could not be read."""
    second_began, done = threading.Event(), list[str]()

    def first() -> None:
        second_began.wait(0.2)
        done.append("first")

    def second() -> None:
        done.append("second")
        second_began.set()

    async def cancel() -> None:
        runner = BatchRunner(place.store(), place.models)
        working = asyncio.create_task(runner.do(first))
        await asyncio.sleep(0)  # it has the lock from here on
        working.cancel()
        await asyncio.sleep(0)  # it waits for the thread
        working.cancel()
        await runner.do(second)
        await asyncio.gather(working, return_exceptions=True)
        assert working.cancelled()

    asyncio.run(cancel())
    assert done == ["first", "second"]


def test_a_runner_whose_store_fails_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.store()
    place.batch(store, line("a"))
    failed = asyncio.Event()

    def failing(*arguments: Any) -> None:
        failed.set()
        raise RuntimeError("damaged")

    monkeypatch.setattr(store, "batches", failing)
    place.run(store, meanwhile=lambda runner: failed.wait())


def test_requests_with_a_common_beginning_follow_each_other() -> None:
    def chat(custom_id: str, system: str, model: str = "m") -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": custom_id}]
        return line(custom_id, model=model, messages=messages)

    content = jsonl(chat("1", "x"), chat("2", "y"), chat("3", "x"), chat("4", "x", "a"), chat("5", "y"))
    lines, broken = read_lines(content, CHAT)
    assert [each.custom_id for each in lines] == ["4", "1", "3", "2", "5"]
    assert not broken


def test_time_is_told_in_seconds_since_1970(openai: OpenAI) -> None:
    before = int(time.time())
    file = openai.files.create(file=("x.jsonl", b"x"), purpose="batch")
    assert before <= file.created_at <= time.time()

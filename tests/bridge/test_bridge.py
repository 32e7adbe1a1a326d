"""Test the bridge with a page whose answers the test writes: access, liveness, engine processes that come and go."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.bridge import engines
from edge.browser.engine import PageEngine
from edge.browser.frames import pack
from edge.browser.page import DOOR, PageConnection
from edge.browser.profile import PageProfile
from edge.errors import EngineError, NotEnoughMemory
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from partition.model.file import ModelFile
from tests.support.bridge_process import HELLO, ScriptedPage, joined, running_bridge
from tests.support.helpers import until

Connect = Callable[[Path], PageConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect to a page as an engine process does. Connections are closed at the end."""
    with ExitStack() as closing:

        def connect(folder: Path) -> PageConnection:
            return closing.enter_context(contextlib.closing(PageConnection(folder)))

        yield connect


def ready(folder: Path) -> bool:
    return (folder / DOOR).exists()


def test_a_key_is_needed(tmp_path: Path) -> None:
    with running_bridge(tmp_path) as bridge:
        key = joined(bridge)
        for headers in (
            {},
            {"Authorization": f"Basic {key}"},
            {"Authorization": "Bearer x"},
        ):
            assert httpx.get(f"{bridge.url}/api/down", headers=headers).status_code == 403
            assert httpx.post(f"{bridge.url}/api/up", headers=headers, content=b"").status_code == 403
        good = {"Authorization": f"Bearer {key}"}
        assert httpx.post(f"{bridge.url}/api/up", headers=good, content=b"").status_code == 204


@pytest.mark.parametrize("headers", [
    {"Origin": "https://elsewhere.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://elsewhere.{host}"}, {"Origin": "https://{host}"},
])  # fmt: skip
def test_a_page_from_elsewhere_cannot_use_the_bridge(tmp_path: Path, headers: dict[str, str]) -> None:
    with running_bridge(tmp_path) as bridge:
        body = {"token": bridge.browsers.invite("phone", 600)}
        headers = {name: value.format(host=bridge.url.removeprefix("http://")) for name, value in headers.items()}
        assert httpx.post(f"{bridge.url}/api/join", json=body, headers=headers).status_code == 403
        assert httpx.post(f"{bridge.url}/api/join", json=body, headers={"Origin": bridge.url}).status_code == 200


def test_every_answer_isolates_the_page(tmp_path: Path) -> None:
    """Without these headers a page has no threads, and other pages could read it."""
    with running_bridge(tmp_path) as bridge:
        for path in ("", "worker.js", "api/down", "missing"):
            headers = httpx.get(f"{bridge.url}/{path}").headers
            assert headers["cross-origin-opener-policy"] == "same-origin", path
            assert headers["cross-origin-embedder-policy"] == "require-corp", path
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'"), path


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{}", b'{"token": 1}', b"[" * 3000, b"\xff"])
def test_a_join_that_is_not_understood_is_refused(tmp_path: Path, body: bytes) -> None:
    with running_bridge(tmp_path) as bridge:
        response = httpx.post(f"{bridge.url}/api/join", content=body)
        assert (response.status_code, response.json()) == (400, {"error": "This link is incomplete. Copy all of it."})


@pytest.mark.parametrize(
    "body", [b"\x00", b"\xff\xff\xff\xff", pack({"event": "alive"}) + b"\x01", b"\x04\0\0\0\0\0\0\0"]
)
def test_frames_that_are_not_valid_are_refused(tmp_path: Path, body: bytes) -> None:
    with running_bridge(tmp_path) as bridge:
        headers = {"Authorization": f"Bearer {joined(bridge)}"}
        assert httpx.post(f"{bridge.url}/api/up", headers=headers, content=body).status_code == 400


def test_a_page_that_says_hello_gets_a_worker_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed page is lost sooner than a silent one."""
    monkeypatch.setattr("edge.bridge.page.GONE_S", 0.1)
    with running_bridge(tmp_path, lost_s=20.0) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge))
        until(lambda: page.say({"event": "alive"}) == 204, "the page is known")
        page.begin(bridge)
        profile = PageProfile.load(bridge.folder("phone"))
        assert (profile.threads, profile.memory_bytes_per_s, profile.flops) == (2, 1e9, 1e10)
        assert 0 < (profile.round_trip_s or 0) < 60
        assert 1e3 < (profile.bytes_per_s or 0) < 1e10
        page.close()
        until(lambda: not ready(bridge.folder("phone")), "the worker has ended", 12)


def test_a_silent_page_is_lost_and_comes_back(tmp_path: Path, connect: Connect) -> None:
    with running_bridge(tmp_path, lost_s=3.0) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge))
        folder = page.begin(bridge)
        connection = connect(folder)
        with pytest.raises(EngineError, match="closed or lost"):
            connection._next()
        until(lambda: not ready(folder), "the page is lost")
        page.say({"event": "alive"})
        until(lambda: ready(folder), "the page is back")


@pytest.mark.parametrize("back", ["hello", "alive"])
def test_a_page_that_says_that_it_is_closed_is_lost_at_once_and_comes_back(tmp_path: Path, back: str) -> None:
    """Also if its connection stays, as in a browser that has the page in memory."""
    with running_bridge(tmp_path, lost_s=86_400.0) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge))
        folder = page.begin(bridge)
        page.say({"event": "closed"})
        until(lambda: not ready(folder), "the page is lost")
        page.say({**HELLO, "event": back})
        until(lambda: ready(folder) and bridge._pages["phone"]._worker.runs, "the page is back")


def test_a_page_that_is_suspended_while_it_joins_comes_back(tmp_path: Path) -> None:
    with running_bridge(tmp_path, lost_s=1.0) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge))
        page.is_suspended = True
        page.say(HELLO)
        until(lambda: bridge._pages["phone"]._starting is None, "the page is lost")
        page.is_suspended = False
        page.say({"event": "alive"})
        until(lambda: ready(bridge.folder("phone")), "the page is back")


def test_a_page_that_computes_wrong_numbers_is_refused(tmp_path: Path) -> None:
    n_vocab = ModelFile.open(MODEL_PATH).shape.n_vocab

    def answer(header: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        if header["op"] == "file":
            return {"missing": []}, b""
        if header["op"] == "load":
            return {"model": {"n_vocab": n_vocab}, "context": {"n_rs_seq": 0, "can_shift": True}}, b""
        n = header.get("n", 0)
        return {"code": 0, "rows": n, "width": n_vocab, "result": True}, bytes(4 * n * n_vocab)

    with running_bridge(tmp_path, check=True) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge), answer)
        bridge.browsers.remember_check("phone", "Chrome 139")  # an older version was right
        page.say(HELLO)
        until(lambda: any("computes wrong numbers" in text for text in page.shown), "the page is refused", 60)
        assert_computes_nothing(page)
        page.say(HELLO)  # it was loaded again
        assert page.next_op()["op"] == "unload"


def assert_computes_nothing(page: ScriptedPage) -> None:
    """A sign of life alone does not start a page that was refused or paused."""
    while not page.ops.empty():
        page.ops.get()
    page.say({"event": "alive"})
    page.say({"event": "ended"})  # after this answer a start would have begun
    assert page.ops.empty()


@pytest.mark.parametrize(("away", "back"), [("paused", "resumed"), ("paused", "hello"), ("leave", "hello")])
def test_a_page_that_its_user_paused_computes_nothing_until_it_is_resumed(tmp_path: Path, away: str, back: str) -> None:
    """Also if the page is closed meanwhile, and opened again."""
    with running_bridge(tmp_path) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge))
        folder = page.begin(bridge)
        page.say({"event": away})
        until(lambda: not ready(folder), "the page is paused")
        assert_computes_nothing(page)
        page.say({**HELLO, "event": back})
        until(lambda: ready(folder) and bridge._pages["phone"]._worker.runs, "the page is back")


@pytest.mark.parametrize("is_loaded", [True, False])
def test_hello_of_a_page_without_a_slice_ends_no_worker(tmp_path: Path, connect: Connect, is_loaded: bool) -> None:
    """The session has ended, or the page could not load its slice."""
    with running_bridge(tmp_path) as bridge:
        answer = {} if is_loaded else {"error": "no memory"}
        page = ScriptedPage(bridge.url, joined(bridge), lambda *_: (answer, b""))
        connection = connect(page.begin(bridge))
        with contextlib.nullcontext() if is_loaded else pytest.raises(EngineError, match="no memory"):
            connection.call("load", file="x")
        assert page.next_op()["op"] == "load"
        if is_loaded:
            connection.close()
            assert page.next_op()["op"] == "unload"
        page.say({**HELLO, "loaded": ""})
        assert_computes_nothing(page)
        assert ready(bridge.folder("phone"))


def test_a_second_tab_replaces_the_first(tmp_path: Path, connect: Connect) -> None:
    """The first one's slice is lost, and its sessions end."""
    with running_bridge(tmp_path) as bridge:
        key = joined(bridge)
        first = ScriptedPage(bridge.url, key)
        connection = connect(first.begin(bridge))
        connection.call("load", file="x")
        second = ScriptedPage(bridge.url, key)
        assert first.next_op()["op"] == "load"
        assert first.next_op() == {"op": "replaced"}
        assert first.ended.wait(60)
        second.say(HELLO)
        with pytest.raises(EngineError, match="closed or lost"):
            connection._next()
        until(lambda: not second.ops.empty(), "the second tab is asked")
        assert second.next_op()["op"] == "unload"


def test_a_connection_that_breaks_loses_nothing(tmp_path: Path, connect: Connect) -> None:
    """The page connects again in time. What it had not received is sent again, and its replies are taken once."""
    with running_bridge(tmp_path) as bridge:
        key = joined(bridge)
        first = ScriptedPage(bridge.url, key, lambda header, _: None if header["op"] == "clear" else ({}, b""))
        connection = connect(first.begin(bridge))
        connection.call("load", file="x")
        numbers = [connection._ask(op) for op in ("clear", "clear")]
        ids = [first.next_op()["id"] for _ in range(3)][1:]
        first.close()
        assert first.ended.wait(60)
        second = ScriptedPage(bridge.url, key, lambda *_: None)
        second.say({**HELLO, "loaded": "x", "pending": ids[:1]})
        assert second.next_op() == {"id": ids[1], "op": "clear"}
        for _ in range(2):  # the second time it is not known any more
            second.say({"id": ids[0], "error": "the first"})
        second.say({"id": ids[1]})
        with pytest.raises(EngineError, match="the first"):
            connection._answer(numbers[0])
        connection._answer(numbers[1])


def test_one_engine_process_has_the_page_until_it_ends(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_bridge(tmp_path) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge))
        folder = page.begin(bridge)
        first, second = connect(folder), connect(folder)
        with pytest.raises(EngineError, match="nothing is loaded"):
            first.call("clear")
        first.call("load", file="x")
        assert page.next_op()["op"] == "load"
        monkeypatch.setattr(engines, "TURN_S", 0.2)
        for op in ("load", "clear", "decode"):
            with pytest.raises(EngineError, match="another session"):
                second.call(op)
        monkeypatch.setattr(engines, "TURN_S", 60.0)
        second.call("file", name="y")  # sending a slice ahead disturbs nobody
        first.call("clear")
        assert [page.next_op()["op"] for _ in range(2)] == ["file", "clear"]
        second.stop()  # another session's request to stop is not passed on
        first.stop()
        assert page.next_op()["op"] == "stop"
        number = second._ask("load", file="x")
        first.close()
        second._answer(number)  # it waited until the page was free again
        assert [page.next_op()["op"] for _ in range(2)] == ["unload", "load"]
        assert page.ops.empty()


def test_answers_reach_the_process_that_asked(tmp_path: Path, connect: Connect) -> None:
    with running_bridge(tmp_path) as bridge:
        page = ScriptedPage(
            bridge.url, joined(bridge), lambda header, payload: ({"name": header["name"]}, payload[::-1])
        )
        folder = page.begin(bridge)
        connections = [connect(folder) for _ in range(3)]
        numbers = [
            (c, c._ask("file", bytes([i]), name=f"{i} {j}")) for j in range(4) for i, c in enumerate(connections)
        ]
        for j in range(4):
            for i, connection in enumerate(connections):
                header, payload = connection._answer(numbers[3 * j + i][1])
                assert (header["name"], bytes(payload)) == (f"{i} {j}", bytes([i]))


def test_an_error_of_the_page_is_one_line(tmp_path: Path, connect: Connect) -> None:
    with running_bridge(tmp_path) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge), lambda *_: ({"error": "x" * 10_000}, b""))
        page.begin(bridge)
        connection = connect(bridge.folder("phone"))
        with pytest.raises(EngineError) as raised:
            connection.call("file")
        assert len(str(raised.value)) < 600


def test_a_page_is_lost_in_the_middle_of_an_operation(tmp_path: Path, connect: Connect) -> None:
    with running_bridge(tmp_path) as bridge:
        page = ScriptedPage(bridge.url, joined(bridge), lambda *_: None)
        page.begin(bridge)
        connection = connect(bridge.folder("phone"))
        number = connection._ask("file")
        assert page.next_op()["op"] == "file"
        page.say({"event": "leave"})
        with pytest.raises(EngineError, match="closed or lost"):
            connection._answer(number)


def test_memory_option_limits_the_slice_of_a_page(tmp_path: Path) -> None:
    file = ModelFile.open(MODEL_PATH)
    for limit, error, text in ((1 << 20, NotEnoughMemory, "which has 1;"), (None, EngineError, "page is closed")):
        options = EngineOptions(context=64, sequences=1, memory=limit)
        with pytest.raises(error, match=text):
            PageEngine(file, options, tmp_path, 1 << 30, (), None)


def test_a_folder_without_a_bridge_is_a_closed_page(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="page is closed"):
        PageConnection(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / DOOR))  # nobody accepts
        with pytest.raises(EngineError, match="page is closed"):
            PageConnection(tmp_path)

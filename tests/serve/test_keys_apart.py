"""Test the isolation of keys: a key cannot affect other keys, and global settings need an administrator."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.errors import NotAllowed, Overloaded
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.adapters import ServedAdapters
from edge.serve.app import create_app
from edge.serve.caller import CALLER, Caller
from edge.serve.lifetimes import LEAST_S, Lifetimes
from edge.serve.options import ServeOptions
from edge.serve.places import Places
from edge.serve.plan_devices import devices_of
from edge.serve.router import Router
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.clock import Clock

A, B, ADMIN = "sk-a", "sk-b", "sk-admin"
PLAN = {"plan": {}}
WAIT_S = 60.0
SETTINGS = {"/v1/memory": {"memory": 0}, "/v1/plan": PLAN}
# Everything else that concerns every key: method, path and body.
SHARED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/front", {"model": "none"}),
    ("POST", "/v1/cluster/invitations", {"name": "phone"}),
    ("POST", "/v1/cluster/devices/pi:1", {"paused": True}),
    ("POST", "/v1/cluster/devices/pi:1", {"address": "10.0.0.1:1"}),
    ("DELETE", "/v1/cluster/devices/pi:1", None),
    ("DELETE", "/v1/cluster/devices/pi:1?revoke=true", None),
    ("DELETE", "/v1/pulls/none", None),
]


def as_caller(work: Callable[[], Any], client: str, *, administrator: bool = False) -> Any:
    """Do something for a request of a client."""
    before = CALLER.set(Caller(client, client, administrator, among_several=True))
    try:
        return work()
    finally:
        CALLER.reset(before)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ServeOptions(api_keys=(A, B), admin_keys=(ADMIN, B))
    with serving(create_app(ScriptedModels(), options)) as address:
        yield address


@pytest.mark.parametrize("path", SETTINGS)
def test_what_concerns_every_key_needs_an_administrators(url: str, path: str) -> None:
    refused = httpx.post(url + path, json=SETTINGS[path], headers={"x-api-key": A})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert "--admin-key" in refused.text
    for key in (ADMIN, B):
        assert httpx.post(url + path, json=SETTINGS[path], headers={"x-api-key": key}).status_code == 200
    assert httpx.get(url + "/v1/memory", headers={"x-api-key": A}).status_code == 200  # to look is free
    assert httpx.post(url + path, json=SETTINGS[path]).status_code == 401


@pytest.mark.parametrize(("method", "path", "body"), SHARED)
def test_devices_plans_and_downloads_are_an_administrators(
    url: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    answers = {
        key: httpx.request(method, url + path, json=body, headers={"x-api-key": key}, timeout=60)
        for key in (A, B, ADMIN)
    }
    assert answers[A].status_code == 403, answers[A].text
    assert "--admin-key" in answers[A].text
    for key in (B, ADMIN):
        assert "--admin-key" not in answers[key].text
        assert answers[key].status_code != 401


@pytest.mark.parametrize(
    ("api_keys", "admin_keys", "administrators"),
    [
        ((), (), {None}),
        ((A,), (), {A}),
        ((A, A), (), {A}),
        ((A, B), (), set()),
        ((A, B), (ADMIN,), {ADMIN}),
        ((A,), (ADMIN,), {ADMIN}),
        ((), (ADMIN,), {ADMIN}),
        ((A, B), (B,), {B}),
    ],
)
def test_who_is_an_administrator(
    api_keys: tuple[str, ...], admin_keys: tuple[str, ...], administrators: set[str | None]
) -> None:
    options = ServeOptions(api_keys=api_keys, admin_keys=admin_keys)
    with serving(create_app(ScriptedModels(), options)) as url:
        for key in (*api_keys, *admin_keys, None):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            status = httpx.post(f"{url}/v1/memory", json={"memory": None}, headers=headers).status_code
            needs_key = 401 if key is None and options.keys else 403
            assert status == (200 if key in administrators else needs_key), key
            if key is not None:
                assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_fetch_of_a_model_needs_an_administrator() -> None:
    async def run() -> None:
        router = Router({"demo": EngineConfig("none")}, fetch=lambda name, progress: EngineConfig(name))
        CALLER.set(Caller("a", "a", is_administrator=False))
        await router.fetch("demo", lambda *done: None)  # is there
        with pytest.raises(NotAllowed, match="only an administrator may have models fetched"):
            await router.fetch("other", lambda *done: None)
        assert router.names == ["demo"]

    asyncio.run(run())


def test_model_stays_for_as_long_as_the_longest_of_its_keys() -> None:
    lifetimes = Lifetimes(60, clock=Clock().monotonic)
    lifetimes.use("m")
    lifetimes.add_user("m", "a")
    lifetimes.add_user("m", "b")
    lifetimes.keep("m", 0, "a")
    assert lifetimes.left_s("m") == 60  # b did not say
    lifetimes.keep("m", 5, "b")
    assert lifetimes.left_s("m") == 5
    lifetimes.keep("m", 0, "b")
    assert lifetimes.left_s("m") == LEAST_S
    lifetimes.keep("m", math.inf, "a")
    assert lifetimes.left_s("m") == math.inf
    assert not lifetimes.stays("m")  # another model may need its memory
    lifetimes.keep("m", 7)  # an administrator's is for all
    assert lifetimes.left_s("m") == 7
    lifetimes.keep("m", math.inf)
    assert lifetimes.stays("m")
    lifetimes.keep("m", None)
    lifetimes.forget_users("m")
    assert lifetimes.left_s("m") == 60


def test_scales_of_one_key_are_not_those_of_another() -> None:
    adapters = ServedAdapters()
    plain: Any = adapters
    plain._adapters = [type("Adapter", (), {"name": name, "scale": 0.5})() for name in ("up", "down")]
    plain._scales = [0.5, 0.5]
    as_caller(lambda: adapters.use({0: 1.0}), "a")
    assert as_caller(adapters.scales, "a") == [1.0, 0.0]
    assert as_caller(adapters.scales, "b") == [0.5, 0.5]
    as_caller(lambda: adapters.use({1: 2.0}), "admin", administrator=True)
    assert as_caller(adapters.scales, "a") == [1.0, 0.0]
    assert as_caller(adapters.scales, "b") == as_caller(adapters.scales, "admin") == [0.0, 2.0]


def test_request_that_has_asked_for_a_model_keeps_it_until_its_end() -> None:
    async def run() -> None:
        router = Router({"demo": EngineConfig(str(MODEL_PATH), EngineOptions(threads=1, sequences=1), prefix_cache=0)})
        try:
            waiting = Caller("a", "a")
            waiting.begin()
            CALLER.set(waiting)
            await router.model("demo")
            await router.model("DEMO")
            CALLER.set(Caller("admin", "admin"))
            router.keep("demo", 0)
            for _ in range(3):
                assert not await router.unload("demo")
                await router.unload_idle()
                assert not await router._unload_longest_idle("")
            assert [model.name for model in await router.loaded()] == ["demo"]
            waiting.end()
            waiting.hold(router._lifetimes.holders, "demo")  # work that outlives its request holds nothing
            router.keep("demo", None)
            CALLER.set(Caller("b", "b", is_administrator=False))
            router.keep("demo", 0)
            assert not await router.unload("demo")  # "a" did not say that it may go
            CALLER.set(Caller("admin", "admin"))
            assert await router.unload("demo")
            assert router._lifetimes.holders.total() == 0
        finally:
            await router.close()

    asyncio.run(run())


def test_plan_with_a_foreign_device_is_refused_before_anything_is_dialled() -> None:
    cut = limits(GgufFile.open(MODEL_PATH))
    foreign = make_plan(cut, MODEL_PATH.stem, "", [LOCAL, "10.1.2.3:22"], stages_of=(1, 1)).to_json()

    async def run() -> None:
        router = Router({"demo": EngineConfig(str(MODEL_PATH))})
        with pytest.raises(NotAllowed, match=r"10\.1\.2\.3:22, but this server only uses the workers"):
            await router.use_plan(None, foreign)
        assert await router.loaded() == []
        assert "10.1.2.3:22" in devices_of({"demo": EngineConfig(str(MODEL_PATH), plan=foreign)})

    asyncio.run(run())


# --- places ---


def run_places(work: Callable[[Places], Coroutine[Any, Any, None]], *arguments: Any) -> None:
    async def run() -> None:
        await asyncio.wait_for(work(Places("tests", *arguments)), WAIT_S)

    asyncio.run(run())


async def take(places: Places, client: str, may_end: asyncio.Event, order: list[str]) -> None:
    CALLER.set(Caller(client, client, is_administrator=False, among_several=True))
    async with places.place():
        order.append(client)
        await may_end.wait()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_free_place_goes_to_the_client_that_has_fewest() -> None:
    async def work(places: Places) -> None:
        order: list[str] = []
        ends = [asyncio.Event() for _ in range(6)]
        tasks = []
        for client, end in zip("aaaabb", ends, strict=True):
            tasks.append(asyncio.create_task(take(places, client, end, order)))
            await settled()
        assert order == ["a", "a"]
        for end in ends:
            end.set()
            await settled()
        await asyncio.gather(*tasks)
        assert order == ["a", "a", "b", "a", "a", "b"]  # "b" keeps its first place
        assert places._free == 2
        assert not places._taken

    run_places(work, 2, 20)


def test_one_client_leaves_places_and_half_of_the_line() -> None:
    async def work(places: Places) -> None:
        order: list[str] = []
        end = asyncio.Event()
        tasks = [asyncio.create_task(take(places, "a", end, order)) for _ in range(4)]
        await settled()
        assert order == ["a", "a"]  # of three places; two wait, and two are left
        with pytest.raises(Overloaded, match="2 requests wait for tests"):
            await take(places, "a", end, order)
        tasks.append(asyncio.create_task(take(places, "b", end, order)))
        await settled()
        assert order == ["a", "a", "b"]
        end.set()
        await asyncio.gather(*tasks)

    run_places(work, 3, 4, 2)


@pytest.mark.parametrize("cancelled_first", [True, False])
@pytest.mark.parametrize("n_behind", [0, 1])
def test_place_is_not_lost_if_its_client_goes_in_the_moment_of_getting_it(n_behind: int, cancelled_first: bool) -> None:
    async def work(places: Places) -> None:
        end, order = asyncio.Event(), list[str]()
        end.set()
        async with places.place():
            waiting = [asyncio.create_task(take(places, client, end, order)) for client in "ab"[: 1 + n_behind]]
            await settled()
            if cancelled_first:
                waiting[0].cancel()
        waiting[0].cancel()
        await settled()
        assert order == ["b"] * n_behind
        assert all(task.done() for task in waiting)
        assert (places._free, places._waiting, +places._taken) == (1, [], {})

    run_places(work, 1, 5)


def test_cancelled_waiting_leaves_nothing_behind_and_work_keeps_its_place() -> None:
    async def work(places: Places) -> None:
        end, order = asyncio.Event(), list[str]()
        first = asyncio.create_task(take(places, "a", end, order))
        waiting = asyncio.create_task(take(places, "b", end, order))
        await settled()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert places._waiting == []
        end.set()
        await first
        may_end = asyncio.Event()
        whole = asyncio.create_task(places.whole(may_end.wait))
        await settled()
        whole.cancel()  # its client has gone; the work goes on
        await asyncio.gather(whole, return_exceptions=True)
        assert places._free == 0
        late = asyncio.create_task(take(places, "b", end, order))
        await settled()
        assert order == ["a"]
        may_end.set()
        await late
        assert (order, places._free) == (["a", "b"], 1)

    run_places(work, 1, 5)


@pytest.mark.parametrize("seed", range(30))
def test_no_client_exceeds_its_places_and_none_waits_that_could_have_one(seed: int) -> None:
    """Requests of three clients begin, end and are cancelled in any order."""
    most, n_places, rng = 1 + seed % 3, 3, random.Random(seed)

    async def work(places: Places) -> None:
        order: list[str] = []
        requests: list[tuple[str, asyncio.Event, asyncio.Task[None]]] = []
        for _ in range(60):
            if rng.random() < 0.5 and len(requests) < 20:
                client, end = rng.choice("abc"), asyncio.Event()
                requests.append((client, end, asyncio.create_task(take(places, client, end, order))))
            elif requests:
                _, end, task = requests.pop(rng.randrange(len(requests)))
                if rng.random() < 0.5:
                    end.set()
                if rng.random() < 0.5:
                    task.cancel()
                if not end.is_set():
                    task.cancel()
                if rng.random() < 0.5:
                    continue  # the next step comes in the same moment
            await settled()
            waiting = {client for client, _ in places._waiting}
            occupied = +places._taken
            assert all(n <= most for n in occupied.values())
            assert occupied.total() + places._free == n_places
            assert not places._free or all(occupied[client] == most for client in waiting)
        for _, end, _ in requests:
            end.set()
        await asyncio.gather(*(task for *_, task in requests), return_exceptions=True)
        await settled()
        assert (places._free, places._waiting, +places._taken) == (n_places, [], {})

    run_places(work, n_places, 50, most)

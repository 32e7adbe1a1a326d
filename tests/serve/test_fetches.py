"""Test model downloads: their number is limited, other threads continue, and a stalled download is cancelled."""

import asyncio
import threading

import pytest

from edge.api.config import EngineConfig
from edge.errors import HubError, Interrupted, Overloaded
from edge.models.wheels import Progress
from edge.serve import fetches
from edge.serve.fetches import MOST, Fetches
from edge.serve.router import Router
from tests.support.clock import Clock

WAIT_S = 60.0


def nothing(*_: object) -> None:
    return


def test_stalled_fetches_keep_no_thread_that_others_need_and_are_bounded() -> None:
    may_end = threading.Event()

    def stalled(name: str, progress: Progress) -> EngineConfig:
        may_end.wait(WAIT_S)
        return EngineConfig(name)

    async def run() -> None:
        router = Router({"demo": EngineConfig("none")}, fetch=stalled)
        pulls = [asyncio.create_task(router.fetch(f"stalled-{i}", nothing)) for i in range(MOST)]
        again = asyncio.create_task(router.fetch("stalled-0", nothing))  # waits for the first one
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"{MOST} models are being fetched"):
            await router.fetch("one-more", nothing)
        for _ in range(40):  # more than the threads that others share
            assert await asyncio.wait_for(asyncio.to_thread(router.file, "demo"), WAIT_S)
        may_end.set()
        await asyncio.gather(*pulls, again)
        assert len(router.names) == 1 + MOST
        await router.fetch("one-more", nothing)
        await router.close()

    asyncio.run(run())


def test_fetch_of_which_nothing_comes_ends_and_its_thread_counts_until_it_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock().install(monkeypatch, fetches)
    may_go_on, said, noticed = threading.Event(), threading.Event(), threading.Event()

    def drips(name: str, report: Progress) -> None:
        report(10, 100)
        said.set()
        may_go_on.wait(WAIT_S)
        try:
            report(10, 100)
        finally:
            noticed.set()

    async def run() -> None:
        several = Fetches(drips)
        task = asyncio.create_task(several.have("model", nothing, nothing))
        await asyncio.to_thread(said.wait, WAIT_S)
        clock.now += fetches.STALLED_S
        with pytest.raises(HubError, match="no data came for 300 s; try again to continue the download"):
            await asyncio.wait_for(task, WAIT_S)
        assert several._threads == 1
        may_go_on.set()
        await asyncio.to_thread(noticed.wait, WAIT_S)
        while several._threads:
            await asyncio.sleep(0)
        assert not several._tasks

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_fetch_that_goes_on_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, fetches)
    used: list[int] = []

    def slow(name: str, report: Progress) -> int:
        for done in range(5):
            report(done, 5)
            clock.now += fetches.STALLED_S - 1
        return 7

    asyncio.run(Fetches(slow).have("model", nothing, used.append))
    assert used == [7]


@pytest.mark.parametrize("first", ["cancelled", "failed", "complete"])
def test_nothing_of_a_fetch_is_left_for_the_next_one_of_its_name(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tick_s=1e-6).install(monkeypatch, fetches)
    monkeypatch.setattr(fetches, "_LOOK_S", 1e-3)
    may_end, begun = threading.Event(), threading.Event()

    def reports(name: str, report: Progress) -> str:
        report(10, 100)
        begun.set()
        may_end.wait(WAIT_S)
        if first == "failed" and not used:
            used.append("failed")
            raise HubError("broken")
        return name

    def silent(name: str, report: Progress) -> str:
        begun.set()
        may_end.wait(WAIT_S)
        return name

    used: list[str] = []

    async def have(fetches_: Fetches[str]) -> None:
        await asyncio.wait_for(fetches_.have("model", nothing, used.append), WAIT_S)

    async def run() -> None:
        several = Fetches(reports)
        assert not several.cancel("model")  # nothing to cancel: the next one goes on
        task = asyncio.create_task(have(several))
        await asyncio.to_thread(begun.wait, WAIT_S)
        assert several.running == {"model": (10, 100)}
        if first == "cancelled":
            assert several.cancel("model")
            with pytest.raises(Interrupted):
                await task
            may_end.set()
        else:
            may_end.set()
            await asyncio.gather(task, return_exceptions=True)
        while several._threads:
            await asyncio.sleep(0)
        assert several.running == {}
        may_end.clear()
        begun.clear()
        several._fetch = silent
        again = asyncio.create_task(have(several))
        await asyncio.to_thread(begun.wait, WAIT_S)
        assert several.running == {"model": (0, 0)}  # the hub has not answered yet
        looks_until = clock.now + 5e-6
        while clock.now < looks_until and not again.done():  # it is looked at several times
            await asyncio.sleep(0)
        may_end.set()
        await again
        assert used[-1] == "model"
        assert (several.running, several._threads) == ({}, 0)

    asyncio.run(run())


def test_reports_without_a_further_byte_do_not_keep_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, fetches)
    given_up = threading.Event()

    def repeats(name: str, report: Progress) -> None:
        report(10, 100)
        try:
            while not given_up.wait(0.001):
                clock.now += fetches.STALLED_S / 10
                report(10, 100)
        finally:
            given_up.set()

    async def run() -> None:
        with pytest.raises(HubError, match="no data came for 300 s"):
            await asyncio.wait_for(Fetches(repeats).have("model", nothing, nothing), WAIT_S)
        assert await asyncio.to_thread(given_up.wait, WAIT_S)  # its next report ends its thread

    asyncio.run(run())


def test_stalled_fetch_does_not_keep_the_server_from_ending() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def stalled(name: str, progress: Progress) -> EngineConfig:
        begun.set()
        may_end.wait(WAIT_S)
        return EngineConfig(name)

    async def run() -> None:
        router = Router({"demo": EngineConfig("none")}, fetch=stalled)
        pull = asyncio.create_task(router.fetch("stalled", nothing))
        await asyncio.to_thread(begun.wait, WAIT_S)
        await asyncio.wait_for(router.close(), WAIT_S)
        assert (await asyncio.gather(pull, return_exceptions=True))[0] is not None
        assert router.names == ["demo"]

    try:
        asyncio.run(run())
    finally:
        may_end.set()

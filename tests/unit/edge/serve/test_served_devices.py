"""Test pausing, removing and inviting devices of a server: which workers its models leave out, also later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devices import remembered
from devices.errors import TrustError
from devices.profile import describe
from edge.serve.devices import members
from edge.serve.devices.devices import ServedDevices
from edge.serve.devices.left_out import LeftOut, LeftOutDevices
from edge.serve.devices.members import KnownMember
from edge.serve.devices.watch import Sight
from edge.serve.http.errors import BadRequest, NotThere
from edge.serve.options import ServeOptions
from partition.plan.plan import LOCAL
from tests.support.deployments import own_folders

A, B, C = (f"10.0.0.{n}:7070" for n in range(1, 4))
PROFILE = describe("any")


class Server:
    """The devices of a server whose workers are made up."""

    def __init__(self) -> None:
        self.workers: dict[str, bool] = {}
        self.sights: dict[str, Sight] = {LOCAL: Sight("this device", PROFILE)}
        self.left_out: Collection[str] = ()
        self.members: list[KnownMember] = []
        workers = SimpleNamespace(known=lambda: self.workers, leave_out=self._leave_out)
        models: Any = SimpleNamespace(workers=workers)
        self.devices = ServedDevices(models, ServeOptions())
        self.missing: frozenset[str] = frozenset()
        watch: Any = SimpleNamespace(look=self._look, announced={})
        self.devices._watch = self.watch = watch
        known: Any = SimpleNamespace(known=lambda: self.members, problem="")
        self.devices._members = known

    def _leave_out(self, addresses: Collection[str]) -> None:
        assert set(addresses) != set(self.left_out), "nothing has changed"
        self.left_out = addresses

    def _look(self, workers: Collection[str], missing: frozenset[str]) -> dict[str, Sight]:
        self.looked, self.missing = workers, missing
        return {address: sight for address, sight in self.sights.items() if address in (LOCAL, *workers)}

    def answers(self, name: str, address: str) -> None:
        """Let a worker answer at an address, and nowhere else."""
        for former in [at for at, sight in self.sights.items() if sight.name == name]:
            del self.sights[former]
        self.workers[address] = False
        self.sights[address] = Sight(name, PROFILE, is_member=True)

    async def change(self, name: str, paused: bool | None = None, address: str | None = None) -> None:
        await self.devices.change(name, (), paused, address)

    async def states(self) -> dict[str, str]:
        return {device["name"]: device["state"] for device in (await self.devices.to_json(()))["devices"]}


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, work: Callable[[], Awaitable[None]]) -> None:
    own_folders(monkeypatch, folder)

    async def main() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(main())


def member(name: str, state: str = "joined", address: str = "") -> KnownMember:
    return KnownMember(name, state, 0.0, time.time() + 600, address, is_browser=False)


def test_paused_devices_stay_paused_at_other_addresses_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        server = Server()
        server.answers("pi", A)
        server.answers("nas", B)
        await server.change("pi", paused=True)
        assert set(server.left_out) == {A}
        assert await server.devices.addresses() == [B]
        server.answers("pi", C)
        assert (await server.states())["pi"] == "paused"
        assert set(server.left_out) == {C}
        await server.change(B, paused=True)
        assert set(server.left_out) == {B, C}
        await server.change("nas", paused=False)
        assert set(server.left_out) == {C}
        again = Server()
        await again.devices.start()
        assert set(again.left_out) == {C}
        again.answers("pi", C)
        await again.change("pi", paused=False)
        assert set(again.left_out) == set()
        assert await again.devices.addresses() == [C]
        last = Server()
        await last.devices.start()
        assert last.left_out == ()

    run(monkeypatch, tmp_path, work)


def test_address_of_a_paused_device_is_free_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        server = Server()
        server.answers("pi", A)
        await server.change("pi", paused=True)
        server.answers("pi", B)
        server.answers("nas", A)
        await server.states()
        assert await server.states() == {"this device": "ready", "nas": "ready", "pi": "paused"}
        assert set(server.left_out) == {B}

    run(monkeypatch, tmp_path, work)


def test_device_that_was_paused_before_it_had_a_name_is_paused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        server = Server()
        server.workers[A] = False
        await server.change(A, paused=True)
        server.answers("pi", A)
        assert (await server.states())["pi"] == "paused"
        await server.devices.remove("pi", (), revoke=False)
        assert LeftOutDevices().load().keys() == {"pi"}
        state = await server.devices.to_json(())
        assert ([device["name"] for device in state["devices"]], state["removed"]) == (["this device"], ["pi"])
        await server.change("pi", paused=False)
        assert (await server.states())["pi"] == "ready"
        assert set(server.left_out) == set()

    run(monkeypatch, tmp_path, work)


def test_devices_stay_left_out_if_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board without a battery has an old time after its start."""
    LeftOutDevices(tmp_path).put(LeftOut("pi", A, removed=False, since=0.0))
    before_s = time.time()
    monkeypatch.setattr(remembered.time, "time", lambda: before_s - 1e6)  # type: ignore[attr-defined]
    assert LeftOutDevices(tmp_path).load()["pi"].address == A


def test_damaged_entries_of_devices_are_ignored(tmp_path: Path) -> None:
    began_s = time.time()
    LeftOutDevices(tmp_path).put(LeftOut("pi", "", removed=True, since=0.0))
    file = remembered.Remembered("left-out-devices", tmp_path)
    damaged: tuple[Any, ...] = ([], "x", 7, None, {}, {"address": 1, "removed": True}, {"address": A, "removed": "no"})
    for i, value in enumerate(damaged):
        file.put(f"device {i}", value)
    [entry] = LeftOutDevices(tmp_path).load().values()
    assert (entry.name, entry.address, entry.removed) == ("pi", "", True)
    assert began_s - 1 <= entry.since <= time.time() + 1  # an age is subtracted from the time, and loses digits


def test_removing_revokes_only_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revoked: list[str] = []
    monkeypatch.setattr(members, "revoke", revoked.append)

    async def work() -> None:
        server = Server()
        server.members = [member("pi", address=A), member("phone", "invited")]
        server.answers("pi", A)
        server.workers[B] = False
        await server.devices.remove("phone", (), revoke=False)  # withdraws the invitation
        assert (revoked, set(server.left_out), (await server.devices.to_json(()))["removed"]) == (["phone"], set(), [])
        await server.devices.remove("pi", (), revoke=False)
        assert (revoked, set(server.left_out)) == (["phone"], {A})
        await server.devices.remove("pi", (), revoke=True)
        assert revoked == ["phone", "pi"]
        with pytest.raises(BadRequest, match="has no certificate"):
            await server.devices.remove(B, (), revoke=True)
        assert (await server.devices.to_json(()))["removed"] == ["pi"]

        def refuse(name: str) -> None:
            raise TrustError(f"{name} is not known")

        monkeypatch.setattr(members, "revoke", refuse)
        server.members.append(member("nas", address=C))
        server.answers("nas", C)
        with pytest.raises(BadRequest, match="nas is not known"):
            await server.devices.remove("nas", (), revoke=True)
        assert set(server.left_out) == {A}

    run(monkeypatch, tmp_path, work)


def test_addresses_that_a_person_gives_come_before_announced_and_remembered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        server = Server()
        server.members = [member("pi"), member("nas", address=B), member("board", address=C)]
        assert await server.devices.addresses() == [B, C]
        assert server.missing == {"pi", "nas", "board"}
        server.watch.announced["board"] = A
        assert await server.devices.addresses() == [B, A]
        await server.change("pi", address="10.0.0.9")
        await server.change("board", address="10.0.0.8:99")
        assert await server.devices.addresses() == ["10.0.0.9:7070", B, "10.0.0.8:99"]
        server.answers("nas", B)
        await server.devices.addresses()
        assert server.missing == {"pi", "board"}
        for name, error in (("nobody", NotThere), ("this device", BadRequest), (LOCAL, BadRequest)):
            with pytest.raises(error):
                await server.change(name, paused=True)
        with pytest.raises(BadRequest, match="HOST"):
            await server.change("pi", address="10.0.0.9:x")
        server.workers["10.0.0.5:1"] = False
        with pytest.raises(BadRequest, match="invite it first"):
            await server.change("10.0.0.5:1", address=A)
        assert set(server.left_out) == set()

    run(monkeypatch, tmp_path, work)


def test_inviting_creates_a_cluster_only_on_request_and_resumes_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(members, "create_cluster", lambda: calls.append("create"))
    monkeypatch.setattr(members, "invite", lambda name, _: calls.append(name) or "token")

    async def work() -> None:
        server = Server()
        server.answers("pi", A)
        await server.devices.remove("pi", (), revoke=False)
        known: Any = server.devices._members

        async def link(name: str | None, lifetime_s: float, *, has_cluster: bool) -> str:
            return "https://127.0.0.1"

        server.devices._bridge.link = link  # type: ignore[method-assign]

        async def invite(name: str = "pi", *, browser: bool = False, init: bool = False) -> dict[str, Any]:
            return await server.devices.invite(name, 60, browser=browser, init=init)

        for problem, words in (
            ("no cluster yet", "send `init`"),
            ("it is in one of another machine", "another machine"),
        ):
            known.problem = problem
            with pytest.raises(BadRequest, match=words):
                await invite()
            assert (await invite(browser=True))["link"] == "https://127.0.0.1"  # a page needs no cluster here
        assert calls == []
        assert set(server.left_out) == set()
        await server.devices.remove("pi", (), revoke=False)
        with pytest.raises(BadRequest, match="letters"):
            await invite("-pi", init=True)
        assert (calls, set(server.left_out)) == ([], {A})
        assert (await invite(init=True))["command"] == "edge worker --join token"
        assert (calls, set(server.left_out)) == (["create", "pi"], set())
        known.problem = ""
        await invite("nas", init=True)
        assert calls == ["create", "pi", "nas"]
        server.watch.close = lambda: calls.append("closed")
        await server.devices.close()
        assert calls[-1] == "closed"

    run(monkeypatch, tmp_path, work)

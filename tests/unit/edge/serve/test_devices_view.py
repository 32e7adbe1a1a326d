"""Test the state of devices as JSON: states, texts about losses, names, and tiers of memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from devices.profile import describe
from edge.serve.devices.left_out import LeftOut
from edge.serve.devices.members import KnownMember
from edge.serve.devices.view import DevicesView, joined
from edge.serve.devices.watch import Sight
from partition.plan.plan import LOCAL

A, B = "10.0.0.1:7070", "10.0.0.2:7070"
PROFILE = replace(describe("any"), memory_total_bytes=100, memory_available_bytes=40, memory_limit_bytes=None)
HERE = {LOCAL: Sight("this device", PROFILE)}


def status(busy: float = 0.0, events: tuple[str, ...] = (), slots: int = 0, **more: Any) -> dict[str, Any]:
    """Status of a model with layers 0-3 on this device and 4-7 on A."""
    parts = [(LOCAL, "this device", [0, 4]), (A, "pi", [4, 8])]
    devices = [
        {"name": name, "address": address, "rank": rank, "layers": layers, "heads": [0, 4], "busy": busy}
        for rank, (address, name, layers) in enumerate(parts)
    ]
    lines = [{"time": time.time(), "text": text} for text in events]
    running = [{"id": number, "is_processing": True} for number in range(slots)]
    return {
        "model": {"name": "tiny"},
        "devices": devices,
        "events": lines,
        "slots": running,
        "tokens_per_s": 3.0,
        **more,
    }


def shown(
    sights: dict[str, Sight],
    statuses: list[Any],
    members: list[Any] | None = None,
    left_out: dict[str, Any] | None = None,
) -> dict[str, Any]:
    workers = {A: False} | {address: False for address in sights if address != LOCAL}
    devices = joined(statuses, HERE | sights, workers, members or [], left_out or {})
    values = DevicesView().to_json(devices, statuses, left_out or {})
    return {device["name"]: device for device in values["devices"]} | {"": values}


def test_a_worker_computes_while_its_share_of_time_is_not_zero() -> None:
    pi = Sight("pi", PROFILE)
    busy, idle = (shown({A: pi}, [status(share)])["pi"] for share in (0.4, 0.0))
    assert (busy["state"], busy["text"], busy["busy"]) == ("computing", "computes layers 4-7 of tiny", 0.4)
    assert (idle["state"], idle["text"], idle["tokens_per_s"]) == ("ready", "holds layers 4-7 of tiny", 3.0)
    assert idle["memory"]["memory"] == {"total": 100, "free": 40}
    assert idle["models"][0]["n_layers"] == 8


@pytest.mark.parametrize(
    ("events", "slots", "text"),
    [
        ((), 0, "lost: it went away. tiny: no answer was running"),
        ((), 1, "lost: it went away. tiny: its answers wait until other devices take over"),
        (
            ("pi joined", "pi was lost (went away): going on with this device", "Loading x", "1 answer goes on"),
            1,
            "lost: it went away. tiny: pi was lost (went away): going on with this device; 1 answer goes on",
        ),
    ],
)
def test_a_loss_is_explained_with_what_became_of_the_answers(events: tuple[str, ...], slots: int, text: str) -> None:
    lost = Sight("pi", PROFILE, lost_at=time.monotonic() - 2, why=f"pi at {A} went away")
    device = shown({A: lost}, [status(0.0, events, slots)])["pi"]
    assert (device["state"], device["text"]) == ("lost", text)
    assert 2 <= device["since"] < 60
    assert device["memory"] == {"gpu": None, "memory": None, "disk": None}


def test_paused_removed_invited_and_slow_devices_have_their_states() -> None:
    member = KnownMember("pi", "joined", 0.0, 0.0, A, is_browser=False)
    invited = KnownMember("phone", "invited", time.time(), time.time() + 600, "", is_browser=True)
    sights = {A: Sight("pi", PROFILE, is_member=True), B: Sight("nas", PROFILE, is_slow=True)}
    paused = LeftOut("pi", A, removed=False, since=time.time() - 5)
    values = shown(sights, [status()], [member, invited], {"pi": paused})
    assert values["pi"]["state"] == "paused"
    assert values["pi"]["text"] == "paused: no plan uses it; tiny moves to other devices"
    assert 5 <= values["pi"]["since"] < 60
    assert [values["phone"][key] for key in ("state", "kind", "invited")] == ["joining", "browser", True]
    checked = replace(invited, state="joined")
    phone = shown({}, [], [checked])["phone"]
    assert (phone["state"], phone["invited"]) == ("joining", False)
    assert "its page is being checked" in phone["text"]
    assert values["nas"]["state"] == "slow"
    removed = replace(paused, removed=True)
    still_used = shown(sights, [status()], [member], {"pi": removed})
    assert still_used["pi"]["state"] == "paused"
    gone = shown(sights, [], [member], {"pi": removed})
    assert "pi" not in gone
    assert gone[""]["removed"] == ["pi"]


def test_devices_of_one_name_get_their_addresses_and_hostile_names_stay_text() -> None:
    evil = "<img src=x onerror=alert(1)>"
    values = shown({A: Sight(evil, PROFILE), B: Sight(evil, PROFILE)}, [])
    assert set(values) == {"", "this device", evil, f"{evil} at {B}"}


def test_links_have_the_names_of_devices_and_unused_workers_a_link_to_this_device() -> None:
    link = {"from": "this device", "to": "pi", "kind": "tcp", "latency_s": 1e-4, "bytes_per_s": 1e8}
    sights = {A: Sight("pi", PROFILE, latency_s=0.5), B: Sight("nas", PROFILE, latency_s=0.2)}
    values = shown(sights, [status(links=[link])])[""]["links"]
    assert values == [
        link,
        {"from": "this device", "to": "nas", "kind": "grpc", "latency_s": 0.2, "bytes_per_s": None},
    ]


def test_device_with_parts_of_two_copies_has_the_speed_of_the_model_once() -> None:
    whole = status()
    parts = [{**part, "replica": i} for i in range(2) for part in whole["devices"]]
    pi = shown({A: Sight("pi", PROFILE)}, [{**whole, "devices": parts}, {**status(), "model": {"name": "other"}}])["pi"]
    assert [part["model"] for part in pi["models"]] == ["tiny", "tiny", "other"]
    assert pi["tokens_per_s"] == 6.0


def test_state_begins_when_it_changes_but_computing_and_ready_are_one() -> None:
    now = 0.0
    view = DevicesView(lambda: now)

    def since(sight: Sight, busy: float = 0.0) -> tuple[str, float]:
        devices = joined([status(busy)], {A: sight}, {A: False}, [], {})
        [pi] = [value for value in view.to_json(devices, [status(busy)], {})["devices"] if value["name"] == "pi"]
        return pi["state"], pi["since"]

    pi = Sight("pi", PROFILE)
    assert since(pi) == ("ready", 0.0)
    now = 10.0
    assert since(pi, 0.01) == ("computing", 10.0)
    assert since(replace(pi, is_slow=True)) == ("slow", 0.0)
    now = 15.0
    assert since(replace(pi, is_slow=True)) == ("slow", 5.0)
    assert since(replace(pi, lost_at=12.0), 0.5) == ("lost", 3.0)
    assert since(pi, 0.009) == ("ready", 0.0)
    view.to_json([], [], {})
    now = 20.0
    assert since(pi) == ("ready", 0.0)  # a device that was gone is new


@pytest.mark.parametrize(("before_s", "is_shown"), [(2.5, True), (3.5, False)])
def test_only_events_about_a_loss_explain_it(before_s: float, is_shown: bool) -> None:
    lost = Sight("pi", PROFILE, lost_at=time.monotonic() - 20, why="went away")
    lines = [{"time": time.time() - 20 - before_s, "text": "pi was lost"}]
    assert ("pi was lost" in shown({A: lost}, [status(events=()) | {"events": lines}])["pi"]["text"]) == is_shown


def test_lost_device_has_no_figures_and_no_link() -> None:
    profile = replace(PROFILE, load=0.5, temperature_c=50.0, battery_percent=90.0)
    lost = shown({A: Sight("pi", profile, lost_at=time.monotonic(), why="x")}, [status(0.5)])
    keys = ("load", "busy", "temperature_c", "battery_percent")
    assert [lost["pi"][key] for key in keys] == [None, 0.0, None, None]
    assert lost[""]["links"] == []
    there = shown({A: Sight("pi", profile)}, [status(0.5)])
    assert [there["pi"][key] for key in keys] == [0.5, 0.5, 50.0, 90.0]
    assert len(there[""]["links"]) == 1


def test_tiers_are_known_only_with_both_figures_and_within_limits() -> None:
    def tiers(**changes: Any) -> dict[str, Any]:
        none = {"disk_total_bytes": None, "disk_free_bytes": None, "gpu_total_bytes": None, "gpu_free_bytes": None}
        values: dict[str, Any] = shown({A: Sight("pi", replace(PROFILE, **(none | changes)))}, [])["pi"]["memory"]
        return values

    assert tiers() == {"gpu": None, "memory": {"total": 100, "free": 40}, "disk": None}
    assert tiers(memory_limit_bytes=30)["memory"] == {"total": 30, "free": 30}
    assert tiers(memory_limit_bytes=300)["memory"] == {"total": 100, "free": 40}
    for tier in ("disk", "gpu"):
        total, free = f"{tier}_total_bytes", f"{tier}_free_bytes"
        assert tiers(**{total: 7})[tier] is None
        assert tiers(**{free: 7})[tier] is None
        assert tiers(**{total: 7, free: 0})[tier] == {"total": 7, "free": 0}


def test_links_of_several_models_are_shown_once_and_none_leads_to_its_own_device() -> None:
    def link(start: str, end: str) -> dict[str, Any]:
        return {"from": start, "to": end, "kind": "tcp", "latency_s": 1e-4, "bytes_per_s": 1e8}

    first, second = (status(links=[link(*ends)]) for ends in (("this device", "pi"), ("pi", "this device")))
    own = status(links=[link("pi", "pi"), link("pi", "gone")])
    links = shown({A: Sight("pi", PROFILE)}, [own, first, second])[""]["links"]
    assert links == [link("this device", "pi")]


def test_members_are_not_mistaken_for_other_devices() -> None:
    member = KnownMember("board", "joined", 0.0, 0.0, A, is_browser=False)
    stranger = Sight("pi", PROFILE)
    values = shown({A: stranger}, [], [member, replace(member, name="own", address=LOCAL)])
    assert {name: value["member"] for name, value in values.items() if name} == {
        "this device": False, "pi": False, "board": True, "own": True,
    }  # fmt: skip
    for own, other in ((A, B), (B, A)):
        sights = {own: Sight("board", PROFILE, is_member=True), other: Sight("board", PROFILE)}
        values = shown(sights, [], [replace(member, address=other)])
        members = [value["address"] for name, value in values.items() if name and value["member"]]
        assert members == [own]
    assert shown({A: Sight()}, [], [member])["board"]["address"] == A  # it has not answered yet


def test_parts_are_in_words() -> None:
    [here, pi] = status()["devices"]
    parts = [{**here, "layers": [0, 7]}, {**pi, "layers": [7, 8]}]
    texts = shown({A: Sight("pi", PROFILE)}, [{**status(), "devices": parts}])
    assert (texts["this device"]["text"], texts["pi"]["text"]) == ("holds layers 0-6 of tiny", "holds layer 7 of tiny")
    left = {**pi, "layers": None, "rank": None, "left_s": 3.0}
    gone = shown({A: Sight("pi", PROFILE, is_slow=True)}, [{**status(), "devices": [{**here, "layers": [0, 8]}, left]}])
    assert (gone["this device"]["text"], gone["pi"]["text"]) == (
        "holds all layers of tiny", "a model found it slower than before",
    )  # fmt: skip
    assert gone["pi"]["models"] == []
    slow = shown({A: Sight("pi", PROFILE, is_slow=True)}, [status()])["pi"]["text"]
    assert slow == "a model found it slower than before; it is used by tiny"

"""Test measured figures: curves, devices and links as values, as JSON, and saved for a day."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.profile import DeviceProfile
from devices.remembered import MAX_AGE_S, Remembered, key_of
from edge.profiling.links import _as_before
from edge.profiling.llm_survey import _LayerProfiler
from edge.profiling.survey import Devices, own_profile
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.speeds import (
    FASTEST_LINK_BYTES_PER_S,
    Curve,
    DeviceSpeed,
    Links,
    LinkSpeed,
    speed_of,
    speed_to_json,
)
from tests.support.planning import MS, device

seconds = st.floats(0, 3600)
curves = st.dictionaries(st.integers(1, 512), seconds, min_size=1, max_size=5).map(
    lambda points: Curve(tuple(sorted(points.items())))
)
speeds = st.builds(
    DeviceSpeed,
    device=st.just("b:1"),
    name=st.just("pi"),
    **dict.fromkeys(("step_s", "layer_s", "half_layer_s", "head_s"), curves),
    **dict.fromkeys(("token_s", "sum_s"), st.floats(0, 1)),
    **dict.fromkeys(("memory_bytes", "runtime_bytes"), st.integers(0, 1 << 45)),
    disk_bytes_per_s=st.none() | st.floats(1, 1e10),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


# ----------------------------------------------------------------------------------------------------------- curves


def test_a_curve_goes_straight_from_point_to_point_and_on() -> None:
    curve = Curve(((2, 10 * MS), (4, 14 * MS), (8, 16 * MS)))
    rows = (0.5, 1, 2, 3, 4, 6, 8, 16)
    assert [curve.at(n) for n in rows] == pytest.approx([n * MS for n in (10, 10, 10, 12, 14, 15, 16, 20)])
    assert curve.times(3).at(6) == pytest.approx(45 * MS)
    assert Curve(((4, MS),)).at(1) == Curve(((4, MS),)).at(100) == MS
    assert Curve(((1, 2 * MS), (2, MS))).at(5) == 0  # a line down ends at nothing


@given(curves)
def test_a_curve_is_what_was_measured_where_it_was(curve: Curve) -> None:
    assert [curve.at(rows) for rows, _ in curve.points] == pytest.approx([n for _, n in curve.points])
    assert Curve.from_json(json.loads(json.dumps(curve.to_json())), "x") == curve


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "a curve at rows []; expected one or more, ascending from 1"),
        (((0, 1.0),), "a curve at rows [0]; expected one or more"),
        (((2, 1.0), (1, 1.0)), "a curve at rows [2, 1]; expected one or more, ascending"),
        (((1, 1.0), (1, 2.0)), "a curve at rows [1, 1]; expected one or more, ascending"),
        (((1, -1.0),), "a curve of [-1.0] seconds; expected 0 to 3600"),
        (((1, nan),), "a curve of [nan] seconds; expected 0 to 3600"),
        (((1, inf),), "a curve of [inf] seconds; expected 0 to 3600"),
    ],
)
def test_curves_that_cannot_be(points: tuple[tuple[int, float], ...], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        Curve(points)
    assert str(raised.value).startswith(message)


# ---------------------------------------------------------------------------------------------------------- devices


@given(speeds)
def test_a_speed_as_json_and_back(speed: DeviceSpeed) -> None:
    written = json.loads(json.dumps(speed_to_json(speed)))
    assert speed_of(written, "b:1", "pi", 7.0) == replace(speed, age_s=7.0)


@given(json_values, st.data())
def test_any_json_is_a_speed_or_refused(value: Any, data: st.DataObject) -> None:
    """Also where one value, anywhere in a good one, is replaced."""
    with pytest.raises(PlanError):
        speed_of(value, LOCAL, "pi", 0.0)
    values = speed_to_json(device(by_row=True))
    inner: Any = values
    while True:
        key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        if not isinstance(inner[key], list) or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = value
    try:
        speed = speed_of(values, LOCAL, "pi", 0.0)
    except PlanError:
        return
    assert speed_of(speed_to_json(speed), LOCAL, "pi", 0.0) == speed


@pytest.mark.parametrize("what", ["watts", "disk_bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, inf, nan])
def test_figures_of_a_device_that_cannot_be(what: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"^local: {what} is {value}; expected a number above 0$"):
        device(**{what: value})


# ------------------------------------------------------------------------------------------------------------ links


def test_a_link_faster_than_memory_contradicts_it() -> None:
    LinkSpeed(0, FASTEST_LINK_BYTES_PER_S)
    with pytest.raises(PlanError, match=r"^a link of 6e\+10 bytes/s; .* at most 5e\+10, which no memory .* it again$"):
        LinkSpeed(0, 6e10)
    for bytes_per_s in (0.0, -1.0, nan, inf):
        with pytest.raises(PlanError, match="expected a number above 0"):
            LinkSpeed(0, bytes_per_s)
    for latency_s in (-1.0, nan, inf):
        with pytest.raises(PlanError, match=r"a link with a latency of .* s; expected 0 or more"):
            LinkSpeed(latency_s, 1e6)


def test_links_are_known_both_ways_or_missed() -> None:
    links = Links({("a", "b"): LinkSpeed(MS, 1e6), ("b", "a"): LinkSpeed(2 * MS, 3e6)})
    assert links.get("a", "b").latency_s == MS
    assert links.get("b", "a").latency_s == 2 * MS
    assert (1 << 20) / links.get("c", "c").bytes_per_s < MS  # from a device to itself
    assert links.slowest("ab") == LinkSpeed(2 * MS, 1e6)
    assert links.slowest("a") == links.get("a", "a")
    for a, b in ("ac", "cb"):
        with pytest.raises(PlanError, match=f"^the link from {a} to {b} was not measured; probe the devices again$"):
            links.get(a, b)
    with pytest.raises(PlanError, match="the link from a to c"):
        links.slowest("abc")


# ------------------------------------------------------------------------------------------------------- remembered


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes it so many seconds later than it is."""
    now = time.time()

    def make(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now + seconds)

    return make


def test_what_is_remembered_has_its_age(tmp_path: Path, later: Callable[[float], None]) -> None:
    later(0)
    Remembered("x", tmp_path).put("key", [1])
    cache = Remembered("x", tmp_path)  # it is in a file
    later(60)
    assert cache.get("key") == ([1], pytest.approx(60))
    assert cache.get("another") is None
    later(MAX_AGE_S)
    assert cache.get("key") is not None
    for stale in (MAX_AGE_S + 1, -1):  # and from the future, where a clock was wrong
        later(stale)
        assert cache.get("key") is None


def test_measured_again_is_what_counts(tmp_path: Path) -> None:
    cache = Remembered("x", tmp_path)
    for value in (3, 5):
        cache.put("key", value)
    cache.put("other", 7)
    results = [cache.get(key) for key in ("key", "other")]
    assert [item and item[0] for item in results] == [5, 7]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '"key"',
        "[" * 100_000,
        '{"key": null}',
        '{"key": {"value": {}}}',
        '{"key": {"measured_at": "today", "value": {}}}',
        '{"key": {"measured_at": 1e999, "value": {}}}',
        f'{{"key": {{"measured_at": {10**400}, "value": {{}}}}}}',
    ],
)
def test_a_file_that_is_broken_is_measured_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    cache = Remembered("x", tmp_path)
    assert cache.get("key") is None
    cache.put("key", 1)
    assert cache.get("key") is not None


def test_a_speed_of_another_version_is_measured_anew() -> None:
    layers = object.__new__(_LayerProfiler)
    layers._devices, layers.pages, layers.has_two_tiers = Devices(None, 1), [False], [False]
    speed = device("b:1", 3 * MS)
    assert layers.read(0, speed_to_json(speed)) == replace(speed, device=LOCAL, name="this device")
    assert layers.read(0, {"layer_s": [[1, 0.1]]}) is None
    layers.pages = [True]  # a device that may have to page needs the speed of its disk
    assert layers.read(0, speed_to_json(speed)) is None
    speed = replace(speed, disk_bytes_per_s=1e8)
    assert layers.read(0, speed_to_json(speed)) is not None
    layers.has_two_tiers = [True]  # a device with a GPU that may be too small needs the times of both
    assert layers.read(0, speed_to_json(speed)) is None
    assert layers.read(0, speed_to_json(replace(speed, gpu=replace(speed, disk_bytes_per_s=None)))) is not None


def test_a_file_that_is_no_text_is_measured_anew(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    assert Remembered("x", tmp_path).get("key") is None


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Remembered("x", tmp_path / "file" / "folder")
    cache.put("key", 1)
    assert cache.get("key") is None


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    entry = {"measured_at": time.time(), "value": 1}
    (tmp_path / "x.json").write_text(json.dumps({f"k{i}": entry for i in range(500)}))
    remembered = Remembered("x", tmp_path)
    remembered.put("k1", 2)  # it is the newest now
    remembered.put("new", 3)
    results = [remembered.get(key) for key in ("k0", "k1", "k2", "new")]
    assert [item and item[0] for item in results] == [None, 2, 1, 3]


def test_what_times_depend_on() -> None:
    profile = own_profile("pi", 2)

    def key(slices: list[str], *profiles: DeviceProfile) -> str:
        return key_of(slices, *profiles)

    same = replace(profile, memory_available_bytes=1, battery_percent=5.0, plugged=False, temperature_c=80.0)
    assert key(["a", "b"], profile) == key(["a", "b"], same)
    others = [
        replace(profile, **item)
        for item in (
            {"name": "other"},
            {"cpu": "other"},
            {"machine": "other"},
            {"threads": 3},
            {"cpu_quota": 0.25},
            {"gpu": "other"},
            {"system": "other"},
            {"runtime": "other"},
            {"llama_cpp": "other"},
        )
    ]
    keys = {key(["a", "b"], item) for item in (profile, *others)}
    keys |= {key(["a"], profile), key(["ab"], profile), key(["b", "a"], profile), key(["a", "b"], profile, profile)}
    assert len(keys) == len(others) + 5


def test_a_link_is_as_before_if_it_answers_as_before() -> None:
    """8 KiB took 2 ms there and back, of which 1 ms is latency: a third of the rest, and noise, may come and go."""
    values = {"trip_s": 2 * MS, "latency_s": 0.5 * MS, "there": 1e7, "back": 2e7}
    ways = (LinkSpeed(0.5 * MS, 1e7, age_s=60), LinkSpeed(0.5 * MS, 2e7, age_s=60))
    for trip_s in (1.65 * MS, 2 * MS, 2.35 * MS):
        assert _as_before((values, 60.0), trip_s) == ways
    for trip_s in (0.0, 1.5 * MS, 2.5 * MS, 12 * MS):
        assert _as_before((values, 60.0), trip_s) is None
    assert _as_before(None, 2 * MS) is None
    broken: list[Any] = [None, [], {}, values | {"there": 6e10}, values | {"trip_s": "x"}, values | {"back": 10**400}]
    for other in broken:
        assert _as_before((other, 60.0), 2 * MS) is None

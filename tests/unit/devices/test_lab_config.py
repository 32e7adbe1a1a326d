"""Test lab files: the meaning of valid ones, and the errors for invalid ones."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.catalog import CATALOG, EMULATED
from devices.errors import LabFileError
from devices.lab.config import THREE_DEVICES, LabDevice, parse_lab, read_lab
from devices.lab.shaper import Shape
from tests.support.helpers import ROOT, assert_one_line_error, run_edge

A, B = {"name": "a"}, {"name": "b"}
TOTAL = psutil.virtual_memory().total


def test_the_example() -> None:
    lab = read_lab(ROOT / "docs" / "example-lab.toml")
    pi, laptop = lab.devices
    assert (pi.name, pi.preset, pi.cpu, pi.memory_bytes) == ("pi", "pi4", EMULATED["pi4"].cpu, 2 << 30)
    assert (laptop.cpu, laptop.threads, laptop.cache_bytes) == (0.4, 1, 4 << 30)
    between = Shape(0.003, 0.002, 6_250_000, 0.001)
    assert lab.shape("pi", "old-laptop") == lab.shape("old-laptop", "pi") == between
    assert lab.shape("owner", "pi") == Shape(0.0005)
    assert lab.shaped


def test_without_links_all_is_loopback() -> None:
    lab = parse_lab({"device": [A, B]})
    assert lab.devices == (LabDevice("a"), LabDevice("b"))
    assert not lab.shaped
    assert lab.shape("a", "b") == Shape()
    assert not parse_lab({"device": [A], "link": [{"delay_ms": 0}]}).shaped


def test_a_device_with_a_bandwidth_makes_a_lab_with_links() -> None:
    lab = parse_lab({"device": [{"name": "a", "bandwidth_mbps": 8}, {"name": "b"}]})
    assert [device.bytes_per_s for device in lab.devices] == [1e6, None]
    assert lab.shaped


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "lab.toml").write_text('[[device]]\nname = "a"\nmodels = "models"\n')
    assert read_lab(tmp_path / "lab.toml").devices[0].models == tmp_path / "models"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({}, ["device[0].name", "None"]),
        ({"name": ""}, ["device[0].name"]),
        ({"name": "../up"}, ["device[0].name"]),
        ({"name": 3}, ["device[0].name", "3"]),
        ({"name": "owner"}, ["device[0].name", "owner"]),
        ({"cores": 2}, ["device[0]", "'cores'", "cpu"]),
        ({"preset": "cray"}, ["device[0].preset", "pi4, pi5", "'cray'"]),
        ({"cpu": 0}, ["device[0].cpu", "0.01"]),
        ({"cpu": -1.5}, ["device[0].cpu", "-1.5"]),
        ({"cpu": "2"}, ["device[0].cpu", "a number", "'2'"]),
        ({"cpu": True}, ["device[0].cpu", "True"]),
        ({"cpu": float("nan")}, ["device[0].cpu", "nan"]),
        ({"cpu": 10**400}, ["device[0].cpu", "0000..."]),
        ({"memory": "1 parsec"}, ["device[0].memory", '"1GiB"']),
        ({"memory": 1 << 30}, ["device[0].memory", '"1GiB"']),
        ({"memory": "-1GiB"}, ["device[0].memory"]),
        ({"memory": "0MiB"}, ["device[0].memory"]),
        ({"memory": "1MiB"}, ["device[0].memory", "128MiB"]),
        ({"memory": f"{TOTAL + 1}B"}, ["device[0].memory", f"{TOTAL / 2**30:.1f}GiB"]),
        ({"threads": 1.5}, ["device[0].threads", "whole"]),
        ({"threads": 0}, ["device[0].threads"]),
        ({"affinity": "all"}, ["device[0].affinity", "all"]),
        ({"affinity": "4000"}, ["device[0].affinity", "4000"]),
        ({"cache_size": "much"}, ["device[0].cache_size"]),
        ({"models": "/nowhere/at/all"}, ["device[0].models", "/nowhere/at/all"]),
    ],
)
def test_a_device_that_cannot_be(device: dict[str, Any], words: list[str]) -> None:
    provided = {"name": "a", **device} if device else {}
    with pytest.raises(LabFileError) as error:
        parse_lab({"device": [provided]})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ({"delay": 1}, ["link[0]", "'delay'", "delay_ms"]),
        ({"delay_ms": -1}, ["link[0].delay_ms", "-1"]),
        ({"delay_ms": "5ms"}, ["link[0].delay_ms", "'5ms'"]),
        ({"jitter_ms": 1e9}, ["link[0].jitter_ms"]),
        ({"bandwidth_mbps": 0}, ["link[0].bandwidth_mbps"]),
        ({"loss": 101}, ["link[0].loss"]),
        ({"between": ["a"]}, ["link[0].between", "['a']"]),
        ({"between": ["a", "a"]}, ["link[0].between", "different"]),
        ({"between": "ab"}, ["link[0].between"]),
        ({"between": ["a", "c"]}, ["link[0].between", "'c'", "owner, a, b"]),
        ({"between": ["a", ["b"]]}, ["link[0].between"]),
    ],
)
def test_a_link_that_cannot_be(link: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LabFileError) as error:
        parse_lab({"device": [A, B], "link": [link]})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, ["1 to 64", "got 0"]),
        ({"device": {"name": "a"}}, ["[[device]]"]),
        ({"device": ["a"]}, ["[[device]]"]),
        ({"device": [{"name": f"d{i}"} for i in range(65)]}, ["got 65"]),
        ({"device": [A, A]}, ["device[1].name", "'a'"]),
        ({"device": [A], "links": []}, ["'links'", "device, link"]),
        ({"device": [A, B], "link": [{"between": ["a", "b"]}, {"between": ["b", "a"]}]}, ["link[1]", "a and b"]),
        ({"device": [A], "link": [{"delay_ms": 1}, {"delay_ms": 2}]}, ["link[1]", "all pairs"]),
    ],
)
def test_a_lab_that_cannot_be(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LabFileError) as error:
        parse_lab(data)
    assert all(word in str(error.value) for word in words), error.value


def test_files_that_are_no_lab(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    assert_one_line_error(run_edge("lab", "up", file), 3, str(file), "No such file")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(LabFileError, match=r"lab\.toml is not valid TOML"):
        read_lab(file)
    file.write_text('[[device]]\nname = "a"\nname = "b"\n')
    with pytest.raises(LabFileError, match=r"lab\.toml is not valid TOML.*line 3"):
        read_lab(file)
    file.write_text('[[device]]\nname = "a"\nram = "1GiB"\n')
    assert_one_line_error(run_edge("lab", "up", file), 3, str(file), "device[0]", "'ram'")


def test_the_process_that_makes_a_lab_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pi.json").write_text('{"speed": {}}')
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    data = {
        "device": [
            {"name": "a", "cpu": 0.5, "memory": "1GiB", "affinity": "0", "models": "models", "bandwidth_mbps": 8},
            {"name": "b", "compute": "sleep", "profile": "pi.json"},
            {"name": "c", "compute": "sleep", "preset": "rtx-3060"},
            {"name": "d", "compute": "sleep", "profile": '{"preset": "pi4"}'},
        ],
        "link": [{"between": ["owner", "a"], "delay_ms": 3, "bandwidth_mbps": 100, "loss": 1}, {"jitter_ms": 0.5}],
    }
    lab = parse_lab(data)
    monkeypatch.chdir("/")
    assert parse_lab(json.loads(json.dumps(lab.data)), lab.folder) == lab
    assert (lab.devices[0].models, lab.devices[1].profile) == (tmp_path / "models", '{"speed": {}}')


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "between", "cpu"]), inner),
    max_leaves=9,
)
keys = st.sampled_from(
    ["name", "preset", "cpu", "memory", "threads", "affinity", "cache_size", "models", "bandwidth_mbps"]
)
link_keys = st.sampled_from(["between", "delay_ms", "jitter_ms", "bandwidth_mbps", "loss"])


@given(st.lists(st.dictionaries(keys, values), max_size=2) | values, st.lists(st.dictionaries(link_keys, values)))
def test_whatever_is_given_is_a_lab_or_a_clear_error(some: Any, links: Any) -> None:
    with suppress(LabFileError):
        assert parse_lab({"device": some, "link": links}).devices


def test_a_device_that_sleeps_takes_any_preset_or_a_profile(tmp_path: Path) -> None:
    (tmp_path / "pi.json").write_text('{"speed": {}}')
    lab = parse_lab(
        {
            "device": [
                {"name": "a", "compute": "sleep", "preset": "rtx-3060"},
                {"name": "b", "compute": "sleep", "profile": "pi.json", "memory": "900GiB"},
            ]
        },
        tmp_path,
    )
    a, b = lab.devices
    assert (a.profile, a.cpu, a.memory_bytes) == ('{"preset": "rtx-3060"}', None, CATALOG["rtx-3060"].memory_bytes)
    assert (b.profile, b.preset, b.memory_bytes) == ('{"speed": {}}', None, 900 << 30)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"compute": "fast"}, ["device[0].compute", "'sleep'", "'fast'"]),
        ({"compute": "sleep"}, ["device[0].profile", "preset"]),
        ({"compute": "sleep", "preset": "pi4", "profile": "pi.json"}, ["device[0].profile", "exactly one of them"]),
        ({"compute": "sleep", "preset": "cray"}, ["device[0].preset", "rtx-3060"]),
        ({"compute": "sleep", "preset": "pi4", "cpu": 1}, ["device[0].cpu", "devices that compute"]),
        ({"profile": "pi.json"}, ["device[0].profile", "compute"]),
        ({"preset": "rtx-3060"}, ["device[0].preset", "pi4, pi5"]),
        ({"compute": "sleep", "profile": "none.json"}, ["device[0].profile", "none.json", "No such file"]),
        ({"compute": "sleep", "profile": "bad.json"}, ["device[0].profile", "bad.json"]),
    ],
)
def test_what_sleeps_by_nothing_is_refused(device: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(LabFileError) as error:
        parse_lab({"device": [{"name": "a", **device}]}, tmp_path)
    for word in words:
        assert word in str(error.value)


def test_the_lab_without_a_file_has_three_devices() -> None:
    assert [device.name for device in read_lab(THREE_DEVICES).devices] == ["pi", "phone", "old-laptop"]

"""Test cluster files: the meaning of valid ones, and the errors for invalid ones."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.errors import EXIT_CODES
from devices.catalog import CATALOG
from devices.cluster_file import LOCAL, Cluster, ClusterDevice, ClusterLink, read_cluster
from devices.errors import ClusterFileError
from devices.names import join_address, parse_address

HERE, PI = '[[device]]\nname = "here"\naddress = "local"\n', '[[device]]\nname = "pi"\naddress = "pi.local:7071"\n'

WHOLE = """
[[device]]
name = "desk"
address = "local"
memory = "2GiB"
watts = 45.5
threads = 3
speed = 0.5
disk_mb_per_s = 1500

[[device]]
name = "pi"
address = "10.0.0.7"

[[device]]
name = "new-phone"
preset = "phone"
speed = 2

[[link]]
delay_ms = 2.5

[[link]]
between = ["pi", "local"]
bandwidth_mbps = 940

[[link]]
between = ["new-phone", "pi"]
delay_ms = 0
bandwidth_mbps = 0.5
"""


def parsed(text: str) -> Cluster:
    """The cluster of a file with this text."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "my.toml"
        file.write_text(text)
        return read_cluster(file)


def test_all_of_it() -> None:
    cluster = parsed(WHOLE)
    desk, pi, phone = cluster.devices
    assert desk == ClusterDevice("desk", LOCAL, None, 2 << 30, 45.5, 3, 0.5, 1.5e9)
    assert pi == ClusterDevice("pi", "10.0.0.7:7070")
    assert phone == ClusterDevice("new-phone", None, "phone", speed=2.0)
    assert (cluster.local, cluster.local_name, cluster.workers) == (desk, "desk", (pi,))
    assert cluster.link("desk", "pi") == cluster.link("pi", "desk") == ClusterLink(None, 117_500_000)
    assert cluster.link("pi", "new-phone") == ClusterLink(0.0, 62_500)
    assert cluster.link("desk", "new-phone") == ClusterLink(0.0025, None)


def test_what_is_not_said_is_measured() -> None:
    cluster = parsed(PI)
    assert cluster.devices == (ClusterDevice("pi", "pi.local:7071"),)
    assert cluster.link("pi", LOCAL) is None
    assert (cluster.local, cluster.local_name) == (None, LOCAL)


def test_a_link_to_this_device_where_it_is_not_listed() -> None:
    cluster = parsed(f'{PI}[[link]]\nbetween = ["local", "pi"]\ndelay_ms = 1')
    assert cluster.link("pi", LOCAL) == ClusterLink(0.001, None)


def test_a_preset_is_not_asked_even_at_an_address() -> None:
    cluster = parsed(f'{PI}preset = "pi5"\n')
    assert cluster.workers == ()
    assert cluster.devices[0].address == "pi.local:7071"


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("pi", "pi:7070"),
        ("pi:1", "pi:1"),
        ("::1", "[::1]:7070"),
        ("[::1]", "[::1]:7070"),
        ("[fd00::7]:65535", "[fd00::7]:65535"),
    ],
)
def test_addresses(written: str, address: str) -> None:
    cluster = parsed(f'[[device]]\nname = "a"\naddress = "{written}"')
    assert cluster.devices[0].address == address


@pytest.mark.parametrize(
    "text",
    [
        "pi",
        "pi.local:7071",
        "::1",
        "[::1]:1",
        "[pi]",
        "pi:",
        "pi:70000",
        "pi:0",
        "a b",
        "u@pi",
        "1:2:3",
        "fe80::1%eth0",
    ],
)
def test_an_address_is_what_it_is_to_commands(text: str) -> None:
    try:
        address = join_address(*parse_address(text))
    except ValueError:
        with pytest.raises(ClusterFileError):
            Cluster.of_addresses([text])
    else:
        assert Cluster.of_addresses([text]).devices[1].address == address


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name = 3", ["device[0].name", "3"]),
        ('name = "../up"', ["device[0].name", "../up"]),
        ('name = "local"', ["device[0].name", "this device"]),
        ('address = "pi:70000"', ["device[0].address", "HOST:PORT", "70000"]),
        ('address = "http://pi"', ["device[0].address"]),
        ('address = "[pi]"', ["device[0].address"]),
        ('address = ""', ["device[0].address"]),
        ("address = 7070", ["device[0].address", "7070"]),
        ('preset = "cray"', ["device[0].preset", "pi4, pi5", "'cray'"]),
        ("preset = 5", ["device[0].preset"]),
        ("ram = 1", ["device[0]", "'ram'", "memory"]),
        ("cpu = 0.5", ["device[0]", "'cpu'"]),  # of a lab
        ('memory = "2GB/s"', ["device[0].memory", '"1GiB"', "2GB/s"]),
        ("memory = 2", ["device[0].memory", '"1GiB"']),
        ('memory = "0B"', ["device[0].memory"]),
        ("watts = 0", ["device[0].watts", "0.01"]),
        ('watts = "5W"', ["device[0].watts", "without a unit", "5W"]),
        ("watts = nan", ["device[0].watts", "nan"]),
        ("threads = 1.5", ["device[0].threads", "whole"]),
        ("threads = 0", ["device[0].threads"]),
        ("threads = true", ["device[0].threads", "True"]),
        ("speed = -1", ["device[0].speed", "-1"]),
        ("speed = inf", ["device[0].speed", "inf"]),
        ("disk_mb_per_s = 0", ["device[0].disk_mb_per_s"]),
        ("disk_gbps = 1", ["device[0]", "'disk_gbps'", "disk_mb_per_s"]),
    ],
)
def test_a_device_that_cannot_be(line: str, words: list[str]) -> None:
    key = line.split()[0]
    lines = {"name": 'name = "a"', "address": 'address = "pi"', key: line}
    refused("[[device]]\n" + "\n".join(lines.values()), *words)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", ["link[0]", "delay_ms, bandwidth_mbps"]),
        ('between = ["here", "pi"]', ["link[0]", "has no properties"]),
        ("delay = 1", ["link[0]", "'delay'", "delay_ms"]),
        ("jitter_ms = 1", ["link[0]", "'jitter_ms'"]),  # of a lab
        ("delay_ms = -1", ["link[0].delay_ms", "0 to 60000", "-1"]),
        ("delay_ms = 60001", ["link[0].delay_ms", "60001"]),
        ('delay_ms = "5ms"', ["link[0].delay_ms", "without a unit", "5ms"]),
        ("bandwidth_mbps = 0", ["link[0].bandwidth_mbps"]),
        ("bandwidth_mbps = 400001", ["link[0].bandwidth_mbps", "400000", "faster than memory", "400001"]),
        (f"bandwidth_mbps = 1{'0' * 400}", ["link[0].bandwidth_mbps", "faster than memory"]),
        ('bandwidth_mbps = "2GB/s"', ["link[0].bandwidth_mbps", "without a unit", "2GB/s"]),
        ('between = ["here"]\ndelay_ms = 1', ["link[0].between", "two"]),
        ('between = "here"\ndelay_ms = 1', ["link[0].between"]),
        ('between = ["pi", "pi"]\ndelay_ms = 1', ["link[0].between", "different"]),
        ('between = ["here", "local"]\ndelay_ms = 1', ["link[0].between", "different"]),
        ('between = ["pi", "attic"]\ndelay_ms = 1', ["link[0].between", "'attic'", "here, pi"]),
        ('between = ["pi", ["here"]]\ndelay_ms = 1', ["link[0].between"]),
        ("delay_ms = 1\n[[link]]\ndelay_ms = 2", ["link[1]", "all pairs"]),
        (
            'between = ["here", "pi"]\ndelay_ms = 1\n[[link]]\nbetween = ["pi", "local"]\ndelay_ms = 1',
            ["link[1]", "between pi and here"],
        ),
    ],
)
def test_a_link_that_cannot_be(lines: str, words: list[str]) -> None:
    refused(f"{HERE}{PI}[[link]]\n{lines}", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["1 to 64", "got 0"]),
        ('device = "pi"', ["[[device]]"]),
        ("device = [1]", ["[[device]]"]),
        (f"{PI}[links]", ["'links'", "device, link"]),
        ('[[device]]\nname = "a"', ["device[0].address", "preset"]),
        (f'{PI}[[device]]\nname = "pi"\naddress = "b"', ["device[1].name", "'pi'"]),
        (f'{PI}[[device]]\nname = "b"\naddress = "pi.local:7071"', ["device[1].address", "pi has pi.local:7071 too"]),
        (f'{HERE}[[device]]\nname = "b"\naddress = "local"', ["device[1].address", "here"]),
        ("".join(f'[[device]]\nname = "d{i}"\naddress = "d{i}"\n' for i in range(65)), ["got 65"]),
        ('[[device]]\nname = "a"\nname = "b"\n', ["not valid TOML", "line 3"]),
    ],
)
def test_a_cluster_that_cannot_be(text: str, words: list[str]) -> None:
    refused(text, *words)


def refused(text: str, *words: str) -> None:
    """One line, which begins with where the text is from and holds all words."""
    with pytest.raises(ClusterFileError) as error:
        parsed(text)
    message = str(error.value)
    assert message.partition(" ")[0].rstrip(":").endswith("/my.toml")
    assert "\n" not in message
    assert len(message) < 400
    assert all(word in message for word in words), message


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    with pytest.raises(OSError, match="No such file"):
        read_cluster(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterFileError, match=r"cluster\.toml is not valid TOML"):
        read_cluster(file)
    file.write_text(f"{PI}ram = 1")
    with pytest.raises(ClusterFileError, match=r"cluster\.toml: device\[0\] has an unknown key 'ram'"):
        read_cluster(file)
    file.write_text(WHOLE)
    assert read_cluster(file) == parsed(WHOLE)
    assert EXIT_CODES[ClusterFileError.__name__] == 3


def test_of_addresses() -> None:
    cluster = Cluster.of_addresses(["pi.local:7070", "10.0.0.7:7071", "::1"])
    assert cluster.devices[0] == ClusterDevice(LOCAL, LOCAL)
    assert [device.address for device in cluster.workers] == ["pi.local:7070", "10.0.0.7:7071", "[::1]:7070"]
    assert [device.name for device in cluster.workers[:2]] == ["pi.local", "10.0.0.7-7071"]
    assert cluster.link("local", "pi.local") is None
    with pytest.raises(ClusterFileError, match="pi:7070 is named twice"):
        Cluster.of_addresses(["pi", "pi:7070"])
    with pytest.raises(ClusterFileError, match="local is named twice"):
        Cluster.of_addresses(["local"])
    with pytest.raises(ClusterFileError, match="HOST:PORT; got 'a b'"):
        Cluster.of_addresses(["a b"])


def test_names_made_of_addresses_differ_and_can_be_names() -> None:
    long = "x" * 60
    some = [f"{long}1", f"{long}2:7071", f"{long}3", "a-1", "a:1", "local:7071", "local:7070", "[::1]:1", "1-1"]
    cluster = Cluster.of_addresses(some)
    names = [device.name for device in cluster.devices]
    assert len(set(names)) == len(some) + 1
    text = "".join(f'[[device]]\nname = "{d.name}"\naddress = "{d.address}"\n' for d in cluster.devices)
    assert parsed(text) == cluster


values = st.sampled_from(
    ['"a"', '"local"', '"pi"', '"pi5"', '"1GiB"', "1", "0", "-1", "2.5", "nan", "inf", "true", '["a", "b"]', "{}", "[]"]
)
keys = st.sampled_from(["name", "address", "preset", "memory", "watts", "threads", "speed", "disk_mb_per_s", "more"])
link_keys = st.sampled_from(["between", "delay_ms", "bandwidth_mbps"])


@given(
    st.lists(st.dictionaries(keys, values), max_size=3),
    st.lists(st.dictionaries(link_keys, values), max_size=2),
)
def test_whatever_is_given_is_a_cluster_or_a_clear_error(
    devices: list[dict[str, str]], links: list[dict[str, str]]
) -> None:
    text = "".join(
        f"[[{kind}]]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
        for kind, some in (("device", devices), ("link", links))
        for table in some
    )
    with suppress(ClusterFileError):
        cluster = parsed(text)
        assert all(device.address or device.preset in CATALOG for device in cluster.devices)
        assert all(link.latency_s is not None or link.bytes_per_s is not None for link in cluster.links.values())


@pytest.mark.parametrize("text", ["a = " + "[" * 3000 + "]" * 3000, "a = " + "{b=" * 3000 + "1" + "}" * 3000])
def test_a_file_that_is_nested_deep_is_an_error_of_that_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterFileError, match=r"cluster\.toml.*nested too deep"):
        read_cluster(path)

"""Test the kinds of devices to buy: read from a file, with the presets' figures and prices, and bad input."""

from pathlib import Path

import pytest

from devices.catalog import CATALOG, GIB
from devices.errors import ClusterFileError
from edge.planning.device_kinds import MANY, DeviceKinds, preset_kinds, read_kinds

MINE = """
currency = "EUR"
delay_ms = 0.5
bandwidth_mbps = 1000

[[device]]
preset = "pi5"
price = 95
source = "a shop, 2026-03-01"

[[device]]
name = "box"
preset = "mini-pc"
price = 210.5
watts = 30
memory = "28GiB"
memory_gb_per_s = 60
gflops = 800
most = 2
"""


def read(tmp_path: Path, text: str) -> DeviceKinds:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    return read_kinds(path)


def test_a_file_of_kinds(tmp_path: Path) -> None:
    result = read(tmp_path, MINE)
    assert (result.currency, result.latency_s, result.bytes_per_s) == ("EUR", 0.0005, 125e6)
    pi, box = result.kinds
    assert (pi.name, pi.price, pi.price_source, pi.most) == ("pi5", 95.0, "a shop, 2026-03-01", MANY)
    assert pi.preset == CATALOG["pi5"]
    assert (box.name, box.price, box.most) == ("box", 210.5, 2)
    figures = (box.preset.memory_bytes, box.preset.memory_bytes_per_s, box.preset.flops, box.preset.watts)
    assert figures == (28 * GIB, 60e9, 800e9, 30.0)


def test_the_price_of_a_preset_is_taken_where_it_is_of_the_same_device_and_currency(tmp_path: Path) -> None:
    [kind] = read(tmp_path, '[[device]]\npreset = "pi5"').kinds
    assert (kind.price, kind.price_source) == (80.0, CATALOG["pi5"].source["price_usd"])
    for other in ('currency = "EUR"\n[[device]]\npreset = "pi5"', '[[device]]\npreset = "pi5"\nmemory = "15GiB"'):
        assert read(tmp_path, other).kinds[0].price is None
    assert read(tmp_path, '[[device]]\npreset = "phone"').kinds[0].price is None


def test_presets_are_kinds() -> None:
    kinds = {kind.name: kind for kind in preset_kinds().kinds}
    assert kinds.keys() == CATALOG.keys()
    assert kinds["pi4"].price == 55.0
    assert kinds["laptop"].price is None
    assert [kind.name for kind in preset_kinds().named(["pi5", "pi4", "pi5"]).kinds] == ["pi5", "pi4"]
    with pytest.raises(ClusterFileError, match="no kind of device is called 'cray'; known are pi4"):
        preset_kinds().named(["cray"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"there is no device; expected a \[\[device\]\]"),
        ("[[kind]]", "the file has an unknown key 'kind'"),
        ("currency = 3\n", 'currency needs its letters, such as "EUR"; got 3'),
        ('[[device]]\nname = "x"', r"device\[0\].preset needs the one that it is most like, of pi4"),
        ('[[device]]\npreset = "cray"', r"device\[0\].preset needs .*; got 'cray'"),
        ('[[device]]\npreset = "pi5"\nprice = "95 EUR"', r"device\[0\].price needs a number .*, without a unit"),
        ('[[device]]\npreset = "pi5"\nprice = -1', r"device\[0\].price needs a number from 0"),
        ('[[device]]\npreset = "pi5"\nwatts = "12W"', r"device\[0\].watts needs a number .*, without a unit"),
        ('[[device]]\npreset = "pi5"\nmemory = 8', r"device\[0\].memory needs a size"),
        ('[[device]]\npreset = "pi5"\ngflops = 0', r"device\[0\].gflops needs a number from 0.01"),
        ('[[device]]\npreset = "pi5"\nmost = 0', r"device\[0\].most needs a number from 1"),
        ('[[device]]\npreset = "pi5"\nmost = 1.5', r"device\[0\].most needs a whole number"),
        ('[[device]]\npreset = "pi5"\nsource = 2026', r"device\[0\].source needs a text of one line"),
        ('[[device]]\npreset = "pi5"\ncost = 1', r"device\[0\] has an unknown key 'cost'"),
        ('[[device]]\npreset = "pi5"\nname = "-x"', r"device\[0\].name needs 1 to"),
        ('[[device]]\npreset = "pi5"\n[[device]]\npreset = "pi5"', r"device\[1\].name: another kind is called 'pi5'"),
        ('delay_ms = "2ms"\n[[device]]\npreset = "pi5"', "the file.delay_ms needs a number .*, without a unit"),
        ('bandwidth_mbps = 0\n[[device]]\npreset = "pi5"', "the file.bandwidth_mbps needs a number from 0.001"),
        ("[[device", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterFileError, match=message) as caught:
        read(tmp_path, text)
    assert "devices.toml" in str(caught.value)

"""Test the presets for what-if plans: every figure has its source and is plausible for a device."""

import dataclasses
import re

import pytest

from devices.catalog import CATALOG, EMULATED, GIB, DevicePreset

FIGURES = {field.name for field in dataclasses.fields(DevicePreset)} - {"title", "source", "lab"}


def test_what_people_have_is_there() -> None:
    assert {"pi4", "pi5", "phone", "laptop", "mini-pc", "gtx-1650", "rtx-3060", "jetson-orin-nano"} <= CATALOG.keys()
    assert {"pi4", "pi5", "phone", "laptop"} == EMULATED.keys()
    assert all(row.reason and row.memory_bytes >= CATALOG[name].memory_bytes for name, row in EMULATED.items())


@pytest.mark.parametrize("name", CATALOG)
def test_every_figure_has_its_source(name: str) -> None:
    preset = CATALOG[name]
    known = {figure for figure in FIGURES if getattr(preset, figure) is not None}
    assert preset.source.keys() == known >= FIGURES - {"price_usd"}
    assert all(len(text) > 10 and text.isprintable() for text in preset.source.values())


@pytest.mark.parametrize("name", CATALOG)
def test_figures_are_in_their_units(name: str) -> None:
    preset = CATALOG[name]
    assert GIB <= preset.memory_bytes <= 16 * GIB
    assert 1e9 < preset.memory_bytes_per_s < 500e9
    assert 1e7 < preset.disk_bytes_per_s < preset.memory_bytes_per_s
    # Arithmetic is ahead of memory on all of them: a prompt token is cheaper than a generated one.
    assert 2 * preset.memory_bytes_per_s < preset.flops < 30e12
    assert 1 < preset.watts < 500


@pytest.mark.parametrize("name", [name for name, preset in CATALOG.items() if preset.price_usd is not None])
def test_a_price_has_its_date(name: str) -> None:
    preset = CATALOG[name]
    assert preset.price_usd is not None
    assert 10 < preset.price_usd < 5000
    assert re.search(r"\.com, 20\d\d-\d\d-\d\d$", preset.source["price_usd"])


@pytest.mark.parametrize("figure", ["memory_bytes_per_s", "flops", "watts"])
def test_faster_ones_are_faster(figure: str) -> None:
    for order in (
        ("pi4", "pi5", "laptop", "apple-m4"),
        ("phone", "phone-flagship"),
        ("gtx-1650", "rtx-3050", "rtx-3060"),
    ):
        figures = [getattr(CATALOG[name], figure) for name in order if (name, figure) != ("apple-m4", "watts")]
        assert figures == sorted(figures), order

"""Test the measured speeds of kernels: their plausible range, and the predictions that use them."""

import json
import math
from pathlib import Path

import pytest

from edge.llama.products import loose_weight
from edge.quantization import kernels
from edge.quantization.kernels import KINDS, KernelSpeed, known_kernels, measure_kernels, slow_kinds
from quant.types import TYPES

NAMES = ("q4_0", "q6_k", "f16")


def speeds(**decode: float) -> list[KernelSpeed]:
    return [KernelSpeed(TYPES[name], rate, None, False) for name, rate in decode.items()]


def device(cache: Path, monkeypatch: pytest.MonkeyPatch, **rates: float) -> None:
    """From now on the cache folder is `cache`, and says of a device with one thread that every type is as fast as it is
    small, but for those in `rates`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = cache / "edge" / "kernels.json"
    path.unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "KINDS", ("q4_0",))
        known_kernels(1)
    usual = {name: 100 / TYPES[name].bits_per_weight for name in KINDS}
    [(key, entry)] = json.loads(path.read_bytes()).items()
    path.write_text(json.dumps({key: entry | {"value": usual | rates}}))


def test_speeds_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "KINDS", ("q4_0", "q8_0"))  # all of them take seconds

    def rates(again: bool = False) -> dict[str, float]:
        return {known_kernel.type.name: known_kernel.decode for known_kernel in known_kernels(1, again=again)}

    first = rates()
    assert list(first) == ["q4_0", "q8_0"]
    path = tmp_path / "edge" / "kernels.json"
    before = path.read_bytes()
    assert rates() == first
    assert path.read_bytes() == before
    known_kernels(2)
    assert len(json.loads(path.read_bytes())) == 2
    again = rates(again=True)
    assert rates() == again != first
    damaged_entries = {key: entry | {"value": {"q4_0": "fast"}} for key, entry in json.loads(before).items()}
    for damaged in ("{", "[]", json.dumps(damaged_entries)):
        path.write_text(damaged)
        assert list(rates()) == ["q4_0", "q8_0"]


def test_a_device_as_tests_want_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, monkeypatch, q4_k=1.0)
    assert slow_kinds(known_kernels(1)).keys() == {"q4_k"}


def test_a_type_that_is_smaller_and_slower_is_named_with_the_fastest_larger_one() -> None:
    assert slow_kinds(speeds(q2_k=5, q4_0=10, q8_0=8)) == {"q2_k": "q4_0"}
    assert slow_kinds(speeds(q2_k=5, q4_0=7, q8_0=14)) == {"q2_k": "q8_0", "q4_0": "q8_0"}
    assert slow_kinds(speeds(q2_k=12, q4_0=10, q8_0=8)) == {}


def test_hardly_slower_is_not_slow() -> None:
    assert slow_kinds(speeds(q4_0=10, q8_0=10.5)) == {}
    assert slow_kinds(speeds(q4_0=10, q8_0=15)) == {"q4_0": "q8_0"}


def test_types_of_one_size_are_not_held_against_each_other() -> None:
    assert TYPES["q4_0"].bits_per_weight == TYPES["iq4_nl"].bits_per_weight
    assert slow_kinds(speeds(q4_0=10, iq4_nl=2)) == {}
    assert slow_kinds(speeds(iq4_nl=2, q4_0=10, q6_k=5)) == {"iq4_nl": "q6_k"}


def test_nothing_is_slow_alone() -> None:
    assert slow_kinds([]) == slow_kinds(speeds(q2_k=1)) == {}


@pytest.mark.parametrize("prompts", [False, True])
def test_speeds_are_measured(prompts: bool) -> None:
    seen: list[tuple[int, int]] = []
    kinds = [TYPES[name] for name in NAMES]
    result = measure_kernels(kinds, 256, 1, prompts=prompts, progress=lambda *at: seen.append(at))
    assert [item.type for item in result] == kinds
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total in seen} == {len(seen)}
    for item in result:
        assert math.isfinite(item.decode)
        assert item.decode > 0
        with loose_weight(item.type.id, 256, 1024) as weight:
            assert item.repacked == weight.repacks
        if prompts:
            assert item.prefill is not None
            assert math.isfinite(item.prefill)
            assert item.prefill > 0
        else:
            assert item.prefill is None

"""Test which candidates are measured, and how the times of others are derived, with given times."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edge.models.catalog import catalog
from edge.planning.advised_speeds import INTERPOLATED, MEASURED, Profile, references, speeds_of_all
from edge.planning.candidates import Candidate, candidates
from partition.predict.speeds import Curve, DeviceSpeed, Links

NAMES = ("smollm2-135m", "smollm2-360m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-4b", "llama-3.1-8b", "qwen3-32b")
PER_BYTE, FIXED, PER_ROW = 1e-10, 2e-5, 3e-11  # seconds of a layer: for each byte, for itself, and for each further row
HEAD_PER_BYTE, TOKEN_PER_WIDTH, PROMPT_TOKEN_PER_WIDTH = 2e-10, 5e-12, 5e-13


@pytest.fixture(scope="module", name="some")
def of_the_catalog() -> Iterator[list[Candidate]]:
    models = [model for model in catalog() if model.name in (*NAMES, "qwen3-30b-a3b")]
    with candidates(models, ["q8_0"]) as result:
        yield result


def measured(item: Candidate) -> Profile:
    """Times that follow from the bytes by known figures, with a part that no size changes."""
    layer = sum(item.limits.layer_bytes) / len(item.limits.layer_bytes)

    def curve(share: float) -> Curve:
        # A long prompt's chunk of a small model has more rows, and takes less for each than a straight line says.
        chunk = 256 if item.model.name == "smollm2-135m" else 128
        rows = (1, 8, 64, chunk)
        seconds = {n: FIXED + share * layer * (PER_BYTE + (min(n, 64) - 1) * PER_ROW) for n in rows}
        return Curve(tuple(seconds.items()))

    width = max(item.shape.n_heads) * item.shape.head_k
    speed = DeviceSpeed(
        "local", "this device", Curve(((1, 4e-4),)), curve(1.0),
        TOKEN_PER_WIDTH * width, curve(0.5), Curve(((1, HEAD_PER_BYTE * item.shape.head_bytes),)), 16 << 30, 200 << 20,
        PROMPT_TOKEN_PER_WIDTH * width,
    )  # fmt: skip
    return Profile((speed,), Links(), ())


def layer_bytes(item: Candidate) -> float:
    return sum(item.limits.layer_bytes) / len(item.limits.layer_bytes)


def test_three_of_a_kind_are_measured_and_each_with_experts(some: list[Candidate]) -> None:
    requests: list[str] = []

    def measure(item: Candidate) -> Profile:
        requests.append(item.model.name)
        return measured(item)

    result = speeds_of_all(some, measure, memory_bytes=20 << 30)
    assert sorted(requests) == ["llama-3.2-1b", "qwen3-30b-a3b", "qwen3-32b", "smollm2-135m"]
    for entry, of_one in zip(some, result, strict=True):
        assert of_one.figures == (MEASURED if entry.model.name in requests else INTERPOLATED)
        if of_one.figures == INTERPOLATED:
            assert of_one.sources == ("smollm2-135m", "llama-3.2-1b", "qwen3-32b")
    requests.clear()
    assert {of_one.figures for of_one in speeds_of_all(some, measure, memory_bytes=20 << 30, every=True)} == {MEASURED}
    assert sorted(requests) == sorted(element.model.name for element in some)


def test_times_between_are_those_of_the_sizes(some: list[Candidate]) -> None:
    """Where times follow from bytes by a straight line, nothing is lost."""
    for item, of_one in zip(some, speeds_of_all(some, measured, memory_bytes=20 << 30), strict=True):
        [got], [expected] = of_one.profile.speeds, measured(item).speeds
        for rows in (1, 8, 64):
            assert got.layer_s.at(rows) == pytest.approx(expected.layer_s.at(rows)), item.name
            assert got.half_layer_s.at(rows) == pytest.approx(expected.half_layer_s.at(rows)), item.name
        assert got.head_s.at(1) == pytest.approx(expected.head_s.at(1)), item.name
        assert got.token_s == pytest.approx(expected.token_s), item.name
        assert got.prompt_token_s == pytest.approx(expected.prompt_token_s), item.name
        assert got.step_s.at(1) == 4e-4


def test_the_largest_that_is_measured_is_the_largest_that_fits_and_needs_nearly_all(some: list[Candidate]) -> None:
    """The disk is measured with it; what is larger takes longer in proportion, and is read from that disk."""
    group = sorted((item for item in some if item.model.name in NAMES), key=layer_bytes)
    assert references(group, 5 << 30)[-1].model.name == "qwen3-4b"
    assert (
        references(group, 7 << 30)[-1].model.name == "llama-3.1-8b"
    )  # 4 GB have ample room, and no disk would be known
    assert references(group, 1 << 20) == group[:1]
    assert references(group, 1 << 50)[-1].model.name == "qwen3-32b"
    assert references(group[:1], 1 << 30) == group[:1]

    def with_disk(item: Candidate) -> Profile:
        profile = measured(item)
        disk = 1e9 if item.model.name == "qwen3-4b" else None
        return replace(profile, speeds=(replace(profile.speeds[0], disk_bytes_per_s=disk),))

    result = speeds_of_all(group, with_disk, memory_bytes=5 << 30)
    large, reference = result[-1].profile.speeds[0], result[4].profile.speeds[0]
    assert large.disk_bytes_per_s == reference.disk_bytes_per_s == 1e9
    assert [n for n, _ in large.layer_s.points] == [1, 8, 64]  # chunks of 256 and of 128 rows were not timed with all
    assert large.layer_s.at(1) == pytest.approx(
        reference.layer_s.at(1) * layer_bytes(group[-1]) / layer_bytes(group[4])
    )


def test_what_was_measured_while_busy_stays_so(some: list[Candidate]) -> None:
    def busy(item: Candidate) -> Profile:
        profile = measured(item)
        return replace(profile, speeds=(replace(profile.speeds[0], busy=item.model.name == "smollm2-135m"),))

    result = dict(
        zip((entry.model.name for entry in some), speeds_of_all(some, busy, memory_bytes=20 << 30), strict=True)
    )
    assert result["qwen3-4b"].profile.speeds[0].busy
    assert not result["qwen3-32b"].profile.speeds[0].busy

"""Test wire types: their rounding error, values that are not numbers, and independence of cuts at blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quant.wire import BLOCK, F16, Q8, WIRE_IDS, WIRES

Floats = NDArray[np.float32]
TYPES = (F16(), Q8())
SIZES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 1000, 8192, 8193)
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)


def there_and_back(wire: F16 | Q8, x: Floats) -> Floats:
    data = np.full(wire.n_bytes(x.size), 0xA5, np.uint8)
    out = np.full(x.size, 7, np.float32)
    saved = x.copy()
    wire.encode(x, data)
    wire.decode(data, out)
    assert x.tobytes() == saved.tobytes()
    return out


def floats(values: list[float]) -> Floats:
    return np.array(values, np.float32)


def test_names_and_sizes() -> None:
    assert list(WIRES) == ["f32", "f16", "q8"]
    assert WIRE_IDS == {"f32": 0, "f16": 1, "q8": 3}, "ids are written down: devices of two versions must agree"
    assert WIRES["f32"] is None
    assert [wire.name for wire in TYPES] == ["f16", "q8"]
    for n in SIZES:
        assert F16().n_bytes(n) == 2 * n
        assert Q8().n_bytes(n) == n + 4 * -(-n // BLOCK), "a scale, an index, a high byte"


@pytest.mark.parametrize("wire", TYPES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("n", SIZES)
def test_any_number_of_floats(wire: F16 | Q8, n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    assert np.allclose(there_and_back(wire, x), x, atol=0.02)


@given(st.lists(ANY, max_size=100))
def test_f16_errs_by_2_to_minus_11(values: list[float]) -> None:
    x = floats(values)
    back = there_and_back(F16(), x)
    limited = np.clip(x.astype(np.float64), -65504, 65504)
    # Below 2^-14 a float16 has a fixed step of 2^-24.
    assert (np.abs(back - limited) <= np.maximum(2.0**-11 * np.abs(limited), 2.0**-25)).all()


def q8_bound(block: NDArray[np.float64]) -> float:
    """The most that a value of a block may change: half of the scale, which is rounded up to bfloat16."""
    *_, second, largest = np.sort(np.abs(np.append(block, 0.0)))
    return max(second / 127, largest / (127 * 257)) / 2 * (1 + 2**-7) * (1 + 1e-5) + 6e-39


@given(st.lists(ANY, max_size=100), st.sampled_from([1.0, 1e-6, 1e-30]))
def test_q8_errs_by_half_of_a_scale_that_the_second_largest_value_of_a_block_makes(
    values: list[float], scale: float
) -> None:
    """Whatever the numbers: ordinary ones, very large and very small ones, one among others."""
    x = np.clip(floats(values), -3e38, 3e38) * np.float32(scale)
    back = there_and_back(Q8(), x)
    assert np.isfinite(back).all()
    for lo in range(0, x.size, BLOCK):
        block = x[lo : lo + BLOCK].astype(np.float64)
        assert (np.abs(back[lo : lo + BLOCK] - block) <= q8_bound(block)).all()


@pytest.mark.parametrize("times", [1, 3, 100, 257, 1e4, -100])
@pytest.mark.parametrize("at", [0, 7, 31])
def test_q8_keeps_the_others_where_one_value_of_a_block_is_large(times: float, at: int) -> None:
    x = np.random.default_rng(at).uniform(-1, 1, 64).astype(np.float32)
    x[at] = times
    most = max(1.0, abs(times) / 257) / 252
    assert np.abs(there_and_back(Q8(), x) - x).max() <= most


def test_q8_limits_what_is_too_large() -> None:
    back = there_and_back(Q8(), floats([3.4e38, -3.4e38, 1e37]))
    assert np.allclose(back, [3e38, -3e38, 1e37], rtol=0.01, atol=1.3e36)


@pytest.mark.parametrize("wire", TYPES, ids=lambda wire: wire.name)
@given(values=st.lists(st.floats(width=32), max_size=100))
def test_no_bits_make_a_warning_or_an_error(wire: F16 | Q8, values: list[float]) -> None:
    there_and_back(wire, floats(values))


def test_f16_keeps_what_is_no_number_and_limits_what_is_too_large() -> None:
    back = there_and_back(F16(), floats([np.nan, np.inf, -np.inf, 1e30, -1e30, 65519, 65536, -0.0, 1e-40]))
    assert np.isnan(back[0])
    assert back[1:7].tolist() == [65504, -65504, 65504, -65504, 65504, 65504]
    assert (back[7], np.signbit(back[7]), back[8]) == (0, True, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [32, 40, 96])
def test_q8_makes_a_block_that_is_not_finite_nan_and_no_other(bad: float, n: int) -> None:
    x = np.ones(n, np.float32)
    x[32 if n > 32 else 0] = bad
    back = there_and_back(Q8(), x)
    lost = slice(32, 64) if n > 32 else slice(0, 32)
    assert np.isnan(back[lost]).all()
    others = np.ones(n, bool)
    others[lost] = False
    assert np.allclose(back[others], 1, atol=1 / 500)


@pytest.mark.parametrize("wire", TYPES, ids=lambda wire: wire.name)
@given(n=st.integers(1, 300), cut=st.integers(0, 9), seed=st.integers(0, 99))
def test_pieces_cut_at_blocks_decode_as_the_whole_does(wire: F16 | Q8, n: int, cut: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    at = min(n, cut * BLOCK)
    pieces = np.concatenate([there_and_back(wire, x[:at]), there_and_back(wire, x[at:])])
    assert pieces.tobytes() == there_and_back(wire, x).tobytes()


@pytest.mark.parametrize("wire", TYPES, ids=lambda wire: wire.name)
@given(n=st.integers(1, 300), cuts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_pieces_cut_at_blocks_are_slices_of_the_bytes_of_the_whole(
    wire: F16 | Q8, n: int, cuts: tuple[int, int]
) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    lo, hi = sorted(min(n, cut * BLOCK) for cut in cuts)
    whole, piece = np.empty(wire.n_bytes(n), np.uint8), np.empty(wire.n_bytes(hi - lo), np.uint8)
    wire.encode(x, whole)
    wire.encode(x[lo:hi], piece)
    assert whole[wire.n_bytes(lo) : wire.n_bytes(hi)].tobytes() == piece.tobytes()


def test_q8_as_it_is_written() -> None:
    """Scales are bfloat16, rounded up; the largest value has a high byte; the last block ends with its last float."""
    x = np.zeros(34, np.float32)
    x[[0, 1, 9, 32, 33]] = (127, -1000, 2.4, 1000, 0)
    data = np.empty(Q8().n_bytes(34), np.uint8)
    Q8().encode(x, data)
    assert data[:2].view(np.uint16)[0] == 0x3F80  # 1.0
    assert data[2:4].view(np.int8).tolist() == [1, -4]
    assert data[4:36].view(np.int8).tolist() == [127, 24, *[0] * 7, 2, *[0] * 22]
    # 1000 / 32639 = 0.03063..., the next bfloat16 is 0.0306396484375, of which 1000 has 32637.4.
    assert (data[36:38].view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0] == 0.0306396484375
    assert data[38:].view(np.int8).tolist() == [0, 127, 125, 0]


def test_an_index_of_a_peer_may_be_anything() -> None:
    data = np.full(Q8().n_bytes(40), 255, np.uint8)
    data[[0, 1]] = 0
    out = np.empty(40, np.float32)
    Q8().decode(data, out)
    assert (out[:32] == 0).all()
    assert np.isnan(out[32:]).all()


@pytest.mark.parametrize("wire", TYPES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("n", [1, 31, 33, 100])
def test_bytes_may_lie_at_any_address(wire: F16 | Q8, n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    n_bytes = wire.n_bytes(n)
    moved = np.zeros(n_bytes + 3, np.uint8)[3:]
    wire.encode(x, moved)
    out = np.empty(n, np.float32)
    wire.decode(moved, out)
    assert out.tobytes() == there_and_back(wire, x).tobytes()

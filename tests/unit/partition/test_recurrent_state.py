"""Test snapshots of recurrent layers: only those of the right shape and position are accepted."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.errors import StateError
from partition.state.recurrent import SnapshotShape

SHAPE = SnapshotShape(3, ((0, 8), (0, 4), (0, 16), (0, 12)))
HEAD = struct.pack("<Ii", 0xAF143CD8, 5)


def blank() -> np.ndarray:
    parts = b"".join(struct.pack("<iQ", *part) for part in SHAPE.parts)
    return np.frombuffer(HEAD + struct.pack("<III", 0, 0, 3) + parts, np.uint8)


def snapshot(position: int) -> np.ndarray:
    parts = b"".join(struct.pack("<iQ", *part) + bytes(range(part[1])) for part in SHAPE.parts)
    return np.frombuffer(HEAD + struct.pack("<IiIII", 1, position, 0, 0, 3) + parts, np.uint8)


def test_the_shape_is_that_of_an_empty_sequence() -> None:
    assert SnapshotShape.from_blank(blank()) == SHAPE
    assert SHAPE.n_bytes == len(snapshot(7))
    SHAPE.check(snapshot(7), 8)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (blank()[:-1], "55 bytes"),
        (blank()[:12], "12 bytes"),
        (snapshot(7), "no snapshot|has 1 cells"),
    ],
)
def test_what_is_no_empty_sequence(data: np.ndarray, why: str) -> None:
    data = data if len(data) != 67 else data[:-1]
    with pytest.raises(StateError):
        SnapshotShape.from_blank(data)


@pytest.mark.parametrize("length", [7, 9, 0, -7])
def test_a_snapshot_of_another_position(length: int) -> None:
    with pytest.raises(StateError, match=rf"up to position 7; expected one up to {length - 1}"):
        SHAPE.check(snapshot(7), length)


def test_a_snapshot_that_was_cut_off() -> None:
    with pytest.raises(StateError, match=f"a snapshot of {SHAPE.n_bytes - 1} bytes; expected {SHAPE.n_bytes}"):
        SHAPE.check(snapshot(7)[:-1], 8)


@given(st.integers(0, SHAPE.n_bytes - 1), st.integers(1, 255))
def test_any_other_byte_that_is_no_value_is_refused(place: int, change: int) -> None:
    data = snapshot(7).copy()
    data[place] ^= change
    values = [range(start, start + n) for start, n in ((40, 8), (60, 4), (76, 16), (104, 12))]
    if place < 8 or any(place in part for part in values):  # whose it was, or what it holds
        SHAPE.check(data, 8)
    else:
        with pytest.raises(StateError):
            SHAPE.check(data, 8)

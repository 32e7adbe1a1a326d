"""Test masks on a link: each rank decodes its part of the packed mask, and refuses invalid bytes."""

import itertools
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.parallel.masks import Form, pack, unpack
from edge.text.constraints.constraint import Mask
from transport.errors import ProtocolError

N_VOCAB = 100
BOUNDS = (0, 37, 64, N_VOCAB)  # of three ranks
TWO = struct.Struct("<ii")


def allowing(*ids: int, n_vocab: int = N_VOCAB) -> Mask:
    """A mask of these tokens."""
    mask = np.zeros(n_vocab, bool)
    mask[list(ids)] = True
    return mask


MASKS = st.lists(
    st.none()
    | st.builds(
        lambda ids, others: allowing(*ids) ^ others,
        st.sets(st.integers(0, N_VOCAB - 1), max_size=9) | st.sets(st.integers(0, N_VOCAB - 1)),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(MASKS)
def test_each_rank_reads_its_part(masks: list[Mask | None]) -> None:
    data = pack(BOUNDS, masks)
    assert len(data) <= 4 * len(BOUNDS) + len(masks) * (TWO.size + -(-N_VOCAB // 8))
    for own, (start, stop) in enumerate(itertools.pairwise(BOUNDS)):
        result = unpack(data, len(masks), 3, own, stop - start)
        for mask, part in zip(masks, result, strict=True):
            assert (mask is None) == (part is None)
            if mask is not None and part is not None:
                np.testing.assert_array_equal(part, mask[start:stop])


@pytest.mark.parametrize(
    ("mask", "form", "n_bytes"),
    [
        (None, Form.NONE, 0),
        (allowing(7, n_vocab=32_000), Form.ALLOWED, 4),
        (~allowing(7, 8, n_vocab=32_000), Form.FORBIDDEN, 8),
        (~allowing(n_vocab=32_000), Form.FORBIDDEN, 0),
        (allowing(n_vocab=32_000), Form.ALLOWED, 0),
        (allowing(*range(999), n_vocab=32_000), Form.ALLOWED, 4 * 999),
        (allowing(*range(1000), n_vocab=32_000), Form.BITS, 4000),
        (~allowing(*range(1000), n_vocab=32_000), Form.BITS, 4000),
    ],
)
def test_the_shortest_form(mask: Mask | None, form: Form, n_bytes: int) -> None:
    data = pack((0, 32_000), [mask])
    assert len(data) == 8 + 8 + n_bytes
    assert TWO.unpack_from(data, 8)[0] == form


def said(*rows: bytes, bounds: tuple[int, ...] = BOUNDS) -> bytes:
    """Masks of these rows."""
    return np.array(bounds, np.int32).tobytes() + b"".join(rows)


def row(form: int, n_named: int, *ids: int) -> bytes:
    """A mask of a row."""
    return TWO.pack(form, n_named) + np.array(ids, np.int32).tobytes()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "masks of 0 bytes were received; the first 16 must state the tokens of each of 3 ranks"),
        (said(row(0, 0), bounds=(0, 37, 65, 100)), "masks were received for 28 tokens of rank 1 of 3; it has 27"),
        (said(row(0, 0), bounds=(1, 37, 64, 100)), "rank 1 of 3"),
        (said(row(0, 0), bounds=(0, 37, 64, 64)), "rank 1 of 3"),
        (said(), "the mask of row 0 of 1 is invalid"),
        (said(row(4, 0)), "the mask of row 0 of 1 is invalid"),
        (said(row(-1, 0)), "the mask of row 0 of 1 is invalid"),
        (said(row(1, -1)), "the mask of row 0 of 1 is invalid"),
        (said(row(1, 2, 5)), "28 bytes are too few for it"),
        (said(row(1, 2**31 - 1)), "24 bytes are too few for it"),
        (said(row(3, 2**31 - 1, *[0] * 4)), "40 bytes are too few for it"),
        (said(TWO.pack(3, 101) + bytes(13)), "a mask of 101 tokens was received; expected 100 tokens"),
        (said(TWO.pack(3, 96) + bytes(12)), "a mask of 96 tokens was received; expected 100 tokens"),
        (said(row(0, 1, 5)), "a row without a mask has 1 tokens; expected none"),
        (said(row(1, 1, 100)), "names invalid tokens: ids must ascend from 0 to 99"),
        (said(row(2, 1, -1)), "names invalid tokens"),
        (said(row(1, 2, 5, 5)), "names invalid tokens"),
        (said(row(1, 2, 6, 5)), "names invalid tokens"),
        (said(row(1, 1, 5), b"\0"), "1 bytes follow the masks of 1 rows"),
        (said(row(1, 1, 5), row(0, 0)), "8 bytes follow the masks of 1 rows"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(data, 1, 3, 1, 27)


@given(MASKS, st.data())
def test_masks_with_bytes_changed_are_masks_or_an_error(masks: list[Mask | None], data: st.DataObject) -> None:
    packed = bytearray(pack(BOUNDS, masks))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    del packed[data.draw(st.integers(0, len(packed))) :]
    with suppress(ProtocolError):
        result = unpack(bytes(packed), len(masks), 3, 1, 27)
        assert all(mask is None or (mask.dtype == bool and mask.shape == (27,)) for mask in result)

"""Test steps on a link: they arrive unchanged, and invalid bytes are refused."""

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.llama.llama import Batch
from edge.llm.states import Part
from edge.parallel import steps
from edge.parallel.step_times import KEPT, StepTime, StepTimes, Summary
from edge.parallel.steps import (
    HASH_BYTES,
    MOST_HASHES,
    PART_FLOATS,
    Decode,
    Step,
    max_bytes,
    output_rows,
    pack,
    receive_states,
    send_states,
    unpack,
)
from quant.wire import WIRES
from tests.support import memory_link
from tests.support.helpers import TIMEOUT_S
from tests.support.links import start
from transport.errors import ProtocolError

CAPACITY = 24
INT32 = st.integers(-(2**31), 2**31 - 1)
HEAD = struct.Struct("<BBBBiiii")  # of a decode
UINT32 = st.integers(0, 2**32 - 1)
HASH = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)
HASHES = st.sampled_from((1, 2, MOST_HASHES)).map(lambda n: tuple(i.to_bytes(HASH_BYTES, "little") for i in range(n)))
PART = st.sampled_from([Part(i) for i in range(4)])
SCALES = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=64).map(tuple)
OTHERS = st.one_of(
    st.builds(steps.Remove, INT32, INT32, INT32, st.booleans(), st.booleans()),
    *(st.builds(operation, INT32, INT32, INT32, INT32) for operation in (steps.Copy, steps.Shift)),
    *(st.builds(operation) for operation in (steps.Clear, steps.End)),
    *(st.builds(operation, INT32, INT32, INT32) for operation in (steps.Read, steps.Write)),
    st.builds(steps.Times, st.booleans(), UINT32, UINT32),
    st.builds(steps.Keep, INT32, INT32, HASHES),
    st.builds(steps.Count, PART, HASHES),
    st.builds(steps.Restore, INT32, INT32, PART, HASHES),
    st.builds(steps.Snapshot, INT32, HASH),
    st.builds(steps.SetBack, INT32, INT32, HASH),
    st.builds(steps.Adapt, SCALES),
)


@st.composite
def decodes(draw: st.DrawFn) -> tuple[Decode, Batch]:
    """Any decode of a rank that takes CAPACITY rows."""
    n = draw(st.integers(1, CAPACITY))
    rows = Batch(CAPACITY)
    rows.positions[:n] = draw(st.lists(INT32, min_size=n, max_size=n))
    rows.sequences[:n] = draw(st.lists(INT32, min_size=n, max_size=n))
    rows.outputs[:n] = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    rows.causal = draw(st.booleans())
    if draw(st.booleans()):
        rows.offsets = np.array(draw(st.lists(INT32, min_size=3 * n, max_size=3 * n)), np.int32).reshape(3, n)
    expected = int(rows.outputs[:n].sum())
    top = draw(st.integers(0, 2**31 - 1))
    masks = draw(st.binary(max_size=40)) if top and expected else b""
    return Decode(n, expected, top, draw(st.booleans()), draw(st.booleans()), masks), rows


@given(decodes())
def test_decode_is_received_as_sent(sent: tuple[Decode, Batch]) -> None:
    step, rows = sent
    data = pack(step, rows)
    parts = 0 if rows.offsets is None else 12
    assert len(data) == HEAD.size + (9 + parts) * step.rows + len(step.masks) <= max_bytes(step.rows)
    there = Batch(CAPACITY)
    for form in (data, bytearray(data), memoryview(data)):
        assert unpack(form, there) == step
    n = step.rows
    for name in ("positions", "sequences", "outputs"):
        np.testing.assert_array_equal(getattr(there, name)[:n], getattr(rows, name)[:n])
    assert there.causal == rows.causal
    assert (there.offsets is None) == (rows.offsets is None)
    assert rows.offsets is None or np.array_equal(there.offsets, rows.offsets)
    assert list(output_rows(there, n)) == np.flatnonzero(rows.outputs[:n]).tolist()


@given(OTHERS)
def test_other_steps_are_received_as_sent(step: Step) -> None:
    packed = pack(step, Batch(CAPACITY))
    assert len(packed) <= max_bytes(0)
    for form in (packed, bytearray(packed), memoryview(packed)):
        received = unpack(form, Batch(CAPACITY))
        assert (type(received), received) == (type(step), step)


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda head, rest: HEAD.pack(*head) + rest,
        st.tuples(st.integers(0, 17), *[st.integers(0, 2)] * 2, st.integers(0, 5), *[st.integers(-2, 26)] * 4),
        st.integers(0, CAPACITY).flatmap(lambda n: st.binary(min_size=9 * n, max_size=9 * n)),
    )
)
@example(HEAD.pack(1, 0, 0, 0, 2**31 - 1, 0, 0, 0))
@example(HEAD.pack(1, 0, 0, 0, -1, 0, 0, 0) + bytes(9))
def test_any_bytes_are_a_step_or_an_error(data: bytes) -> None:
    rows = Batch(CAPACITY)
    try:
        step = unpack(data, rows)
    except ProtocolError:
        return
    assert isinstance(step, Step)
    if isinstance(step, Decode):
        assert 1 <= step.rows <= CAPACITY
        assert step.top >= 0
        assert step.outputs == len(list(output_rows(rows, step.rows)))


@given(decodes() | st.tuples(OTHERS, st.builds(Batch, st.just(CAPACITY))), st.data())
def test_step_with_one_byte_changed_is_a_step_or_an_error(sent: tuple[Step, Batch], data: st.DataObject) -> None:
    step, rows = sent
    packed = bytearray(pack(step, rows))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolError):
        assert isinstance(unpack(bytes(packed), Batch(CAPACITY)), Step)


@pytest.mark.parametrize(
    ("head", "rest", "why"),
    [
        ((2, 0, 0, 1, 0, 0, 0), 9, "a decode has the flags 2 and 0; update both devices"),
        ((0, 2, 0, 1, 0, 0, 0), 9, "flags 0 and 2"),
        ((0, 0, 2, 1, 0, 0, 0), 9, "a step of 1 rows has 29 bytes"),
        ((0, 0, 0, 0, 0, 0, 0), 0, "a step of 0 rows"),
        ((0, 0, 0, 25, 0, 0, 0), 225, "a step of 25 rows has 245 bytes; this rank takes 1 to 24 rows"),
        ((0, 0, 0, 3, 0, 0, 0), 26, "a step of 3 rows has 46 bytes"),
        ((0, 0, 0, 3, 1, 0, 0), 27, "a step states 1 output rows, but marks another number"),
        ((0, 0, 0, 3, 0, -1, 0), 27, "marks another number"),
        ((0, 0, 0, 1, 0, 0, 5), 14, "5 bytes of masks were received for 0 logits of 0 rows"),
        ((0, 0, 0, 1, 1, 0, 5), 14, "5 bytes of masks were received for 0 logits of 1 rows"),
        ((0, 0, 0, 1, 1, 40, -1), 8, "-1 bytes of masks"),
        ((0, 0, 0, 1, 1, 40, 2**20 + 1), 2**20 + 10, "1048577 bytes of masks were received .* up to 1048576 bytes"),
        ((0, 0, 0, 1, 1, 40, 5), 13, "a step of 1 rows has 33 bytes"),
    ],
)
def test_wrong_decode_is_refused(head: tuple[int, ...], rest: int, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(HEAD.pack(1, *head) + bytes(rest), Batch(CAPACITY))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "a step of 0 bytes has the unknown operation 0; update both devices"),
        (bytes(20), "a step of 20 bytes has the unknown operation 0"),
        (bytes([8]) + bytes(19), "operation 8"),
        (bytes([17]) + bytes(19), "operation 17"),
        (bytes([1]) + bytes(18), "a decode has 19 bytes; it needs at least 20"),
        (bytes([4]) + bytes(15), "operation 4 has 16 bytes; it needs 17"),
        (bytes([5, 0]), "operation 5 has 2 bytes; it needs 1"),
        (bytes([15]) + bytes(39), "operation 15 has 40 bytes; it needs 41"),
        (bytes([12, 0]), "a step has 0 bytes of block hashes"),
        (bytes([12, 0]) + bytes(63), "a step has 63 bytes of block hashes"),
        (bytes([11]) + bytes(8 + 32 * 257), "it takes 1 to 256 hashes"),
        (bytes([12, 4]) + bytes(32), "4 is not a known kind of cache part"),
        (bytes([13]) + bytes(8) + bytes([9]) + bytes(32), "9 is not a known kind"),
        (bytes([16]) + bytes(7), "scales of adapters have 7 bytes; at most 64"),
        (bytes([16]) + bytes(4 * 65), "scales of adapters have 260 bytes"),
        (bytes([16]) + struct.pack("<f", float("nan")), "a scale of an adapter is not a number"),
    ],
)
def test_other_wrong_steps_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(data, Batch(CAPACITY))


# Hidden states.


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "shape", [(1, 32), (5, 96), (600, 1024), (1, PART_FLOATS), (3, PART_FLOATS // 2 + 32)], ids=str
)
def test_hidden_states_cross_in_parts(shape: tuple[int, int], wire: str) -> None:
    kind = WIRES[wire]
    states = np.random.default_rng(1).standard_normal(shape, np.float32)
    ours, theirs = memory_link.pair()
    sending = start(send_states, ours, states, kind)
    out = np.empty_like(states)
    receive_states(theirs, out, kind)
    sending.result(TIMEOUT_S)
    most = {"f32": 0.0, "f16": 2e-3, "q8": 0.03}[wire]
    assert np.abs(out - states).max() <= most
    assert ours.sent_bytes <= states.nbytes
    assert wire == "f32" or ours.sent_bytes < 0.6 * states.nbytes
    ours.close()
    theirs.close()


# Times of steps.

TIMES = st.builds(
    StepTime,
    st.booleans(),
    *[st.floats(0, 1e4)] * 3,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)


@given(st.lists(TIMES, min_size=1, max_size=50))
def test_summaries_survive_the_wire(steps: list[StepTime]) -> None:
    times = StepTimes()
    for step in steps:
        times.add(step)
    result = times.summaries()
    assert sum(summary.steps for summary in result.values()) == len(steps)
    for kind, summary in result.items():
        assert Summary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
        of_it = [step for step in steps if step.decode == (kind == "decode")]
        assert summary.steps == len(of_it)
        computed = [1e3 * step.compute_s for step in of_it]
        assert summary.compute_ms.median == pytest.approx(np.median(computed))
        assert summary.compute_ms.p99 in computed
        assert sum(value > summary.compute_ms.p99 for value in computed) <= len(computed) // 100
    times.clear()
    assert times.summaries() == {}


def test_old_steps_are_forgotten() -> None:
    times = StepTimes()
    for i in range(KEPT + 100):
        times.add(StepTime(1, compute_s=float(i)))
    assert times.summaries()["decode"].steps == KEPT
    assert times.summaries()["decode"].compute_ms.median > 1e5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(Summary.__annotations__)) | st.text(max_size=8), inner, max_size=7)
    ),
    max_leaves=12,
)


@given(JSON)
@example({"steps": 1, "compute_ms": 3})
@example({"steps": 1e999, **{name: {"median": 1, "p99": 2} for name in Summary.__annotations__ if name != "steps"}})
@example({"steps": 1, **{name: {"median": 10**400, "p99": 2} for name in Summary.__annotations__ if name != "steps"}})
def test_any_other_answer_is_no_summary(values: Any) -> None:
    with suppress(ValueError):
        assert isinstance(Summary.from_json(values), Summary)

"""Steps as they cross a link: what was packed comes out, and nothing else is believed."""

import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.llama.llama import Batch
from edge.parallel.step_times import KEPT, StepTime, StepTimes, Summary
from edge.parallel.steps import (
    HASH_BYTES,
    MOST_HASHES,
    PART_FLOATS,
    Op,
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
HEAD = struct.Struct("<BBHiiii")


@st.composite
def decodes(draw: st.DrawFn) -> tuple[Step, Batch]:
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
    numbers = n, expected, top, len(masks)
    return Step(Op.DECODE, draw(st.booleans()), numbers, masks=masks, hidden=draw(st.booleans())), rows


@given(decodes())
def test_a_decode_comes_as_it_was_sent(sent: tuple[Step, Batch]) -> None:
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


@given(st.sampled_from([op for op in Op if op is not Op.DECODE]), st.booleans(), st.tuples(*[INT32] * 4), st.data())
def test_other_steps_come_as_they_were_sent(
    op: Op, fresh: bool, numbers: tuple[int, int, int, int], data: st.DataObject
) -> None:
    names: tuple[bytes, ...] = ()
    if op in (Op.KEEP, Op.COUNT, Op.RESTORE, Op.SNAPSHOT, Op.SET_BACK):
        n = data.draw(st.sampled_from((1, 2, MOST_HASHES)))
        names = tuple(i.to_bytes(HASH_BYTES, "little") for i in range(n))
        numbers = (*numbers[:2], n, numbers[3])
    scales: tuple[float, ...] = ()
    if op is Op.ADAPT:
        scales = tuple(data.draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=64)))
        numbers = (len(scales), *numbers[1:])
    step = Step(op, fresh, numbers, names, scales=scales)
    packed = pack(step, Batch(CAPACITY))
    assert len(packed) == HEAD.size + HASH_BYTES * len(names) + 4 * len(scales) <= max_bytes(0)
    assert unpack(packed, Batch(CAPACITY)) == step


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda head, rest: HEAD.pack(*head) + rest,
        st.tuples(st.integers(0, 16), st.integers(0, 2), st.sampled_from((0, 0, 0, 1)), *[st.integers(-2, 26)] * 4),
        st.integers(0, CAPACITY).flatmap(lambda n: st.binary(min_size=9 * n, max_size=9 * n)),
    )
)
@example(HEAD.pack(1, 0, 0, 2**31 - 1, 0, 0, 0))
@example(HEAD.pack(1, 0, 0, -1, 0, 0, 0) + bytes(9))
def test_bytes_of_any_kind_are_a_step_or_an_error(data: bytes) -> None:
    rows = Batch(CAPACITY)
    try:
        step = unpack(data, rows)
    except ProtocolError:
        return
    assert isinstance(step, Step)
    if step.op is Op.DECODE:
        assert 1 <= step.rows <= CAPACITY
        assert step.top >= 0
        assert step.numbers[1] == len(list(output_rows(rows, step.rows)))


@given(decodes(), st.data())
def test_a_step_with_one_byte_changed(sent: tuple[Step, Batch], data: st.DataObject) -> None:
    step, rows = sent
    packed = bytearray(pack(step, rows))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolError):
        assert isinstance(unpack(bytes(packed), Batch(CAPACITY)), Step)


@pytest.mark.parametrize(
    ("head", "rest", "why"),
    [
        ((0, 0, 0, 0, 0, 0, 0), 0, "operation 0 with flags 0 and 0 is none; update both devices"),
        ((17, 0, 0, 0, 0, 0, 0), 0, "operation 17"),
        ((15, 0, 0, 0, 0, 0, 0), 0, "a step of 0 block hashes"),
        ((12, 0, 0, 0, 0, 0, 0), 0, "a step of 0 block hashes came with 0 bytes"),
        ((12, 0, 0, 0, 0, 2, 0), 63, "a step of 2 block hashes came with 63 bytes"),
        ((13, 0, 0, 0, 0, 257, 0), 32 * 257, "it takes 1 to 256"),
        ((2, 2, 0, 0, 0, 0, 0), 0, "flags 2 and 0"),
        ((2, 0, 7, 0, 0, 0, 0), 0, "flags 0 and 7"),
        ((2, 0, 1, 0, 0, 0, 0), 0, "flags 0 and 1"),
        ((1, 0, 2, 1, 0, 0, 0), 9, "flags 0 and 2"),
        ((2, 0, 1024, 0, 0, 0, 0), 0, "flags 0 and 1024"),
        ((2, 0, 256, 0, 0, 0, 0), 0, "flags 0 and 256"),
        ((1, 0, 512, 1, 0, 0, 0), 9, "a step of 1 rows came in 29 bytes"),
        ((1, 0, 0, 0, 0, 0, 0), 0, "a step of 0 rows"),
        ((1, 0, 0, 25, 0, 0, 0), 225, "a step of 25 rows came in 245 bytes; this rank takes 1 to 24 rows"),
        ((1, 0, 0, 3, 0, 0, 0), 26, "a step of 3 rows came in 46 bytes"),
        ((1, 0, 0, 3, 1, 0, 0), 27, "a step of 1 output rows marks others"),
        ((1, 0, 0, 3, 0, -1, 0), 27, "marks others"),
        ((1, 0, 0, 1, 0, 0, 5), 14, "5 bytes of masks came for 0 logits of 0 rows"),
        ((1, 0, 0, 1, 1, 0, 5), 14, "5 bytes of masks came for 0 logits of 1 rows"),
        ((1, 0, 0, 1, 1, 40, -1), 8, "-1 bytes of masks"),
        ((1, 0, 0, 1, 1, 40, 2**20 + 1), 2**20 + 10, "1048577 bytes of masks came .* up to 1048576 bytes"),
        ((1, 0, 0, 1, 1, 40, 5), 13, "a step of 1 rows came in 33 bytes"),
        ((5, 0, 0, 0, 0, 0, 0), 1, "a step of 0 rows came in 21 bytes"),
    ],
)
def test_what_is_wrong_is_said(head: tuple[int, ...], rest: int, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(HEAD.pack(*head) + bytes(rest), Batch(CAPACITY))


def test_too_short() -> None:
    with pytest.raises(ProtocolError, match="a step of 19 bytes came, it has at least 20"):
        unpack(bytes(19), Batch(CAPACITY))


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

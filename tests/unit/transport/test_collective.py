"""Test collectives: every rank gets the same bits with any algorithm, wire type and order of arrival; and no rank waits
forever if a rank or a link fails.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quant.wire import Q8, WIRES
from tests.support import memory_link
from tests.support.links import PATIENT, WAIT_S, start, tcp_sockets
from tests.support.shaped_link import Shape, ShapedLink
from tests.support.thorough import each_once, some
from transport.choice import ALGORITHMS
from transport.collective import CHUNK_FLOATS, Group, Wire
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, TransportError
from transport.frame import Frame, Kind
from transport.link import Deadlines, Link
from transport.tcp_link import TcpLink

Floats = NDArray[np.float32]
MakePair = Callable[[int, int, Deadlines], tuple[Link, Link]]
T = TypeVar("T")

IMPATIENT = Deadlines(step_timeout_s=0.3, send_timeout_s=0.3)
MODES = (*ALGORITHMS, "auto")
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-42, 1e30, -1e30, 3e38, -3e38, 1.0, 65504, 1e-8], np.float32
)
SPECIAL[4:5].view(np.uint32)[:] = 0x7FC12345  # two NaNs that can be told apart
SIZES = (0, 1, 31, 32, 33, 100, 1000, 4096, CHUNK_FLOATS, CHUNK_FLOATS + 1, 40_001, 70_000)


class Dawdling(Link):
    """`inner`, at times a bit late on either side."""

    def __init__(self, inner: Link, seed: int) -> None:
        super().__init__(inner.peer, inner.deadlines)
        self.inner = inner
        self._random = random.Random(seed)

    def _nap(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * 300e-6)

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        self._nap()
        self.inner.send(payload, Kind(header[5]))

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        self._nap()
        return self.inner.receive(timeout_s, max_bytes)

    def _end(self) -> None:
        self.inner.close()


def memory(_: int, __: int, deadlines: Deadlines) -> tuple[Link, Link]:
    return memory_link.pair(deadlines=deadlines)


def tcp(_: int, __: int, deadlines: Deadlines) -> tuple[Link, Link]:
    left, right = tcp_sockets()
    return TcpLink(left, "b", deadlines, poll_s=0), TcpLink(right, "a", deadlines, poll_s=0)


def unix(_: int, __: int, deadlines: Deadlines) -> tuple[Link, Link]:
    left, right = socket.socketpair()
    return TcpLink(left, "b", deadlines), TcpLink(right, "a", deadlines)


def dawdling(i: int, j: int, deadlines: Deadlines) -> tuple[Link, Link]:
    a, b = memory_link.pair(deadlines=deadlines)
    return Dawdling(a, i * 8 + j), Dawdling(b, j * 8 + i)


def groups(ranks: int, make: MakePair = memory, deadlines: Deadlines = PATIENT) -> list[Group]:
    """All ranks of one group."""
    links: list[dict[int, Link]] = [{} for _ in range(ranks)]
    for i, j in itertools.combinations(range(ranks), 2):
        links[i][j], links[j][i] = make(i, j, deadlines)
        links[i][j].peer, links[j][i].peer = f"rank {j}", f"rank {i}"
    return [Group(rank, links[rank]) for rank in range(ranks)]


def on_all(ranks: list[Group], work: Callable[[Group], T]) -> list[T]:
    """Do it on every rank at the same time; what came of it, in rank order."""
    return [done.result(3 * WAIT_S) for done in [start(work, group) for group in ranks]]


def close(ranks: list[Group]) -> None:
    for group in ranks:
        group.close()


def tensors(ranks: int, n: int, seed: int, special: float = 0.0) -> list[Floats]:
    """One of each rank; a share of the values is out of the ordinary."""
    rng = np.random.default_rng([seed, ranks, n])
    results = []
    for _ in range(ranks):
        x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32)
        odd = rng.random(n) < special
        x[odd] = rng.choice(SPECIAL, int(odd.sum()))
        results.append(x)
    return results


def decoded(x: Floats, wire: Wire | None) -> Floats:
    """As the other ranks read it."""
    out = x.copy()
    if wire is not None:
        data = np.empty(wire.n_bytes(x.size), np.uint8)
        wire.encode(x, data)
        wire.decode(data, out)
    return out


def expected(inputs: list[Floats], wire: Wire | None) -> Floats:
    """((x0 + x1) + x2) + ... of what the others read; one rank alone sends nothing."""
    if len(inputs) == 1:
        return inputs[0]
    read = [decoded(x, wire) for x in inputs]
    total = read[0].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for x in read[1:]:
            total = total + x
    return total


def assert_sums(
    ranks: list[Group], inputs: list[Floats], mode: Any, wire: Wire | None, late: int | None = None
) -> None:
    """Every rank holds the same bits, and the right ones. late: seed of how much later each rank begins."""
    want = expected(inputs, wire)

    def work(group: Group) -> Floats:
        x = inputs[group.rank].copy()
        if late is not None:
            time.sleep(random.Random(late * 8 + group.rank).random() * 2e-3)
        used = group.allreduce(x, mode, wire)
        assert used in ALGORITHMS
        assert mode in ("auto", used)
        return x

    for rank, got in enumerate(on_all(ranks, work)):
        same = got.view(np.uint32) == want.view(np.uint32)
        assert same.all(), (rank, mode, wire, np.flatnonzero(~same)[:5], got[~same][:5], want[~same][:5])


# The same bits everywhere.


@pytest.mark.parametrize(("n_ranks", "wire"), each_once(range(1, 9), WIRES))
def test_all_algorithms_come_to_the_same_bits(n_ranks: int, wire: str) -> None:
    ranks = groups(n_ranks)
    for n in SIZES:
        inputs = tensors(n_ranks, n, seed=1, special=0.05)
        for mode in MODES if n_ranks < 6 or n in (33, 40_001) else ("star", "split"):
            assert_sums(ranks, inputs, mode, WIRES[wire])
    close(ranks)


@settings(max_examples=some(20, 60))
@given(
    n_ranks=st.integers(1, 8),
    n=st.integers(0, 70_000) | st.integers(0, 300),
    mode=st.sampled_from(MODES),
    wire=st.sampled_from(list(WIRES)),
    seed=st.integers(0, 1000),
    special=st.sampled_from((0.0, 0.01, 0.5, 1.0)),
    rounds=st.integers(1, 3),
)
def test_any_tensors(n_ranks: int, n: int, mode: str, wire: str, seed: int, special: float, rounds: int) -> None:
    ranks = groups(n_ranks)
    for i in range(rounds):
        assert_sums(ranks, tensors(n_ranks, n, seed + i, special), mode, WIRES[wire], late=seed)
    close(ranks)


@pytest.mark.parametrize(
    ("n_ranks", "make"), each_once([2, 3, 5], [tcp, unix], lambda value: getattr(value, "__name__", value))
)
def test_over_sockets(make: MakePair, n_ranks: int) -> None:
    ranks = groups(n_ranks, make)
    for wire, mode, n in itertools.product(WIRES, MODES, (1, 1000, 70_000)):
        assert_sums(ranks, tensors(n_ranks, n, seed=2, special=0.01), mode, WIRES[wire])
    close(ranks)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_whatever_arrives_first(n_ranks: int) -> None:
    ranks = groups(n_ranks, dawdling)
    for seed in range(some(1, 4)):
        for mode, wire in (("star", "q8"), ("mesh", "f32"), ("split", "f16")):
            assert_sums(ranks, tensors(n_ranks, 9000, seed, special=0.1), mode, WIRES[wire], late=seed)
    close(ranks)


@pytest.mark.parametrize(("mode", "n_ranks"), each_once(ALGORITHMS, [2, 4]))
def test_16_mib_over_tcp_does_not_block(n_ranks: int, mode: str) -> None:
    ranks = groups(n_ranks, tcp)
    for wire in ("f32", "q8") if n_ranks == 2 else ("f32",):
        assert_sums(ranks, tensors(n_ranks, 4 << 20, seed=3), mode, WIRES[wire])
    close(ranks)


@pytest.mark.parametrize(("n_ranks", "wire"), each_once([1, 2, 3], WIRES))
def test_a_rank_learns_what_its_own_tensor_lost(n_ranks: int, wire: str) -> None:
    ranks, inputs = groups(n_ranks), tensors(n_ranks, 40_001, seed=4)
    for mode in MODES:

        def work(group: Group) -> Floats:
            x = inputs[group.rank].copy()
            lost = np.full_like(x, 7)
            group.allreduce(x, mode, WIRES[wire], lost)  # noqa: B023
            return lost

        for x, lost in zip(inputs, on_all(ranks, work), strict=True):
            np.testing.assert_array_equal(lost, x - decoded(x, WIRES[wire] if n_ranks > 1 else None))
    close(ranks)


class Counting(Q8):
    """Counts the floats that were encoded."""

    encoded = 0

    def encode(self, x: Floats, out: NDArray[np.uint8]) -> None:
        """Count, then encode."""
        self.encoded += x.size
        super().encode(x, out)


@pytest.mark.parametrize("mode", ALGORITHMS)
def test_a_tensor_is_encoded_once(mode: Any) -> None:
    ranks, inputs = groups(3), tensors(3, 70_001, seed=5)

    def work(group: Group) -> int:
        wire, x = Counting(), inputs[group.rank].copy()
        group.allreduce(x, mode, wire, np.empty_like(x))
        return wire.encoded

    assert on_all(ranks, work) == [70_001] * 3
    close(ranks)


def test_tensors_of_any_shape_in_place() -> None:
    ranks = groups(2)
    for shape in ((), (1,), (3, 4), (2, 3, 5), (0, 7)):
        inputs = [np.full(shape, rank + 1, np.float32) for rank in range(2)]

        def work(group: Group) -> Floats:
            x = inputs[group.rank]  # noqa: B023
            group.allreduce(x)
            return x

        for x in on_all(ranks, work):
            assert x.shape == shape
            assert (x == 3).all()
    close(ranks)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(4, np.float64),
        np.zeros(4, np.int32),
        np.zeros(4, ">f4"),
        np.zeros((4, 4), np.float32)[:, ::2],
        np.zeros((4, 3), np.float32).T,
        np.zeros(8, np.float32)[::-1],
    ],
    ids=["f64", "i32", "big-endian", "columns", "transposed", "reversed"],
)
def test_other_tensors_are_refused_before_anything_is_sent(x: Any) -> None:
    ranks = groups(2)
    for group in ranks:
        with pytest.raises(ValueError, match="allreduce takes contiguous float32, not"):
            group.allreduce(x)
    assert_sums(ranks, tensors(2, 10, 0), "star", None)
    close(ranks)


def test_read_only_tensors_and_unknown_algorithms_are_refused() -> None:
    ranks = groups(2)
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="'tree' is not an allreduce algorithm; use auto, star, mesh, split"):
        ranks[0].allreduce(x, "tree")  # type: ignore[arg-type]
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ranks[0].allreduce(x)
    assert_sums(ranks, tensors(2, 10, 0), "mesh", None)
    close(ranks)


def test_a_group_needs_a_link_to_every_other_rank() -> None:
    link = memory_link.pair()[0]
    for rank, links in ((0, {0: link}), (0, {2: link}), (3, {0: link}), (-1, {0: link})):
        with pytest.raises(ValueError, match="needs a link to every other rank"):
            Group(rank, links)


# Everything else.


@pytest.mark.parametrize(("n", "n_ranks"), each_once([0, 1, 1000, (1 << 20) + 1, 3 << 20], [1, 2, 3, 8]))
def test_broadcast_and_gather(n_ranks: int, n: int) -> None:
    ranks = groups(n_ranks, unix if n > 1000 else memory)
    rows = [np.random.default_rng(rank).integers(0, 256, n, np.uint8) for rank in range(n_ranks)]
    for root in {0, n_ranks - 1}:

        def work(group: Group) -> tuple[Any, Any]:
            mine = rows[group.rank].copy()
            gathered = group.gather(mine, root)  # noqa: B023
            group.broadcast(mine, root)  # noqa: B023
            return gathered, mine

        for rank, (gathered, mine) in enumerate(on_all(ranks, work)):
            assert mine.tobytes() == rows[root].tobytes()
            if rank == root:
                assert [row.tobytes() for row in gathered] == [row.tobytes() for row in rows]
            else:
                assert gathered is None
    close(ranks)


@pytest.mark.parametrize("n_ranks", [1, 2, 5])
def test_nobody_passes_a_barrier_before_all_have_come(n_ranks: int) -> None:
    ranks = groups(n_ranks)
    for _ in range(5):
        came: list[int] = []

        def work(group: Group) -> int:
            time.sleep(random.random() * 2e-3)
            came.append(group.rank)  # noqa: B023
            group.barrier()
            return len(came)  # noqa: B023

        assert on_all(ranks, work) == [n_ranks] * n_ranks
    close(ranks)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_all_agree_on_the_worst_figures(n_ranks: int) -> None:
    ranks = groups(n_ranks)
    on_all(ranks, lambda group: group.agree(0.001 * (group.rank + 1), 1e6 * (group.rank + 1)))
    for group in ranks:
        assert (group.latency_s, group.bandwidth) == (0.001 * n_ranks, 1e6)
        assert group.choice(1000) == ranks[0].choice(1000)
        assert group.choice(1000, WIRES["q8"]) == ranks[0].choice(1000, WIRES["q8"])
    close(ranks)


def test_auto_uses_what_is_cheapest() -> None:
    ranks = groups(8)
    for latency_s, bandwidth, n, want in ((0.001, 12.5e6, 8192, "split"), (0.05, 12.5e6, 8192, "mesh")):
        on_all(ranks, lambda group, a=latency_s, b=bandwidth: group.agree(a, b))  # type: ignore[misc]
        result = on_all(ranks, lambda group, n=n: group.allreduce(np.zeros(n, np.float32)))  # type: ignore[misc]
        assert set(result) == {ranks[0].choice(n).algorithm} == {want}
    close(ranks)


def test_a_choice_is_made_once_for_each_size() -> None:
    ranks = groups(3)
    group = ranks[0]
    result = group.choice(1000)
    assert group.choice(1000) is result
    assert group.choice(1001) is not result
    assert group.choice(1000, WIRES["q8"]) is not result
    on_all(ranks, lambda group: group.agree(0.02, 1e6))
    assert group.choice(1000) is not result  # other figures, another choice
    assert group.choice(1000).seconds != result.seconds
    assert group.choice(1000) is group.choice(1000)
    close(ranks)


def test_parts_of_a_group_sum_by_themselves() -> None:
    """Also at the same time, over links that they share with the whole."""
    ranks = groups(5)
    on_all(ranks, lambda group: group.agree(0.001 * (group.rank + 1), 1e6))
    inputs = tensors(5, 3000, seed=4)
    for split in (((0, 1, 2, 3, 4),), ((0, 1), (2, 3, 4)), ((3, 0), (4, 2, 1)), ((2,), (4, 3, 1, 0))):

        def work(group: Group) -> Floats:
            mine = next(part for part in split if group.rank in part)  # noqa: B023
            part = group.part(mine)
            assert (part.rank, part.world_size) == (mine.index(group.rank), len(mine))
            assert (part.latency_s, part.bandwidth) == (group.latency_s, group.bandwidth)
            assert part.choice(3000).seconds == part.choice(3000).seconds
            x = inputs[group.rank].copy()
            for mode in MODES:
                y = inputs[group.rank].copy()
                assert part.allreduce(y, mode) in ALGORITHMS
                if mode != MODES[0]:
                    assert y.tobytes() == x.tobytes()
                x = y
            part.barrier()
            return x

        result = on_all(ranks, work)
        for part in split:
            want = expected([inputs[rank] for rank in part], None)
            for rank in part:
                np.testing.assert_array_equal(result[rank], want)
        assert_sums(ranks, inputs, "mesh", None)  # the whole is as it was
    close(ranks)


def test_a_part_has_the_rank_that_asks_for_it() -> None:
    ranks = groups(3)
    for others in ((1, 2), (), (0, 7)):
        with pytest.raises((ValueError, KeyError)):
            ranks[0].part(others)
    close(ranks)


# Failures.


def outcomes(ranks: list[Group], work: Callable[[Group], Any]) -> list[BaseException | None]:
    """Return how it ended on each rank; a rank that fails closes its links, as its process would."""

    def guarded(group: Group) -> None:
        try:
            work(group)
        except BaseException:
            group.close()
            raise

    results = [done.exception(WAIT_S) for done in [start(guarded, group) for group in ranks]]
    close(ranks)
    return results


@pytest.mark.parametrize("mode", ALGORITHMS)
@pytest.mark.parametrize("gentle", [True, False], ids=["closes", "is silent"])
@pytest.mark.parametrize("n", [1000, 70_000])
def test_a_rank_that_dies_makes_the_others_raise_within_the_deadline(mode: Any, gentle: bool, n: int) -> None:

    def die(dying: int) -> list[BaseException | None]:
        def work(group: Group) -> None:
            x = np.ones(n, np.float32)
            group.allreduce(x, mode)
            if group.rank == dying:
                if gentle:
                    raise LinkClosed("dead")
                return
            group.allreduce(x, mode)

        return outcomes(groups(4, unix, IMPATIENT), work)

    for dying, done in [(dying, start(die, dying)) for dying in (0, 1, 3)]:
        for rank, error in enumerate(done.result(WAIT_S)):
            if rank != dying:
                assert isinstance(error, TransportError), (rank, error)
                assert gentle or isinstance(error, (LinkTimeout, LinkClosed)), (rank, error)


@pytest.mark.parametrize("mode", ALGORITHMS)
@pytest.mark.parametrize("shape", [Shape(drop=0.1), Shape(truncate=0.1)], ids=["drop", "truncate"])
def test_lost_and_cut_frames_are_errors_and_never_a_wrong_sum(mode: Any, shape: Shape) -> None:

    def lose(seed: int) -> list[BaseException | None]:
        def shaped(i: int, j: int, deadlines: Deadlines) -> tuple[Link, Link]:
            a, b = memory_link.pair(deadlines=deadlines)
            bad = shape if (i, j) == (0, 1) else Shape()
            return ShapedLink(a, bad, seed=seed), ShapedLink(b, bad, seed=seed + 100)

        def work(group: Group) -> None:
            for i in range(200):
                x = np.full(3000, group.rank + i, np.float32)
                group.allreduce(x, mode)
                assert (x == 3 * i + 3).all()

        return outcomes(groups(3, shaped, IMPATIENT), work)

    for done in [start(lose, seed) for seed in range(4)]:
        result = done.result(WAIT_S)
        assert all(isinstance(error, TransportError) for error in result), result


def test_another_size_is_an_error() -> None:
    for mode, sizes in (("star", (100, 101)), ("mesh", (100, 99)), ("split", (1000, 3000))):
        ranks = groups(2, memory, Deadlines(step_timeout_s=0.3))
        result = outcomes(ranks, lambda group: group.allreduce(np.ones(sizes[group.rank], np.float32), mode))  # noqa: B023  # type: ignore[misc]
        assert any(isinstance(error, ProtocolError) for error in result), (mode, result)
    ranks = groups(2, memory, Deadlines(step_timeout_s=0.3))
    result = outcomes(ranks, lambda group: group.broadcast(np.zeros(10 + group.rank, np.uint8)))
    assert isinstance(result[1], ProtocolError)


def test_another_collective_is_an_error() -> None:
    ranks = groups(2, memory, Deadlines(step_timeout_s=0.3))

    def work(group: Group) -> None:
        if group.rank:
            group.barrier()
        else:
            group.allreduce(np.ones(100, np.float32), "mesh")

    result = outcomes(ranks, work)
    assert any(isinstance(error, ProtocolError) for error in result)

"""Test the paging window: for any order, sizes and room, an acquired matrix has the bytes of the file, in the CPU's
layout if necessary.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.errors import EngineError, WeightsError
from edge.llama import llama
from edge.llama.address_space import PAGE, AddressSpace
from edge.llama.buffers import ROW_GROUP, CallerBuffer
from edge.weights import reader as reader_module
from edge.weights.direct_file import DirectFile
from edge.weights.load import load_stub
from edge.weights.reader import Job, Reader, helped, helper_reader
from edge.weights.roles import Roles, sort_weights
from edge.weights.window import Pager, Piece
from quant.gguf.file import GgufFile
from tests.support import paging
from tests.support.helpers import TIMEOUT_S, until
from tests.support.thorough import some

Bytes = np.ndarray


def bytes_at(address: int, n_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))


@dataclass
class Loaded:
    """A model without memory, its pieces, and what each of them is in memory."""

    model: llama.Model
    own: CallerBuffer
    files: list[DirectFile]
    roles: dict[bool, Roles]  # by whether weights are repacked
    cuts: dict[bool, list[Piece]]  # of the head, in parts of three sizes
    whole: dict[Piece, Bytes]

    def pieces(self, repack: bool) -> list[Piece]:
        """Pieces of many sizes: the factors, and parts of the head."""
        return [*self.roles[repack].factors, *self.cuts[repack]]

    def close(self) -> None:
        self.model.close()
        self.own.close()
        for file in self.files:
            file.close()


def load(path: Path) -> Loaded:
    file = GgufFile.open(path)
    model, own = load_stub(file)
    opened = DirectFile(path, path.stat().st_size)
    sources = {name: (opened, tensor.offset) for name, tensor in file.tensors.items()}
    roles = {repack: sort_weights(own.weights, sources, repack=repack, tokens=True) for repack in (True, False)}
    cuts = {
        repack: [piece for most in (20_000, 100_000, 300_000) for piece in role.head_pieces(most)]
        for repack, role in roles.items()
    }
    loaded = Loaded(model, own, [opened], roles, cuts, {})
    loaded.whole.update((piece, whole(file, piece)) for repack in roles for piece in loaded.pieces(repack))
    return loaded


def whole(file: GgufFile, piece: Piece) -> Bytes:
    """All bytes of a piece as they are to lie in memory, laid out in one go."""
    tensor = file.tensors[piece.weight.name]
    first = piece.offset - tensor.offset
    plain = np.frombuffer(file.data(tensor.name), np.uint8)[first : first + piece.n_bytes]
    if not piece.repacked:
        return plain
    spaces = [AddressSpace(piece.n_bytes) for _ in range(2)]
    np.frombuffer(spaces[0].view(0, piece.n_bytes), np.uint8)[:] = plain
    piece.weight.repack(spaces[0].address, piece.rows, spaces[1].address)
    result = np.frombuffer(spaces[1].view(0, piece.n_bytes), np.uint8).copy()
    for space in spaces:
        space.close()
    return result


@pytest.fixture(scope="module", params=["q4_0", "f16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    built = load(paging.model(tmp_path_factory, "llama", request.param))
    yield built
    built.close()


def acquired(pager: Pager, piece: Piece) -> Bytes:
    return bytes_at(pager.acquire(piece), piece.n_bytes)


@pytest.fixture(autouse=True)
def small_pages() -> Iterator[None]:
    """A window of so many bytes has no more."""
    with paging.small_pages():
        yield


Make = Callable[..., Pager]


@st.composite
def readers(draw: st.DrawFn) -> tuple[int, int]:
    """(threads, bytes of a read)."""
    return draw(st.integers(1, 4)), draw(st.sampled_from([1, PAGE, 5 * PAGE, 64 << 10, 1 << 20]))


# Hypothesis: fixtures of the module are not made anew for each example, and need not be.
any_of_it = settings(max_examples=some(20, 80), suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_of_it
@given(data=st.data(), reader=readers())
def test_any_pass_over_any_window_finds_the_bytes_of_the_file(
    loaded: Loaded, data: st.DataObject, reader: tuple[int, int]
) -> None:
    repack = data.draw(st.booleans())
    order = data.draw(st.lists(st.sampled_from(loaded.pieces(repack)), min_size=1, max_size=14, unique=True))
    largest = max(piece.span for piece in order)
    some = sum(piece.span for piece in order[: data.draw(st.integers(0, 6))])  # they fit, or miss by a page
    window = max(largest, some + data.draw(st.integers(-2, 3)) * PAGE)
    threads = Reader(max(piece.weight.row_bytes for piece in order), *reader)
    pager = Pager(order, window, threads)
    try:
        for _ in range(data.draw(st.integers(1, 4))):
            request, done = passes(data, order), 0
            for piece in request:
                result = acquired(pager, piece)
                apart(pager, window)
                np.testing.assert_array_equal(result, loaded.whole[piece])
                if data.draw(st.integers(0, 9)) == 0:
                    break  # the pass failed here
                pager.release()
                done += 1
            if done == len(request):
                pager.end()
            pager.begin()
    finally:
        threads.close()
        pager.close()


def apart(pager: Pager, window: int) -> None:
    """No two that have a place share any of it, and all lie in the window."""
    end = 0
    for start, piece in sorted(((start, piece) for piece, _, start in pager._placed), key=lambda item: item[0]):
        assert start >= end
        end = start + piece.span
    assert end <= window


def passes(data: st.DataObject, order: list[Piece]) -> list[Piece]:
    """Draw what one pass asks for: all in the order made known, or in another, or some of it, some even twice."""
    kind = data.draw(st.sampled_from(["as planned", "otherwise", "some", "any"]))
    if kind == "as planned":
        return order
    if kind == "otherwise":
        return list(data.draw(st.permutations(order)))
    if kind == "some":
        return [piece for piece in order if data.draw(st.booleans())]
    return data.draw(st.lists(st.sampled_from(order), max_size=12))


@pytest.fixture
def ring(loaded: Loaded) -> Iterator[Callable[..., Pager]]:
    """`ring(pieces, window)`: a pager, closed at the end."""
    built: list[tuple[Pager, Reader]] = []

    def make(order: list[Piece], window: int, chunk: int = 64 << 10) -> Pager:
        reader = Reader(max(piece.weight.row_bytes for piece in order), 2, chunk)
        pager = Pager(order, window, reader)
        built.append((pager, reader))
        return pager

    yield make
    for pager, reader in built:
        reader.close()
        pager.close()


def test_a_window_of_one_matrix_has_it_while_it_is_used(loaded: Loaded, ring: Make) -> None:
    order = loaded.pieces(True)[:6]
    pager = ring(order, max(piece.span for piece in order))
    for _ in range(3):
        for piece in order:
            result = acquired(pager, piece)
            for _ in range(3):  # nothing is read over it
                np.testing.assert_array_equal(result, loaded.whole[piece])
            pager.release()
        pager.begin()


def test_what_is_next_is_there_before_it_is_asked_for(loaded: Loaded, ring: Make) -> None:
    order = loaded.pieces(True)[:4]
    pager = ring(order, sum(piece.span for piece in order))
    for _ in range(2):
        for piece in order:
            wait_until_ready(pager)
            waited = pager._reader.counts().wait_s
            acquired(pager, piece)
            assert pager._reader.counts().wait_s == waited
            pager.release()
        pager.begin()


def wait_until_ready(pager: Pager) -> None:
    with pager._reader._turn:
        assert pager._reader._arrival.wait_for(pager.ready, 10)


def test_a_new_order_is_learned_and_then_read_ahead(loaded: Loaded, ring: Make) -> None:
    order = loaded.pieces(True)[:5]
    pager = ring(order, 2 * max(piece.span for piece in order))
    turned = order[::-1]
    for _ in range(2):
        for piece in turned:
            acquired(pager, piece)
            pager.release()
        pager.end()
        pager.begin()
    before = pager._reader.counts().n_bytes
    for _ in range(3):
        for piece in turned:
            wait_until_ready(pager)
            np.testing.assert_array_equal(acquired(pager, piece), loaded.whole[piece])
            pager.release()
        pager.end()
        pager.begin()
    read = pager._reader.counts().n_bytes - before
    most = 3 * sum(piece.n_bytes for piece in order) + 2 * max(piece.span for piece in order)
    assert read <= most  # nothing was read in vain


def test_what_is_used_before_others_that_are_there_is_not_read_again(loaded: Loaded, ring: Make) -> None:
    order = loaded.pieces(True)[:6]
    swapped = [order[1], order[0], order[3], order[2], order[5], order[4]]
    pager = ring(order, 2 * max(piece.span for piece in order))
    for piece in swapped:
        np.testing.assert_array_equal(acquired(pager, piece), loaded.whole[piece])
        pager.release()
    assert pager._reader.counts().n_bytes <= sum(piece.n_bytes for piece in order) + pager._window.n_bytes


def test_two_at_a_time_are_refused(loaded: Loaded, ring: Make) -> None:
    first, second, *_ = order = loaded.pieces(True)[:3]
    pager = ring(order, sum(piece.span for piece in order))
    acquired(pager, first)
    with pytest.raises(EngineError, match=f"{second.name} is needed before {first.name} was released"):
        pager.acquire(second)
    pager.begin()  # the pass failed
    np.testing.assert_array_equal(acquired(pager, first), loaded.whole[first])


def test_a_read_that_hangs_writes_to_no_place_that_others_have(
    loaded: Loaded, ring: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who waited for it was told so, and asks for something else; then it comes back."""
    first, second = loaded.pieces(False)[:2]
    go_on = threading.Event()
    preadv = os.preadv

    def hang(descriptor: int, into: list[memoryview], offset: int) -> int:
        if first.offset // PAGE * PAGE <= offset < first.offset + first.n_bytes:
            go_on.wait(TIMEOUT_S)
        return preadv(descriptor, into, offset)

    monkeypatch.setattr(os, "preadv", hang)
    monkeypatch.setattr(reader_module, "READ_TIMEOUT_S", 0.05)
    pager = ring([first, second], max(first.span, second.span), chunk=1 << 20)
    try:
        with pytest.raises(WeightsError, match=r"arrived in 0\.05 s"):
            pager.acquire(first)
        pager.begin()
        with suppress(WeightsError):  # it may go on saying so
            result = acquired(pager, second)
            np.testing.assert_array_equal(result, loaded.whole[second])
            go_on.set()
            reader = pager._reader
            until(lambda: not (reader._at_work or reader._ahead), "all reads return")
            np.testing.assert_array_equal(result, loaded.whole[second])
        go_on.set()
        until(lambda: not pager._reader._at_work, "what hung returns")
        monkeypatch.setattr(reader_module, "READ_TIMEOUT_S", TIMEOUT_S)
        pager.begin()
        np.testing.assert_array_equal(acquired(pager, first), loaded.whole[first])  # and is read again
    finally:
        go_on.set()


def test_releasing_nothing_changes_nothing(loaded: Loaded, ring: Make) -> None:
    order = loaded.pieces(True)[:3]
    pager = ring(order, sum(piece.span for piece in order))
    for piece in order:
        pager.release()
        pager.begin()
        np.testing.assert_array_equal(acquired(pager, piece), loaded.whole[piece])
        pager.release()
        pager.release()


@any_of_it
@given(most=st.integers(1, 2 << 20), repack=st.booleans())
def test_the_pieces_of_a_head_are_the_head(loaded: Loaded, most: int, repack: bool) -> None:
    head = loaded.roles[repack].head
    assert head is not None
    pieces = loaded.roles[repack].head_pieces(most)
    assert sum(piece.rows for piece in pieces) == head.weight.rows
    assert len({piece.name for piece in pieces}) == len(pieces)
    at = head.offset
    for piece in pieces:
        assert piece.offset == at
        assert piece.rows % ROW_GROUP == 0 or piece is pieces[-1]
        assert piece.n_bytes <= max(most, ROW_GROUP * head.weight.row_bytes)
        at += piece.n_bytes


@pytest.mark.parametrize("chunk", [1, PAGE, 100_000, 1 << 22])
@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_plain_piece_is_read_to_any_place(loaded: Loaded, chunk: int, aligned: bool, huge: bool) -> None:
    """Into place where page offsets agree and the disk is fast with that, by way of a buffer where not."""
    reader = Reader(PAGE, 3, chunk)
    try:
        for piece in loaded.pieces(False)[:3]:
            start = 2 * PAGE + piece.offset % PAGE + (0 if aligned else 36)
            space = AddressSpace(start + piece.n_bytes + 2 * PAGE, huge=huge)
            job = Job(piece.weight, piece.file, piece.offset, piece.n_bytes, space, start, False)
            assert job.in_place == (aligned and huge)
            reader.wait(reader.submit(job))
            np.testing.assert_array_equal(bytes_at(space.address + start, piece.n_bytes), loaded.whole[piece])
            space.close()
    finally:
        reader.close()


def test_of_jobs_that_are_dropped_together_nothing_more_is_read(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that comes free while the first is waited for does not go on with the others: they would take memory."""
    begun, goes_on, preadv = threading.Event(), threading.Event(), os.preadv

    def slow(descriptor: int, into: list[memoryview], offset: int) -> int:
        begun.set()
        assert goes_on.wait(TIMEOUT_S)
        return preadv(descriptor, into, offset)

    monkeypatch.setattr(os, "preadv", slow)
    reader = Reader(PAGE, 1, PAGE)
    spaces = [AddressSpace(piece.span, huge=True) for piece in loaded.pieces(False)[:3]]
    jobs = [piece.read(space, 0) for piece, space in zip(loaded.pieces(False), spaces, strict=False)]
    try:
        for job in jobs:
            reader.submit(job)
        assert begun.wait(TIMEOUT_S)
        thread = threading.Thread(target=reader.drop, args=jobs)
        thread.start()
        until(lambda: not reader._ahead, "all to be forgotten")
        goes_on.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert [job.next > 0 for job in jobs] == [True, False, False]
    finally:
        goes_on.set()
        reader.close()
        for space in spaces:
            space.close()


def test_a_reader_beside_another_holds_what_it_reads_to_the_same_digests(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, read = Reader(PAGE, 1, PAGE, verify=True), DirectFile.read
    piece = loaded.pieces(False)[0]
    space = AddressSpace(piece.span, huge=True)
    other = helper_reader(reader, 1)

    def damaged(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
        skip = read(file, offset, n_bytes, into)
        into[skip] ^= 1
        return skip

    try:
        reader.wait(reader.submit(piece.read(space, 0)))
        other.wait(other.submit(piece.read(space, 0)))
        monkeypatch.setattr(DirectFile, "read", damaged)
        with pytest.raises(WeightsError, match="differ from the bytes that were read the first time"):
            other.wait(other.submit(piece.read(space, 0)))
    finally:
        other.close()
        reader.close()
        space.close()


def test_helpers_read_at_once_with_a_reader_and_end_with_their_block(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, alone, read, threads = threading.Barrier(2), threading.Event(), DirectFile.read, set[int]()

    def meets(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
        threads.add(threading.get_ident())
        if not alone.is_set():
            at_once.wait(TIMEOUT_S)
        return read(file, offset, n_bytes, into)

    monkeypatch.setattr(DirectFile, "read", meets)
    pieces = [piece for piece in loaded.pieces(False) if piece.n_bytes > 2 * PAGE][:2]
    spaces = [AddressSpace(piece.span, huge=True) for piece in pieces]
    reader = Reader(PAGE, 1, 1 << 20)  # each piece is one chunk
    try:
        jobs = [reader.submit(piece.read(space, 0)) for piece, space in zip(pieces, spaces, strict=True)]
        with helped(reader, 1):
            for job in jobs:
                reader.wait(job)
        assert len(threads) == 2
        threads.clear()
        alone.set()
        for _ in range(4):
            reader.wait(reader.submit(pieces[0].read(spaces[0], 0)))
        assert len(threads) == 1
    finally:
        at_once.abort()
        reader.close()
        for space in spaces:
            space.close()

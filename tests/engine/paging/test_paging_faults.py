"""Test disks that fail or hang while a model runs: an error names the file and offset, no token is wrong, and later
tokens are right.
"""

import errno
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from edge.errors import EngineError, WeightsError
from edge.llama.address_space import PAGE, AddressSpace
from edge.llm.engine import Engine
from edge.weights import reader
from edge.weights.direct_file import DirectFile
from tests.support import paging
from tests.support.helpers import TIMEOUT_S, until
from tests.support.paging import OPTIONS, answer, descriptors, fails, goes_on, idle, least, paged, reads, weight_threads

_preadv = os.preadv


# Disks that fail.


class Flaky:
    """Reads that fail from the time `code` is set until it is 0 again."""

    def __init__(self) -> None:
        self.code, self.failed = 0, 0

    def __call__(self, descriptor: int, into: list[memoryview], offset: int) -> int:
        if self.code:
            self.failed += 1
            raise OSError(self.code, os.strerror(self.code))
        return _preadv(descriptor, into, offset)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_and_comes_back(engine: Engine, path: Path, original: Path, code: int) -> None:
    flaky = Flaky()
    with reads(flaky):
        for _ in range(2):
            flaky.code = code
            fails(engine, str(path), "at offset ", os.strerror(code))
            flaky.code = 0
            goes_on(engine, original)
    assert flaky.failed
    goes_on(engine, original, 12)


def test_a_disk_that_fails_while_the_model_is_loaded(path: Path, original: Path) -> None:
    flaky = Flaky()

    def progress(_: float) -> None:
        flaky.code = errno.EIO

    with (
        paging.steady_runtime(),
        reads(flaky),
        pytest.raises(WeightsError, match=r"model\.gguf: .* at offset \d+ .*Input/output error"),
    ):
        Engine(path, replace(OPTIONS, memory=paging.ALL_FITS, io_threads=1, io_chunk=PAGE), progress=progress)
    assert flaky.failed
    assert not weight_threads()


def test_one_read_that_fails_ends_one_decode_at_the_most(engine: Engine, path: Path, original: Path) -> None:
    """At many places of a pass; what failed while it was read ahead may be read again before it is asked for."""
    errors = 0
    for skip in range(0, 40, 3):
        left = skip

        def once(descriptor: int, into: list[memoryview], offset: int) -> int:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EIO, "Input/output error")
            return _preadv(descriptor, into, offset)

        with reads(once):
            with suppress(WeightsError):
                goes_on(engine, original, 3)
                errors -= 1
            errors += 1
            goes_on(engine, original, 3)
        assert left < 0
    assert errors


def test_reads_that_come_in_pages(engine: Engine, original: Path) -> None:
    """A system may return less than it was asked for."""

    def short(descriptor: int, into: list[memoryview], offset: int) -> int:
        return _preadv(descriptor, [into[0][:PAGE]], offset)

    with reads(short):
        goes_on(engine, original, 4)


def test_a_read_that_ends_within_a_page_is_the_end_of_the_file(engine: Engine, path: Path) -> None:
    def cut(descriptor: int, into: list[memoryview], offset: int) -> int:
        return _preadv(descriptor, into, offset) - 1000

    with reads(cut):
        fails(engine, str(path), "at offset ", "the file ended after ")


@pytest.mark.parametrize("left", [0, 1, PAGE])
def test_the_last_bytes_of_a_file_can_be_read(tmp_path: Path, left: int) -> None:
    path = tmp_path / "weights"
    data = np.random.default_rng(1).bytes(3 * PAGE + left)
    path.write_bytes(data)
    file, space = DirectFile(path, len(data)), AddressSpace(6 * PAGE)
    try:
        for offset, n_bytes in ((0, len(data)), (len(data) - 7, 7), (PAGE - 1, 2), (2 * PAGE, PAGE + left)):
            room = space.view(0, space.n_bytes)
            skip = file.read(offset, n_bytes, room)
            assert bytes(room[skip : skip + n_bytes]) == data[offset : offset + n_bytes]
        with pytest.raises(WeightsError, match=rf"{n_bytes + 1} bytes were to be read at offset {offset}"):
            file.read(offset, n_bytes + 1, space.view(0, space.n_bytes))
    finally:
        file.close()
        space.close()


# Readers that never come back.


def test_a_read_that_never_returns(engine: Engine, path: Path, original: Path) -> None:
    go_on = threading.Event()

    def stuck(descriptor: int, into: list[memoryview], offset: int) -> int:
        go_on.wait(TIMEOUT_S)
        return _preadv(descriptor, into, offset)

    with mock.patch.object(reader, "READ_TIMEOUT_S", 0.1), reads(stuck):
        for _ in range(2):
            fails(engine, str(path), "at offset ", "0.1 s")
        go_on.set()
    idle(engine)
    goes_on(engine, original)


def test_an_engine_whose_reads_are_stuck_can_be_closed(path: Path, original: Path) -> None:
    go_on = threading.Event()

    def stuck(descriptor: int, into: list[memoryview], offset: int) -> int:
        go_on.wait(TIMEOUT_S)
        return _preadv(descriptor, into, offset)

    engine = paged(path, least(original))
    try:
        with mock.patch.object(reader, "READ_TIMEOUT_S", 0.1), reads(stuck):
            with pytest.raises(WeightsError):
                answer(engine)
            engine.close()
            go_on.set()
            until(lambda: not weight_threads(), "threads end when their reads return")
    finally:
        go_on.set()


# The end.


def test_threads_and_files_end_with_the_engine(path: Path, original: Path) -> None:
    options = replace(OPTIONS, io_threads=3)
    for _ in range(3):
        with paged(path, least(original, options), options) as engine:
            assert len(weight_threads()) == 3
            engine.decode([5], 0)
        assert not weight_threads()
    del engine
    assert not descriptors(path)


def test_a_load_that_is_ended_leaves_no_threads(path: Path, original: Path) -> None:
    def progress(done: float) -> None:
        raise KeyError("from progress")

    with paging.steady_runtime(), pytest.raises(KeyError, match="from progress"):
        Engine(path, replace(OPTIONS, memory=least(original)), progress=progress)
    assert not weight_threads()
    assert not descriptors(path)


def test_an_engine_may_be_closed_twice(original: Path) -> None:
    engine = paging.resident(original)
    engine.close()
    engine.close()
    engine = paged(original, least(original))
    engine.close()
    engine.close()


def test_what_is_asked_of_a_failed_engine_is_still_checked(engine: Engine, path: Path) -> None:
    os.truncate(path, PAGE)
    fails(engine, str(path))
    with pytest.raises(EngineError, match="a decode takes 1 to"):
        engine.decode([1] * 600, 0)

"""Files that are cut or changed while a model runs from them, and filesystems of all kinds: never wrong weights."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from devices.files import DIRECT
from edge.errors import WeightsError
from edge.llama.address_space import PAGE
from edge.llm.engine import Engine
from edge.weights.direct_file import DirectFile
from tests.engine.paging.conftest import MakeModel
from tests.support.paging import (
    answer,
    descriptors,
    expected,
    fails,
    goes_on,
    idle,
    least,
    paged,
    reads,
    weight_threads,
)

_preadv = os.preadv


# Files that change.


def test_a_file_that_was_cut(engine: Engine, path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
    for _ in range(3):  # and again
        fails(engine, str(path), "at offset ", "oad the model again")


def test_a_file_that_was_written_to(engine: Engine, path: Path, original: Path) -> None:
    data = original.read_bytes()
    path.write_bytes(data)  # the very same bytes: nobody can know
    for _ in range(3):
        fails(engine, str(path), "at offset ", "was changed while in use")


def test_a_file_that_was_replaced_is_read_on(engine: Engine, path: Path, original: Path, make_model: MakeModel) -> None:
    other = path.with_suffix(".new")
    shutil.copy(make_model("llama", "q4_0", ff=256), other)
    os.replace(other, path)
    goes_on(engine, original)


def test_a_file_that_was_removed_is_read_on(engine: Engine, path: Path, original: Path) -> None:
    path.unlink()
    goes_on(engine, original)


def test_a_file_that_was_cut_between_its_header_and_its_weights(path: Path, original: Path) -> None:
    """The file whose header was read and the file opened for the weights need not be the same."""
    size = path.stat().st_size
    with pytest.raises(WeightsError, match=rf"has {size} bytes, {size + 1} were expected"):
        DirectFile(path, size + 1)
    with pytest.raises(WeightsError, match=r"cannot be opened: No such file"):
        DirectFile(path.with_name("none.gguf"), 1)


def test_a_file_that_ends_while_the_model_is_loaded(path: Path, original: Path) -> None:
    def cut(descriptor: int, into: list[memoryview], offset: int) -> int:
        got = _preadv(descriptor, into, offset)
        return got if offset == 0 else 0

    with reads(cut), pytest.raises(WeightsError, match=r"model\.gguf: \d+ bytes were to be read at offset \d+, .* cut"):
        paged(path, least(original))
    assert not weight_threads()


# Filesystems without direct reads.


def refuse_to_open(path: object, flags: int, *more: int, **how: int) -> int:
    if flags & DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return _open(path, flags, *more, **how)


_open = os.open


@pytest.mark.skipif(not DIRECT, reason="this system has no direct reads at all")
def test_a_filesystem_that_refuses_to_open_for_direct_reads(path: Path, original: Path) -> None:
    with mock.patch.object(os, "open", refuse_to_open), paged(path, least(original)) as engine:
        assert engine.paging is not None
        assert kinds(engine) == {"buffered"}
        np.testing.assert_array_equal(answer(engine), expected(original, engine))


@pytest.mark.skipif(not DIRECT, reason="this system has no direct reads at all")
def test_a_filesystem_that_refuses_only_when_read(path: Path, original: Path) -> None:
    def refuse(descriptor: int, into: list[memoryview], offset: int) -> int:
        if flags_of(descriptor) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return _preadv(descriptor, into, offset)

    with reads(refuse), paged(path, least(original)) as engine:
        assert kinds(engine) == {"buffered"}
        np.testing.assert_array_equal(answer(engine), expected(original, engine))
    del engine
    assert not descriptors(path)


def flags_of(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def kinds(engine: Engine) -> set[str]:
    assert engine.paging is not None
    plan = engine.paging.plan
    return {piece.file.reads for piece in (*plan.resident, *plan.streamed)}


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no filesystem in memory here")
def test_a_filesystem_in_memory(original: Path) -> None:
    path = Path("/dev/shm", f"edge-test-{os.getpid()}.gguf")
    try:
        shutil.copy(original, path)
        with paged(path, least(original)) as engine:
            np.testing.assert_array_equal(answer(engine), expected(original, engine))
            os.truncate(path, PAGE)
            fails(engine, str(path), "at offset ")
    finally:
        path.unlink(missing_ok=True)


# Bits that turn.


def turn_bits(engine: Engine, path: Path, offset: int) -> None:
    """One in each byte of a page, on the disk, between two reads; the time of the last change stays what it was."""
    idle(engine)
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        data = np.frombuffer(file.read(PAGE), np.uint8) ^ 0x10
        file.seek(offset)
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns


@pytest.mark.parametrize("verify", [True, False])
def test_bits_that_turn_on_the_disk_are_found_when_asked_for(path: Path, original: Path, verify: bool) -> None:
    with paged(path, least(original), verify=verify) as engine:
        answer(engine, n=2)  # all that is streamed was seen once
        assert engine.paging is not None
        streamed = engine.paging.plan.streamed
        piece = streamed[len(streamed) // 2]
        offset = piece.offset + piece.n_bytes // 2
        turn_bits(engine, path, offset)
        if verify:
            fails(
                engine,
                str(path),
                f"of {piece.weight.name} at offset ",
                "differ from the bytes that were read the first time",
            )
            turn_bits(engine, path, offset)  # back
            goes_on(engine, original)
        else:
            with pytest.raises(AssertionError, match="not equal"):
                goes_on(engine, original)


def test_verifying_changes_no_logits(path: Path, original: Path) -> None:
    with paged(path, least(original), verify=True) as engine:
        np.testing.assert_array_equal(answer(engine), expected(original, engine))

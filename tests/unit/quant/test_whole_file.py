"""Test files that appear only when complete: those of quant, and names for other programs to write to."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from devices.files import temporary_beside
from quant.whole_file import check_room, whole_file


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with whole_file(path, 3) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), whole_file(path, 3) as file:
        file.write("no bytes")  # type: ignore[arg-type, call-overload]
    with pytest.raises(TypeError), temporary_beside(path) as temporary:
        temporary.write_bytes("no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "out", 3):
        pass


def test_a_temporary_name_is_beside_it_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usual = tmp_path / "usual"
    usual.touch()
    with temporary_beside(Path("out.gguf"), ".x.gguf") as first, temporary_beside(Path("out.gguf"), ".x.gguf") as other:
        assert first != other
        assert first.parent == tmp_path
        assert first.name.startswith(".out.gguf.")
        assert first.name.endswith(".x.gguf")
        assert (first.stat().st_size, first.stat().st_mode) == (0, usual.stat().st_mode)
        first.replace("out.gguf")
    assert sorted(os.listdir()) == ["out.gguf", "usual"]


def test_no_room_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 30))
    message = r"no room for .*out: 3\.00 GiB needed, 1\.00 GiB free on that disk; free some room or name a"
    with pytest.raises(OSError, match=message), whole_file(tmp_path / "out", 3 << 30):
        pass
    with pytest.raises(OSError, match=message):
        check_room(tmp_path / "out", 3 << 30)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_temporary_file_names_the_file_itself(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "out.png"
    with pytest.raises(OSError, match="No such file") as refused, temporary_beside(missing):
        raise AssertionError
    assert refused.value.filename == str(missing)
    path = tmp_path / "out.png"
    with pytest.raises(OSError, match="No space") as refused, temporary_beside(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert refused.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []

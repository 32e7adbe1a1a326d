"""Test that files are written completely or not at all."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from devices import files, paths
from devices.files import locked, remove_temporary, removed_at_end, write_private, write_whole
from tests.support.small_disk import small_disk


def test_what_cannot_be_written_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, b"{}")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}'"


def test_a_full_disk_is_said_with_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        path = disk / "plan.json"
        write_whole(path, b"old")
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_whole(path, bytes(1 << 20))
        assert caught.value.filename == str(path)
        assert [(item.name, item.read_bytes()) for item in disk.iterdir()] == [("plan.json", b"old")]


@pytest.fixture
def _threads_take_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns")
def test_threads_register_what_is_to_be_removed_at_once(tmp_path: Path) -> None:
    left, gone = tmp_path / "left", tmp_path / "gone"
    for path in (left, gone):
        path.touch()

    together = Barrier(8)

    def register(thread: int) -> None:
        together.wait()
        for _ in range(30):
            with ExitStack() as stack:
                for i in range(20):
                    stack.enter_context(removed_at_end(tmp_path / f"{thread}-{i}"))

    with ThreadPoolExecutor(8) as pool, removed_at_end(gone):
        list(pool.map(register, range(8)))
        remove_temporary()
    assert left.exists()
    assert not gone.exists()


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_S", 0.0)
    with locked(tmp_path):
        with pytest.raises(TimeoutError) as refused, locked(tmp_path):
            pytest.fail("two have the lock")
        assert str(refused.value) == (
            f"another process has held the lock of {tmp_path} for 0 s, and may be stopped; `fuser {tmp_path}/.lock`"
            " names it: end it, or let it continue"
        )
    with locked(tmp_path):
        pass


def test_a_lock_that_is_free_soon_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder lets it go when the other one has tried."""
    tried = Event()
    monkeypatch.setattr("devices.files.time.sleep", lambda seconds: tried.set())

    def lock_too() -> None:
        with locked(tmp_path):
            pass

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            other = pool.submit(lock_too)
            assert tried.wait(60.0)
        other.result(60.0)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_private, ["sync key", "rename key", "sync folder"]),
        (write_whole, ["sync key", "rename key"]),
        (partial(write_whole, sync=False), ["rename key"]),
    ],
    ids=["private", "whole", "not synced"],
)
def test_content_and_name_are_on_the_disk_before_a_private_file_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None], expected: list[str]
) -> None:
    """A power cut loses what was not synced: first the content must be safe, then the name in the folder."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        steps.append("sync folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else "sync key")
        fsync(handle)

    def renamed(source: Any, target: Any) -> None:
        steps.append("rename key")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write(tmp_path / "key", b"secret")
    assert (tmp_path / "key").read_bytes() == b"secret"
    assert steps == expected


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_without_them(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("fcntl.lockf", refuse)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with locked(tmp_path / "state"):
        pass
    assert files.claim(tmp_path / "out")


def test_another_error_of_a_lock_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match="broken"), locked(tmp_path):
        pass


def test_an_unwritable_state_folder_is_no_other_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(files, "make_private", refuse)
    assert files.claim(tmp_path / "out")


def test_all_folders_that_are_made_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.make_private(tmp_path / "a" / "b" / "c")
        files.make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            files.make_private(path)
        other = files.usable(path)
        assert other != path
        assert not other.is_relative_to(tmp_path)
        assert other.parent.stat().st_mode & 0o777 == 0o700


def test_who_has_no_home_has_folders_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for home in ("", "relative", None):
        if home is None:
            monkeypatch.delenv("HOME")
        else:
            monkeypatch.setenv("HOME", home)
        assert not paths.state_folder().exists()
        assert paths.state_folder().is_absolute()
        assert paths.expanded("~/a").is_absolute()

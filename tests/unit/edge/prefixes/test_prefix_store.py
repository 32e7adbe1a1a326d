"""Test the store of the prefix cache: files are complete or absent, the oldest are deleted first, and no disk error
makes it fail.
"""

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from devices.files import DIRECT
from edge.errors import PrefixError
from edge.llama.address_space import PAGE, AddressSpace
from edge.prefixes.store import ABANDONED_S, MOST_FILE_BYTES, PrefixStore
from tests.support import ROOT
from tests.support.small_disk import small_disk
from tests.support.thorough import some

KIB, MIB = 1 << 10, 1 << 20


def name(n: int) -> bytes:
    """The n-th name."""
    return n.to_bytes(32, "big")


def path_of(store: PrefixStore, n: int) -> Path:
    """Where the n-th file lies."""
    return store.folder / f"{name(n).hex()}.kv"


def there(store: PrefixStore, most: int = 100) -> list[int]:
    """Which of the first names have a file."""
    return [n for n in range(most) if store.n_bytes(name(n)) is not None]


def content(store: PrefixStore, n: int, *, direct: bool = False) -> bytes | None:
    """Return the content of the n-th file."""
    into = AddressSpace(MIB).view(0, MIB)
    n_bytes = store.read(name(n), into, direct=direct)
    return None if n_bytes is None else bytes(into[:n_bytes])


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    """A store of 100 KiB."""
    return PrefixStore(tmp_path / "deep" / "prefixes", 100 * KIB)


def test_what_is_written_is_there_for_this_user_alone(store: PrefixStore) -> None:
    assert content(store, 1) is None
    assert store.files() == []
    assert store.used_bytes() == store.clear() == 0
    assert not store.folder.exists()
    assert store.write(name(1), b"abc")
    assert store.write(name(2), b"")
    assert (content(store, 1), content(store, 2), content(store, 3)) == (b"abc", b"", None)
    assert [store.n_bytes(name(n)) for n in (1, 2, 3)] == [3, 0, None]
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert path_of(store, 1).stat().st_mode & 0o777 == 0o600
    assert store.write(name(1), b"longer")
    again = PrefixStore(store.folder, store.max_bytes)
    assert content(again, 1) == b"longer"
    assert again.used_bytes() == 6
    again.remove(name(1))
    again.remove(name(1))
    assert there(store) == [2]
    assert store.problem is None


@pytest.mark.parametrize("wrong", [b"", b"a" * 31, b"a" * 33, b"../" * 11])
def test_only_names_of_32_bytes_reach_a_path(store: PrefixStore, wrong: bytes) -> None:
    for use in (
        lambda n: store.read(n, memoryview(bytearray())),
        store.n_bytes,
        store.remove,
        store.touch,
        lambda n: store.write(n, b""),
    ):
        with pytest.raises(ValueError, match="32 bytes"):
            use(wrong)


def test_what_was_not_used_for_longest_goes_first(store: PrefixStore) -> None:
    for n in range(5):
        assert store.write(name(n), bytes(20 * KIB))
    for n, used_s in enumerate((300, 100, 200, 500, 400)):
        os.utime(path_of(store, n), (used_s, used_s))
    assert [file.used_ns for file in store.files()] == [s * 10**9 for s in (100, 200, 300, 400, 500)]
    other = PrefixStore(store.folder, store.max_bytes)
    assert other.write(name(10), bytes(1))
    assert there(other) == [0, 2, 3, 4, 10]
    assert content(other, 2) is not None  # after it was counted
    assert other.touch(name(0))
    assert other.write(name(11), bytes(19 * KIB))
    assert other.write(name(12), bytes(20 * KIB))
    assert there(other) == [0, 2, 3, 10, 11, 12]
    assert other.write(name(13), bytes(20 * KIB))
    assert there(other) == [0, 2, 10, 11, 12, 13]
    assert other.used_bytes() <= other.max_bytes
    assert other.problem is None


def test_a_clock_that_was_set_back_does_not_change_the_order(store: PrefixStore) -> None:
    future_s = time.time() + 10**6
    for n in range(3):
        assert store.write(name(n), bytes(30 * KIB))
        os.utime(path_of(store, n), (future_s + n, future_s + n))
    other = PrefixStore(store.folder, store.max_bytes)
    assert other.write(name(9), b"")
    assert content(other, 0) is not None
    assert other.write(name(3), bytes(30 * KIB))
    assert there(other) == [0, 2, 3, 9]
    other.remove(name(9))
    assert other.write(name(4), bytes(30 * KIB))
    assert there(other) == [0, 3, 4]


@pytest.mark.parametrize("use", ["read", "touch"])
def test_use_makes_no_file_older_than_it_was(use: str, store: PrefixStore) -> None:
    future_s = time.time() + 10**6
    for n, ahead_s in enumerate((5, 0)):  # of another process, whose clock was ahead
        assert store.write(name(n), b"")
        os.utime(path_of(store, n), (future_s + ahead_s, future_s + ahead_s))
    other = PrefixStore(store.folder, store.max_bytes)  # it has not looked through the folder
    assert (content(other, 0) is not None) if use == "read" else other.touch(name(0))
    assert [file.path for file in other.files()] == [path_of(store, n) for n in (1, 0)]


def test_what_is_larger_than_the_limit_is_refused_and_nothing_removed(store: PrefixStore) -> None:
    assert store.write(name(1), bytes(90 * KIB))
    assert not store.write(name(2), bytes(100 * KIB + 1))
    assert store.problem == (
        f"a prompt is not stored in {store.folder}: 102,401 bytes needed for a part of it, 102,400 allowed; allow more"
    )
    assert there(store) == [1]
    assert store.write(name(2), bytes(100 * KIB))
    assert there(store) == [2]
    store.max_bytes = MOST_FILE_BYTES * 2
    assert not store.write(name(3), bytes(MOST_FILE_BYTES + 1))


def test_the_folder_is_looked_through_seldom(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: looked.append(folder) or scandir(folder))
    for n in range(1000):  # ten times what it may hold
        assert store.write(name(n), bytes(KIB))
    assert len(looked) <= 10 * 17
    monkeypatch.undo()
    assert there(store, 1000) == list(range(900, 1000))


def test_what_others_write_counts(store: PrefixStore) -> None:
    stores = [PrefixStore(store.folder, store.max_bytes) for _ in range(4)]
    most = 0
    for n in range(400):
        assert stores[n % 4].write(name(n), bytes(2 * KIB))
        most = max(most, store.used_bytes())
    assert most <= 100 * KIB + 4 * (100 * KIB // 16 + 2 * KIB)
    assert store.write(name(999), b"")
    assert store.used_bytes() <= store.max_bytes


def test_files_that_others_remove_are_no_loss(store: PrefixStore) -> None:
    for n in range(4):
        assert store.write(name(n), bytes(24 * KIB))
    other = PrefixStore(store.folder, store.max_bytes)
    assert other.write(name(4), bytes(2 * KIB))
    assert store.clear() == 98 * KIB
    for n in range(5, 9):
        assert other.write(name(n), bytes(24 * KIB))
    assert there(other) == [5, 6, 7, 8]
    assert other.problem is None


def test_only_regular_files_are_read(store: PrefixStore, tmp_path: Path) -> None:
    assert store.write(name(9), b"")
    (tmp_path / "secret").write_text("secret")
    path_of(store, 1).symlink_to(tmp_path / "secret")
    path_of(store, 2).symlink_to(tmp_path / "nowhere")
    os.mkfifo(path_of(store, 3))
    path_of(store, 4).mkdir()
    with path_of(store, 5).open("wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)
    before = (tmp_path / "secret").stat().st_mtime_ns
    assert there(store) == [9]
    for n in range(1, 6):
        assert store.n_bytes(name(n)) is None
        assert content(store, n) is None
    assert sorted(path.name for path in store.folder.iterdir()) == [path_of(store, 4).name, path_of(store, 9).name]
    assert (tmp_path / "secret").read_text() == "secret"
    assert (tmp_path / "secret").stat().st_mtime_ns == before
    assert not store.write(name(4), b"x")
    assert store.problem == f"a prompt is not stored in {store.folder}: Is a directory"
    path_of(store, 1).symlink_to(tmp_path / "secret")
    assert store.write(name(1), b"mine")
    assert content(store, 1) == b"mine"
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("n_bytes", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 36])
def test_a_file_comes_whole_past_the_cache_or_through_it(store: PrefixStore, n_bytes: int, direct: bool) -> None:
    data = os.urandom(n_bytes)
    assert store.write(name(1), data)
    assert store.write(name(2), b"x")
    os.utime(path_of(store, 1), (1, 1))
    assert content(store, 1, direct=direct) == data
    assert [file.path for file in store.files()] == [path_of(store, n) for n in (2, 1)]  # it counts as used
    space = AddressSpace(4 * PAGE)
    if n_bytes:
        assert store.read(name(1), space.view(0, n_bytes - 1), direct=direct) is None  # no room: it is no such file
        assert store.n_bytes(name(1)) is None


@pytest.mark.skipif(not DIRECT, reason="this system has no direct reads at all")
def test_how_a_file_is_read(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = threading.Event()
    read, flags = os.preadv, []

    def noted(handle: int, *total: Any) -> int:
        flags.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & DIRECT))
        if flags[-1] and refuses.is_set():
            raise OSError(errno.EINVAL, "no direct reads here")
        return read(handle, *total)

    monkeypatch.setattr(os, "preadv", noted)
    assert store.write(name(1), b"abc")
    assert content(store, 1) == content(store, 1, direct=True) == b"abc"
    refuses.set()
    assert content(store, 1, direct=True) == b"abc"
    assert flags == [False, True, True, False]


def test_what_is_cached(store: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers follow the system; one that says nothing counts as cached."""
    assert store.write(name(1), b"abc")
    assert store.is_cached(name(1))  # as it was just written
    said: list[Exception] = [BlockingIOError(), OSError(errno.EOPNOTSUPP, "not here"), NotImplementedError()]

    def says(*_: object) -> int:
        raise said.pop(0)

    monkeypatch.setattr(os, "preadv", says)
    assert [store.is_cached(name(1)) for _ in range(3)] == [False, True, True]
    assert store.is_cached(name(2))  # there is none: nothing is to be read past the cache


def test_what_killed_processes_leave_goes_after_a_while(store: PrefixStore) -> None:
    assert store.write(name(1), b"x")
    young, old, foreign = (store.folder / f for f in (f".{'a' * 64}.kv.abcd12_3", f".{'b' * 64}.kv.x", "notes.txt"))
    for path in (young, old, foreign):
        path.write_bytes(bytes(10 * KIB))
    past_s = time.time() - ABANDONED_S - 60
    for path in (old, foreign):
        os.utime(path, (past_s, past_s))
    other = PrefixStore(store.folder, store.max_bytes)
    assert other.used_bytes() == 20 * KIB + 1
    assert other.write(name(2), bytes(90 * KIB))  # what is being written counts
    assert (young.exists(), old.exists(), foreign.exists()) == (True, False, True)
    assert there(other) == [2]
    os.utime(young, (past_s, past_s))
    assert other.clear() == 100 * KIB
    assert [path.name for path in store.folder.iterdir()] == ["notes.txt"]
    assert other.write(name(3), bytes(90 * KIB))
    assert there(other) == [3]


def test_a_full_disk_holds_what_fits(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        store = PrefixStore(disk / "prefixes", 100 * MIB)
        for n in range(8):
            assert store.write(name(n), bytes(MIB))
        assert there(store) == [5, 6, 7]  # a fiftieth stays free
        filler = disk / "filler"
        filler.write_bytes(bytes(MIB // 2))
        assert store.write(name(8), bytes(MIB))
        assert there(store) == [6, 7, 8]
        store.clear()
        filler.write_bytes(bytes(4 * MIB - 200 * KIB))
        assert store.write(name(9), bytes(60 * KIB))
        assert not store.write(name(10), bytes(MIB))
        assert store.problem
        assert store.problem.startswith(f"a prompt is not stored in {store.folder}: 1.08 MiB needed on the disk, ")
        assert there(store) == [9]  # it would not have helped to remove it
        filler.unlink()
        assert store.write(name(10), bytes(MIB))
        assert there(store) == [9, 10]


def test_a_disk_that_takes_no_more_files_holds_as_many_as_it_can(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=4m,nr_inodes=10") as disk:
        store = PrefixStore(disk, MIB)
        for n in range(30):
            assert store.write(name(n), b"x" * 100)
        assert there(store)[-1] == 29
        assert 5 <= len(there(store)) < 10
        assert store.problem is None


def test_a_file_may_be_refused_at_any_byte(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from edge.prefixes.store import PrefixStore\n"
        "store = PrefixStore(Path(sys.argv[1]), 1 << 20)\n"
        "print(store.write(b'a' * 32, bytes(60_000)), store.write(b'b' * 32, bytes(40_000)), store.problem)"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, tmp_path],  # no half of a module is kept
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert done.stdout == f"False True a prompt is not stored in {tmp_path}: File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == [f"{b'b'.hex() * 32}.kv"]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody, not even root, may change a folder that lies on a disk of its own."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


def test_a_disk_that_is_only_read_is_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        store = PrefixStore(disk, MIB)
        assert store.write(name(1), b"x")
        with read_only(disk):
            other = PrefixStore(disk, MIB)
            assert not other.write(name(2), b"y")
            assert other.problem == f"a prompt is not stored in {disk}: Read-only file system"
            assert content(other, 1) == b"x"
            assert other.touch(name(1))
            other.remove(name(1))
            assert there(other) == [1]
            with pytest.raises(PrefixError, match=r"cannot be removed: Read-only file system; check the owner"):
                other.clear()
        assert other.write(name(2), b"y")
        assert other.problem  # said once, and still to be seen


def test_a_folder_that_is_none_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = PrefixStore(tmp_path / "file", MIB)
    assert not store.write(name(1), b"x")
    assert store.problem
    assert store.problem.startswith(f"a prompt is not stored in {store.folder}: ")
    assert content(store, 1) is None
    assert store.n_bytes(name(1)) is None
    with pytest.raises(PrefixError, match=r"cannot be read: Not a directory; check its owner"):
        store.files()


def test_a_folder_that_goes_away_comes_again(store: PrefixStore) -> None:
    assert store.write(name(1), b"x")
    path_of(store, 1).unlink()
    store.folder.rmdir()
    assert store.write(name(2), b"y")
    assert there(store) == [2]


WRITER = """
import sys
from pathlib import Path
from edge.prefixes.store import PrefixStore
from tests.unit.edge.prefixes.test_prefix_store import content
store = PrefixStore(Path(sys.argv[1]), 40_000)
seed = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for i in range(300):
    n = (i * 7 + seed) % 50
    if i % 3:
        assert store.write(n.to_bytes(32, "big"), bytes([n]) * 1000), store.problem
    else:
        assert content(store, n) in (None, bytes([n]) * 1000)
assert store.problem is None, store.problem
"""


def test_processes_share_one_folder(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(seed)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for seed in range(3)
    ]
    for child in children:
        assert child.stdout
        child.stdout.readline()
    for child in children:
        assert child.stdin
        child.stdin.write(b"\n")
        child.stdin.flush()
    for child in children:
        with child:
            child.communicate()
        assert child.returncode == 0
    store = PrefixStore(tmp_path, 40_000)
    assert store.write(name(99), b"")
    assert 30_000 < store.used_bytes() <= 40_000
    for n in there(store, 50):
        assert content(store, n) == bytes([n]) * 1000


def test_threads_share_one_store(store: PrefixStore) -> None:
    failures: list[object] = []

    def work(shift: int) -> None:
        for i in range(200):
            n = (i * 11 + shift) % 60
            if not store.write(name(n), bytes([n]) * 3000) or content(store, n) not in (None, bytes([n]) * 3000):
                failures.append((n, store.problem))

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.used_bytes() <= store.max_bytes + 4 * 3000
    other = PrefixStore(store.folder, store.max_bytes)
    other.write(name(99), b"")
    assert other.used_bytes() <= other.max_bytes


class StoreMachine(RuleBasedStateMachine):
    """Any order of writing, reading and starting anew: just what was not used for longest is removed, and no more."""

    LIMIT = 100
    SIZES = (100, 60, 45, 40, 33, 20, 10, 0)

    def __init__(self) -> None:
        super().__init__()
        shared_memory = Path("/dev/shm")
        self.folder = shared_memory if shared_memory.is_dir() else ROOT
        self.folder = self.folder / f"edge-prefixes-{os.getpid()}-{id(self)}"
        self.store = PrefixStore(self.folder, self.LIMIT)
        self.order: list[int] = []  # what should be there, what was not used for longest first

    def teardown(self) -> None:
        self.store.clear()
        if self.folder.exists():
            self.folder.rmdir()

    @rule(n=st.integers(0, 7))
    def write(self, n: int) -> None:
        others = self.order  # what is replaced counts until it is
        while sum(self.SIZES[i] for i in others) + self.SIZES[n] > self.LIMIT:
            others = others[1:]
        assert self.store.write(name(n), bytes([n]) * self.SIZES[n])
        self.order = [i for i in others if i != n] + [n]

    @rule(n=st.integers(0, 7), only_touch=st.booleans())
    def use(self, n: int, only_touch: bool) -> None:
        is_there = n in self.order
        if only_touch:
            assert self.store.touch(name(n)) == is_there
        else:
            assert content(self.store, n) == (bytes([n]) * self.SIZES[n] if is_there else None)
        if is_there:
            self.order = [i for i in self.order if i != n] + [n]

    @rule(n=st.integers(0, 7))
    def remove(self, n: int) -> None:
        self.store.remove(name(n))
        self.order = [i for i in self.order if i != n]

    @rule()
    def begin_anew(self) -> None:
        self.store = PrefixStore(self.folder, self.LIMIT)

    @rule()
    def clear(self) -> None:
        assert self.store.clear() == sum(self.SIZES[n] for n in self.order)
        self.order = []

    @invariant()
    def holds_what_it_should(self) -> None:
        assert [int(file.path.stem, 16) for file in self.store.files()] == self.order
        assert self.store.problem is None


StoreMachine.TestCase.settings = settings(max_examples=some(40, 500), stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_what_is_replaced_removed_or_cleared_is_not_counted_any_more(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is not looked through in between: a store knows what it wrote itself."""
    assert store.write(name(0), b"")
    monkeypatch.setattr(PrefixStore, "_count", lambda _: None)
    for _ in range(9):  # 270 KiB in all, 30 at a time
        assert store.write(name(1), bytes(30 * KIB))
    assert store.write(name(2), bytes(30 * KIB))
    store.remove(name(2))
    assert store._used == 30 * KIB
    assert store.write(name(3), bytes(60 * KIB))
    assert there(store) == [0, 1, 3]


def test_a_store_that_was_cleared_looks_at_its_folder_again(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        assert store.write(name(n), bytes(30 * KIB))
    store._until_count = MIB  # as where little was written since it was counted
    assert store.clear() == 90 * KIB
    counted: list[int] = []
    count = PrefixStore._count
    monkeypatch.setattr(PrefixStore, "_count", lambda self: (counted.append(1), count(self)))
    assert store.write(name(9), bytes(60 * KIB))
    assert counted
    assert store._used == 60 * KIB


@pytest.mark.parametrize(("age_s", "stays"), [(0, True), (2 * ABANDONED_S, False), (-2 * ABANDONED_S, False)])
def test_what_a_killed_process_left_goes_also_where_the_clock_was_ahead(
    store: PrefixStore, age_s: float, stays: bool
) -> None:
    assert store.write(name(1), b"")
    left = store.folder / f".{name(2).hex()}.kv.abc"
    left.write_bytes(b"half")
    written_s = time.time() - age_s
    os.utime(left, (written_s, written_s))
    store.clear()
    assert left.exists() == stays

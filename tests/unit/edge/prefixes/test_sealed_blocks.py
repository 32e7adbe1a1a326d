"""Test that saved blocks are read unchanged or not at all, whatever the disk, other processes and the clock do."""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from edge.llama.address_space import PAGE, AddressSpace
from edge.prefixes import reading, sealed
from edge.prefixes.group import MOST_BLOCKS, blocks_a_file, data_bytes, group_start, read_header, seal, unseal
from edge.prefixes.keys import block_hashes, derived
from edge.prefixes.sealed import SealedBlocks
from edge.prefixes.store import PrefixStore
from tests.support import ROOT
from tests.support.small_disk import small_disk
from tests.support.thorough import some

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
CHAIN = block_hashes(KEY, range(100), 10)
WAIT_S = 60.0  # for a thread of a busy machine
MIB = 1 << 20
HEADER_BYTES = 24 + 32  # of a file of one block


def block(n: int) -> bytes:
    """The data of the n-th block: its own, and as long as no other."""
    return (b"block %d of keys and values, " % n) * (n + 3)


def file_bytes(n: int) -> int:
    """Return the size of the file of the n-th block alone: a header, the data and a tag."""
    return HEADER_BYTES + len(block(n)) + 16


def path_of(store: PrefixStore, block_hash: bytes, key: bytes = KEY) -> Path:
    """Where a block lies."""
    return store.folder / f"{derived(key, b'name', block_hash).hex()}.kv"


def keep(store: PrefixStore, n: int = len(CHAIN), key: bytes = KEY) -> SealedBlocks:
    """Blocks of the first hashes, written."""
    blocks = SealedBlocks(store, key)
    for i in range(n):
        one_by_one(blocks, i)
    assert blocks.close(WAIT_S)
    return blocks


def one_by_one(blocks: SealedBlocks, i: int, data: bytes | None = None) -> None:
    """Keep the i-th block in a file of its own, where it is not there."""
    if not blocks.count(CHAIN[i : i + 1], use=True):
        blocks.keep([CHAIN[i]], block(i) if data is None else data)


def blocks_of(store: PrefixStore, key: bytes = KEY) -> list[bytes]:
    """Return what another process would find."""
    return all_of(SealedBlocks(store, key).take(CHAIN))


def all_of(runs: Iterable[tuple[memoryview, int, int]]) -> list[bytes]:
    """The data that come, which are there until the next come only."""
    return [bytes(data) for data, _, _ in runs]


def readers() -> list[str]:
    """Threads of iterators, and of writers."""
    return [thread.name for thread in threading.enumerate() if "prompts" in thread.name]


class Gate(PrefixStore):
    """A store on a disk that stands still: writing and reading wait until they are let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)
        self.may_write, self.may_read, self.is_writing = (threading.Event() for _ in range(3))
        self.n_looked_for = 0
        self.cached = True  # whether its files are in the page cache
        self.direct: list[bool] = []  # how each was read

    def write(self, name: bytes, data: bytes) -> bool:  # type: ignore[override]
        self.is_writing.set()
        assert self.may_write.wait(WAIT_S)
        return super().write(name, data)

    def is_cached(self, name: bytes) -> bool:
        return self.cached

    def read(self, name: bytes, into: memoryview, *, direct: bool = False) -> int | None:
        assert self.may_read.wait(WAIT_S)
        self.direct.append(direct)
        return super().read(name, into, direct=direct)

    def n_bytes(self, name: bytes) -> int | None:
        self.n_looked_for += 1
        return super().n_bytes(name)


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    """A store of 1 MiB."""
    return PrefixStore(tmp_path / "prefixes", MIB)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A store that stands still until the test lets it go."""
    gate = Gate(tmp_path / "prefixes")
    yield gate
    gate.may_write.set()
    gate.may_read.set()


def test_blocks_come_back_in_another_process(store: PrefixStore) -> None:
    blocks = keep(store)
    assert (blocks.kept_blocks, blocks.dropped_blocks) == (10, 0)
    again = SealedBlocks(store, KEY)
    assert again.count(CHAIN) == 10
    assert all_of(again.take(CHAIN)) == [block(i) for i in range(10)]
    assert (again.kept_blocks, again.store.problem) == (0, None)
    assert again.count([]) == 0
    assert all_of(again.take([])) == []
    other = block_hashes(KEY, [*range(35), 0], 10)  # shares three blocks
    assert again.count(other) == 3
    assert all_of(again.take(other)) == [block(i) for i in range(3)]
    assert readers() == []


def test_the_disk_shows_neither_data_nor_hashes(store: PrefixStore) -> None:
    keep(store, 2)
    for block_hash, n in zip(CHAIN, range(2), strict=False):
        content = path_of(store, block_hash).read_bytes()
        assert len(content) == file_bytes(n)
        assert content[:8] == b"edge.kv\x02"
        assert not any(block(n)[at : at + 8] in content for at in range(0, len(block(n)), 8))
        assert not any(block_hash in content or block_hash.hex() in path.name for path in store.folder.iterdir())
    first = path_of(store, CHAIN[0]).read_bytes()
    store.clear()
    keep(store, 1)
    assert path_of(store, CHAIN[0]).read_bytes()[8:] != first[8:]  # never the same nonce


def test_a_block_that_is_there_is_touched_and_not_written_again(store: PrefixStore) -> None:
    keep(store, 2)
    path = path_of(store, CHAIN[0])
    before = path.read_bytes()
    os.utime(path, (1, 1))
    blocks = keep(store, 2)
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns > 10**18
    assert (blocks.kept_blocks, blocks.dropped_blocks) == (0, 0)
    assert [file.path for file in store.files()] == [path_of(store, block_hash) for block_hash in CHAIN[:2]]


def test_with_another_key_nothing_is_there(store: PrefixStore) -> None:
    keep(store, 2)
    assert blocks_of(store, OTHER_KEY) == []
    keep(store, 2, OTHER_KEY)
    assert blocks_of(store, OTHER_KEY) == blocks_of(store) == [block(0), block(1)]
    for block_hash in CHAIN[:2]:
        path_of(store, block_hash, OTHER_KEY).replace(path_of(store, block_hash))
    assert blocks_of(store) == []
    assert not path_of(store, CHAIN[0]).exists()


def test_under_another_name_nothing_is_there(store: PrefixStore) -> None:
    keep(store, 3)
    first, second = (path_of(store, block_hash) for block_hash in CHAIN[:2])
    first.replace(second)
    first.write_bytes(path_of(store, CHAIN[2]).read_bytes())
    assert blocks_of(store) == []
    assert not first.exists()
    keep(store, 1)
    assert blocks_of(store) == [block(0)]
    assert not second.exists()


@pytest.mark.parametrize("at", range(file_bytes(0)))
def test_a_block_with_a_byte_changed_is_removed(store: PrefixStore, at: int) -> None:
    keep(store, 2)
    path = path_of(store, CHAIN[0])
    content = bytearray(path.read_bytes())
    for bit in some((at % 8,), range(8)):
        content[at] ^= 1 << bit
        path.write_bytes(content)
        content[at] ^= 1 << bit
        assert blocks_of(store) == []
        assert not path.exists()
    path.write_bytes(content)
    assert blocks_of(store) == [block(0), block(1)]


def test_a_block_that_was_cut_or_grew_is_removed(store: PrefixStore) -> None:
    keep(store, 1)
    path = path_of(store, CHAIN[0])
    content = path.read_bytes()
    for wrong in (*(content[:n] for n in range(len(content))), content + b"\0", content + content, content[1:]):
        path.write_bytes(wrong)
        assert blocks_of(store) == []
        assert not path.exists()


@pytest.mark.parametrize("room", [1, sealed.AHEAD_BYTES])
def test_blocks_before_a_damaged_one_are_taken(store: PrefixStore, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "AHEAD_BYTES", room)  # each block is handed over alone, or all together
    keep(store)
    content = bytearray(path_of(store, CHAIN[4]).read_bytes())
    content[-1] ^= 1
    path_of(store, CHAIN[4]).write_bytes(content)
    assert SealedBlocks(store, KEY).count(CHAIN) == 10
    assert blocks_of(store) == [block(i) for i in range(4)]
    assert SealedBlocks(store, KEY).count(CHAIN) == 4
    keep(store)
    assert blocks_of(store) == [block(i) for i in range(10)]
    path_of(store, CHAIN[4]).write_bytes(b"edge.kv\x01" + bytes(100))  # another version
    assert SealedBlocks(store, KEY).count(CHAIN) == 4
    assert blocks_of(store) == [block(i) for i in range(4)]
    assert not path_of(store, CHAIN[4]).exists()


def test_what_is_no_file_is_no_block(store: PrefixStore, tmp_path: Path) -> None:
    keep(store, 4)
    paths = [path_of(store, block_hash) for block_hash in CHAIN[:4]]
    paths[0].rename(tmp_path / "elsewhere")
    for path in paths[1:]:
        path.unlink()
    paths[0].symlink_to(tmp_path / "elsewhere")
    os.mkfifo(paths[1])
    paths[2].mkdir()
    blocks = SealedBlocks(store, KEY)
    for n in range(3):
        assert blocks.count(CHAIN[n:]) == 0
        assert all_of(blocks.take(CHAIN[n:])) == []
    blocks = keep(store, 4)
    assert blocks_of(store) == [block(0), block(1)]
    assert (blocks.kept_blocks, blocks.dropped_blocks) == (3, 1)
    assert blocks.store.problem == f"a prompt is not stored in {store.folder}: Is a directory"


def mutated(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Another content, such as a disk, a person or an attacker could make of it."""
    damaged = bytearray(content)
    start = draw.randrange(len(content))
    end = draw.randrange(start, len(content)) + 1
    kind = draw.randrange(6)
    if kind == 0:
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del damaged[start:end]
    elif kind == 2:
        damaged[start:end] = bytes(end - start)
    elif kind == 3:
        damaged[start:end] = other[start:end]
    elif kind == 4:
        damaged[start:start] = draw.randbytes(draw.randrange(1, 40))
    else:
        damaged[start:end] = damaged[start:end][::-1]
    return bytes(damaged)


def test_of_random_changes_none_is_taken(store: PrefixStore) -> None:
    keep(store, 2)
    path = path_of(store, CHAIN[0])
    content, other = path.read_bytes(), path_of(store, CHAIN[1]).read_bytes()
    blocks = SealedBlocks(store, KEY)
    draw = random.Random(18)
    n_damaged = 0
    for _ in range(some(400, 20_000)):
        damaged = mutated(content, other, draw)
        path.write_bytes(damaged)
        n_damaged += damaged != content
        assert all_of(blocks.take(CHAIN[:1])) == ([block(0)] if damaged == content else [])
        assert path.exists() == (damaged == content)
    assert n_damaged > some(360, 18_000)


def test_of_very_many_random_changes_none_is_decrypted() -> None:
    cipher, name = AESGCM(KEY), bytes(32)
    content, other = (bytes(seal(cipher, [name], block(i))) for i in range(2))
    draw = random.Random(81)
    n_damaged = 0
    for _ in range(some(20_000, 1_000_000)):
        damaged = mutated(content, other, draw)
        n_damaged += damaged != content
        assert opened(cipher, name, damaged) == (block(0) if damaged == content else None)
    assert n_damaged > some(18_000, 900_000)


def opened(cipher: AESGCM, name: bytes, content: bytes) -> bytes | None:
    """The data in a file; None where it is not what was kept."""
    header = read_header(content, name)
    if header is None:
        return None
    into = memoryview(bytearray(max(0, data_bytes(header, content))))
    return bytes(into) if unseal(cipher, header, memoryview(content), into) else None


def test_blocks_are_there_before_they_are_written(gate: Gate) -> None:
    blocks = SealedBlocks(gate, KEY)
    for i in range(3):
        one_by_one(blocks, i)
        blocks.keep([CHAIN[i]], b"only the first counts")
    assert gate.is_writing.wait(WAIT_S)
    assert not list(gate.folder.glob("*"))
    assert blocks.count(CHAIN) == 3
    assert all_of(blocks.take(CHAIN)) == [block(0), block(1), block(2)]
    assert not blocks.flush(0.01)
    gate.may_write.set()
    assert blocks.flush(WAIT_S)
    assert (blocks.kept_blocks, blocks.count(CHAIN)) == (3, 3)
    assert len(gate.files()) == 3
    assert blocks.close(WAIT_S)
    one_by_one(blocks, 3, block(3))  # too late, and no error
    assert blocks.count(CHAIN) == 3
    assert readers() == []


def test_a_block_larger_than_the_store_is_never_there_and_said(gate: Gate) -> None:
    gate.max_bytes = 1000
    blocks = SealedBlocks(gate, KEY)
    one_by_one(blocks, 0, bytes(1500))
    assert blocks.count(CHAIN) == 0  # while it waits to be written, too
    gate.may_write.set()
    assert blocks.close(WAIT_S)
    assert (blocks.kept_blocks, blocks.dropped_blocks) == (0, 1)
    assert blocks.store.problem


def test_a_block_is_dropped_where_the_disk_is_far_behind(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "KEEP_WAIT_S", 0.01)
    blocks = SealedBlocks(gate, KEY)
    one_by_one(blocks, 0, bytes(40 * MIB))
    one_by_one(blocks, 1, bytes(24 * MIB))
    one_by_one(blocks, 2, b"x")  # 64 MiB wait already
    assert (blocks.count(CHAIN), blocks.dropped_blocks) == (2, 1)
    gate.may_write.set()
    assert blocks.close(WAIT_S)
    assert (blocks.kept_blocks, len(gate.files())) == (2, 2)


def test_a_block_waits_for_room_and_is_kept(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "KEEP_WAIT_S", WAIT_S)
    monkeypatch.setattr(sealed, "QUEUE_BYTES", 1000)
    blocks = SealedBlocks(gate, KEY)
    one_by_one(blocks, 0, bytes(1500))  # alone it may be larger
    waiting = threading.Thread(target=one_by_one, args=(blocks, 1, bytes(10)))
    waiting.start()
    assert blocks.count(CHAIN) == 1
    gate.may_write.set()
    waiting.join()
    assert blocks.close(WAIT_S)
    assert (blocks.kept_blocks, blocks.dropped_blocks) == (2, 0)


@pytest.mark.parametrize("is_stored", [True, False])
def test_blocks_that_left_the_queue_take_no_room_of_it(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    monkeypatch.setattr(sealed, "KEEP_WAIT_S", 0.0)
    monkeypatch.setattr(sealed, "QUEUE_BYTES", 1000)
    gate.max_bytes = 1 << 30 if is_stored else 100  # larger blocks are dropped
    blocks = SealedBlocks(gate, KEY)
    for i in (0, 2, 4):
        gate.may_write.clear()
        for each in (i, i + 1):  # both fit at once, so neither waits for the disk
            blocks.keep([CHAIN[each]], bytes(500))
        assert blocks.is_writing
        gate.may_write.set()
        assert blocks.flush(WAIT_S)
    assert blocks.close(WAIT_S)
    assert (blocks.kept_blocks, blocks.dropped_blocks) == ((6, 0) if is_stored else (0, 6))
    assert len(gate.files()) == blocks.kept_blocks


def test_closing_drops_what_the_disk_does_not_take(gate: Gate) -> None:
    blocks = SealedBlocks(gate, KEY)
    for i in range(5):
        one_by_one(blocks, i)
    assert gate.is_writing.wait(WAIT_S)
    assert not blocks.close(0.01)
    assert (blocks.count(CHAIN), blocks.dropped_blocks) == (1, 4)
    gate.may_write.set()
    assert blocks.flush(WAIT_S)
    assert (blocks.kept_blocks, blocks.count(CHAIN)) == (1, 1)


def test_reading_is_ahead_by_so_much_and_ends_with_the_iterator(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.may_write.set()
    gate.may_read.set()
    keep(gate)
    built: list[int] = []
    monkeypatch.setattr(sealed, "AHEAD_BYTES", 2 * PAGE)  # one page is read, one is taken: each has room for one file
    monkeypatch.setattr(
        reading, "AddressSpace", lambda n_bytes, **how: built.append(n_bytes) or AddressSpace(n_bytes, **how)
    )
    blocks = SealedBlocks(gate, KEY)
    unused = blocks.take(CHAIN)
    gate.n_looked_for = 0
    assert (built, readers()) == ([], [])
    iterator = blocks.take(CHAIN)
    assert next(iterator)[0] == block(0)
    assert readers()
    iterator.close()
    assert built == [PAGE, PAGE]
    assert gate.n_looked_for <= 4  # each found out that there is no room for one more
    assert readers() == []
    del unused
    assert all_of(blocks.take(CHAIN)) == [block(i) for i in range(10)]
    assert readers() == []


def how_read(gate: Gate, monkeypatch: pytest.MonkeyPatch, took: Iterable[float]) -> list[bool]:
    """Which of the files of ten blocks are read past the cache, where those take so long, as parts of what a disk may
    take that is just fast."""
    gate.may_write.set()
    gate.may_read.set()
    keep(gate)
    now, is_end, parts = 0.0, False, iter(took)

    def clock() -> float:
        nonlocal now, is_end
        if is_end:
            now += next(parts) * file_bytes(len(gate.direct) - 1) / reading.FAST_BYTES_PER_S
        is_end = not is_end
        return now

    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", clock)
        assert blocks_of(gate) == [block(i) for i in range(10)]
    return gate.direct


def test_a_fast_disk_is_read_past_the_cache(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.cached = False
    assert how_read(gate, monkeypatch, [0.99] * 10) == [True] * 10


def test_the_cache_keeps_what_a_slow_disk_has(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two slow files are no slow disk."""
    gate.cached = False
    moments = [1.01, 1.01, 0.99, 1.01, 1.01, 1.01]
    assert how_read(gate, monkeypatch, moments + [0.99] * 8) == [True] * 6 + [False] * 4


def test_what_is_cached_comes_from_there(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_read(gate, monkeypatch, [0.0] * 20) == [False] * 10


def test_a_disk_that_does_not_answer_has_no_blocks(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.may_write.set()
    keep(gate, 3)
    monkeypatch.setattr(reading, "READ_TIMEOUT_S", 0.01)
    assert all_of(SealedBlocks(gate, KEY).take(CHAIN)) == []
    gate.may_read.set()
    for thread in threading.enumerate():
        if "prompts" in thread.name:
            thread.join(WAIT_S)
    assert readers() == []
    monkeypatch.setattr(reading, "READ_TIMEOUT_S", WAIT_S)
    assert blocks_of(gate) == [block(0), block(1), block(2)]


def test_a_full_disk_keeps_what_it_can(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        store = PrefixStore(disk / "prefixes", 10 * MIB)
        (disk / "filler").write_bytes(bytes(900 << 10))
        blocks = SealedBlocks(store, KEY)
        one_by_one(blocks, 0, bytes(30 << 10))
        one_by_one(blocks, 1, bytes(200 << 10))
        one_by_one(blocks, 2, bytes(200 << 10))
        assert blocks.close(WAIT_S)
        assert (blocks.kept_blocks, blocks.dropped_blocks) == (1, 2)
        assert blocks.store.problem
        assert "needed on the disk" in blocks.store.problem
        assert all_of(blocks.take(CHAIN)) == [bytes(30 << 10)]


def test_a_block_larger_than_the_limit_is_a_problem_and_no_error(store: PrefixStore) -> None:
    blocks = SealedBlocks(store, KEY)
    one_by_one(blocks, 0, bytes(MIB))  # with what is around it
    assert blocks.close(WAIT_S)
    assert (blocks.kept_blocks, blocks.dropped_blocks) == (0, 1)
    assert blocks.store.problem
    assert "1,048,648 bytes needed for a part of it, 1,048,576 allowed" in blocks.store.problem


WRITER = """
import sys
from pathlib import Path
from edge.prefixes.sealed import SealedBlocks
from edge.prefixes.store import PrefixStore
from tests.unit.edge.prefixes.test_sealed_blocks import KEY
blocks = SealedBlocks(PrefixStore(Path(sys.argv[1]), 1 << 30), KEY)
for i in range(int(sys.argv[2])):
    block_hash = b"%032d" % i
    if not blocks.count([block_hash], use=True):
        blocks.keep([block_hash], bytes([i % 251]) * 200_000)
    if i % 8 == 7:
        assert blocks.flush(60)
    print(f"{blocks.kept_blocks:4000}", flush=True)  # soon fills the pipe: it is never far ahead of its reader
assert blocks.close(60)
print("whole", blocks.store.problem, flush=True)
"""
N_BLOCKS = 200  # many more than are written before the child is killed


def written(folder: Path, n_blocks: int) -> "subprocess.Popen[str]":
    """A process that writes blocks."""
    command = [sys.executable, "-c", WRITER, str(folder), str(n_blocks)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("whole_blocks", [1, 5, 20])
def test_a_killed_writer_leaves_whole_blocks(tmp_path: Path, whole_blocks: int) -> None:
    with written(tmp_path, N_BLOCKS) as child:
        assert child.stdout
        while int(child.stdout.readline()) < whole_blocks:
            pass
        child.kill()
    blocks = SealedBlocks(PrefixStore(tmp_path, 1 << 30), KEY)
    chain = [b"%032d" % i for i in range(N_BLOCKS)]
    n_there = blocks.count(chain)
    assert whole_blocks <= n_there < N_BLOCKS
    for i, (data, _, _) in enumerate(blocks.take(chain)):
        assert data == bytes([i % 251]) * 200_000
    assert blocks.count(chain) == n_there  # none was damaged


def test_two_processes_write_the_same_blocks(tmp_path: Path) -> None:
    children = [written(tmp_path, 60) for _ in range(2)]
    for child in children:
        with child:
            assert child.communicate()[0].endswith("\nwhole None\n")
        assert child.returncode == 0
    used = all_of(SealedBlocks(PrefixStore(tmp_path, 1 << 30), KEY).take([b"%032d" % i for i in range(60)]))
    assert used == [bytes([i]) * 200_000 for i in range(60)]
    assert len(list(tmp_path.iterdir())) == 60


# --- several blocks in a file ---


def keep_all(blocks: SealedBlocks, tokens: Sequence[int], a_file: int) -> None:
    """Keep a history as `States.keep` does: what is not there, in files of so many blocks, of which each group begins
    one. A block has one token here, and a file the tokens up to its end as its data."""
    chain = block_hashes(KEY, tokens, 1)
    first = blocks.count(chain, use=True)
    while first < len(chain):
        end = min(len(chain), (first // a_file + 1) * a_file)
        blocks.keep(chain[first:end], bytes(tokens[:end]))
        first = end
    assert blocks.flush(WAIT_S)


def restored(tokens: Sequence[int], start: int, runs: Iterable[tuple[memoryview, int, int]]) -> int:
    """Return how many of the tokens' blocks come, from block `start` on. What comes must be theirs."""
    at = start
    for data, n_blocks, n_shared in runs:
        assert 0 < n_shared <= n_blocks <= MOST_BLOCKS
        assert len(data) == at + n_blocks  # and so it is the file that begins here
        assert list(data[: at + n_shared]) == list(tokens[: at + n_shared])
        at += n_shared
    return at - start


def test_blocks_of_one_file_come_back_together(store: PrefixStore) -> None:
    blocks = SealedBlocks(store, KEY)
    keep_all(blocks, range(40), 16)
    assert [file.path for file in store.files()] == [
        path_of(store, block_hashes(KEY, range(40), 1)[i]) for i in (0, 16, 32)
    ]
    assert blocks.kept_blocks == 40
    again = SealedBlocks(store, KEY)
    for n in range(41):
        chain = block_hashes(KEY, range(n), 1)
        assert again.count(chain) == restored(range(n), 0, again.take(chain)) == n
    for start in (16, 32):  # from where a group starts on
        chain = block_hashes(KEY, range(40), 1)[start:]
        assert again.count(chain) == restored(range(40), start, again.take(chain)) == 40 - start
    other = [*range(11), 0, 0]  # shares 11 of them
    assert again.count(block_hashes(KEY, other, 1)) == restored(other, 0, again.take(block_hashes(KEY, other, 1))) == 11


def test_the_names_of_all_blocks_are_authenticated(store: PrefixStore) -> None:
    blocks = SealedBlocks(store, KEY)
    chain = block_hashes(KEY, range(3), 1)
    blocks.keep(chain, b"three blocks")
    assert blocks.close(WAIT_S)
    content = path_of(store, chain[0]).read_bytes()
    head, names, rest = content[:24], [content[24 + 32 * i : 56 + 32 * i] for i in range(3)], content[120:]
    for wrong in (
        [names[0], names[2], names[1]],
        [names[0], names[1], names[1]],
        [names[0], names[1], bytes(32)],
        names[:2],
        [*names, names[2]],
    ):
        path_of(store, chain[0]).write_bytes(head + b"".join(wrong) + rest)
        assert all_of(SealedBlocks(store, KEY).take(chain)) == []
        assert not path_of(store, chain[0]).exists()
    for count in (0, 1, 2, 4, 16, 17, 2**32 - 1):
        path_of(store, chain[0]).write_bytes(content[:8] + count.to_bytes(4, "little") + content[12:])
        assert SealedBlocks(store, KEY).count(chain) <= 3
        assert all_of(SealedBlocks(store, KEY).take(chain)) == []
        assert not path_of(store, chain[0]).exists()


def test_blocks_that_wait_come_back_in_part(gate: Gate) -> None:
    """As of a file, a prompt may share only the first ones of them."""
    blocks = SealedBlocks(gate, KEY)
    blocks.keep(block_hashes(KEY, range(8), 1), bytes(range(8)))
    for tokens in ([*range(8), 9], [0, 1, 2, 9]):
        chain = block_hashes(KEY, tokens, 1)
        assert blocks.count(chain) == restored(tokens, 0, blocks.take(chain)) == len(tokens) - 1
    gate.may_write.set()
    gate.may_read.set()
    assert blocks.close(WAIT_S)


def test_a_group_begins_a_file() -> None:
    for block_bytes in (1, 1000, 300_000, 1 << 20, 5 << 20, 1 << 30):
        a_file = blocks_a_file(block_bytes, 1 << 40)
        assert a_file == 1 or a_file * block_bytes <= 4 << 20
        assert {group_start(i) % a_file for i in range(100)} == {0}
    assert [blocks_a_file(n, 1 << 40) for n in (1, 180_000, 360_000, 1 << 20, 5 << 20)] == [16, 16, 8, 4, 1]
    assert [blocks_a_file(360_000, mib << 20) for mib in (32, 16, 4)] == [8, 4, 1]  # a small store has several files
    assert [group_start(i) for i in (0, 15, 16, 33)] == [0, 0, 16, 32]
    most = (1, 2, 3, 7, 8, 100)  # as windows allow
    assert [blocks_a_file(1, 1 << 40, blocks) for blocks in most] == [1, 2, 2, 4, 8, 16]
    assert MOST_BLOCKS == 16


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=40), st.sampled_from((1, 2, 4, 8, 16)), st.integers(0, 2)),
        max_size=some(6, 30),
    )
)
def test_of_any_histories_all_is_there(histories: list[tuple[list[int], int, int]]) -> None:
    """Whatever they share, in whatever portions they grow, and whoever reads them from any group on."""
    with TemporaryDirectory() as folder:
        store = PrefixStore(Path(folder), 1 << 30)
        for tokens, a_file, portions in histories:
            blocks = SealedBlocks(store, KEY)
            for part in range(portions + 1):
                keep_all(blocks, tokens[: len(tokens) * (part + 1) // (portions + 1)], a_file)
            assert blocks.close(WAIT_S)
        for tokens, _, _ in histories:
            chain, again = block_hashes(KEY, tokens, 1), SealedBlocks(store, KEY)
            for start in range(0, len(chain), MOST_BLOCKS):
                rest = chain[start:]
                assert again.count(rest) == restored(tokens, start, again.take(rest)) == len(rest)

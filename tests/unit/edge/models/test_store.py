"""Test the slice store: slices are complete or absent, resumed after any end, within its limit, and kept while an
engine uses them.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge.errors import DigestMismatch, NoRoom, SliceError
from edge.models.partial_slices import Partial
from edge.models.slice_store import SliceStore
from partition.slices.recipe import Copy, Literal, Recipe, whole
from tests.support.helpers import ROOT
from tests.support.small_disk import small_disk
from tests.support.thorough import some

KIB = 1 << 10
MIB = 1 << 20


def content(seed: int, n_bytes: int) -> bytes:
    """Bytes that differ from seed to seed."""
    return (hashlib.sha256(b"%d" % seed).digest() * (n_bytes // 32 + 1))[:n_bytes]


def sha(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def put(store: SliceStore, data: bytes) -> Path:
    """Send a slice from where an earlier attempt has left it."""
    with store.receive(sha(data), len(data)) as partial:
        for at in range(partial.received, len(data), MIB):
            partial.write(data[at : at + MIB])
        return partial.commit()


def begin(store: SliceStore, data: bytes, n_bytes: int) -> None:
    """Send the first bytes of a slice, then break off."""
    with store.receive(sha(data), len(data)) as partial:
        partial.write(data[:n_bytes])


@pytest.fixture
def store(tmp_path: Path) -> SliceStore:
    """A store of 100 KiB."""
    return SliceStore(tmp_path / "slices", 100 * KIB)


def test_a_slice_comes_and_stays(store: SliceStore) -> None:
    data = content(1, 40 * KIB)
    assert store.find(sha(data)) is None
    path = put(store, data)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o444
    again = SliceStore(store.folder, store.max_bytes)
    assert again.find(sha(data)) == path
    assert again.used_bytes() == len(data)
    assert [p.name for p in store.folder.iterdir() if p.suffix == ".partial"] == []
    with pytest.raises(SliceError, match="already"):
        store.receive(sha(data), len(data))


def test_content_and_then_name_of_a_slice_are_flushed_before_commit_returns(
    store: SliceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would otherwise lose a slice that was acknowledged."""
    data, flushed, fsync = content(1, 10 * KIB), list[tuple[bool, bool]](), os.fsync
    final = store.folder / f"{sha(data)}.slice"

    def flush(handle: int) -> None:
        is_folder = os.path.samestat(os.fstat(handle), store.folder.stat())
        flushed.append((is_folder, final.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", flush)
    assert put(store, data) == final
    assert flushed == [(False, False), (True, True)]


def test_a_broken_connection_is_continued(store: SliceStore) -> None:
    data = content(1, 40 * KIB)
    begin(store, data, 15000)
    assert store.find(sha(data)) is None
    reported: list[tuple[int, int]] = []
    with store.receive(sha(data), len(data), lambda done, total: reported.append((done, total))) as partial:
        assert partial.received == 15000
        with pytest.raises(SliceError, match="40960 bytes needed, 15000 received"):
            partial.commit()
        partial.write(data[15000:])
        assert partial.commit().read_bytes() == data
        with pytest.raises(SliceError, match="not open"):
            partial.commit()
    assert reported == [(15000, len(data))]


def test_whoever_sends_may_use_its_buffer_again(tmp_path: Path) -> None:
    store = SliceStore(tmp_path, 16 * MIB)
    buffer = bytearray(MIB)
    data = b"".join(bytes([i]) * MIB for i in range(16))
    with store.receive(sha(data), len(data)) as partial:
        for at in range(0, len(data), MIB):
            buffer[:] = data[at : at + MIB]
            partial.write(memoryview(buffer))
        partial.commit()


def test_other_bytes_than_announced_are_deleted(store: SliceStore) -> None:
    data, other = content(1, 9000), content(2, 9000)
    with store.receive(sha(data), len(data)) as partial:
        partial.write(other)
        with pytest.raises(DigestMismatch, match=f"{sha(data)} needed, {sha(other)} received"):
            partial.commit()
    assert store.used_bytes() == 0
    assert store.find(sha(data)) is None
    assert put(store, data).read_bytes() == data


def test_more_bytes_than_announced_are_refused(store: SliceStore) -> None:
    data = content(1, 9000)
    with store.receive(sha(data), 5000) as partial:
        partial.write(data[:4000])
        with pytest.raises(SliceError, match="announced with 5000 bytes, but 9000 were received"):
            partial.write(data[4000:])
        assert partial.received == 4000
    assert put(store, data).read_bytes() == data  # another size: from the beginning
    assert store.used_bytes() == len(data)


def make_room(store: SliceStore, n_bytes: int) -> None:
    """Begin a slice of so many bytes, and give it up."""
    with store.receive("0" * 64, n_bytes):
        pass


@pytest.mark.parametrize("name", ["", "../" * 21 + "x", "a" * 63, "A" * 64, "a" * 64 + "\n", "/" + "a" * 63])
def test_names_are_checked_before_they_reach_a_path(store: SliceStore, name: str) -> None:
    for what in (store.find, lambda n: store.receive(n, 1), lambda n: store.use(n).__enter__()):
        with pytest.raises(SliceError, match="not the name of a slice"):
            what(name)
    with pytest.raises(SliceError, match="0 bytes"):
        store.receive("a" * 64, 0)


def test_links_and_strange_files_are_not_slices(store: SliceStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (store.folder / f"{'a' * 64}.slice").symlink_to(tmp_path / "secret")
    (store.folder / f"{'b' * 64}.5.partial").symlink_to(tmp_path / "secret")
    (store.folder / "notes.txt").write_text("mine")
    assert store.find("a" * 64) is None
    with pytest.raises(SliceError, match="cannot be used"):
        store.receive("b" * 64, 5)
    make_room(store, store.max_bytes)
    assert len(list(store.folder.iterdir())) == 4  # these and the lock


def test_what_cannot_fit_is_refused_before_anything_is_evicted(store: SliceStore) -> None:
    data = content(1, 60 * KIB)
    put(store, data)
    with pytest.raises(NoRoom, match=r"102,401 bytes needed .* at most 102,400 bytes; .*--cache-size"):
        store.receive("a" * 64, 100 * KIB + 1)
    with store.use(sha(data)) as path, pytest.raises(NoRoom, match="61,440 bytes are in use"):
        make_room(store, 60 * KIB)
    assert path.exists()
    make_room(store, 60 * KIB)
    assert not path.exists()
    with pytest.raises(SliceError, match="send it, or cut it again"), store.use(sha(data)):
        pass


def test_one_writer_at_a_time(store: SliceStore) -> None:
    data = content(1, 30 * KIB)
    with store.receive(sha(data), len(data)) as partial:
        for size in (len(data), 5):
            with pytest.raises(SliceError, match="written by another process"):
                store.receive(sha(data), size)
        with pytest.raises(NoRoom, match="30,720 bytes are in use"):  # reserved, though nothing has come
            store.receive("a" * 64, 80 * KIB)
        partial.write(data)
        partial.commit()
    begin(store, content(2, 30 * KIB), 1)


def test_an_upload_of_nothing_leaves_nothing(store: SliceStore) -> None:
    with store.receive("a" * 64, 5):
        pass
    assert [path.name for path in store.folder.iterdir()] == [".lock"]


def test_cutting_into_the_store(store: SliceStore, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(content(1, 30 * KIB))
    recipe = Recipe(sha(model.read_bytes()), 30 * KIB, (Literal(b"header"), Copy(5, 1000, 2000, 10)))
    data = b"header" + b"".join(model.read_bytes()[5 + 2000 * i : 1005 + 2000 * i] for i in range(10))
    begin(store, data, 3000)
    reported: list[int] = []
    path = store.put_cut(recipe, model, sha(data), lambda done, total: reported.append(done))
    assert path.read_bytes() == data
    assert reported == [3000, len(data)]
    assert store.put_cut(recipe, tmp_path / "not even read", sha(data)) == path
    with pytest.raises(DigestMismatch):
        store.put_cut(recipe, model, "a" * 64)
    assert store.used_bytes() == len(data)


def test_many_writers_of_one_slice_and_of_many(store: SliceStore, tmp_path: Path) -> None:
    recipes = {}
    for seed in range(4):
        model = tmp_path / f"{seed}.gguf"
        model.write_bytes(content(seed, 40 * KIB))
        recipes[model] = whole(sha(model.read_bytes()), 40 * KIB)
    failures: list[BaseException] = []
    used: list[int] = []

    def work(shift: int) -> None:
        own = SliceStore(store.folder, store.max_bytes)
        models = list(recipes)
        for i in range(12):
            model = models[(i + shift) % len(models)]
            digest = recipes[model].model_digest
            try:
                own.put_cut(recipes[model], model, digest)
                with own.use(digest) as path:
                    assert sha(path.read_bytes()) == digest
            except SliceError:  # someone else writes it, or has evicted it, or the others have all the room
                pass
            except BaseException as exc:
                failures.append(exc)
                raise
            with own.locked():
                used.append(own.used_bytes())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 0 < max(used) <= store.max_bytes
    for model, recipe in recipes.items():
        assert store.put_cut(recipe, model, recipe.model_digest).read_bytes() == model.read_bytes()


def test_a_store_whose_lock_somebody_keeps_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devices.files.LOCK_S", 0.0)
    store, other = SliceStore(tmp_path, MIB), SliceStore(tmp_path, MIB)
    with store.locked(), pytest.raises(SliceError) as refused:
        make_room(other, 1)
    assert f"the cache {tmp_path} cannot be used: another process has held the lock of {tmp_path}" in str(refused.value)
    make_room(other, 1)


CHILD = """
import sys
from pathlib import Path
from edge.models.slice_store import SliceStore
from tests.unit.edge.models.test_store import MIB, content, sha
store = SliceStore(Path(sys.argv[1]), 64 * MIB)
used, data = content(1, MIB), content(2, 32 * MIB)
with store.use(sha(used)), store.receive(sha(data), len(data)) as partial:
    for at in range(0, len(data), 65536):
        partial.write(data[at : at + 65536])
        print(partial.received, flush=True)
    sys.stdin.read()
"""


def test_a_killed_writer_is_continued_and_its_locks_end(tmp_path: Path) -> None:
    store = SliceStore(tmp_path, 64 * MIB)
    used, data = content(1, MIB), content(2, 32 * MIB)
    path = put(store, used)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout
        child.stdout.readline()
        with pytest.raises(SliceError, match="written by another process"):
            store.receive(sha(data), len(data))
        with pytest.raises(NoRoom, match="33 MiB are in use"):
            make_room(store, 60 * MIB)
        child.kill()
    assert store.find(sha(data)) is None
    with store.receive(sha(data), len(data)) as partial:
        assert 65536 <= partial.received <= len(data)
        partial.write(data[partial.received :])
        assert partial.commit().read_bytes() == data
    make_room(store, 64 * MIB)
    assert not path.exists()


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        fill(disk)


def fill(disk: Path) -> None:
    """Use a store on a disk of 2 MiB."""
    store = SliceStore(disk / "slices", 100 * MIB)
    with pytest.raises(NoRoom, match=rf"3,145,728 bytes needed .* disk of {store.folder}, 2,097,152 bytes free"):
        store.receive("a" * 64, 3 * MIB)
    old, data = content(1, MIB), content(2, 3 * MIB // 2)
    put(store, old)
    filler = disk / "filler"
    with store.receive(sha(data), len(data)) as partial:
        assert store.find(sha(old)) is None  # evicted for want of disk, far below the limit
        partial.write(data[: MIB // 2])
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - 64 * KIB))
        with pytest.raises(NoRoom, match=rf"disk of {store.folder} is full: 1,048,576 bytes needed"):
            partial.write(data[MIB // 2 :])
        with pytest.raises(SliceError, match="not open"):
            partial.write(b"")
    filler.unlink()
    with store.receive(sha(data), len(data)) as partial:
        assert MIB // 2 < partial.received <= MIB // 2 + 64 * KIB  # what could be written before the disk was full
        partial.write(data[partial.received :])
        assert partial.commit().read_bytes() == data


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SliceError, match="cannot be used"):
        SliceStore(tmp_path / "file", MIB)


class Model:
    """State that the store should have of one slice."""

    def __init__(self, seed: int, size: int) -> None:
        self.data = content(seed, size)
        self.digest = sha(self.data)
        self.written = 0
        self.is_whole = False
        self.partial: Partial | None = None
        self.uses: list[AbstractContextManager[Path]] = []


class StoreMachine(RuleBasedStateMachine):
    """Every order of sending, breaking off, using and restarting: the store evicts just what it should."""

    LIMIT = 100

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda handle: None)  # thousands of them
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.store = SliceStore(Path(self.folder.name), self.LIMIT)
        self.slices = [Model(seed, size) for seed, size in enumerate((101, 60, 45, 40, 33, 20, 10, 1))]
        self.order: list[Model] = []  # what is in the folder, what was not used for longest first

    def teardown(self) -> None:
        for model in self.slices:
            if model.partial:
                model.partial.close()
            for use in model.uses:
                use.__exit__(None, None, None)
        self.folder.cleanup()
        self.patch.undo()

    def touched(self, model: Model) -> None:
        """It is now what was used last."""
        self.order = [m for m in self.order if m is not model] + [model]

    def evicted(self, expected: Model | None, n_bytes: int) -> list[Model] | None:
        """Return what has to go for `n_bytes`; None if that is not enough."""
        others = [m for m in self.order if m is not expected]
        over = sum(len(m.data) if m.partial else m.written for m in others) + n_bytes - self.LIMIT
        result = []
        for model in others:
            if over > 0 and not model.partial and not model.uses:
                result.append(model)
                over -= model.written
        return result if over <= 0 else None

    def forget(self, models: list[Model]) -> None:
        """They are gone."""
        for model in models:
            model.written, model.is_whole = 0, False
            self.order.remove(model)

    @rule(i=st.integers(0, 7))
    def receive(self, i: int) -> None:
        model = self.slices[i]
        gone = self.evicted(model, len(model.data))
        if model.is_whole or model.partial:
            with pytest.raises(SliceError, match=r"already|another process"):
                self.store.receive(model.digest, len(model.data))
            if model.is_whole:
                self.touched(model)
        elif gone is None:
            with pytest.raises(NoRoom):
                self.store.receive(model.digest, len(model.data))
        else:
            self.forget(gone)
            model.partial = self.store.receive(model.digest, len(model.data))
            assert model.partial.received == model.written
            self.touched(model)

    @precondition(lambda self: any(model.partial for model in self.slices))
    @rule(data=st.data(), n=st.integers(1, 60), damage=st.sampled_from((False, False, False, True)))
    def write(self, data: st.DataObject, n: int, damage: bool) -> None:
        model = data.draw(st.sampled_from([m for m in self.slices if m.partial]))
        assert model.partial
        chunk = model.data[model.written : model.written + n]
        if damage and model.written + len(chunk) == len(model.data) and chunk:
            model.partial.write(bytes(b ^ 1 for b in chunk))
            with pytest.raises(DigestMismatch):
                model.partial.commit()
            model.partial = None
            self.forget([model])
            return
        model.partial.write(chunk)
        model.written += len(chunk)

    @precondition(lambda self: any(model.partial for model in self.slices))
    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        model = data.draw(st.sampled_from([m for m in self.slices if m.partial]))
        assert model.partial
        if commit and model.written == len(model.data):
            model.partial.commit()
            model.is_whole = True
        else:
            model.partial.close()
        model.partial = None
        self.touched(model)
        if not model.written:
            self.order.remove(model)

    @rule(i=st.integers(0, 7))
    def send(self, i: int) -> None:
        self.receive(i)
        model = self.slices[i]
        if model.partial:
            model.partial.write(model.data[model.written :])
            model.partial.commit()
            model.written, model.is_whole, model.partial = len(model.data), True, None
            self.touched(model)

    @rule(i=st.integers(0, 7))
    def find(self, i: int) -> None:
        model = self.slices[i]
        path = self.store.find(model.digest)
        assert (path is not None) == model.is_whole
        if path:
            assert path.read_bytes() == model.data
            self.touched(model)

    @precondition(lambda self: any(model.is_whole for model in self.slices))
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([m for m in self.slices if m.is_whole]))
        use = self.store.use(model.digest)
        assert use.__enter__().read_bytes() == model.data
        model.uses.append(use)
        self.touched(model)

    @precondition(lambda self: any(model.uses for model in self.slices))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([m for m in self.slices if m.uses]))
        model.uses.pop().__exit__(None, None, None)
        self.touched(model)

    @rule(n=st.integers(1, 100))
    def make_room(self, n: int) -> None:
        gone = self.evicted(None, n)
        if gone is None:
            with pytest.raises(NoRoom):
                make_room(self.store, n)
        else:
            make_room(self.store, n)
            self.forget(gone)

    @rule()
    def restart(self) -> None:
        self.store = SliceStore(self.store.folder, self.LIMIT)

    @invariant()
    def the_folder_holds_what_it_should(self) -> None:
        assert self.store.used_bytes() <= self.LIMIT
        names = {f"{m.digest}.slice" if m.is_whole else f"{m.digest}.{len(m.data)}.partial" for m in self.order}
        assert {path.name for path in self.store.folder.iterdir()} - {".lock"} == names
        assert self.store.used_bytes() == sum(model.written for model in self.order)

    @invariant()
    def times_tell_what_was_used_last(self) -> None:
        names = [model.digest for model in self.order if not model.partial]
        results = [path for path in self.store.folder.iterdir() if path.name.split(".")[0] in names]
        assert [path.name.split(".")[0] for path in sorted(results, key=lambda path: path.stat().st_atime_ns)] == names


StoreMachine.TestCase.settings = settings(max_examples=some(20, 60), stateful_step_count=40, deadline=None)
test_any_order_of_events = StoreMachine.TestCase

"""Test the transfer of slices to real workers: sent once or cut there, and complete or absent after any failure."""

import contextlib
import hashlib
import os
import random
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.cluster import client
from edge.cluster.client import Remote, explained
from edge.cluster.session import RemoteSession
from edge.errors import SliceError, WorkerError
from edge.models.demo import MODEL_PATH
from edge.models.digests import Digests
from edge.models.slice_cutting import chunks, digest_of
from edge.models.slice_store import SliceStore
from edge.net.channel import open_channel
from edge.worker.limits import WorkerOptions
from edge.worker.service import Worker as InsideWorker
from partition.slices.recipe import Copy, Literal, Recipe, Zeros, whole
from tests.conftest import Synthetic
from tests.support import tiny_gguf
from tests.support.cutting_proxy import cutting_proxy
from tests.support.helpers import TIMEOUT_S, until
from tests.support.thorough import some
from tests.support.workers import SECRET, Worker, health, load_slice, served, stalled, worker
from transport import edge_pb2 as pb
from transport import rpc
from transport.connection_limit import ConnectionLimiter
from transport.errors import LinkClosed

MIB = 1 << 20
SMALL = {"context": 64}


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that the tests of this file share."""
    with worker(tmp_path_factory.mktemp("w")) as first:
        yield first


@pytest.fixture
def remote(one_worker: Worker) -> Iterator[Remote]:
    """A connection to it."""
    with one_worker.remote() as remote:
        yield remote


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The bundled model as a whole slice."""
    digest = Digests(tmp_path_factory.mktemp("d")).model_digest(MODEL_PATH)
    return whole(digest, MODEL_PATH.stat().st_size)


def noise(folder: Path, seed: int, n_bytes: int) -> tuple[Recipe, Path]:
    """A file that no other test has, and the recipe of all of it."""
    path = folder / f"noise-{seed}.gguf"
    path.write_bytes(random.Random(seed).randbytes(n_bytes))
    return whole(Digests(folder / "d").model_digest(path), n_bytes), path


def upload(remote: Remote, data: Iterable[bytes], digest: str, n_bytes: int, offset: int = 0) -> Any:
    """A raw call, which may say anything; gRPC's future."""
    said = ((rpc.SLICE_KEY, digest), (rpc.SLICE_BYTES_KEY, str(n_bytes)), (rpc.OFFSET_KEY, str(offset)))
    return rpc.stub(remote.channel, "Upload").future(iter(data), metadata=said, timeout=60)


def finish(call: Any) -> None:
    """Wait for its end; errors in the worker's words."""
    with explained("worker"):
        call.result()


def refused(call: Any, words: str, error: str) -> None:
    """It fails with this error, in these words."""
    with pytest.raises(WorkerError, match=words) as caught:
        finish(call)
    assert caught.value.error == error


def offer(remote: Remote, digest: str, n_bytes: int, recipe: bytes = b"") -> list[pb.SliceState]:
    """A raw offer and all that is said to it."""
    with explained("worker"):
        request = pb.SliceOffer(slice=digest, n_bytes=n_bytes, recipe=recipe)
        return list(rpc.stub(remote.channel, "Offer")(request, timeout=30))


def sha(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


# Once.


def test_a_slice_is_sent_once_and_loaded(one_worker: Worker, remote: Remote, demo: Recipe) -> None:
    reported: list[tuple[float, float]] = []
    sent = remote.send_slice(demo, MODEL_PATH, demo.model_digest, lambda done, total: reported.append((done, total)))
    assert sent == demo.n_bytes
    assert reported[-1] == (demo.n_bytes, demo.n_bytes)
    assert reported == sorted(reported)
    assert remote.send_slice(demo, MODEL_PATH, demo.model_digest) == 0
    assert (one_worker.slices / f"{demo.model_digest}.slice").read_bytes() == MODEL_PATH.read_bytes()
    assert remote.describe()[1].slices_bytes >= demo.n_bytes
    with RemoteSession(remote, 0, 1, SECRET) as session:
        fractions: list[float] = []
        loaded = load_slice(session, demo.model_digest, SMALL, fractions.append)
        assert (loaded.layers > 0, loaded.context, loaded.load_s > 0) == (True, 64, True)
        assert loaded.memory_bytes > demo.n_bytes
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1
        (state,) = remote.describe()[1].sessions
        assert (state.slice, state.memory_bytes) == (demo.model_digest, loaded.memory_bytes)
        session.unload()
        load_slice(session, demo.model_digest, {"context": 128})
        assert session.died is None


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_where_the_model_is_nothing_is_sent(tmp_path: Path, synthetic: Synthetic, arch: str) -> None:
    model = synthetic(arch)
    size = model.stat().st_size
    recipe = Recipe(
        Digests(tmp_path / "d").model_digest(model),
        size,
        (
            Literal(b"a header of its own"),
            Copy(100, 64, 256, 500),
            Zeros(77),
            Copy(size // 2, 70_000),
            Copy(1, 3, 9, 7),
        ),
    )
    digest = digest_of(recipe, model)
    with worker(tmp_path / "w", "--models", model.parent) as first, first.remote() as remote:
        assert remote.send_slice(recipe, tmp_path / "not here", digest) == 0
        assert (first.slices / f"{digest}.slice").read_bytes() == b"".join(chunks(recipe, model))
        assert "slice-cut" in first.log()
        (state,) = offer(remote, digest, recipe.n_bytes)
        assert state.state == pb.SliceState.READY
        # What the model does not make, whoever says so.
        with pytest.raises(WorkerError, match="differs from the announced one") as caught:
            offer(remote, "ab" * 32, recipe.n_bytes, recipe.to_bytes())
        assert caught.value.error == "DigestMismatch"
        with pytest.raises(WorkerError, match=f"the recipe makes {recipe.n_bytes} bytes, but the offered slice has 5"):
            offer(remote, "ab" * 32, 5, recipe.to_bytes())
        with pytest.raises(WorkerError, match="not a recipe") as caught:
            offer(remote, "ab" * 32, 5, b"nonsense")
        assert caught.value.error == "RecipeError"
        assert [path.name for path in first.slices.glob("*.slice")] == [f"{digest}.slice"]


def test_a_slice_of_a_model_that_is_elsewhere_is_sent(tmp_path: Path, one_worker: Worker, remote: Remote) -> None:
    _, model = noise(tmp_path, 1, 3 * MIB)
    recipe = Recipe(sha(model.read_bytes()), 3 * MIB, (Literal(b"head"), Copy(5, 7, 11, 1000), Zeros(100)))
    digest = digest_of(recipe, model)
    assert remote.send_slice(recipe, model, digest) == recipe.n_bytes
    assert (one_worker.slices / f"{digest}.slice").read_bytes() == b"".join(chunks(recipe, model))


def test_a_model_that_cannot_be_read_here(tmp_path: Path, remote: Remote) -> None:
    recipe, path = noise(tmp_path, 2, 2 * MIB)
    path.write_bytes(b"another")
    with pytest.raises(SliceError, match="it has changed or is another model"):
        remote.send_slice(recipe, path, recipe.model_digest)
    with pytest.raises(SliceError, match="cannot read the model file"):
        remote.send_slice(recipe, tmp_path / "gone", recipe.model_digest)


# Connections that break.


@pytest.mark.parametrize("seed", range(some(1, 4)))
def test_a_broken_connection_is_continued(tmp_path: Path, one_worker: Worker, seed: int) -> None:
    draw = random.Random(seed)
    size = 48 * MIB + draw.randrange(100_000)
    recipe, path = noise(tmp_path, 100 + seed, size)
    limits = [draw.choice((draw.randrange(30 * MIB), 20 * MIB)) for _ in range(4)]
    with cutting_proxy((one_worker.host, one_worker.port), limits) as proxy:
        channel, _ = open_channel("127.0.0.1", proxy.port, None, 10.0)
        with Remote(channel, "127.0.0.1", proxy.port, None) as remote:
            sent = remote.send_slice(recipe, path, recipe.model_digest)
            assert proxy.cuts >= 1
            # Again comes what was on its way at a break: at most gRPC's window, which grows to 16 MiB on a fast wire.
            assert size <= sent <= size + proxy.cuts * 16 * MIB
            assert sent < size * (proxy.cuts + 1)
            assert remote.send_slice(recipe, path, recipe.model_digest) == 0
    assert (one_worker.slices / f"{recipe.model_digest}.slice").read_bytes() == path.read_bytes()


def test_a_worker_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    recipe, path = noise(tmp_path, 20, 40 * MIB)
    killed = threading.Event()
    sent: list[int] = []
    with ExitStack() as stack:
        first = stack.enter_context(worker(tmp_path / "w"))
        remote = stack.enter_context(first.remote())

        def progress(done: float, _: float) -> None:
            if done > 20 * MIB and not killed.is_set():
                first.kill()
                killed.set()

        thread = threading.Thread(
            target=lambda: sent.append(remote.send_slice(recipe, path, recipe.model_digest, progress))
        )
        thread.start()
        assert killed.wait(TIMEOUT_S)
        (partial,) = first.slices.glob("*.partial")
        assert partial.stat().st_size > 5 * MIB
        again = stack.enter_context(worker(tmp_path / "w", listen=first.address))
        thread.join()
        assert recipe.n_bytes <= sent[0] < recipe.n_bytes + 16 * MIB
        assert (again.slices / f"{recipe.model_digest}.slice").read_bytes() == path.read_bytes()


def test_a_worker_that_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.cluster.client.RECONNECT_S", 0.5)
    recipe, path = noise(tmp_path, 21, MIB)
    with worker(tmp_path / "w") as first, first.remote() as remote:
        first.end()
        with pytest.raises(LinkClosed, match=r"did not come back for 0\.5 s"):
            remote.send_slice(recipe, path, recipe.model_digest)


# Uploads that are not what they say.


def test_wrong_bytes_leave_nothing(one_worker: Worker, remote: Remote) -> None:
    data = random.Random(30).randbytes(2 * MIB)
    digest = sha(data)
    damaged = data[:1000] + b"x" + data[1001:]
    call = upload(remote, [damaged[:MIB], damaged[MIB:]], digest, len(data))
    refused(call, f"SHA-256 {digest} needed, {sha(damaged)} received; it was deleted", "DigestMismatch")
    assert not list(one_worker.slices.glob(f"{digest}*"))
    (state,) = offer(remote, digest, len(data))
    assert (state.state, state.held_bytes) == (pb.SliceState.MISSING, 0)
    upload(remote, [data], digest, len(data)).result()
    assert (one_worker.slices / f"{digest}.slice").read_bytes() == data


def test_uploads_that_cannot_be(one_worker: Worker, remote: Remote) -> None:
    data = random.Random(31).randbytes(5000)
    digest = sha(data)
    refused(
        upload(remote, [data], digest, 5000, 17), "has 0 bytes of .* continues after 17; offer the slice", "SliceError"
    )
    refused(upload(remote, [data[:1000]], digest, 5000), "5000 bytes needed, 1000 received", "SliceError")
    (state,) = offer(remote, digest, 5000)
    assert (state.state, state.held_bytes) == (pb.SliceState.MISSING, 1000)
    refused(upload(remote, [data], digest, 5000), "has 1000 bytes of slice .* continues after 0;", "SliceError")
    too_long = upload(remote, [data], digest, 5000, 1000)
    refused(too_long, "announced with 5000 bytes, but 6000 were received", "SliceError")
    upload(remote, [data[1000:]], digest, 5000, 1000).result()
    assert upload(remote, [data], digest, 5000).result().state == pb.SliceState.READY  # there already
    for name in ("", "../x", digest.upper(), digest + "\n"):
        with pytest.raises(WorkerError, match="is not the name of a slice"):
            offer(remote, name, 5000)
    refused(upload(remote, [data], "cd" * 32, 0), "is said to have 0 bytes", "SliceError")
    refused(upload(remote, [data], "cd" * 32, 10**14), "needed for a slice, the cache .* holds at most", "NoRoom")
    for n_bytes in (0, 10**15, 2**64 - 1):
        assert offer(remote, "cd" * 32, n_bytes)[-1].held_bytes == 0
    said = ((rpc.SLICE_KEY, digest), (rpc.SLICE_BYTES_KEY, "-3"), (rpc.OFFSET_KEY, "0"))
    refused(
        rpc.stub(remote.channel, "Upload").future(iter([b"x"]), metadata=said),
        "as a number of bytes, not '-3'",
        "SliceError",
    )
    refused(rpc.stub(remote.channel, "Upload").future(iter([b"x"])), "as a number of bytes, not ''", "SliceError")
    assert not list(one_worker.slices.glob("cdcd*"))


def test_an_upload_that_stands_still_is_alone_with_that(tmp_path: Path, one_worker: Worker, remote: Remote) -> None:
    data = random.Random(32).randbytes(3 * MIB)
    digest = sha(data)
    go = threading.Event()
    call = upload(remote, stalled([data[:MIB], data[MIB : 2 * MIB]], go), digest, len(data))
    (partial,) = [one_worker.slices / f"{digest}.{len(data)}.partial"]
    until(lambda: partial.exists() and partial.stat().st_size == 2 * MIB, "two thirds of it")
    recipe, path = noise(tmp_path, 33, MIB)
    with one_worker.remote() as other:
        assert health(other.channel)
        assert other.send_slice(recipe, path, recipe.model_digest) == MIB
        refused(upload(other, [data], digest, len(data)), "is being written by another process", "SliceBusy")
        call.cancel()
        go.set()
        until(lambda: offer(other, digest, len(data))[-1].held_bytes == 2 * MIB, "the end of the first attempt")
        upload(other, [data[2 * MIB :]], digest, len(data), 2 * MIB).result()
    assert (one_worker.slices / f"{digest}.slice").read_bytes() == data


def test_an_upload_that_stands_still_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.worker.service.STALL_S", 0.5)
    data = random.Random(34).randbytes(2 * MIB)
    go = threading.Event()
    with served(tmp_path) as remote:
        with pytest.raises(LinkClosed):
            finish(upload(remote, stalled([data[:MIB]], go), sha(data), len(data)))
        go.set()
        until(lambda: offer(remote, sha(data), len(data))[-1].held_bytes == MIB, "its half")
        upload(remote, [data[MIB:]], sha(data), len(data), MIB).result()


def test_a_cut_ends_with_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, path = noise(tmp_path, 35, 8 * MIB)
    options = WorkerOptions("inside", "127.0.0.1", 1, None, tmp_path, None)
    first = InsideWorker(options, SliceStore(tmp_path / "slices", 1 << 30), Digests(tmp_path), ConnectionLimiter(64))
    check = iter([None] * 3)
    states = first._cut(
        pb.SliceOffer(slice=recipe.model_digest, n_bytes=recipe.n_bytes), recipe, path, lambda: next(check)
    )
    with pytest.raises((StopIteration, RuntimeError)):
        list(states)
    assert not any(thread.name == "cut" for thread in threading.enumerate())
    with first._store.receive(recipe.model_digest, recipe.n_bytes) as partial:  # nobody holds it
        assert 0 < partial.received < recipe.n_bytes


def test_two_send_the_same_slice_at_once(tmp_path: Path, one_worker: Worker) -> None:
    for seed in range(40, 44):
        recipe, path = noise(tmp_path, seed, 12 * MIB)
        sent: list[int] = []

        def send(recipe: Recipe = recipe, path: Path = path, sent: list[int] = sent) -> None:
            with one_worker.remote() as remote:
                sent.append(remote.send_slice(recipe, path, recipe.model_digest))

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sent) == 3
        assert max(sent) == recipe.n_bytes
        assert (one_worker.slices / f"{recipe.model_digest}.slice").read_bytes() == path.read_bytes()


def test_an_upload_that_is_over_lets_go_of_the_file(tmp_path: Path) -> None:
    recipe, path = noise(tmp_path, 60, 2 * MIB)
    upload = client._Upload(chunks(recipe, path, 0, MIB), 0, recipe.n_bytes, None)
    assert len(next(upload)) == MIB
    assert str(path) in {file.path for file in psutil.Process().open_files()}
    upload.close()
    assert str(path) not in {file.path for file in psutil.Process().open_files()}
    assert list(upload) == []


# Room.


def test_the_cache_has_a_size_and_forgets_what_is_old(tmp_path: Path, demo: Recipe) -> None:
    with worker(tmp_path / "w", "--cache-size", "24MiB") as first, first.remote() as remote:

        def send(seed: int) -> str:
            recipe, path = noise(tmp_path, seed, 8 * MIB)
            remote.send_slice(recipe, path, recipe.model_digest)
            return recipe.model_digest

        def stored() -> set[str]:
            return {path.stem for path in first.slices.glob("*.slice")}

        too_large, path = noise(tmp_path, 50, 25 * MIB)
        with pytest.raises(WorkerError, match=r"25 MiB needed .* holds at most 24 MiB; .*--cache-size") as caught:
            remote.send_slice(too_large, path, too_large.model_digest)
        assert caught.value.error == "NoRoom"

        remote.send_slice(demo, MODEL_PATH, demo.model_digest)
        with RemoteSession(remote, 0, 1, SECRET) as session:
            load_slice(session, demo.model_digest, SMALL)
            a, b = send(51), send(52)
            assert stored() == {demo.model_digest, a, b}
            c = send(53)
            assert stored() == {demo.model_digest, b, c}  # the loaded one is older than `a`, and stays
            with pytest.raises(WorkerError, match="loaded already"):
                load_slice(session, "0" * 64)
            d = send(54)
            assert stored() == {demo.model_digest, c, d}
            recipe, path = noise(tmp_path, 55, 17 * MIB)
            with pytest.raises(WorkerError, match=r"17 MiB needed .* 7,880,736 bytes are in use") as caught:
                remote.send_slice(recipe, path, recipe.model_digest)
            assert caught.value.error == "NoRoom"
            assert stored() == {demo.model_digest, c, d}  # nothing is lost for nothing
        until(lambda: not remote.describe()[1].sessions, "the slice given back")
        e = send(56)
        assert stored() == {demo.model_digest, d, e}
        f = send(57)
        assert stored() == {demo.model_digest, e, f}
        assert stored() == {demo.model_digest, e, f}
        g = send(58)
        assert stored() == {e, f, g}  # it was last used when its session ended
        assert remote.describe()[1].slices_bytes == 24 * MIB


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 6 MiB, mounted there."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    data = random.Random(60).randbytes(4 * MIB)
    digest = sha(data)
    folder = tmp_path / "w" / "cache"
    with small_disk(folder), worker(tmp_path / "w") as first, first.remote() as remote:
        large = upload(remote, [data], "ab" * 32, 100 * MIB)
        refused(large, r"100 MiB needed for a slice on the disk of .* free", "NoRoom")
        go = threading.Event()

        def pieces() -> Iterator[bytes]:
            yield data[:MIB]
            go.wait(TIMEOUT_S)
            yield from (data[at : at + MIB] for at in range(MIB, len(data), MIB))

        call = upload(remote, pieces(), digest, len(data))
        partial = first.slices / f"{digest}.{len(data)}.partial"
        until(lambda: partial.exists() and partial.stat().st_size == MIB, "the first part")
        (folder / "other").write_bytes(bytes(4 * MIB))  # somebody else fills it meanwhile
        go.set()
        refused(call, "the disk of .* is full: .* needed for the rest of a slice, .* free", "NoRoom")
        assert health(remote.channel)
        (folder / "other").unlink()
        current = offer(remote, digest, len(data))[-1].held_bytes
        assert MIB <= current < len(data)
        upload(remote, [data[current:]], digest, len(data), current).result()
        assert (first.slices / f"{digest}.slice").read_bytes() == data


def test_memory_has_a_limit(tmp_path: Path, demo: Recipe) -> None:
    with worker(tmp_path / "w", "--memory", "32MiB") as item, item.remote() as remote:
        remote.send_slice(demo, MODEL_PATH, demo.model_digest)
        words = (
            r"needs at least 96\.0 MiB, and of 0 B that are shared 0 B .* daemon takes \d+ MiB of this worker's 32\.0"
        )
        with pytest.raises(WorkerError, match=words) as caught, RemoteSession(remote, 0, 1, SECRET):
            pass
        assert caught.value.error == "NotEnoughMemory"
        assert not remote.describe()[1].sessions
    large = {"context": 32768}  # takes more than the process of a session without a model
    with (
        worker(tmp_path / "v", "--memory", "1GiB") as other,
        other.remote() as free,
        RemoteSession(free, 0, 1, SECRET) as session,
    ):
        free.send_slice(demo, MODEL_PATH, demo.model_digest)
        need = load_slice(session, demo.model_digest, large).memory_bytes
    # Room for the daemon, a session that holds nothing, and one that holds the model; not for two of these.
    assert need > 250 << 20
    with worker(tmp_path / "w", "--memory", f"{need + (240 << 20)}B") as item, item.remote() as remote:
        first, second = RemoteSession(remote, 0, 1, SECRET), RemoteSession(remote, 0, 1, SECRET)
        with first, second:
            load_slice(first, demo.model_digest, large)
            words = r"needs at least \d+ MiB, and of \d+ MiB that are shared \d+ MiB are available: .* end a session$"
            with pytest.raises(WorkerError, match=words) as caught:
                load_slice(second, demo.model_digest, large)
            assert caught.value.error == "NotEnoughMemory"
            first.unload()
            load_slice(second, demo.model_digest, large)
            second.unload()
            # Both at the same moment: the limit holds for the two together.
            came = []
            for session in (first, second):
                session.tell(pb.Command(load=pb.Load(slice=demo.model_digest, options=large)))
            for session in (first, second):
                with contextlib.suppress(WorkerError):
                    came.append(session.answer().loaded.memory_bytes)
            assert len(came) == 1


# Models that are damaged, on purpose or not.


def hostile() -> Iterator[tuple[str, bytes]]:
    """(what is wrong with it, the file)"""
    header, data = tiny_gguf.model().encode()
    yield "nothing of a model", b"GGUF" + os.urandom(2000)
    yield "cut off in its header", header[:400]
    yield "cut off in its weights", header + data[: len(data) // 2]
    yield "random weights", header + os.urandom(len(data))
    yield "counts that cannot be", header[:8] + b"\xff" * 16 + header[24:] + data
    for what, pairs in (
        ("no layers", {"llama.block_count": ("u32", 0)}),
        ("too many layers", {"llama.block_count": ("u32", 2**31)}),
        ("no heads", {"llama.attention.head_count": ("u32", 0)}),
        ("heads that do not divide", {"llama.attention.head_count": ("u32", 7)}),
        ("another width", {"llama.embedding_length": ("u32", 1 << 30)}),
        ("an architecture of its own", {"general.architecture": ("str", "hostile")}),
        ("a vocabulary of another size", {"tokenizer.ggml.tokens": ("arr[str]", ["a"])}),
    ):
        model = tiny_gguf.model()
        model.pairs |= pairs
        yield what, b"".join(model.encode())
    for what, tensor in (
        ("a tensor outside the file", tiny_gguf.Tensor((64, 64), offset=1 << 40)),
        ("a tensor of an unknown type", tiny_gguf.Tensor((64, 64), type_id=99)),
        ("a tensor of another shape", tiny_gguf.Tensor((1, 1))),
        ("a tensor without end", tiny_gguf.Tensor((1 << 40, 1 << 40))),
    ):
        model = tiny_gguf.model()
        model.tensors["blk.0.attn_q.weight"] = tensor
        yield what, b"".join(model.encode())


def test_damaged_models_harm_nobody(tmp_path: Path, one_worker: Worker, remote: Remote, demo: Recipe) -> None:
    remote.send_slice(demo, MODEL_PATH, demo.model_digest)
    session = RemoteSession(remote, 0, 1, SECRET)
    with ExitStack() as stack:
        stack.callback(lambda: session.close())
        said: list[tuple[str, str, str]] = []
        for what, content in hostile():
            path = tmp_path / "hostile.gguf"
            path.write_bytes(content)
            recipe = whole(sha(content), len(content))
            remote.send_slice(recipe, path, recipe.model_digest)
            if what == "random weights":
                load_slice(session, recipe.model_digest, SMALL)
                session.unload()
                continue
            with pytest.raises(WorkerError) as caught:
                load_slice(session, recipe.model_digest, SMALL)
            said.append((what, caught.value.error, str(caught.value)))
            if session.died:
                session = RemoteSession(remote, 0, 1, SECRET)
        assert health(remote.channel)
        assert load_slice(session, demo.model_digest, SMALL).layers > 0
    for what, error, words in said:
        assert error in ("ModelFileError", "EngineError") or "the engine process was" in words, (what, error, words)
        assert "unexpected" not in words
        assert "\n" not in words

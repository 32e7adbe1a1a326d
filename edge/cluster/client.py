"""Workers as their owner sees them: calls to the daemon. Sessions are in edge/cluster/session.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from devices.profile import DeviceProfile
from edge.closing import Closing
from edge.errors import WorkerError
from edge.slices.cutting import chunks
from edge.version import version
from edge.worker.messages import profile_from
from partition.slices.recipe import Recipe
from transport import edge_pb2 as pb
from transport import frame, rpc
from transport.errors import LinkClosed, LinkTimeout, Refused, TransportError
from transport.grpc_link import MAX_MESSAGE, rpc_failed
from transport.received import printable
from transport.security import Identity

CALL_TIMEOUT_S = 10.0  # for an answer that takes no work
CUT_TIMEOUT_S = 3600.0  # for a slice to be cut there, from a model that may first have to be hashed
STALL_TIMEOUT_S = 60.0  # for an upload that no longer moves; hashing what is held counts as no move
_SLOWEST_BYTES_PER_S = 10e6  # of a worker that reads what it holds
_LOOK_S = 0.25
_ATTEMPTS = 5  # to send a slice over connections that break before more of it has come
RECONNECT_S = 30.0  # for a worker to come back

Progress = Callable[[float, float], None]  # (done, of)


class Remote(Closing):
    """A connected worker. `close()` it; it is also a context manager."""

    def __init__(self, channel: grpc.Channel, host: str, port: int, identity: Identity | None) -> None:
        self.host, self.port = host, port
        self.identity = identity
        self.channel = channel
        self.return_s: float | None = None  # for it to come back while it is sent a slice; None: RECONNECT_S
        self._closed = False
        self.name = identity.name if identity else f"{host}:{port}"
        self.label = self.name  # to people; names of several devices come with addresses (`edge.cluster.fleet.label`)

    @property
    def secure(self) -> bool:
        """True if what passes is encrypted and both sides are known."""
        return self.identity is not None

    def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> tuple[DeviceProfile, pb.Description]:
        """Describe the device and its sessions."""
        said: pb.Description = self.call("Describe", pb.DescribeRequest(), timeout_s)
        if said.protocol != frame.VERSION:
            there = f"version {said.protocol} of the protocol (edge {said.profile.runtime or 'unknown'})"
            here = f"version {frame.VERSION} (edge {version('edge-runtime')})"
            raise Refused(f"{self.name} speaks {there}, this device {here}; update both to the same version")
        try:
            profile = profile_from(said.profile)
        except ValueError as error:
            raise Refused(
                f"{self.name} describes itself in a way this version does not read: {error}; update both"
            ) from error
        if self.identity is None:  # who has a certificate is called what the owner called it
            self.name = self.label = profile.name
        return profile, said

    def send_slice(self, recipe: Recipe, model: Path, digest: str, progress: Progress | None = None) -> int:
        """See that a slice is there: held, cut from a model file there, or sent from `model`.

        Bytes sent, 0 where none were needed. A connection that breaks is made again, and only the rest is sent.
        WorkerError, SliceError or a TransportError where it cannot be.
        """
        sent, most, attempts, waits = 0, -1, 0, 0
        while True:
            try:
                n_sent = self._offer(recipe, digest, progress)
                if n_sent is None:
                    return sent
                if n_sent > most:
                    most, attempts, waits = n_sent, 0, 0
                upload = _Upload(chunks(recipe, model, n_sent), n_sent, recipe.n_bytes, progress)
                try:
                    self._upload(upload, digest, recipe.n_bytes, n_sent)
                finally:
                    upload.close()
                    sent += upload.n_bytes
                return sent
            except (LinkClosed, LinkTimeout):
                attempts += 1
                if attempts == _ATTEMPTS or self._closed:
                    raise
                self._reconnect()
            except WorkerError as error:
                # Somebody else was first: the next offer waits for what comes of it.
                waits += 1
                if error.error != "SliceBusy" or waits * _LOOK_S > CUT_TIMEOUT_S:
                    raise
                time.sleep(_LOOK_S)

    def _reconnect(self) -> None:
        """Wait until the worker can be reached again."""
        return_s = RECONNECT_S if self.return_s is None else self.return_s
        deadline = time.monotonic() + return_s
        while (left := deadline - time.monotonic()) > 0:
            # A call that waits for a connection: to watch the channel's state instead may outlive the channel.
            try:
                with self._explained():
                    rpc.stub(self.channel, "Describe")(pb.DescribeRequest(), timeout=left, wait_for_ready=True)
                return
            except LinkTimeout:
                break
            except LinkClosed:  # the connection ended under this call, or is to stay closed
                if self._closed:
                    raise
                time.sleep(min(left, _LOOK_S))
        raise LinkClosed(f"{self.label} went away, and did not come back for {return_s:g} s")

    def _offer(self, recipe: Recipe, digest: str, progress: Progress | None) -> int | None:
        """Offer a slice; return how many bytes of it the worker holds, None where it has it all."""
        offer = pb.SliceOffer(slice=digest, n_bytes=recipe.n_bytes, recipe=recipe.to_bytes())
        if offer.ByteSize() > MAX_MESSAGE:
            offer.ClearField("recipe")  # the slice is sent, then
        state = pb.SliceState()
        with self._explained():
            for state in rpc.stub(self.channel, "Offer")(offer, timeout=CUT_TIMEOUT_S):
                if state.state == pb.SliceState.CUTTING and progress:
                    progress(state.held_bytes, recipe.n_bytes)
        return None if state.state == pb.SliceState.READY else int(state.held_bytes)

    def _upload(self, upload: _Upload, digest: str, n_bytes: int, n_sent: int) -> None:
        metadata = ((rpc.SLICE_KEY, digest), (rpc.SLICE_BYTES_KEY, str(n_bytes)), (rpc.OFFSET_KEY, str(n_sent)))
        with self._explained():
            call = rpc.stub(self.channel, "Upload").future(upload, metadata=metadata)
            try:
                while not _finished(call):
                    if time.monotonic() > upload.moved_at + STALL_TIMEOUT_S:
                        raise LinkTimeout(f"{self.label} took no more of the slice for {STALL_TIMEOUT_S:g} s")
                if upload.failed is not None:
                    raise upload.failed
                call.result()
            finally:
                call.cancel()

    def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One call with one answer."""
        with self._explained():
            return rpc.stub(self.channel, method)(request, timeout=timeout_s)

    def close(self) -> None:
        """End the connection, and with it all sessions and whatever waits for the worker."""
        self._closed = True
        self.channel.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """As `explained`; LinkClosed where this end was closed, before or meanwhile."""
        try:
            with explained(self.label):
                yield
        except (TransportError, ValueError) as error:  # ValueError: gRPC's word for a channel that was closed
            if self._closed:
                raise LinkClosed(f"the connection to {self.label} was closed here") from error
            raise


class _Upload:
    """Iterator over the chunks of an upload, which counts them."""

    def __init__(self, source: Generator[bytes], n_sent: int, n_bytes: int, progress: Progress | None) -> None:
        self._source = source
        self._lock = threading.Lock()  # of the source
        self._n_sent = n_sent
        self._n_bytes = n_bytes
        self._progress = progress
        self.n_bytes = 0
        # The worker first hashes what it holds, at the speed of a slow card.
        self.moved_at = time.monotonic() + n_sent / _SLOWEST_BYTES_PER_S
        self.failed: Exception | None = None  # our own file cannot be read, or the progress display had enough

    def __iter__(self) -> _Upload:
        return self

    def __next__(self) -> bytes:
        try:
            with self._lock:
                chunk = next(self._source)
            self.n_bytes += len(chunk)
            self.moved_at = time.monotonic()
            if self._progress:
                self._progress(self._n_sent + self.n_bytes, self._n_bytes)
        except StopIteration:
            raise
        except Exception as error:  # gRPC, whose thread this is, would only say that iterating failed
            self.failed = error
            raise
        return chunk

    def close(self) -> None:
        """Let go of the file, which gRPC's thread may hold for longer than the call."""
        with self._lock:
            self._source.close()


def _finished(call: grpc.Future) -> bool:
    try:
        call.exception(timeout=_LOOK_S)
    except grpc.FutureTimeoutError:
        return False
    except grpc.FutureCancelledError:
        pass
    return True


@contextmanager
def explained(peer: str) -> Iterator[None]:
    """Failed calls in our own words: WorkerError where the worker says why, else a TransportError."""
    try:
        yield
    except grpc.FutureCancelledError as error:
        raise LinkClosed(f"{peer} went away") from error
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        said = {key: str(value) for key, value in error.trailing_metadata() or ()}
        if rpc.ERROR_KEY in said and error.code() is not grpc.StatusCode.PERMISSION_DENIED:
            raise WorkerError(f"{peer}: {printable(error.details() or '')}", said[rpc.ERROR_KEY]) from error
        raise rpc_failed(error, peer) from error

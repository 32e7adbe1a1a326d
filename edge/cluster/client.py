"""The owner's connection to a worker's daemon. Sessions on a worker are in edge/cluster/session.py."""

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
from edge.models.slice_cutting import chunks
from edge.net.channel import ANY_CALL
from edge.version import version
from edge.worker.messages import profile_from
from partition.slices.recipe import Recipe
from transport import edge_pb2 as pb
from transport import frame, rpc
from transport.errors import LinkClosed, LinkTimeout, Refused, TransportError
from transport.grpc_link import MAX_MESSAGE, rpc_failed
from transport.received import printable
from transport.security import Identity

CALL_TIMEOUT_S = 10.0  # bound on a call that only returns what the daemon knows
CUT_TIMEOUT_S = 3600.0  # bound on cutting a slice on the worker, which may first have to hash the model
STALL_TIMEOUT_S = 60.0  # bound on an upload without progress; the worker's hashing of earlier bytes is not counted
_SLOWEST_BYTES_PER_S = 10e6  # reading speed of the slowest worker's disk
_LOOK_S = 0.25
_ATTEMPTS = 5  # attempts to send a slice over a connection that breaks without progress
RECONNECT_S = 30.0  # time for a worker to become reachable again

Progress = Callable[[float, float], None]  # (amount done, total amount)


class Remote(Closing):
    """A connection to a worker. `close()` ends it; a `Remote` is also a context manager."""

    def __init__(self, channel: grpc.Channel, host: str, port: int, identity: Identity | None) -> None:
        self.host, self.port = host, port
        self.identity = identity
        self.channel = channel
        # Seconds to wait for the worker if it vanishes during an upload; None: RECONNECT_S.
        self.return_s: float | None = None
        self._closed = False
        self.name = identity.name if identity else f"{host}:{port}"
        # Name for people; devices with equal names get their address added (`edge.cluster.fleet.label`).
        self.label = self.name

    @property
    def secure(self) -> bool:
        """True if the connection is encrypted and both sides have shown certificates."""
        return self.identity is not None

    def describe(self, timeout_s: float = CALL_TIMEOUT_S) -> tuple[DeviceProfile, pb.Description]:
        """Return the worker's device profile and its description of sessions and slices.

        Raises Refused if the worker speaks another version of the protocol, or sends a profile that cannot be read.
        """
        said: pb.Description = self.call("Describe", pb.DescribeRequest(), timeout_s)
        if said.protocol != frame.VERSION:
            there = f"version {said.protocol} of the protocol (edge {said.profile.runtime or 'unknown'})"
            here = f"version {frame.VERSION} (edge {version('edge-runtime')})"
            raise Refused(f"{self.name} speaks {there}, this device {here}; update both to the same version")
        try:
            profile = profile_from(said.profile)
        except ValueError as error:
            raise Refused(
                f"{self.name} sent a description that this version cannot read: {error}; update both"
            ) from error
        if self.identity is None:  # a worker with a certificate keeps the name that the owner gave it
            self.name = self.label = profile.name
        return profile, said

    def ping_s(self) -> float:
        """Return the seconds of a call for which the worker does nothing. Raises the errors of `call`."""
        began = time.perf_counter()
        with self._explained():
            self.channel.unary_unary(ANY_CALL)(b"", timeout=CALL_TIMEOUT_S)
        return time.perf_counter() - began

    def padded_s(self, n_bytes: int) -> float:
        """Return the seconds of a call that carries this many bytes to the worker. Raises the errors of `call`."""
        request = pb.DescribeRequest(padding=bytes(n_bytes))
        began = time.perf_counter()
        self.call("Describe", request)
        return time.perf_counter() - began

    def send_slice(self, recipe: Recipe, model: Path, digest: str, progress: Progress | None = None) -> int:
        """Make sure that the worker holds a slice, and return the number of bytes sent.

        Nothing is sent if the worker already holds the slice or can cut it from its own copy of the model. If the
        connection breaks, it is made again and only the rest is sent.

        recipe: the tensors and bytes of the slice.
        model: the model file that contains the slice.
        digest: SHA-256 of the slice.
        progress: called with the bytes done and in total.

        Raises WorkerError, SliceError or a TransportError if the slice cannot be sent.
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
                # Another owner is sending this slice. The next offer waits for its outcome.
                waits += 1
                if error.error != "SliceBusy" or waits * _LOOK_S > CUT_TIMEOUT_S:
                    raise
                time.sleep(_LOOK_S)

    def _reconnect(self) -> None:
        """Wait until the worker can be reached again."""
        return_s = RECONNECT_S if self.return_s is None else self.return_s
        deadline = time.monotonic() + return_s
        while (left := deadline - time.monotonic()) > 0:
            # A call with `wait_for_ready` is used because a watch of the channel's state may outlive the channel.
            try:
                with self._explained():
                    rpc.stub(self.channel, "Describe")(pb.DescribeRequest(), timeout=left, wait_for_ready=True)
                return
            except LinkTimeout:
                break
            except LinkClosed:  # the connection ended during this call, or this end was closed
                if self._closed:
                    raise
                time.sleep(min(left, _LOOK_S))
        raise LinkClosed(f"{self.label} went away, and did not come back for {return_s:g} s")

    def _offer(self, recipe: Recipe, digest: str, progress: Progress | None) -> int | None:
        """Offer a slice. Return the number of bytes that the worker holds, or None if it holds the whole slice."""
        offer = pb.SliceOffer(slice=digest, n_bytes=recipe.n_bytes, recipe=recipe.to_bytes())
        if offer.ByteSize() > MAX_MESSAGE:
            offer.ClearField("recipe")  # without the recipe the worker cannot cut the slice, so it is sent
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
                        raise LinkTimeout(f"{self.label} accepted no more bytes of the slice for {STALL_TIMEOUT_S:g} s")
                if upload.failed is not None:
                    raise upload.failed
                call.result()
            finally:
                call.cancel()

    def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Make a unary call and return its response."""
        with self._explained():
            return rpc.stub(self.channel, method)(request, timeout=timeout_s)

    def close(self) -> None:
        """End the connection, with all sessions and pending calls on it."""
        self._closed = True
        self.channel.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate errors as `explained` does. Raises LinkClosed if this end of the connection was closed."""
        try:
            with explained(self.label):
                yield
        except (TransportError, ValueError) as error:  # gRPC raises ValueError for a closed channel
            if self._closed:
                raise LinkClosed(f"the connection to {self.label} was closed here") from error
            raise


class _Upload:
    """Iterator over the chunks of an upload that counts the bytes sent."""

    def __init__(self, source: Generator[bytes], n_sent: int, n_bytes: int, progress: Progress | None) -> None:
        self._source = source
        self._lock = threading.Lock()  # held while a thread reads the source
        self._n_sent = n_sent
        self._n_bytes = n_bytes
        self._progress = progress
        self.n_bytes = 0
        # The worker first hashes the bytes that it holds, at the speed of its disk.
        self.moved_at = time.monotonic() + n_sent / _SLOWEST_BYTES_PER_S
        self.failed: Exception | None = None  # error of reading the model file, or of the progress display

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
        except Exception as error:  # gRPC iterates in its own thread and would only report that iterating failed
            self.failed = error
            raise
        return chunk

    def close(self) -> None:
        """Close the file. gRPC's thread may hold the iterator for longer than the call."""
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
    """Translate gRPC errors in a block: WorkerError if the worker gave a reason, else a TransportError."""
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

"""gRPC service of a worker (transport/edge.proto): description, sessions, slices, and access control."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from devices.errors import TrustError
from devices.trust import credentials as trust_files
from edge import log
from edge.errors import EdgeError, SliceBusy, SliceError
from edge.models.digests import Digests
from edge.models.slice_store import SliceStore
from edge.net import credentials as trust
from edge.parallel.engine_kinds import own_kind
from edge.worker.limits import WorkerOptions
from edge.worker.messages import profile_message
from edge.worker.sessions import Sessions
from partition.slices.recipe import Recipe
from transport import edge_pb2 as pb
from transport import frame, grpc_link, rpc, security
from transport.connection_limit import ConnectionLimiter
from transport.errors import LinkClosed, Refused
from transport.received import printable

_PROGRESS_S = 0.25  # interval between two progress reports of a long cut

STALL_S = 120.0  # deadline for the next chunk of an upload, which blocks other uploads of the slice

# Roles that may make a call, for all services. Only the owner may make other calls.
_ROLES = {
    f"/{rpc.SERVICE}/{rpc.LINK}": security.MEMBERS,
    f"/{health.SERVICE_NAME}/Check": security.ANYONE,  # first call on every connection
}


class Worker:
    """gRPC service: one object for the whole daemon. gRPC calls its methods from many threads."""

    def __init__(self, options: WorkerOptions, store: SliceStore, digests: Digests, limiter: ConnectionLimiter) -> None:
        """limiter: is informed of the caller of each connection."""
        self._options = options
        self._limiter = limiter
        self._store = store
        self._digests = digests
        self.sessions = Sessions(store, options)
        self._enrolling = threading.Lock()
        self._cutting = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers for the gRPC server."""
        return rpc.handlers(self, self._guarded)

    def admit(self, method: str, context: grpc.ServicerContext) -> rpc.Caller:
        """Return the caller of a call. Runs before every call of every service, and ends calls without permission."""
        caller = rpc.Caller("a caller", owner=True)  # without credentials every caller has all rights
        with _explained(method, context):
            if self._options.credentials is not None:
                roles = _ROLES.get(method, frozenset({security.OWNER}))
                admitted = security.admit_caller(context.auth_context(), self.credentials(), roles)
                caller = rpc.Caller(admitted.name, owner=admitted.role == security.OWNER)
            self._limiter.admitted(context.peer(), caller.name, caller.owner)
        return caller

    def credentials(self) -> security.Credentials:
        """Return the current credentials for each new connection. Enrolment changes the certificate while the daemon
        runs."""
        return trust.required(self._folder())

    def ask_memory(self, n_bytes: int | None) -> None:
        """Make all sessions together hold at most `n_bytes`, or their minimum if that is more. None restores the
        initial size.

        Without a memory limit nothing is divided, and the call has no effect.
        """
        if self.sessions.memory is None:
            log.warning("memory-asked", why="this worker was started without --memory, so it gives none back")
            return
        self.sessions.memory.ask(n_bytes)
        log.info("memory-asked", bytes=n_bytes)

    def measure_rates(self) -> None:
        """Measure the rates of this device, unless they are remembered. `Describe` reports them from then on."""
        kind = own_kind()
        kind.measure_rates(kind.describe(self._options.name, threads=self._options.threads))

    # --- calls, named as in the .proto ---

    def Describe(self, _: pb.DescribeRequest, __: grpc.ServicerContext) -> pb.Description:  # noqa: N802
        """Return the device's profile, the worker's limits, and its sessions."""
        options, kind = self._options, own_kind()
        profile = kind.describe(options.name, threads=options.threads, memory_limit_bytes=options.memory_limit_bytes)
        profile = options.limited(profile)
        return pb.Description(
            name=options.name,
            profile=profile_message(profile),
            protocol=frame.VERSION,
            secure=options.credentials is not None,
            sessions=self.sessions.states(),
            slices_bytes=self._store.used_bytes(),
            slices_limit_bytes=self._store.max_bytes,
            clock_s=time.time(),
            leaving=self.sessions.leaving.is_set(),
            sleeps=kind.sleeps,
        )

    def Session(self, commands: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Event]:  # noqa: N802
        """Run an engine process and yield its events."""
        return self.sessions.run(commands, context)

    def Link(self, _: Iterator[bytes], context: grpc.ServicerContext) -> grpc_link.Served:  # noqa: N802
        """Return the server of a data link to an engine process."""
        return self.sessions.link(context)

    def Offer(self, offer: pb.SliceOffer, context: grpc.ServicerContext) -> Iterator[pb.SliceState]:  # noqa: N802
        """Report whether a slice is in the store. If only its model is here, cut the slice first."""
        recipe = model = None
        if offer.recipe and not self._store.find(offer.slice):
            recipe = Recipe.from_bytes(offer.recipe)
            model = self._model_of(recipe, _while_active(context))
        while not self._store.find(offer.slice):
            try:
                held_bytes = self._store.received_bytes(offer.slice, offer.n_bytes)
                if recipe is None or model is None:
                    yield pb.SliceState(state=pb.SliceState.MISSING, held_bytes=held_bytes)
                    return
                yield from self._cut(offer, recipe, model, _while_active(context))
            except SliceBusy:  # an upload with a broken connection ends soon; any other upload provides the slice
                yield pb.SliceState(state=pb.SliceState.WAITING)
                time.sleep(_PROGRESS_S)
        yield pb.SliceState(state=pb.SliceState.READY)

    def Upload(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> pb.SliceState:  # noqa: N802
        """Receive the bytes of a slice, continuing after the last attempt."""
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        digest = metadata.get(rpc.SLICE_KEY, "")
        n_bytes, offset = _number(metadata, rpc.SLICE_BYTES_KEY), _number(metadata, rpc.OFFSET_KEY)
        began = time.monotonic()
        if self._store.find(digest):  # another upload has just completed it
            return pb.SliceState(state=pb.SliceState.READY, held_bytes=n_bytes)
        with self._store.receive(digest, n_bytes, _while_active(context)) as partial:
            if partial.received != offset:
                raise SliceError(
                    f"the worker has {partial.received} bytes of slice {digest[:12]}, but the upload continues after"
                    f" {offset}; offer the slice again"
                )
            with rpc.call_deadline(context, STALL_S) as moved:
                for chunk in chunks:
                    partial.write(chunk)
                    moved()
            partial.commit()
        took = f"{time.monotonic() - began:.2f}"
        log.info("slice-received", slice=digest[:12], bytes=n_bytes - offset, seconds=took)
        return pb.SliceState(state=pb.SliceState.READY, held_bytes=n_bytes)

    def Enroll(self, _: pb.EnrollRequest, __: grpc.ServicerContext) -> pb.SigningRequest:  # noqa: N802
        """Return a request to sign a key that was created here and never leaves this device."""
        with self._enrolling:
            membership = self._membership()
            if membership.holder.role != security.INVITED or membership.invitation is None:
                raise TrustError(f"{membership.holder.name} is a member already")
            csr = trust_files.pending_csr(self._folder(), membership.holder.name)
            return pb.SigningRequest(csr_pem=csr, invitation_pem=membership.invitation)

    def Install(self, certificate: pb.Certificate, _: grpc.ServicerContext) -> pb.Installed:  # noqa: N802
        """Install the owner's answer to Enroll."""
        if certificate.refused:
            name = self._membership().holder.name
            log.warning("refused", name=name, why=printable(certificate.refused))
            return pb.Installed(name=name)
        with self._enrolling:
            membership = trust_files.install(self._folder(), certificate.certificate_pem)
        log.info("joined", name=membership.holder.name, cluster=membership.fingerprint)
        return pb.Installed(name=membership.holder.name)

    def UpdateRevoked(self, revoked: pb.RevokedList, _: grpc.ServicerContext) -> pb.Installed:  # noqa: N802
        """Install a list of revoked certificates. Return the list in use if it differs."""
        before = self._membership()
        membership = trust_files.update_crl(self._folder(), revoked.crl_pem)
        name, serial = membership.holder.name, membership.holder.serial
        if serial in membership.revoked and serial not in before.revoked:
            why = f"the cluster's owner revoked this device; `edge cluster invite {name}` there lets it join again"
            log.warning("revoked", name=name, why=why)
        crl = membership.crl if membership.crl != revoked.crl_pem else None
        return pb.Installed(name=membership.holder.name, crl_pem=crl or b"")

    # --- helpers ---

    def _model_of(self, recipe: Recipe, check: Callable[..., None]) -> Path | None:
        """Return the model file for cutting a slice, or None if it is not here. A slice without copied bytes can use
        any file."""
        if not recipe.copies:
            return Path(os.devnull)
        if self._options.models is None:
            return None
        return self._digests.find_model(self._options.models, recipe.model_digest, recipe.model_bytes, check)

    def _cut(
        self, offer: pb.SliceOffer, recipe: Recipe, model: Path, check: Callable[..., None]
    ) -> Iterator[pb.SliceState]:
        """Cut a slice from a local model file and report progress. `check` raises to abort."""
        if recipe.n_bytes != offer.n_bytes:
            raise SliceError(f"the recipe makes {recipe.n_bytes} bytes, but the offered slice has {offer.n_bytes}")
        done = threading.Event()
        failed: list[Exception] = []
        cut_bytes = 0

        def progress(n: float, _: float | None = None) -> None:
            nonlocal cut_bytes
            cut_bytes = int(n)
            check()

        def run() -> None:
            try:
                while not self._cutting.acquire(timeout=_PROGRESS_S):
                    check()
                try:
                    self._store.put_cut(recipe, model, offer.slice, progress)
                finally:
                    self._cutting.release()
            except Exception as error:
                failed.append(error)
            done.set()

        threading.Thread(target=run, daemon=True, name="cut").start()
        while not done.wait(_PROGRESS_S):
            yield pb.SliceState(state=pb.SliceState.CUTTING, held_bytes=cut_bytes)
        if failed:
            raise failed[0]
        log.info("slice-cut", slice=offer.slice[:12], bytes=recipe.n_bytes, model=model)

    def _folder(self) -> Path:
        if self._options.credentials is None:
            raise TrustError("this worker is in no cluster")
        return self._options.credentials

    def _membership(self) -> trust_files.Membership:
        return trust_files.required_membership(self._folder())

    # --- wrapping of every call ---

    def _guarded(self, name: str, handler: rpc.Handler) -> rpc.Handler:
        """Wrap a handler so that its errors reach the caller as text."""

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with _explained(name, context):
                return handler(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with _explained(name, context):
                yield from handler(request, context)

        return stream if name in rpc.STREAMED else call


@contextmanager
def _explained(call: str, context: grpc.ServicerContext) -> Iterator[None]:
    """Convert an error into the end of the call, with the error's class and message."""
    try:
        yield
    except grpc.RpcError:  # the caller has disconnected
        raise
    except Exception as error:
        name, why = type(error).__name__, str(error)
        if not isinstance(error, (EdgeError, OSError)):
            why = f"unexpected {name}: {error}; please report it"
        log.warning("call-failed", call=call, peer=context.peer(), error=name, why=why)
        code = grpc.StatusCode.PERMISSION_DENIED if isinstance(error, Refused) else grpc.StatusCode.FAILED_PRECONDITION
        context.set_trailing_metadata(((rpc.ERROR_KEY, name),))
        context.abort(code, why)


def _while_active(context: grpc.ServicerContext) -> Callable[..., None]:
    """Return a progress callback that aborts long work when its call has ended, including the end of the daemon."""

    def check(*_: float) -> None:
        if not context.is_active():
            raise LinkClosed("the caller has disconnected")

    return check


def _number(metadata: dict[str, str], key: str) -> int:
    text = metadata.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise SliceError(f"an upload needs {key} as a number of bytes, not {text[:20]!r}")
    return int(text)

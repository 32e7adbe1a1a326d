"""What a worker answers (transport/edge.proto): what it is, its sessions, slices, and who may ask at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health

from devices.errors import TrustError
from devices.profile import describe
from devices.trust import credentials as held
from edge import log
from edge.errors import EdgeError, SliceBusy, SliceError
from edge.net import credentials as trust
from edge.prefixes.store import DEFAULT_BYTES
from edge.slices.digests import Digests
from edge.slices.store import SliceStore
from edge.version import version
from edge.worker.limits import ResourceLimits
from edge.worker.messages import profile_message
from edge.worker.sessions import Sessions
from partition.slices.recipe import Recipe
from transport import edge_pb2 as pb
from transport import frame, grpc_link, rpc, security
from transport.connection_limit import ConnectionLimiter
from transport.errors import LinkClosed, Refused
from transport.grpc_link import printable

_PROGRESS_S = 0.25  # between two words about a long cut

STALL_S = 120.0  # for the next piece of an upload, which keeps others from sending that slice

# Who may call what, of all services. What is not named here is for the owner alone.
_ROLES = {
    f"/{rpc.SERVICE}/{rpc.LINK}": security.MEMBERS,
    f"/{health.SERVICE_NAME}/Check": security.ANYONE,  # the first call over every connection
}


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is told when it starts."""

    name: str
    host: str  # it listens on
    threads: int
    memory_limit_bytes: int | None
    models: Path | None  # where model files may be found, to cut slices from
    credentials: Path | None  # the folder, where mutual TLS is used
    affinity: tuple[int, ...] = ()  # the cores it lends; none: all it may use
    gpu_layers: int | None = None  # the most that a session may put on the GPU; None: as many as it likes
    prefix_bytes: int = DEFAULT_BYTES  # of keys and values of prompts that are kept for the owner; 0: none


class Worker:
    """The service. One object for the whole daemon; gRPC calls its methods from many threads."""

    def __init__(self, options: WorkerOptions, store: SliceStore, digests: Digests, limiter: ConnectionLimiter) -> None:
        """limiter: learns which caller each connection belongs to."""
        self._options = options
        self._limiter = limiter
        self._store = store
        self._digests = digests
        lent = ResourceLimits(options.threads, options.affinity, options.gpu_layers)
        self._sessions = Sessions(
            store, options.host, options.credentials, lent, options.memory_limit_bytes, options.prefix_bytes
        )
        self._request: tuple[bytes, bytes] | None = None  # (key, request to sign it) of an enrolment under way
        self._leaving = False
        self._enrolling = threading.Lock()
        self._cutting = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """What the gRPC server registers."""
        return rpc.handlers(self, self._guarded)

    def admit(self, method: str, context: grpc.ServicerContext) -> rpc.Caller:
        """Before every call of every service: who makes it. The call is ended where they may not make it."""
        caller = rpc.Caller("a caller", owner=True)  # who needs no credentials may do everything
        with _explained(method, context):
            if self._options.credentials is not None:
                roles = _ROLES.get(method, frozenset({security.OWNER}))
                found = security.admit_caller(context.auth_context(), self.credentials(), roles)
                caller = rpc.Caller(found.name, owner=found.role == security.OWNER)
            self._limiter.admitted(context.peer(), caller.name, caller.owner)
        return caller

    def credentials(self) -> security.Credentials:
        """Asked at every new connection: enrolment changes the certificate while the daemon runs."""
        return trust.required(self._folder())

    @property
    def in_use(self) -> int:
        """Sessions that take part in the steps of a model."""
        return self._sessions.in_use

    def leave(self) -> None:
        """Take no new sessions, and let the owner move away."""
        self._leaving = True
        self._sessions.leave()

    def close(self) -> None:
        """End all engine processes."""
        self._sessions.close()

    # --- the calls, named as in the .proto ---

    def Describe(self, _: pb.DescribeRequest, __: grpc.ServicerContext) -> pb.Description:  # noqa: N802
        """What the device is, its limits, and what it does now."""
        options = self._options
        profile = describe(
            options.name,
            threads=options.threads,
            memory_limit_bytes=options.memory_limit_bytes,
            runtime=version("edge-runtime"),
            llama_cpp=version("llama-cpp-python"),
        )
        return pb.Description(
            name=options.name,
            profile=profile_message(profile),
            protocol=frame.VERSION,
            secure=options.credentials is not None,
            sessions=self._sessions.states(),
            slices_bytes=self._store.used_bytes(),
            slices_limit_bytes=self._store.max_bytes,
            clock_s=time.time(),
            leaving=self._leaving,
        )

    def Session(self, commands: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Event]:  # noqa: N802
        """An engine process and what it says."""
        return self._sessions.run(commands, context)

    def Link(self, _: Iterator[bytes], context: grpc.ServicerContext) -> grpc_link.Served:  # noqa: N802
        """Who serves a data link to an engine process."""
        return self._sessions.link(context)

    def Offer(self, offer: pb.SliceOffer, context: grpc.ServicerContext) -> Iterator[pb.SliceState]:  # noqa: N802
        """Whether a slice is here; where the model is, it is cut first."""
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
            except SliceBusy:  # an upload whose connection broke ends soon, any other one leads to the slice
                yield pb.SliceState(state=pb.SliceState.WAITING)
                time.sleep(_PROGRESS_S)
        yield pb.SliceState(state=pb.SliceState.READY)

    def Upload(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> pb.SliceState:  # noqa: N802
        """The bytes of a slice, from where the last attempt ended."""
        said = {key: str(value) for key, value in context.invocation_metadata()}
        digest = said.get(rpc.SLICE_KEY, "")
        n_bytes, offset = _number(said, rpc.SLICE_BYTES_KEY), _number(said, rpc.OFFSET_KEY)
        began = time.monotonic()
        if self._store.find(digest):  # somebody else has just sent it
            return pb.SliceState(state=pb.SliceState.READY, held_bytes=n_bytes)
        with self._store.receive(digest, n_bytes, _while_active(context)) as partial:
            if partial.received != offset:
                raise SliceError(
                    f"{partial.received} bytes of slice {digest[:12]} are here, not {offset}; offer it again"
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
        """A request to sign a key that was made here and never leaves."""
        with self._enrolling:
            membership = self._membership()
            if membership.holder.role != security.INVITED or membership.invitation is None:
                raise TrustError(f"{membership.holder.name} is a member already")
            # The same key until it is signed: an earlier request's answer may have been lost, and the owner signs one.
            if self._request is None:
                self._request = held.make_csr(membership.holder.name)
            return pb.SigningRequest(csr_pem=self._request[1], invitation_pem=membership.invitation)

    def Install(self, given: pb.Certificate, _: grpc.ServicerContext) -> pb.Installed:  # noqa: N802
        """The owner's answer to Enroll."""
        with self._enrolling:
            if self._request is None:
                raise TrustError("nothing was asked to be signed")
            if given.refused:
                name = self._membership().holder.name
                log.warning("refused", name=name, why=printable(given.refused))
                return pb.Installed(name=name)
            membership = held.install(self._folder(), given.certificate_pem, self._request[0])
            self._request = None
        log.info("joined", name=membership.holder.name, cluster=membership.fingerprint)
        return pb.Installed(name=membership.holder.name)

    def UpdateRevoked(self, given: pb.RevokedList, _: grpc.ServicerContext) -> pb.Installed:  # noqa: N802
        """A list of certificates that are no longer believed; where another is kept, that is the answer."""
        before = self._membership()
        membership = held.update_crl(self._folder(), given.crl_pem)
        name, serial = membership.holder.name, membership.holder.serial
        if serial in membership.revoked and serial not in before.revoked:
            why = f"the cluster's owner revoked this device; `edge cluster invite {name}` there lets it join again"
            log.warning("revoked", name=name, why=why)
        kept = membership.crl if membership.crl != given.crl_pem else None
        return pb.Installed(name=membership.holder.name, crl_pem=kept or b"")

    # --- pieces ---

    def _model_of(self, recipe: Recipe, check: Callable[..., None]) -> Path | None:
        """The file to cut a slice from; None where it is not here. Any will do for a slice that takes nothing of it."""
        if not recipe.copies:
            return Path(os.devnull)
        if self._options.models is None:
            return None
        return self._digests.find_model(self._options.models, recipe.model_digest, recipe.model_bytes, check)

    def _cut(
        self, offer: pb.SliceOffer, recipe: Recipe, model: Path, check: Callable[..., None]
    ) -> Iterator[pb.SliceState]:
        """Cut a slice from a model file of ours, and say now and then how far that is. `check` raises to end it."""
        if recipe.n_bytes != offer.n_bytes:
            raise SliceError(f"the recipe makes {recipe.n_bytes} bytes, the slice offered has {offer.n_bytes}")
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

    def _membership(self) -> held.Membership:
        return trust.membership(self._folder())

    # --- around every call ---

    def _guarded(self, name: str, handler: rpc.Handler) -> rpc.Handler:
        """Errors a person can act on reach the caller in words."""

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with _explained(name, context):
                return handler(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with _explained(name, context):
                yield from handler(request, context)

        return stream if name in rpc.STREAMED else call


class _explained:  # noqa: N801 - reads as a verb
    """Turn an error into the end of the call, with the error's class and words."""

    def __init__(self, call: str, context: grpc.ServicerContext) -> None:
        self._call = call
        self._context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.RpcError):  # the caller has gone
            return
        name, why = type(error).__name__, str(error)
        if not isinstance(error, (EdgeError, OSError)):
            why = f"unexpected {name}: {error}; please report it"
        log.warning("call-failed", call=self._call, peer=self._context.peer(), error=name, why=why)
        code = grpc.StatusCode.PERMISSION_DENIED if isinstance(error, Refused) else grpc.StatusCode.FAILED_PRECONDITION
        self._context.set_trailing_metadata(((rpc.ERROR_KEY, name),))
        self._context.abort(code, why)


def _while_active(context: grpc.ServicerContext) -> Callable[..., None]:
    """A progress that ends long work once nobody waits for it, also because the daemon ends."""

    def check(*_: float) -> None:
        if not context.is_active():
            raise LinkClosed("the caller has gone")

    return check


def _number(said: dict[str, str], key: str) -> int:
    text = said.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise SliceError(f"an upload needs {key} as a number of bytes, not {text[:20]!r}")
    return int(text)

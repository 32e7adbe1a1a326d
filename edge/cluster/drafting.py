"""A drafting model on a worker: loaded there, in an engine process of its own, to draft for this device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from edge.closing import Closing
from edge.cluster.connect import CONNECT_TIMEOUT_S, LOSS_TIMEOUT_S
from edge.cluster.fleet import Fleet
from edge.cluster.preflight import check_memory
from edge.cluster.rank_group import RankGroup
from edge.errors import EdgeError
from edge.llm.options import EngineOptions
from edge.slices.local import OwnSlices
from edge.tasks import SILENT, AggregateProgress, CancelScope, CheckedSteps, Steps
from edge.worker.draft_queries import ANSWER_S, RemoteProposer
from edge.worker.messages import options_message
from partition.slices.recipe import whole
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.errors import TransportError
from transport.link import Deadlines

AGAIN_S = 10.0  # until a worker that was lost is tried again, for the first time
MOST_AGAIN_S = 600.0  # for any time
_RANK = 1  # the worker's; this process is rank 0


class DraftDevice(Closing):
    """A worker that drafts. Where it is lost, or takes too long, it drafts nothing until it is taken back: that is
    tried in the background, and each try waits twice as long as the one before. `close()` it; it is also a context
    manager."""

    def __init__(
        self,
        address: str,
        path: Path,
        context: int,
        n_vocab: int,
        *,
        insecure: bool = False,
        steps: Steps = SILENT,
    ) -> None:
        """Load the model at `path` on the worker at `address`. context: tokens that it is to have room for. n_vocab: of
        its vocabulary. insecure: also where it does not encrypt. steps: shows how it loads, and where it is lost or
        taken back.

        NotEnoughMemory, NoRoom, WorkerError or a TransportError where it cannot be.
        """
        self._address, self._path, self._context = address, path, context
        self._insecure, self._steps, self.n_vocab = insecure, steps, n_vocab
        self._closing, self._over = CancelScope(), threading.Event()
        self._closing.then(self._over.set)
        self._again_s = AGAIN_S
        self._loaded: LoadedDraft | None = None  # None: it is lost
        try:
            loaded = self._loaded = self._load(CONNECT_TIMEOUT_S, steps)
        except BaseException:
            self.close()
            raise
        self.name, self.context = loaded.name, loaded.context

    @property
    def is_lost(self) -> bool:
        """True if it drafts nothing now."""
        return self._loaded is None

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """`n` tokens behind these, each the likeliest; none while the device is lost."""
        loaded = self._loaded
        if loaded is None:
            return []
        try:
            return loaded.propose(tokens, n)
        except TransportError as error:
            self._lose(loaded, error)
            return []

    def close(self) -> None:
        """Unload the model there, and take nothing back."""
        self._closing.close()

    # --- pieces ---

    def _load(self, timeout_s: float, steps: Steps) -> LoadedDraft:
        """Reach the worker and load the model there. timeout_s: for it to answer."""
        fleet = Fleet([self._address], insecure=self._insecure, timeout_s=timeout_s)
        loaded = LoadedDraft(fleet, self._steps.say)
        self._closing.then(loaded.close)
        try:
            loaded.load(self._path, self._context, self.n_vocab, steps)
        except BaseException:
            loaded.close()
            raise
        return loaded

    def _lose(self, loaded: LoadedDraft, error: TransportError) -> None:
        """Go on without it: it only said what might come."""
        self._loaded = None
        self._steps.say(f"{self.name} drafts no more, and the answer goes on without: {loaded.why_lost(error)}")
        loaded.close()
        threading.Thread(target=self._take_back, daemon=True, name="lost draft").start()

    def _take_back(self) -> None:
        """Load the model there again, as soon as that can be."""
        while not self._over.wait(self._again_s):
            self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
            try:
                loaded = self._load(LOSS_TIMEOUT_S, CheckedSteps(self._closing.check))
            except (EdgeError, OSError):
                continue
            if self._over.is_set():
                return
            self.context, self._loaded = loaded.context, loaded
            self._steps.say(f"{self.name} drafts again")
            return


class LoadedDraft(RankGroup):
    """A drafting model in an engine process of a worker. `close()` it."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        """fleet: the one worker, which is let go at the end. say: called where it stops while it is waited for."""
        deadlines = Deadlines(step_timeout_s=ANSWER_S, send_timeout_s=ANSWER_S)
        super().__init__(fleet, 2, say, transport="auto", deadlines=deadlines, streams=False, gives_up=True)
        self._closing.then(fleet.close)
        (worker,) = fleet.workers.values()
        self.name = worker.label
        self._waits = False  # somebody waits for a draft

    def load(self, path: Path, context: int, n_vocab: int, steps: Steps) -> None:
        """As `DraftDevice`. steps: shows how it loads."""
        ((address, worker),) = self._fleet.workers.items()
        n_bytes = path.stat().st_size
        if self._fleet.profiles[address].memory_limit_bytes is None:  # else it pages what does not fit
            check_memory(
                self._fleet, [(address, {"weights": n_bytes})], "use a smaller drafting model, or another worker"
            )
        digest = OwnSlices().model_digest(path)
        with steps.step(f"Loading {path.name} on {self.name}") as show:
            total = AggregateProgress(show, 2 * n_bytes, self._closing.check)
            with total.part(n_bytes) as sent:
                worker.send_slice(whole(digest, n_bytes), path, digest, sent)
            session = self._open_session(_RANK, address, ())
            group, _, _ = self._join(threads=1)
            self.link = group.links[_RANK]
            load = pb.Load(slice=digest, options=options_message(EngineOptions(context=context)))
            with total.part(n_bytes) as read:
                done = session.ask(pb.Command(load=load), lambda event: read(event.loading.fraction * n_bytes, n_bytes))
        session.tell(pb.Command(run=pb.Run(wire=next(iter(WIRES)), algorithm="auto")))
        self.context = int(done.loaded.context)
        self._proposer = RemoteProposer(self.link, self.context, n_vocab)
        self._closing.then(self._end)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """As `RemoteProposer.propose`."""
        self._waits = True
        try:
            return self._proposer.propose(tokens, n)
        finally:
            self._waits = False

    def why_lost(self, error: TransportError) -> Exception:
        """Return the last word of its process, else the error."""
        return self._by_rank[_RANK].word() or error

    # --- pieces ---

    def _is_busy(self) -> bool:
        return self._waits

    def _end(self) -> None:
        with suppress(TransportError):  # it is lost, and nothing is to be ended there
            self._proposer.end()

"""A worker that computes something for this device beside the model's ranks: loaded in an engine process of its own,
given up where it is lost, and taken back later."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from edge.closing import Closing
from edge.cluster.connect import CONNECT_TIMEOUT_S, LOSS_TIMEOUT_S
from edge.cluster.fleet import Fleet
from edge.cluster.rank_group import RankGroup
from edge.errors import EdgeError
from edge.tasks import SILENT, CancelScope, CheckedSteps, Steps
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.errors import TransportError
from transport.link import Deadlines

AGAIN_S = 10.0  # until a worker that was lost is tried again, for the first time
MOST_AGAIN_S = 600.0  # for any time
_RANK = 1  # the worker's; this process is rank 0


class LoadedHelper(RankGroup):
    """A model in an engine process of the one worker of a fleet, which answers requests. `close()` it."""

    answer_s: float  # for an answer to a request

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        """fleet: is let go at the end. say: called where the worker stops while it is waited for."""
        deadlines = Deadlines(step_timeout_s=self.answer_s, send_timeout_s=self.answer_s)
        super().__init__(fleet, 2, say, transport="auto", deadlines=deadlines, streams=False, gives_up=True)
        self._closing.then(fleet.close)
        ((self._address, self._worker),) = fleet.workers.items()
        self.name = self._worker.label
        self.profile = fleet.profiles[self._address]
        self._waits = False  # somebody waits for an answer

    def why_lost(self, error: TransportError) -> Exception:
        """Return the last word of its process, else the error."""
        return self._by_rank[_RANK].end_reason() or error

    # --- pieces ---

    def _start(self, load: pb.Load, read: Callable[[float], None]) -> pb.Loaded:
        """Open the session, load what is on the worker, and let it follow. Afterwards `_end_quietly` is to be called at
        the end. read: gets the fraction loaded."""
        session = self._open_session(_RANK, self._address, ())
        group, _ = self._join(threads=1)
        self.link = group.links[_RANK]
        done = session.ask(pb.Command(load=load), lambda event: read(event.loading.fraction))
        session.tell(pb.Command(run=pb.Run(wire=next(iter(WIRES)), algorithm="auto")))
        return done.loaded

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _is_busy(self) -> bool:
        return self._waits

    def _end_quietly(self, end: Callable[[], None]) -> None:
        """Tell the worker that no more requests come."""
        with suppress(TransportError):  # it is lost, and nothing is to be ended there
            end()


Loaded = TypeVar("Loaded", bound=LoadedHelper)
T = TypeVar("T")


class HelperDevice(Closing, Generic[Loaded]):
    """A worker that helps. Where it is lost, or takes too long, this device does without until it is taken back: that
    is tried in the background, and each try waits twice as long as the one before. `close()` it."""

    loads: type[Loaded]
    lost_text = back_text = ""  # said behind its name where it is lost, and where it is taken back

    def __init__(self, address: str, *, insecure: bool = False, steps: Steps = SILENT) -> None:
        """Load the model there. insecure: also where it does not encrypt. steps: shows how it loads, and where it is
        lost or taken back."""
        self._address, self._insecure, self._steps = address, insecure, steps
        self._closing, self._over = CancelScope(), threading.Event()
        self._closing.then(self._over.set)
        self._again_s = AGAIN_S
        self._loaded: Loaded | None = None  # None: it is lost
        try:
            loaded = self._loaded = self._reach(CONNECT_TIMEOUT_S, steps)
        except BaseException:
            self.close()
            raise
        self.name = loaded.name

    @property
    def is_lost(self) -> bool:
        """True if it does nothing now."""
        return self._loaded is None

    def close(self) -> None:
        """Unload the model there, and take nothing back."""
        self._closing.close()

    # --- pieces ---

    @abstractmethod
    def _load(self, loaded: Loaded, steps: Steps) -> None:
        """Load it. NotEnoughMemory, WorkerError or a TransportError where it cannot be."""

    def _reach(self, timeout_s: float, steps: Steps) -> Loaded:
        """Reach the worker and load the model there. timeout_s: for it to answer."""
        fleet = Fleet([self._address], insecure=self._insecure, timeout_s=timeout_s)
        loaded = self.loads(fleet, self._steps.say)
        self._closing.then(loaded.close)
        try:
            self._load(loaded, steps)
        except BaseException:
            loaded.close()
            raise
        return loaded

    def _ask(self, request: Callable[[Loaded], T]) -> T | None:
        """Return its answer. None while it is lost: who asks goes on without it."""
        loaded = self._loaded
        if loaded is None:
            return None
        try:
            return request(loaded)
        except TransportError as error:
            self._loaded = None
            self._steps.say(f"{self.name} {self.lost_text}: {loaded.why_lost(error)}")
            loaded.close()
            threading.Thread(target=self._take_back, daemon=True, name="lost helper").start()
            return None

    def _take_back(self) -> None:
        """Load the model there again, as soon as that can be."""
        while not self._over.wait(self._again_s):
            self._again_s = min(2 * self._again_s, MOST_AGAIN_S)
            try:
                loaded = self._reach(LOSS_TIMEOUT_S, CheckedSteps(self._closing.check))
            except (EdgeError, OSError):
                continue
            if self._over.is_set():
                return
            self._loaded = loaded
            self._steps.say(f"{self.name} {self.back_text}")
            return

"""Helper worker: it loads a model in its own engine process, is dropped when it is lost, and is reconnected later."""

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

AGAIN_S = 10.0  # delay before the first attempt to reconnect a lost worker
MOST_AGAIN_S = 600.0  # maximum delay between two attempts
_RANK = 1  # rank of the worker; this process is rank 0


class LoadedHelper(RankGroup):
    """Model in an engine process of a fleet's only worker, which answers requests. Call `close()` when done."""

    answer_s: float  # deadline for an answer

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        """fleet: closed together with this object.
        say: called if the worker stalls during a wait.
        """
        deadlines = Deadlines(step_timeout_s=self.answer_s, send_timeout_s=self.answer_s)
        super().__init__(fleet, 2, say, transport="auto", deadlines=deadlines, streams=False, gives_up=True)
        self._closing.then(fleet.close)
        ((self._address, self._worker),) = fleet.workers.items()
        self.name = self._worker.label
        self.profile = fleet.profiles[self._address]
        self._waits = False  # True while a request waits for an answer

    def why_lost(self, error: TransportError) -> Exception:
        """Return the reason from the worker's process, or else the error."""
        return self._by_rank[_RANK].end_reason() or error

    # --- pieces ---

    def _start(self, load: pb.Load, read: Callable[[float], None]) -> pb.Loaded:
        """Open the session, load the part on the worker, and start its request loop.

        The caller must arrange for `_end_quietly` at the end.
        read: receives the fraction loaded.
        """
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
        """Tell the worker that no more requests follow."""
        with suppress(TransportError):  # the worker is lost, so there is nothing to end
            end()


Loaded = TypeVar("Loaded", bound=LoadedHelper)
T = TypeVar("T")


class HelperDevice(Closing, Generic[Loaded]):
    """Worker that helps this device. Call `close()` when done.

    If the worker is lost or too slow, this device continues without it and reconnects in the background. The delay
    doubles with each attempt.
    """

    loads: type[Loaded]
    lost_text = back_text = ""  # message texts after the worker's name

    def __init__(self, address: str, *, insecure: bool = False, steps: Steps = SILENT) -> None:
        """Load the model on the worker.

        insecure: allow a worker without encryption.
        steps: shows loading, loss and reconnection.
        """
        self._address, self._insecure, self._steps = address, insecure, steps
        self._closing, self._over = CancelScope(), threading.Event()
        self._closing.then(self._over.set)
        self._again_s = AGAIN_S
        self._loaded: Loaded | None = None  # None: the worker is lost
        try:
            loaded = self._loaded = self._reach(CONNECT_TIMEOUT_S, steps)
        except BaseException:
            self.close()
            raise
        self.name = loaded.name

    @property
    def is_lost(self) -> bool:
        """Return whether the worker is lost."""
        return self._loaded is None

    def close(self) -> None:
        """Unload the model on the worker, and stop reconnecting."""
        self._closing.close()

    # --- pieces ---

    @abstractmethod
    def _load(self, loaded: Loaded, steps: Steps) -> None:
        """Load the model. Raises NotEnoughMemory, WorkerError or a TransportError if that fails."""

    def _reach(self, timeout_s: float, steps: Steps) -> Loaded:
        """Connect to the worker and load the model there. timeout_s: deadline for the connection."""
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
        """Return the worker's answer, or None if the worker is lost."""
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
        """Reconnect and load the model again as soon as possible."""
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

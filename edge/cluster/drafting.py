"""A drafting model on a worker: loaded there, in an engine process of its own, to guess for this device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edge.cluster.fleet import Fleet
from edge.cluster.preflight import check_memory
from edge.cluster.rank_group import RankGroup
from edge.llm.options import EngineOptions
from edge.slices.local import OwnSlices
from edge.tasks import SILENT, AggregateProgress, Steps
from edge.worker.guesses import GUESS_S, RemoteGuesser
from edge.worker.messages import options_message
from partition.slices.recipe import whole
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.errors import TransportError
from transport.link import Deadlines

_RANK = 1  # the worker's; this process is rank 0


class DraftDevice(RankGroup):
    """A worker that guesses. Once it is lost, or took too long, it guesses nothing any more. `close()` it; it is also a
    context manager."""

    def __init__(self, fleet: Fleet, path: Path, context: int, n_vocab: int, *, steps: Steps = SILENT) -> None:
        """Load the model at `path` on the one worker of `fleet`. context: tokens that it is to have room for. n_vocab:
        of its vocabulary. steps: told how it loads, and where it is lost.

        NotEnoughMemory, NoRoom, WorkerError or a TransportError where it cannot be.
        """
        deadlines = Deadlines(step_timeout_s=GUESS_S, send_timeout_s=GUESS_S)
        super().__init__(fleet, 2, steps.say, transport="auto", deadlines=deadlines, streams=False, gives_up=True)
        ((address, worker),) = fleet.workers.items()
        self.name = worker.label
        self.is_lost = False
        self._steps = steps
        self._waits = False  # somebody waits for a guess
        try:
            self._guesser = self._load(address, path, context, n_vocab)
        except BaseException:
            self.close()
            raise
        self.context, self.n_vocab = self._guesser.context, n_vocab

    def likeliest(self, tokens: Sequence[int], n: int) -> list[int]:
        """`n` tokens behind these, each the likeliest; none once the device is lost."""
        if self.is_lost:
            return []
        self._waits = True
        try:
            return self._guesser.likeliest(tokens, n)
        except TransportError as error:
            self._lose(error)
            return []
        finally:
            self._waits = False

    # --- pieces ---

    def _is_busy(self) -> bool:
        return self._waits

    def _load(self, address: str, path: Path, context: int, n_vocab: int) -> RemoteGuesser:
        worker, n_bytes = self._fleet.workers[address], path.stat().st_size
        if self._fleet.profiles[address].memory_limit_bytes is None:  # else it pages what does not fit
            check_memory(
                self._fleet, [(address, {"weights": n_bytes})], "use a smaller drafting model, or another worker"
            )
        digest = OwnSlices().model_digest(path)
        with self._steps.step(f"Loading {path.name} on {self.name}") as show:
            total = AggregateProgress(show, 2 * n_bytes, self._closing.check)
            with total.part(n_bytes) as sent:
                worker.send_slice(whole(digest, n_bytes), path, digest, sent)
            session = self._open_session(_RANK, address, ())
            group, _, _ = self._join(threads=1)
            self._link = group.links[_RANK]
            load = pb.Load(slice=digest, options=options_message(EngineOptions(context=context)))
            with total.part(n_bytes) as read:
                done = session.ask(pb.Command(load=load), lambda event: read(event.loading.fraction * n_bytes, n_bytes))
        session.tell(pb.Command(run=pb.Run(wire=next(iter(WIRES)), algorithm="auto")))
        guesser = RemoteGuesser(self._link, int(done.loaded.context), n_vocab)
        self._closing.then(self._end)
        return guesser

    def _lose(self, error: TransportError) -> None:
        """Go on without it: it only said what might come."""
        self.is_lost = True
        why = self._by_rank[_RANK].word() or error
        self._steps.say(f"{self.name} guesses no more, and the answer goes on without: {why}")
        self.close()

    def _end(self) -> None:
        with suppress(TransportError):  # it is lost, and nothing is to be ended there
            self._guesser.end()


@contextmanager
def draft_device(
    address: str, path: Path, context: int, n_vocab: int, *, insecure: bool = False, steps: Steps = SILENT
) -> Iterator[DraftDevice]:
    """The worker at `address` with the drafting model at `path`, until the end of the block. insecure: also one that
    does not encrypt. The errors of Fleet and DraftDevice."""
    with (
        Fleet([address], insecure=insecure) as fleet,
        DraftDevice(fleet, path, context, n_vocab, steps=steps) as device,
    ):
        yield device

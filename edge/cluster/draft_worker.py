"""A drafting model on a worker: loaded there, in an engine process of its own, to draft for this device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from edge.cluster.helper_worker import HelperDevice, LoadedHelper
from edge.cluster.preflight import check_memory
from edge.llm.options import EngineOptions
from edge.models.local_slices import OwnSlices
from edge.tasks import SILENT, AggregateProgress, Steps
from edge.worker.draft_queries import ANSWER_S, RemoteProposer
from edge.worker.messages import options_message
from partition.slices.recipe import whole
from transport import edge_pb2 as pb


class LoadedDraft(LoadedHelper):
    """A drafting model in an engine process of a worker. `close()` it."""

    answer_s = ANSWER_S

    def load(self, path: Path, context: int, n_vocab: int, steps: Steps) -> None:
        """As `DraftDevice`. steps: shows how it loads."""
        n_bytes = path.stat().st_size
        if self.profile.memory_limit_bytes is None:  # else it pages what does not fit
            check_memory(
                self._fleet, [(self._address, {"weights": n_bytes})], "use a smaller drafting model, or another worker"
            )
        digest = OwnSlices().model_digest(path)
        with steps.step(f"Loading {path.name} on {self.name}") as show:
            total = AggregateProgress(show, 2 * n_bytes, self._closing.check)
            with total.part(n_bytes) as sent:
                self._worker.send_slice(whole(digest, n_bytes), path, digest, sent)
            load = pb.Load(slice=digest, options=options_message(EngineOptions(context=context)))
            with total.part(n_bytes) as read:
                loaded = self._start(load, lambda fraction: read(fraction * n_bytes, n_bytes))
        self.context = int(loaded.context)
        self._proposer = RemoteProposer(self.link, self.context, n_vocab)
        self._closing.then(partial(self._end_quietly, self._proposer.end))

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """As `RemoteProposer.propose`."""
        with self._waiting():
            return self._proposer.propose(tokens, n)


class DraftDevice(HelperDevice[LoadedDraft]):
    """A worker that drafts. It drafts nothing while it is lost. `close()` it; it is also a context manager."""

    loads = LoadedDraft
    lost_text, back_text = "drafts no more, and the answer goes on without", "drafts again"

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
        its vocabulary. insecure, steps: as of `HelperDevice`.

        NotEnoughMemory, NoRoom, WorkerError or a TransportError where it cannot be.
        """
        self._path, self._room, self.n_vocab = path, context, n_vocab
        super().__init__(address, insecure=insecure, steps=steps)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """`n` tokens behind these, each the likeliest; none while the device is lost."""
        return self._ask(lambda loaded: loaded.propose(tokens, n)) or []

    def _load(self, loaded: LoadedDraft, steps: Steps) -> None:
        loaded.load(self._path, self._room, self.n_vocab, steps)
        self.context = loaded.context

"""Draft model on a worker, which drafts for this device in its own engine process."""

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
    """Draft model in an engine process of a worker. Call `close()` when done."""

    answer_s = ANSWER_S

    def load(self, path: Path, context: int, n_vocab: int, steps: Steps) -> None:
        """Load the model. steps: shows the progress. For the other parameters see `DraftDevice`."""
        n_bytes = path.stat().st_size
        if self.profile.memory_limit_bytes is None:  # a worker with a limit pages the rest
            check_memory(
                self._fleet, [(self._address, {"weights": n_bytes})], "use a smaller drafting model, or another worker"
            )
        digest = OwnSlices().model_digest(path)
        with steps.step(f"Loading {path.name} on {self.name}") as show:
            total = AggregateProgress(show, 2 * n_bytes, self._closing.check)
            with total.part(n_bytes, "sending") as sent:
                self._worker.send_slice(whole(digest, n_bytes), path, digest, sent)
            load = pb.Load(slice=digest, options=options_message(EngineOptions(context=context)))
            with total.part(n_bytes, "loading") as read:
                loaded = self._start(load, lambda fraction: read(fraction * n_bytes, n_bytes))
        self.context = int(loaded.context)
        self._proposer = RemoteProposer(self.link, self.context, n_vocab)
        self._closing.then(partial(self._end_quietly, self._proposer.end))

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return draft tokens, as `RemoteProposer.propose` does."""
        with self._waiting():
            return self._proposer.propose(tokens, n)


class DraftDevice(HelperDevice[LoadedDraft]):
    """Worker that drafts, except while it is lost. Context manager; or call `close()` when done."""

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
        """Load the model at `path` on the worker at `address`.

        context: size of the context in tokens.
        n_vocab: size of its vocabulary.
        insecure, steps: see `HelperDevice`.
        Raises NotEnoughMemory, NoRoom, WorkerError or a TransportError if that fails.
        """
        self._path, self._room, self.n_vocab = path, context, n_vocab
        super().__init__(address, insecure=insecure, steps=steps)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the `n` most likely tokens after `tokens`, or none while the worker is lost."""
        return self._ask(lambda loaded: loaded.propose(tokens, n)) or []

    def _load(self, loaded: LoadedDraft, steps: Steps) -> None:
        loaded.load(self._path, self._room, self.n_vocab, steps)
        self.context = loaded.context

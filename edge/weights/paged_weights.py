"""Weights of a model under a budget: load, stream, and point to them before their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from edge.llama import llama
from edge.llama.hooks import Hook, NodeHooks
from edge.llama.products import Products
from edge.weights.arena import Arena
from edge.weights.budget import Opening
from edge.weights.experts import ExpertCounts, Experts
from edge.weights.memory import MemoryNeed
from edge.weights.node_hooks import PagingHooks
from edge.weights.plan import PagePlan
from edge.weights.reader import Job, Reader, beside_bytes, helped
from edge.weights.roles import Roles
from edge.weights.stats import PagingStats, Passes
from edge.weights.token_rows import TokenRows
from edge.weights.window import Pager, Piece

_HELPERS = 2  # additional reader threads while nothing computes


@contextmanager
def one_pass(weights: PagedWeights, rows: llama.Batch, n: int) -> Iterator[None]:
    """Keep weights in place while the first `n` rows are decoded in the block."""
    weights.begin(rows, n)
    try:
        yield
    except BaseException:
        weights.reset()
        raise
    weights.end()


class PagedWeights:
    """Weights of a model under a budget, moved to where its graphs read them. `close()` frees all memory."""

    def __init__(
        self,
        opening: Opening,
        roles: Roles,
        plan: PagePlan,
        reader: Reader,
        arena: Arena,
        progress: Callable[[float], None] | None,
    ) -> None:
        """Load the resident weights.

        arena: their memory. It is closed with the weights, and so is the reader.
        progress: receives the loaded fraction; its errors abort the load.
        Raises WeightsError if the weights cannot be read.
        """
        self._shape, self._threads = opening.request.file.shape, opening.request.threads
        self._reader, self._progress, self._arena = reader, progress, arena
        self.stop_pass: Callable[[], None] | None = None  # ends a pass early, which is then computed again
        self._jobs: dict[Piece, Job] = {}  # by resident weight
        self._rows: TokenRows | None = None
        self._pager: Pager | None = None
        self._experts: Experts | None = None
        self._products: Products | None = None
        try:
            self._use(roles, plan)
        except BaseException:
            self.close()
            raise

    def _use(self, roles: Roles, plan: PagePlan) -> None:
        """Load the resident weights of a plan, and prepare for the others."""
        self._roles, self.plan = roles, plan
        self._places: dict[Piece, int] = {}  # addresses of resident weights
        self._load()
        if plan.streamed:
            self._pager = Pager(plan.streamed, plan.window, self._reader)
        if plan.expert_room:
            self._experts = Experts(roles.experts, plan.expert_room, self._reader)
        if plan.head_pieces:
            self._products = Products(self._threads)
        self._at_nodes = PagingHooks(roles, plan, self._places, self._pager, self._experts, self._products)
        self._passes = Passes(self._reader, lambda: self._experts.counts if self._experts else ExpertCounts())

    # --- before and after a decode ---

    def begin(self, rows: llama.Batch, n: int) -> None:
        """Prepare a pass: read the token rows of the first `n` rows into memory."""
        self._passes.begin(rows.sequences[:n])
        if self._pager is not None:
            self._pager.begin()
        if self._rows is not None:
            self._rows.bring(rows.tokens[:n])

    def end(self) -> None:
        """End the pass."""
        self._at_nodes.restore()  # now, because its graph may be freed before the next pass
        self._passes.end()
        if self._pager is not None:
            self._pager.end()

    def hooks(self) -> list[Hook]:
        """Return the hooks that the graphs need, or none if every weight stays in place."""
        return self._at_nodes.hooks()

    def node_hooks(self, hooks: Sequence[Hook]) -> NodeHooks | None:
        """Return the node callback of these hooks and the graphs' own hooks, or None if there are none."""
        all_hooks = (*self.hooks(), *hooks)
        return NodeHooks(all_hooks) if all_hooks else None

    def reset(self) -> None:
        """Undo the changes of an interrupted pass. Call it before the graphs are freed."""
        self._at_nodes.restore()

    def stats(self) -> PagingStats:
        """Return bytes read, waits and cache hits since the last `clear_stats`."""
        return self._passes.stats()

    def figures(self, need: MemoryNeed) -> list[tuple[str, str]]:
        """Return a table of (name, text) about the use of the budget and the paging statistics."""
        rows = [("memory", self.plan.describe(need))]
        if self.plan.pages:
            stats = self.stats()
            kinds = (("decode", stats.decode), ("prefill", stats.prefill))
            rows += [(name, kind.describe()) for name, kind in kinds if kind.tokens]
        return rows

    def news(self) -> list[str]:
        """Return lines about changes since the last call; none for a constant budget."""
        return []

    def clear_stats(self) -> None:
        self._passes.clear()

    @property
    def reads(self) -> str:
        """Read mode of the files (see `DirectFile`), the least direct one if they differ."""
        order = ("direct", "uncached", "buffered")
        return max((piece.file.reads for piece in self.plan.resident), key=order.index, default="direct")

    @property
    def reader(self) -> Reader:
        return self._reader

    def close(self) -> None:
        """Free all memory. The model must be freed, or must not compute until other weights are in place."""
        self._reader.close()
        if not self._reader.hangs:  # otherwise its threads may still write there
            self._release()
            self._arena.close()
        for piece in self.plan.streamed:
            if piece.is_laid_out:  # this file belongs to the piece
                piece.file.close()

    def _release(self) -> None:
        """Free all memory except that of resident weights."""
        self._reader.drop(*self._jobs.values())
        self._jobs.clear()
        for part in (self._pager, self._experts, self._rows, self._products):
            if part is not None:
                part.close()
        self._pager = self._experts = self._rows = self._products = None

    # --- loading ---

    def _load(self) -> None:
        for piece in self.plan.resident:
            job = self._jobs[piece] = self._arena.read(piece)
            if job.left:
                self._reader.submit(job)
        done, total = 0, max(1, sum(piece.n_bytes for piece in self.plan.resident))
        whole_head = self._roles.head if not self.plan.head_pieces else None
        # use the memory of the window, which does not exist yet
        has_room = self.plan.window >= beside_bytes(self._reader, _HELPERS)
        with helped(self._reader, _HELPERS) if has_room else nullcontext():
            for piece, job in self._jobs.items():
                self._reader.wait(job)
                self._arena.arrived(piece)
                address = self._places[piece] = job.space.address + job.start
                if piece not in self.plan.head_pieces:
                    piece.weight.point(address, piece.repacked)
                done += piece.n_bytes
                if self._progress is not None:
                    self._progress(done / total)
        table = self._roles.table
        # A tied head that has the file's layout in memory also serves as the token table.
        if table is not None and not (self._roles.tied and whole_head and not whole_head.repacked):
            self._rows = TokenRows(table, self._reader)

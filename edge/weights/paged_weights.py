"""The weights of a model under a budget: loaded, streamed and pointed at in time."""

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

_HELPERS = 2  # threads more that read while nothing computes


@contextmanager
def one_pass(weights: PagedWeights, rows: llama.Batch, n: int) -> Iterator[None]:
    """Have weights in place while the first `n` rows are decoded in the block."""
    weights.begin(rows, n)
    try:
        yield
    except BaseException:
        weights.reset()
        raise
    weights.end()


class PagedWeights:
    """Weights of a model under a budget, brought to where its graphs read them. `close()` frees all memory."""

    def __init__(
        self,
        opening: Opening,
        roles: Roles,
        plan: PagePlan,
        reader: Reader,
        arena: Arena,
        progress: Callable[[float], None] | None,
    ) -> None:
        """Load what stays. WeightsError if it cannot be read; what `progress` raises ends the load. arena: the memory
        that it stays in, which is closed with the weights, as the reader is."""
        self._shape, self._threads = opening.request.shape, opening.request.threads
        self._reader, self._progress, self._arena = reader, progress, arena
        self.stop_pass: Callable[[], None] | None = None  # has a pass end early, and computed again
        self._jobs: dict[Piece, Job] = {}  # of what stays
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
        """Load what stays by a plan, and be ready for what does not."""
        self._roles, self.plan = roles, plan
        self._places: dict[Piece, int] = {}  # addresses of what stays
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
        """Bring the token rows of the first `n` rows into memory, before they are decoded."""
        self._passes.begin(rows.sequences[:n])
        if self._pager is not None:
            self._pager.begin()
        if self._rows is not None:
            self._rows.bring(rows.tokens[:n])

    def end(self) -> None:
        """End the decode."""
        self._at_nodes.restore()  # now, as its graph may be freed before the next one
        self._passes.end()
        if self._pager is not None:
            self._pager.end()

    def hooks(self) -> list[Hook]:
        """Return the hooks the graphs need; none if every weight stays where it is."""
        return self._at_nodes.hooks()

    def node_hooks(self, hooks: Sequence[Hook]) -> NodeHooks | None:
        """Return the callback of these hooks and the graphs' own; None if there are none."""
        all_hooks = (*self.hooks(), *hooks)
        return NodeHooks(all_hooks) if all_hooks else None

    def reset(self) -> None:
        """Undo what an interrupted pass left behind. Call it before the graphs are freed."""
        self._at_nodes.restore()

    def stats(self) -> PagingStats:
        """Return bytes read, waits and cache hits since the last `clear_stats`."""
        return self._passes.stats()

    def figures(self, need: MemoryNeed) -> list[tuple[str, str]]:
        """Return (name, figures) of what the budget is used for and what paging took, for people."""
        rows = [("memory", self.plan.describe(need))]
        if self.plan.pages:
            stats = self.stats()
            kinds = (("decode", stats.decode), ("prefill", stats.prefill))
            rows += [(name, kind.describe()) for name, kind in kinds if kind.tokens]
        return rows

    def news(self) -> list[str]:
        """Return what has changed since the last call, in a line each: nothing, where the budget stays."""
        return []

    def clear_stats(self) -> None:
        self._passes.clear()

    @property
    def reads(self) -> str:
        """Return how files are read, as `DirectFile` says; of several, the least direct."""
        order = ("direct", "uncached", "buffered")
        return max((piece.file.reads for piece in self.plan.resident), key=order.index, default="direct")

    @property
    def reader(self) -> Reader:
        return self._reader

    def close(self) -> None:
        """Free all memory. The model must have been freed, or not compute until other weights are in place."""
        self._reader.close()
        if not self._reader.hangs:  # else its threads may still write there
            self._release()
            self._arena.close()
        for piece in self.plan.streamed:
            if piece.is_laid_out:  # its file is its own
                piece.file.close()

    def _release(self) -> None:
        """Free all memory but that of what stays."""
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
        has_room = self.plan.window >= beside_bytes(self._reader, _HELPERS)  # that of the window, which is yet to come
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
        # A tied head that lies in memory as it lies in the file is the token table, too.
        if table is not None and not (self._roles.tied and whole_head and not whole_head.repacked):
            self._rows = TokenRows(table, self._reader)

"""Weights that change between two passes: other bits, or other parts in memory, as the room changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from edge.elastic.ahead import ReadAhead
from edge.elastic.governor import SLACK, Governor
from edge.elastic.room import ROOM, Room
from edge.elastic.sizes import SizeChoice, Sizes
from edge.errors import WeightsError
from edge.llama import llama
from edge.llama.hooks import Hook, NodeHooks
from edge.log import info
from edge.paging.arena import ElasticArena
from edge.paging.load import Opening
from edge.paging.reader import Reader
from edge.paging.weights import PagedWeights
from edge.tasks import Repeated
from partition.slices.rules import router_first
from quant.text import bytes_text

_MOST_NEWS = 16
LOOK_S = 0.1  # between two looks at the memory
_CHECK_S = 0.02  # likewise, while weights are read
PASS_WAIT_S = 0.5  # that a pass goes on for when memory shrinks; what is longer is stopped, and computed again
GROW_WAIT_S = 0.02  # of reading that a pass may wait for on the way up; with more to read it is computed as before
_LITTLE = 16 << 20  # bytes that are worth no delay on any disk
_ATTEMPTS = 3  # to load what others take the memory of meanwhile; then the least is loaded


class RoomIsGone(Exception):
    """Others took the memory that a change was for."""


@dataclass(frozen=True)
class Change:
    """A change that was made."""

    budget: int  # bytes of the process, since then
    choice: SizeChoice
    took_s: float


class ElasticWeights(PagedWeights):
    """Weights of a model that has several sizes. A thread looks at the memory; what has to change, changes between two
    passes: at the beginning of the next one, or at once while none is computed."""

    def __init__(self, opening: Opening, sizes: Sizes, governor: Governor, room: Room = ROOM) -> None:
        """Load what the budget gets. WeightsError if it cannot be read; RoomIsGone."""
        self.sizes, self._governor, self._room = sizes, governor, room
        self._lock = threading.Lock()  # of a pass, or a change
        self._computing, self.pass_size = False, 0
        self._was_stopped = False  # since a pass ended by itself: then the next one is computed to its end
        self._intact = True  # False: a change failed, and is to be tried again
        self._changing = False
        self._hooks: tuple[NodeHooks, Sequence[Hook]] | None = None  # and those that are not of the weights
        self._shown = opening.progress
        self._watch: Repeated | None = None
        self._checked_s = 0.0  # when `_loads` looked last
        self.choice = sizes.choose(governor.budget)  # changed by who has the lock
        self._due: deque[SizeChoice] = deque(maxlen=1)  # the thread that looks adds, who has the lock takes
        self.changes: deque[Change] = deque(maxlen=_MOST_NEWS)  # that `news` has not told yet
        arena = ElasticArena()
        arena.make_places(self.choice.plan.resident, sizes.having)
        reader = Reader(sizes.longest_row, sizes.read.threads, sizes.read.chunk, verify=opening.options.verify)
        self._ahead, self._arena_lock = ReadAhead(arena, reader), threading.Lock()  # of what is read ahead, or a change
        super().__init__(
            self.choice.roles,
            self.choice.plan,
            reader,
            threads=opening.threads,
            experts_used=opening.shape.n_experts_used,
            router_first=router_first(opening.shape.architecture),
            progress=self._loads,
            arena=arena,
        )
        self._shown = None
        self._watch = Repeated(self.follow, LOOK_S, "memory")

    def prepare(self) -> int:
        """Change the weights if that is due; then they stay until the next pass is over, or `reset`. Return the number
        of their size."""
        if not self._computing:
            self._lock.acquire()
            self._computing = True
            self._room.share.begin_pass()
            try:
                self._change()
            except BaseException:
                self._pass_is_over()
                raise
        return self.choice.number

    def begin(self, rows: llama.Batch, n: int) -> None:
        """Change the weights if that is due, then as `PagedWeights`."""
        self.pass_size = self.prepare()  # that the last pass was computed with
        try:
            super().begin(rows, n)
        except BaseException:
            self._pass_is_over()
            raise

    def end(self) -> None:
        try:
            super().end()
            self._was_stopped = False
        finally:
            self._pass_is_over()

    def reset(self) -> None:
        super().reset()
        self._pass_is_over()

    @property
    def planned_bytes(self) -> int:
        """Return the bytes that the process is to hold."""
        return self.choice.n_bytes + self._ahead.n_bytes

    def hooks(self) -> list[Hook]:
        """Return the hooks the graphs need now, and one that is always there: later they may need more."""
        return [_NO_HOOK, *super().hooks()]

    def node_hooks(self, hooks: Sequence[Hook]) -> NodeHooks:
        node_hooks = NodeHooks((*self.hooks(), *hooks))
        self._hooks = node_hooks, hooks
        return node_hooks

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._pass_is_over()  # the model was freed
        with self._lock, self._arena_lock:  # a change may be under way, or what is read ahead
            self._reader.close()
            if self._ahead.close() and not self._reader.hangs:
                self._release()
                self._arena.close()

    def news(self) -> list[str]:
        lines = []
        while self.changes:
            change = self.changes.popleft()
            lines.append(f"{bytes_text(change.budget)} of memory: {change.choice}; changed in {change.took_s:.1f} s")
            if change.budget < self.sizes.least:
                lines.append(f"{bytes_text(self.sizes.least)} is the least that it can run in; free memory, or end it")
            elif other := self.sizes.other(change.budget):
                lines.append(f"--prefer {other[0]} would have {other[1]}")
        return lines

    def look(self) -> None:
        """See how much memory there is, and note what has to change."""
        before, planned = self._governor.budget, self.planned_bytes
        room, stalled_s = self._room.for_process(planned), self._room.stalled_s()
        if self._changing or planned != self.planned_bytes:
            return  # that is not there yet, or still there
        promised = max((due.n_bytes - due.n_bytes // SLACK for due in [*self._due]), default=0)  # and being read
        budget = self._governor.look(room, max(self.choice.n_bytes, promised), stalled_s, self._room.now())
        if budget > self._room.share.limit:  # which others are to have, also where nothing has to change for it
            self._governor.budget = budget = self._room.share.limit
        if budget != before:
            self._due.append(self.sizes.choose(budget))

    def follow(self) -> None:
        """Look, and change what is due unless a pass is computed, which has the next one change it. What may be due
        soon is read ahead."""
        seen = self._room.share.seen
        self.look()
        resident = max(self.planned_bytes, min(self._governor.budget, self.sizes.most))
        if self._intact and not self._changing:  # else what a change gives back may still be there
            self._room.share.report(resident, seen)
        with suppress(WeightsError, OSError):  # the next pass tries again, and says what is wrong
            due = next(iter([*self._due]), None)
            shrinks = due is not None and due.n_bytes < self.choice.n_bytes and not due.is_like(self.choice)
            if self._due and self._lock.acquire(timeout=PASS_WAIT_S if shrinks else 0):
                try:
                    if self._watch is None or not self._watch.is_over:
                        self._change()
                finally:
                    self._lock.release()
            elif shrinks and self._due and self.stop_pass is not None and not self._was_stopped:  # the pass takes long
                self._was_stopped = True
                self.stop_pass()
            _read_ahead(self)

    def _pass_is_over(self) -> None:
        if self._computing:
            self._computing = False
            self._room.share.end_pass()
            self._lock.release()

    def _change(self) -> None:
        """Change to what is due. The lock is held. WeightsError if it cannot be read: then the weights are not usable
        until it can."""
        if self._intact and _due_now(self) is None:
            return
        began_s, self._changing = self._room.now(), True  # before it is known what is due: `follow` may just look
        try:
            due = self._due.pop() if self._due else self.choice
            if self._intact and due.is_like(self.choice):
                self.choice = due
                return
            with self._arena_lock:
                due = self._change_within_room(due)
        finally:
            self._changing = False
        change = Change(self._governor.budget, due, self._room.now() - began_s)
        self.changes.append(change)
        size, streamed = due.size.file_bytes, due.plan.streamed_bytes
        info("memory", budget=change.budget, size=size, streamed=streamed, took_ms=round(1e3 * change.took_s))

    def _change_within_room(self, choice: SizeChoice) -> SizeChoice:
        """Change to a choice, or to less where others take the memory meanwhile. Return what was changed to."""
        for attempt in range(_ATTEMPTS):
            try:
                self._change_to(choice)
                break
            except RoomIsGone:
                room, budget = self._room.for_process(choice.n_bytes), self._governor.budget
                if attempt < _ATTEMPTS - 2:
                    self._governor.shrink(min(room, budget))
                else:
                    self._governor.budget = min(self.sizes.least, budget)
                choice = self.sizes.choose(self._governor.budget)
        return choice

    def _change_to(self, choice: SizeChoice) -> None:
        super().reset()
        self._ahead.end([*self.choice.plan.resident, *choice.plan.resident])  # where that fails, all stays as it is
        self.choice, self._intact = choice, False
        self._release()
        assert isinstance(self._arena, ElasticArena)
        self._arena.keep_only(choice.plan.resident)
        self._arena.make_places(choice.plan.resident, self.sizes.having)
        try:
            self._use(choice.roles, choice.plan)
        except BaseException:
            self._release()
            raise
        self._intact = True
        if self._hooks is not None:
            node_hooks, others = self._hooks
            node_hooks.use((*self.hooks(), *others))

    def _loads(self, fraction: float) -> None:
        """Show how far loading is. RoomIsGone if what is left has no room any more."""
        if self._shown is not None:
            self._shown(fraction)
        now = self._room.now()
        if now - self._checked_s < _CHECK_S or self.choice.n_bytes <= self.sizes.least:
            return
        self._checked_s = now
        left = sum(job.left for job in self._jobs.values())
        if left and left > self._room.free():
            raise RoomIsGone


def _read_ahead(weights: ElasticWeights) -> None:
    """Read what a larger budget would have if it stays likely, and give that back where it does not."""
    if not weights._arena_lock.acquire(blocking=False):
        return
    try:
        if weights._watch is not None and weights._watch.is_over:
            return
        budget = weights._governor.coming(weights._room.now())
        if (budget > weights._governor.budget or weights._due) and weights._intact:
            weights._ahead.follow(weights.sizes, budget, weights.choice)
        elif budget < weights._ahead.budget:
            weights._ahead.end(weights.choice.plan.resident)
    finally:
        weights._arena_lock.release()


def _due_now(weights: ElasticWeights) -> SizeChoice | None:
    """Return what is due. More is not yet, while much of it can be read as passes go on."""
    due = next(iter([*weights._due]), None)
    if due is None or due.n_bytes <= weights.choice.n_bytes:
        return due
    if not weights._arena_lock.acquire(blocking=False):  # no pass waits for reads that end
        return None
    try:
        with suppress(WeightsError, OSError):  # the change itself tells
            if not weights._ahead.budget:
                weights._ahead.follow(weights.sizes, weights._governor.budget, weights.choice)
    finally:
        weights._arena_lock.release()
    return due if weights._ahead.left <= max(_LITTLE, GROW_WAIT_S * weights.sizes.read_rate) else None


def next_size(weights: PagedWeights | None) -> int:
    """Return the number of the size that a pass would be computed with now; 0: the largest, or the only one."""
    return (_due_now(weights) or weights.choice).number if isinstance(weights, ElasticWeights) else 0


@contextmanager
def next_pass(weights: PagedWeights | None) -> Iterator[int]:
    """Yield the number of the size that the pass in the block is computed with. WeightsError as of `begin`."""
    if not isinstance(weights, ElasticWeights):
        yield 0
        return
    try:
        yield weights.prepare()
    except BaseException:
        weights.reset()
        raise


def pass_size(weights: PagedWeights | None) -> int:
    """Return the same of the last pass."""
    return weights.pass_size if isinstance(weights, ElasticWeights) else 0


_NO_HOOK = Hook(lambda node: False, None)

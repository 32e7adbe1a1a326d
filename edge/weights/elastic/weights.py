"""Weights that follow the available memory: between two passes they change their quantization or resident parts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from edge.errors import WeightsError
from edge.llama import llama
from edge.llama.hooks import Hook, NodeHooks
from edge.log import info
from edge.tasks import Repeated
from edge.weights.arena import ElasticArena
from edge.weights.budget import Opening
from edge.weights.elastic.ahead import ReadAhead
from edge.weights.elastic.governor import SLACK, Governor
from edge.weights.elastic.room import ROOM, Room
from edge.weights.elastic.sizes import SizeChoice, Sizes
from edge.weights.elastic.turn import Turn
from edge.weights.paged_weights import PagedWeights
from edge.weights.plan import PagePlan
from edge.weights.reader import Reader
from edge.weights.roles import Roles
from quant.text import bytes_text

_MOST_NEWS = 16
LOOK_S = 0.1  # interval between two looks at the memory
_CHECK_S = 0.02  # interval between two looks while weights are read
PASS_WAIT_S = 0.5  # time that a running pass may take when memory shrinks; a longer pass is stopped and computed again
# seconds of reading that a pass may wait for when memory grows; with more to read, the pass uses the old weights
GROW_WAIT_S = 0.02
_LITTLE = 16 << 20  # bytes that never justify a delay, on any disk
RETRY_S = 1.0  # time from a failed change to the next attempt, unless a pass comes first
_ATTEMPTS = 3  # attempts to load while other processes take memory; the last attempt loads the minimum size


class RoomIsGone(Exception):
    """Other processes took, or will get, the memory for a change."""


@dataclass(frozen=True)
class Change:
    """Completed change."""

    budget: int  # new budget of the process in bytes
    choice: SizeChoice
    took_s: float


class ElasticWeights(PagedWeights):
    """Weights of a model with several sizes, which change only between two passes.

    A thread observes the memory. A due change happens at the beginning of the next pass, or immediately if no pass
    runs.
    """

    def __init__(self, opening: Opening, sizes: Sizes, governor: Governor, room: Room = ROOM) -> None:
        """Load the size for the budget. Raises WeightsError if reading fails, or RoomIsGone if even the minimum does
        not fit."""
        self.sizes, self._governor, self._room = sizes, governor, room
        self._turn, self.pass_size = Turn(), 0
        # True: a pass was stopped since the last complete one, so the next one runs to its end
        self._was_stopped = False
        self._intact = True  # False: a change failed and must be tried again
        self._changing = False
        self._retry_s = 0.0  # time of the next attempt after a failed change
        # node hooks, and the hooks that do not belong to the weights
        self._hooks: tuple[NodeHooks, Sequence[Hook]] | None = None
        self._shown = opening.request.progress
        self._watch: Repeated | None = None
        self._checked_s = 0.0  # time of the last check in `_loads`
        self.choice = sizes.choose(governor.budget)  # changed only by the holder of the turn
        self._target = self.choice  # choice for the current budget; a change is due until it is loaded
        self.changes: deque[Change] = deque(maxlen=_MOST_NEWS)  # changes that `news` has not reported yet
        arena = ElasticArena()
        reader = Reader(sizes.longest_row, sizes.read.threads, sizes.read.chunk, verify=opening.options.verify)
        # The lock is held while weights are read ahead, and during a change.
        self._ahead, self._arena_lock = ReadAhead(arena, reader), threading.Lock()
        self._turn.begin_pass(room.share)  # loading is followed by a pass
        super().__init__(opening, self.choice.roles, self.choice.plan, reader, arena, self._loads)
        self._shown = None
        self._turn.end_pass()
        self._watch = Repeated(self.follow, LOOK_S, "memory")

    def prepare(self) -> int:
        """Make a due change. The weights then stay until the next pass ends, or until `reset`. Return the number of
        their size."""
        if not self._turn.is_of_a_pass:
            self._turn.begin_pass(self._room.share)
            try:
                self._change()
            except BaseException:
                self._turn.end_pass()
                raise
        return self.choice.number

    def begin(self, rows: llama.Batch, n: int) -> None:
        """Make a due change, and then begin a pass as `PagedWeights` does."""
        self.pass_size = self.prepare()  # size of the last pass
        try:
            super().begin(rows, n)
        except BaseException:
            self._turn.end_pass()
            raise

    def end(self) -> None:
        try:
            super().end()
            self._was_stopped = False
        finally:
            self._turn.end_pass()

    def reset(self) -> None:
        super().reset()
        self._turn.end_pass()

    @property
    def due(self) -> SizeChoice | None:
        """Choice to load, or None if the loaded one stays."""
        return None if self._intact and self._target is self.choice else self._target

    @property
    def planned_bytes(self) -> int:
        """Bytes that the process plans to hold."""
        return self.choice.n_bytes + self._ahead.n_bytes

    def hooks(self) -> list[Hook]:
        """Return the hooks that the graphs need now, and one permanent hook, because later graphs may need hooks."""
        return [_NO_HOOK, *super().hooks()]

    def node_hooks(self, hooks: Sequence[Hook]) -> NodeHooks:
        node_hooks = NodeHooks((*self.hooks(), *hooks))
        self._hooks = node_hooks, hooks
        return node_hooks

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._turn.end_pass()  # the model is already freed
        with self._turn.lock, self._arena_lock:  # a change or reading ahead may be running
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
        """Observe the memory, and record a due change."""
        before, planned = self._governor.budget, self.planned_bytes
        room, stalled_s = self._room.for_process(planned), self._room.stalled_s()
        if self._changing or planned != self.planned_bytes:
            return  # this memory is not allocated yet, or not released yet
        due = self.due
        promised = due.n_bytes - due.n_bytes // SLACK if due is not None else 0  # bytes that are still being read
        self._governor.look(room, max(self.choice.n_bytes, promised), stalled_s, self._room.now())
        budget = self._governor.bound(self._room.share.limit)  # other processes get the rest, even if a change is due
        if budget != before:
            self._target = self.sizes.choose(budget)

    def follow(self) -> None:
        """Observe the memory, and make a due change unless a pass runs. Then the next pass makes it.

        Pieces that may be needed soon are read ahead.
        """
        seen = self._room.share.seen
        self.look()
        resident = _resident(self)  # computed before `_changing` is checked, because a change may begin at any time
        if self._intact and not self._changing:  # otherwise memory that a change releases may still be resident
            self._room.share.report(resident, seen)
        with suppress(WeightsError, OSError):  # the next pass retries, and raises the error
            due = self.due
            shrinks = due is not None and due.n_bytes < self.choice.n_bytes and not due.is_like(self.choice)
            if due is None or self._room.now() < self._retry_s:
                pass
            elif self._turn.lock.acquire(timeout=PASS_WAIT_S if shrinks else 0):
                try:
                    if self._watch is None or not self._watch.is_over:
                        self._change()
                finally:
                    self._turn.lock.release()
            elif shrinks and self.due and self.stop_pass and not (self._changing or self._was_stopped):
                self._was_stopped = True  # the pass takes long
                self.stop_pass()
            _read_ahead(self)

    def _change(self) -> None:
        """Make the due change, while holding the turn. Until it is complete, it stays due.

        Raises WeightsError if reading fails. The weights may be unusable then until a change succeeds.
        """
        if _due_now(self) is None:
            return
        # set before the due change is read, because `follow` may be looking
        began_s, self._changing = self._room.now(), True
        try:
            due = self._target
            if self._intact and due.is_like(self.choice):
                self.choice = due
                return
            with self._arena_lock:
                self._change_to(due)
        except BaseException:
            self._retry_s = self._room.now() + RETRY_S
            raise
        finally:
            self._changing = False
        change = Change(self._governor.budget, self.choice, self._room.now() - began_s)
        self.changes.append(change)
        size, streamed = self.choice.size.file_bytes, self.plan.streamed_bytes
        info("memory", budget=change.budget, size=size, streamed=streamed, took_ms=round(1e3 * change.took_s))

    def _change_to(self, choice: SizeChoice) -> None:
        super().reset()
        self._reader.drop(*self._jobs.values())  # jobs of a failed change write to memory that is released below
        self._ahead.end([*self.choice.plan.resident, *choice.plan.resident])  # if this fails, everything stays as it is
        self.choice, self._intact = choice, False
        self._use(choice.roles, choice.plan)
        self._intact, self._retry_s = True, 0.0
        if self._hooks is not None:
            node_hooks, others = self._hooks
            node_hooks.use((*self.hooks(), *others))

    def _use(self, roles: Roles, plan: PagePlan) -> None:
        """Load this plan of the current choice. If its memory disappears meanwhile, load the choice that still fits."""
        assert isinstance(self._arena, ElasticArena)
        lost = 0  # number of times that other processes took the memory
        while True:
            self._release()
            self._arena.keep_only(plan.resident)
            self._arena.make_places(plan.resident, self.sizes.having)
            try:
                _check_room(self)
                super()._use(roles, plan)
                return
            except RoomIsGone:
                room, budget = self._room.for_process(self.choice.n_bytes), self._governor.budget
                if self._watch is None and room < self.sizes.least:
                    raise
                lost += self.choice.n_bytes <= self._room.share.limit
                if lost < _ATTEMPTS - 1:
                    self._governor.shrink(min(room, budget))
                else:
                    self._governor.bound(self.sizes.least)
                self.choice = self._target = self.sizes.choose(self._governor.budget)
                roles, plan = self.choice.roles, self.choice.plan
            except BaseException:
                self._release()
                raise

    def _loads(self, fraction: float) -> None:
        """Report the loading progress. Raises RoomIsGone or Interrupted."""
        if self._shown is not None:
            self._shown(fraction)
        now = self._room.now()
        if now - self._checked_s >= _CHECK_S:
            self._checked_s = now
            _check_room(self)


def _check_room(weights: ElasticWeights) -> None:
    """Check that the choice still fits, and report the memory that the process will hold after loading.

    The report comes early, because the process that divides a budget does not wait for loading.

    Raises RoomIsGone if the rest does not fit any more or others will get its memory, or Interrupted if the weights are
    closed.
    """
    if weights._watch is not None:
        weights._watch.check()
    share, choice = weights._room.share, weights.choice
    seen, left = share.seen, sum(job.left for job in weights._jobs.values())
    is_least = choice.n_bytes <= weights.sizes.least
    if not is_least and (left > max(0, weights._room.free()) or choice.n_bytes > share.limit):
        raise RoomIsGone
    weights._governor.bound(share.limit)
    share.report(_resident(weights), seen)


def _resident(weights: ElasticWeights) -> int:
    """Return the bytes that the process may hold from now on, as it reports them."""
    return max(weights.planned_bytes, min(weights._governor.budget, weights.sizes.most))


def _read_ahead(weights: ElasticWeights) -> None:
    """Read ahead for a larger budget that is likely. If it is not likely any more, release that memory."""
    if not weights._arena_lock.acquire(blocking=False):
        return
    try:
        if weights._watch is not None and weights._watch.is_over:
            return
        budget = weights._governor.coming(weights._room.now())
        if (budget > weights._governor.budget or weights.due) and weights._intact:
            weights._ahead.follow(weights.sizes, budget, weights.choice)
        elif budget < weights._ahead.budget:
            weights._ahead.end(weights.choice.plan.resident)
    finally:
        weights._arena_lock.release()


def _due_now(weights: ElasticWeights) -> SizeChoice | None:
    """Return the due change, or None.

    A change to more memory is deferred while much of it is still to be read and passes can use the current weights.
    """
    due = weights.due
    if due is None or due.n_bytes <= weights.choice.n_bytes or not weights._intact:
        return due
    if not weights._arena_lock.acquire(blocking=False):  # passes do not wait for reads that are ending
        return None
    try:
        with suppress(WeightsError, OSError):  # the change itself raises the error
            if not weights._ahead.budget:
                weights._ahead.follow(weights.sizes, weights._governor.budget, weights.choice)
    finally:
        weights._arena_lock.release()
    return due if weights._ahead.left <= max(_LITTLE, GROW_WAIT_S * weights.sizes.read_rate) else None


def next_size(weights: PagedWeights | None) -> int:
    """Return the number of the size that the next pass would use. 0: the largest or only size."""
    return (_due_now(weights) or weights.choice).number if isinstance(weights, ElasticWeights) else 0


@contextmanager
def next_pass(weights: PagedWeights | None) -> Iterator[int]:
    """Yield the number of the size that the pass in the block uses.

    Raises WeightsError if the weights of a due change cannot be read.
    """
    if not isinstance(weights, ElasticWeights):
        yield 0
        return
    try:
        yield weights.prepare()
    except BaseException:
        weights.reset()
        raise


def pass_size(weights: PagedWeights | None) -> int:
    """Return the number of the size that the last pass used."""
    return weights.pass_size if isinstance(weights, ElasticWeights) else 0


_NO_HOOK = Hook(lambda node: False, None)

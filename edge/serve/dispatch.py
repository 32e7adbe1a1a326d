"""The dispatcher of a model: sends each request to the replica that is expected to finish it soonest, unless it would
delay the other answers there too much.

If a replica is lost, the others continue its answers with the same tokens. A replica with a free slot takes a request
that waits at another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import EdgeError, EngineGone, PoisonousRequest
from edge.serve.answer import AnswersOwner, ProcessAnswer
from edge.serve.caller import CALLER
from edge.serve.fair_order import FairOrder
from edge.serve.process import EngineProcess
from edge.serve.prompt_blocks import BLOCK_CHARS, PromptBlocks, block_digests, prompt_text
from edge.serve.served import Generation
from edge.serve.speeds import AnswerLengths

_CLEARLY = 0.8  # another replica must need less than this share of the time to take a request from the preferred one
_TOGETHER_S = 1.0  # assumed time of a token while no replica was measured; only ratios count


@dataclass
class Replica:
    """One replica. A process that fails for good is replaced by a new one."""

    config: EngineConfig
    process: EngineProcess
    blocks: PromptBlocks = field(default_factory=PromptBlocks)
    starting: asyncio.Task[None] | None = None  # starts the process, and starts it again after a loss

    @property
    def sequences(self) -> int:
        """Number of answers that the process generates at the same time."""
        return int(self.process.about.get("sequences", 1))

    @property
    def is_loaded(self) -> bool:
        """True if the process has loaded the model, and has not failed."""
        return self.process.is_ready and self.process.failed is None


@dataclass(frozen=True)
class _Prompt:
    """Facts about a request that decide where it is answered."""

    chars: int
    digests: Sequence[bytes]
    limit: int | None  # largest number of tokens of the answer
    least: int = 0  # smallest number of tokens of the answer


class Dispatcher(AnswersOwner):
    """Dispatcher of one model. Use it in one event loop."""

    def __init__(self, replanned: Callable[[], None] = lambda: None) -> None:
        """replanned: called when `copies` has changed while the model runs."""
        self._replanned = replanned
        self.replicas: list[Replica] = []
        self.copies: Sequence[Mapping[str, Any]] = ()  # plans of the replicas besides the first one
        self.changes = asyncio.Event()  # set when a process has loaded the model, or has failed for good
        self.moves: set[asyncio.Task[None]] = set()  # answers that go on at another replica
        self.is_closing = False
        self._order, self._lengths = FairOrder(), AnswerLengths()
        self._prompts: dict[ProcessAnswer, _Prompt] = {}  # facts about each unfinished answer

    @property
    def all_failed(self) -> Exception | None:
        """The reason why no more requests are accepted: all replicas have failed."""
        reasons = [replica.process.failed for replica in self.replicas]
        return None if None in reasons else reasons[0]

    @property
    def usable(self) -> Sequence[Replica]:
        """The loaded replicas, or else those that may still load, or else all."""
        loaded = [replica for replica in self.replicas if replica.is_loaded]
        return loaded or [replica for replica in self.replicas if replica.process.failed is None] or self.replicas

    def goes_on_elsewhere(self, lost: Replica) -> bool:
        """Return True if a request whose replica failed should be sent to another one."""
        return lost.process.failed is not None and self.all_failed is None and not self.is_closing

    async def generate(self, generation: Generation) -> ProcessAnswer:
        """Begin an answer. Raises the errors of the request."""
        caller, text = CALLER.get(), prompt_text(generation)
        client, limit = caller.client, generation.max_tokens
        sampling = generation.sampling
        least = limit if limit and sampling.get("ignore_eos") else sampling.get("min_tokens", 0)
        cost = self._lengths.prompt_tokens(len(text)) + self._lengths.tokens(limit, least)
        tag = self._order.tag(client, cost, caller.weight)
        answer = ProcessAnswer(replace(generation, client=client, tag=tag))
        digests = block_digests(generation, text) if len(self.replicas) > 1 else ()
        self._prompts[answer] = _Prompt(len(text), digests, limit, least)
        try:
            await self._place(answer)
        except BaseException:
            self._prompts.pop(answer, None)
            raise
        return answer

    async def _place(self, answer: ProcessAnswer, replica: Replica | None = None) -> None:
        """Generate an answer on a replica, and on another one if that is lost meanwhile. None: the best replica."""
        while True:
            replica = replica or self._best(answer)
            replica.blocks.add(self._prompts[answer].digests)
            try:
                return await replica.process.generate(answer)
            except PoisonousRequest:
                raise
            except EngineGone:
                if not self.goes_on_elsewhere(replica):
                    raise
                replica = None

    def begun(self, answer: ProcessAnswer) -> None:
        self._order.begun(answer.generation.tag)

    def ended(self, answer: ProcessAnswer) -> None:
        if (prompt := self._prompts.pop(answer, None)) is not None and answer.accepted:
            self._lengths.ended(len(answer.tokens), prompt.chars, answer.prompt_tokens)
        self._balance()

    def loaded(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        self.copies = replicas or self.copies
        self.changes.set()
        self._balance()

    def replanned(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        self.copies = replicas
        self._replanned()

    def failed(self) -> None:
        self.changes.set()

    def moved(self, answer: ProcessAnswer) -> bool:
        if self.all_failed is not None or self.is_closing:
            return False
        self._move(answer)
        return True

    def _move(self, answer: ProcessAnswer, replica: Replica | None = None) -> None:
        """Generate an answer elsewhere. replica: the first one to try; None: the best one."""

        async def move() -> None:
            try:
                await self._place(answer, replica)
            except (EdgeError, OSError) as error:
                self._prompts.pop(answer, None)
                answer.pieces.put_nowait(error)
            self._balance()

        task = asyncio.create_task(move())
        self.moves.add(task)
        task.add_done_callback(self.moves.discard)

    # --- choice ---

    def _best(self, answer: ProcessAnswer) -> Replica:
        """Return the replica where the seconds of an answer, times the factor by which it delays each other, are least.

        So the product of the rates of all answers is largest (proportional fairness; Kelly, 1997), and slow replicas
        take answers when fast ones are crowded. A replica that has computed the beginning of the prompt is preferred,
        unless another one is clearly better.
        """
        there = self.usable
        if len(there) == 1:
            return there[0]
        costs = [self._finish_s(replica, answer) * self._delay(replica) for replica in there]
        digests = self._prompts[answer].digests
        preferred = max(range(len(there)), key=lambda i: (there[i].blocks.n_common(digests), -costs[i]))
        least = min(range(len(there)), key=lambda i: costs[i])
        return there[least if costs[least] < _CLEARLY * costs[preferred] else preferred]

    def _delay(self, replica: Replica) -> float:
        """Return the factor by which one more answer delays another at a replica, multiplied over all answers there."""
        n_running = min(len(replica.process.answers), replica.sequences - 1)
        return replica.process.answers.speeds.slowdown(n_running) ** n_running

    def _finish_s(self, replica: Replica, answer: ProcessAnswer) -> float:
        """Return the expected seconds until a replica has finished an answer that waits."""
        prompt, lengths, answers = self._prompts[answer], self._lengths, replica.process.answers
        others = [other for other in answers.values() if other is not answer]
        n_running = min(len(others) + 1, replica.sequences)
        known = [own for r in self.replicas if (own := r.process.answers.speeds.token_s(n_running)) is not None]
        token_s = answers.speeds.token_s(n_running) or min(known, default=_TOGETHER_S * (1 + n_running) / 2)
        prefills = [own for r in self.replicas if (own := r.process.answers.speeds.prefill_s()) is not None]
        prefill_s = answers.speeds.prefill_s() or min(prefills, default=token_s / 4)
        cached = min(prompt.chars, replica.blocks.n_common(prompt.digests) * BLOCK_CHARS)
        own_s = (
            lengths.prompt_tokens(prompt.chars - cached) * prefill_s
            + max(1.0, lengths.tokens(prompt.limit, prompt.least) - len(answer.tokens)) * token_s
        )
        # While more answers are there than can be generated, those that wait take turns in the slots.
        n_before = max(0, len(others) + 1 - replica.sequences)
        return own_s + n_before / replica.sequences * lengths.tokens(None) * token_s

    def _balance(self) -> None:
        """Let each replica with a free slot take an answer that waits at another, if it would finish it sooner."""
        loaded = [replica for replica in self.replicas if replica.is_loaded]
        for replica in loaded if len(loaded) > 1 else ():
            if len(replica.process.answers) >= replica.sequences:
                continue
            waiting = [
                (answer, other)
                for other in self.replicas
                if other.is_loaded and len(other.process.answers) > other.sequences
                for answer in other.process.answers.values()
                if answer.accepted and not answer.begun and not answer.cancelled
            ]
            if not waiting:
                return
            answer, other = min(waiting, key=lambda item: (item[0].generation.priority, item[0].generation.tag))
            if self._finish_s(replica, answer) < self._finish_s(other, answer):
                answer.leave_process()
                other.process.answers.release(answer)
                self._move(answer, replica)

"""Cost model of a language model's plan: seconds, bytes and joules, by formula, from measurements.

A step is one pass of b rows (tokens of b sequences) through all stages; M microbatches of b rows are in flight. A stage
has k layers, counted in average ones by their weights. The functions take k as a number or as an array: one formula
serves a plan, and all stages that could be at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count
from typing import Any

import numpy as np

from partition.model.model import ModelShape
from partition.plan.plan import Shard
from partition.plan.tensor import Limits, attention_bytes, kv_heads
from partition.predict.drafts import Draft, most_windows
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from quant.types import CacheType
from quant.wire import WIRES

Numbers = Any  # a float, or an array of them
# Seconds of one all-reduce by the best algorithm. Arguments: bytes as float32, bytes in the wire type, ranks, latency_s
# and bytes_per_s of the links.
AllreduceSeconds = Callable[[int, int, int, float, float], float]

PROMPT_CHUNKS = 8  # chunks of a prompt, so that two stages work on different ones; more stages have more
LEAST_CHUNK, MOST_CHUNK = 32, 512  # tokens; edge.llm.options.DEFAULT_BATCH is the most rows of a step
_ANSWER_BYTES = 512  # bytes of a row's largest logits with their token ids
_WINDOW_LAYERS = 2  # layers that must fit beside KV cache and runtime if weights are paged
_F32 = 4


@dataclass(frozen=True)
class Work:
    """A language model, and what is to be done with it."""

    shape: ModelShape
    limits: Limits
    context: int  # tokens that the KV cache holds, of all sequences together
    depth: int  # tokens that a sequence has behind it, on average, when one more is decoded
    prompt: int  # tokens, for the time to the first one
    concurrency: int  # C sequences at once
    kv: CacheType
    allreduce_s: AllreduceSeconds
    wire: str = "f32"  # wire type of hidden states and partial sums between ranks
    draft: Draft | None = None  # speculative decoding of a request that is alone; None: off

    @property
    def drafts_thin(self) -> bool:
        """Return whether a thin owner has the drafts, too: not where recurrent layers are to forget some."""
        return self.draft is None or self.draft.rollback is None

    @property
    def alone_rows(self) -> int:
        """Rows of a pass where there is one request."""
        return 1 if self.draft is None else self.draft.rows

    def drafting_s(self, devices: Sequence[str], owner: str) -> float:
        """Return seconds in which the devices of a stage draft, or wait for drafts, for a window behind others. owner:
        the device that requests them."""
        if self.draft is None:
            return 0.0
        waits_s = self.draft.waiting_s(self.draft.rows) if owner in devices else 0.0
        return max(waits_s, self.draft.rows * self.draft.guess_s if self.draft.worker in devices else 0.0)

    def alone_s(self, pass_s: Numbers, busy_s: Numbers, stages: Numbers) -> tuple[Numbers, Numbers]:
        """Return (seconds of a token with one request, the number of its windows in flight), the fastest choice.

        pass_s: time of its passes of `alone_rows` rows; busy_s: time of the busiest stage or link in these, drafting
        included. stages: their number limits the windows.
        """
        if self.draft is None:
            return pass_s, 1
        times, possible = [], self.draft.possible_windows
        for windows in possible:
            least = next(n for n in count(1) if most_windows(n) >= windows)
            token_s = replace(self.draft, windows=windows).token_s(pass_s, busy_s)
            times.append(np.where(stages >= least, token_s, np.inf))
        return np.minimum.reduce(times), np.take(possible, np.argmin(times, axis=0))

    @cached_property
    def before(self) -> tuple[float, ...]:
        """[layers + 1]: how many average layers, by the weights a token reads, lie before each."""
        average = sum(self.limits.layer_bytes) / len(self.limits.layer_bytes)
        return tuple(accumulate((n / average for n in self.limits.layer_bytes), initial=0.0))

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """[layers + 1]: bytes of the layers before each, all experts among them."""
        return tuple(accumulate(self.shape.layer_bytes, initial=0))

    @cached_property
    def kv_before(self) -> tuple[int, ...]:
        """[layers + 1]: bytes of KV cache of the layers before each."""
        return self._kv_before(self.context)

    @cached_property
    def prompt_kv_before(self) -> tuple[int, ...]:
        """[layers + 1]: bytes of the prompt's keys and values of the layers before each."""
        return self._kv_before(self.prompt)

    def _kv_before(self, tokens: int) -> tuple[int, ...]:
        layers = range(self.shape.n_layers)
        layer_bytes = (self.shape.kv_layer_bytes(layer, tokens, self.kv.keys, self.kv.values) for layer in layers)
        return tuple(accumulate(layer_bytes, initial=0))

    def sum_s(self, rows: float, ranks: int, latency_s: float, bytes_per_s: float) -> float:
        """Return seconds of one all-reduce of the hidden states of `rows` over links with these figures."""
        n_bytes = _F32 * self.shape.n_embd * max(1, round(rows))
        return self.allreduce_s(n_bytes, self.state_bytes(rows), ranks, latency_s, bytes_per_s)

    def state_bytes(self, rows: float) -> int:
        """Return the wire bytes of the hidden states of `rows` between stages."""
        n = self.shape.n_embd * max(1, round(rows))
        codec = WIRES[self.wire]
        return _F32 * n if codec is None else codec.n_bytes(n)


class GroupCost:
    """Cost of one stage's group of ranks, by the number of its layers.

    With one rank, for a row with d tokens behind it:
        seconds(k, b) = step(b) + k (layer(b) + b d token) + [last] head(outputs)
    With several, rank r having parts a_r of attention, f_r of the FFN and v_r of the head:
        seconds(k, b) = max_r step_r(b) + k (max_r A_r + max_r F_r + 2 sum(b)) + [last] max_r v_r head_r(outputs)
    where A_r + F_r is DeviceSpeed.part_s of the rank's weights, its constant part shared equally by the two, each with
    a sum's own work sum_s; and sum(b) = the allreduce of b rows of n_embd floats over the slowest of the group's links.
    A prompt of P tokens goes through in chunks of c, each behind those before it:
        prompt = sum over chunks of (step(c) + k (layer(c) + c tokens before it prompt_token)) + [last] head(1)
    A device that must page reads what has no room in every pass, while it computes:
        seconds = max(the above, max_r paged bytes_r / disk_r)
    """

    def __init__(self, work: Work, speeds: Sequence[DeviceSpeed], shards: Sequence[Shard], links: Links) -> None:
        """shards: heads, ff and vocab of each rank; vocab may be none, if it is not the last stage."""
        self.work, self.speeds, self.shards = work, tuple(speeds), tuple(shards)
        self.slowest = links.slowest([speed.device for speed in speeds])
        limits = work.limits
        attention = [attention_bytes(limits, shard.heads) for shard in shards]
        ff = [len(shard.ff) * limits.ff_bytes for shard in shards]
        average = sum(limits.layer_bytes) / len(limits.layer_bytes)
        # Parts of a layer's weights. Norms, which all ranks have, are in the constant part that was measured.
        self._attention = [n / average for n in attention] if len(shards) > 1 else [0.0]
        self._ff = [n / average for n in ff] if len(shards) > 1 else [1.0]
        self._layer_bytes = [a + f for a, f in zip(self._attention, self._ff, strict=True)]
        if not limits.shares_heads and len(shards) > 1:
            # Measured were all heads with half of the columns: what each rank computes whole is in the constant part.
            self._attention = [0.0] * len(shards)
            self._ff = [len(shard.ff) / limits.sizes.ff for shard in shards]
        self._heads = [len(shard.heads) / max(1, limits.sizes.heads) for shard in shards]
        self._kv = [_kv_part(limits, shard) for shard in shards]
        self._vocab = [len(shard.vocab) / limits.sizes.vocab for shard in shards]

    def seconds(self, k: Numbers, rows: float, last: Numbers) -> Numbers:
        """Return seconds of one decoding step with weights in memory: all of its rows give logits."""
        return self._step_s(rows) + k * self.layer_s(rows, self.work.depth) + last * self._head_s(rows)

    def prompt_s(self, k: Numbers, last: Numbers, rows: int, disk_s: Numbers = 0.0) -> Numbers:
        """Return seconds of the whole prompt in chunks of `rows` tokens, of which the last row alone gives logits.

        Rows of a chunk attend to each other, which is in what was measured, and to all chunks before, which makes the
        time of a long prompt grow with its square. disk_s: that every chunk takes at least, reading weights.
        """
        whole, rest = divmod(self.work.prompt, rows)
        seconds: Numbers = last * self._head_s(1)
        for n, chunk, before in ((whole, rows, (whole - 1) / 2 * rows), (1, rest, whole * rows)):
            if n and chunk:
                seconds = seconds + n * (self._step_s(chunk) + k * self.layer_s(chunk, before, prompt=True))
        return np.maximum(seconds, -(-self.work.prompt // rows) * disk_s)

    def _step_s(self, rows: float) -> float:
        """Return seconds of a step beside layers and head."""
        return max(speed.step_s.at(rows) for speed in self.speeds)

    def _head_s(self, rows: float) -> float:
        """Return seconds of the head for so many rows."""
        return max(speed.head_s.at(rows) * part for speed, part in zip(self.speeds, self._vocab, strict=True))

    def layer_s(self, rows: float, depth: float, *, prompt: bool = False) -> float:
        """Return seconds of one average layer with its all-reduces; each row attends to `depth` earlier tokens. prompt:
        the rows are of one sequence."""
        behind = rows * depth
        token_s = [speed.row_token_s(prompt=prompt) for speed in self.speeds]
        if len(self.speeds) == 1:
            return self.speeds[0].layer_s.at(rows) + behind * token_s[0]
        attention, ff = 0.0, 0.0
        for i, speed in enumerate(self.speeds):
            constant, slope = speed.part_line_s(rows)
            own = behind * token_s[i] * self._heads[i]
            own += speed.sum_s if self.work.limits.shares_heads else 0.0
            attention = max(attention, constant / 2 + self._attention[i] * slope + own)
            ff = max(ff, constant / 2 + self._ff[i] * slope + speed.sum_s)
        return attention + ff + self.work.limits.sums_a_layer * self.sum_s(rows)

    def own_s(self, rank: int, k: float, last: bool, rows: float = 1) -> float:
        """Return the seconds that one rank computes in a step in which each row gives logits, without all-reduces and
        waiting."""
        speed, behind = self.speeds[rank], rows * self.work.depth
        head = last * self._vocab[rank] * speed.head_s.at(rows)
        if len(self.speeds) == 1:
            return speed.step_s.at(rows) + k * (speed.layer_s.at(rows) + behind * speed.token_s) + head
        part = self._attention[rank] + self._ff[rank]
        layer_s = speed.part_s(part, rows) + behind * speed.token_s * self._heads[rank]
        return speed.step_s.at(rows) + k * layer_s + head

    def sum_s(self, rows: float) -> float:
        """Return seconds of one all-reduce of `rows`."""
        way = self.slowest
        return self.work.sum_s(rows, len(self.speeds), way.latency_s, way.bytes_per_s)

    def moved_s(self, kv: Numbers, ways: Sequence[LinkSpeed]) -> Numbers:
        """Return seconds in which the prompt's keys and values of a stage, `kv` bytes, cross the way of each rank.
        Those of each chunk cross by themselves."""
        n, parts = chunks(self.work.prompt), zip(ways, self._kv, strict=True)
        return np.maximum.reduce([n * way.latency_s + kv * part / way.bytes_per_s for way, part in parts])

    def bytes_needed(self, weights: Numbers, kv: Numbers, last: Numbers) -> list[Numbers]:
        """Return the bytes each rank needs: runtime + its part of the stage's weights, of its KV cache, and of the
        head."""
        shape = self.work.shape
        head = last * shape.head_bytes
        if len(self.speeds) == 1 and not shape.head_is_tied:  # alone it has the token table; ranks look rows up in it
            whole = np.asarray(weights) >= self.work.weights_before[-1]
            head = head + np.where(whole, shape.embedding_bytes, 0)
        return [
            speed.runtime_bytes + weights * min(part, 1.0) + kv * held_part + head * vocab
            for speed, part, held_part, vocab in zip(self.speeds, self._layer_bytes, self._kv, self._vocab, strict=True)
        ]

    def bytes_held(self, weights: Numbers, kv: Numbers, last: Numbers) -> list[Numbers]:
        """Return the bytes each rank holds: those it needs, but at most what it has; the rest is paged."""
        needs = self.bytes_needed(weights, kv, last)
        return [np.minimum(need, speed.memory_bytes) for need, speed in zip(needs, self.speeds, strict=True)]

    def paged(self, k: Numbers, weights: Numbers, kv: Numbers, last: Numbers) -> list[Numbers]:
        """Return the bytes of weights that each rank reads again in every pass: what it needs less what it has.
        inf if it cannot page, because a window of two layers, the KV cache and the runtime have no room.
        """
        paged_bytes = []
        for i, (speed, need) in enumerate(zip(self.speeds, self.bytes_needed(weights, kv, last), strict=True)):
            short = np.maximum(0.0, need - speed.memory_bytes)
            per_layer = weights * (self._attention[i] + self._ff[i]) / np.maximum(k, 1e-9)
            window = speed.runtime_bytes + kv * self._kv[i] + _WINDOW_LAYERS * per_layer
            can = speed.disk_bytes_per_s is not None
            paged_bytes.append(np.where((short > 0) & ((not can) | (window > speed.memory_bytes)), np.inf, short))
        return paged_bytes

    def disk_s(self, paged: Sequence[Numbers]) -> Numbers:
        """Return seconds in which the slowest disk reads the paged bytes."""
        times = [n / (speed.disk_bytes_per_s or 1.0) for speed, n in zip(self.speeds, paged, strict=True)]
        return np.maximum.reduce(times)

    @property
    def watts(self) -> float:
        """Power of all ranks while they compute; nan if a device's is unknown."""
        return sum(np.nan if speed.watts is None else speed.watts for speed in self.speeds)


def hop_s(work: Work, before: Sequence[str], after: Sequence[str], links: Links, rows: float) -> tuple[float, float]:
    """(latency, how long the bytes keep the link busy) of hidden states from stage to stage; they take both together.

    Rank t of the next stage has them from rank t modulo the width of the one before: max over t of each.
    """
    ways = [links.get(before[t % len(before)], device) for t, device in enumerate(after)]
    n_bytes = work.state_bytes(rows)
    return max(way.latency_s for way in ways), max(n_bytes / way.bytes_per_s for way in ways)


def answer_s(last: Sequence[str], owner: str, links: Links, rows: float) -> tuple[float, float]:
    """The same for the largest logits of each row, from every rank of the last stage to the owner."""
    ways = [links.get(device, owner) for device in last]
    return max(way.latency_s for way in ways), max(_ANSWER_BYTES * rows / way.bytes_per_s for way in ways)


def ttft_s(passes: Numbers, busiest: Numbers, prompt: int, stages: int = 2) -> Numbers:
    """A prompt in chunks that follow each other through the stages: busiest + (passes - busiest) / chunks.

    passes: seconds of the whole prompt through all stages, busiest: through the slowest of them; stages: that compute.
    The last chunk waits for the others at the slowest stage, and only its own part of the rest comes on top.
    """
    return busiest + (passes - busiest) / chunks(prompt, stages)


def pair_ttft_s(
    prompt_s: Numbers, to_owner_s: Numbers, from_owner_s: Numbers, pass_s: Numbers, prompt: int, stages: int = 2
) -> Numbers:
    """Time to first token where one placement computes the prompt and another one generates: chunks are computed, their
    keys and values go to the owner and from there to the other placement, one behind the other; then it computes a row.

    prompt_s, to_owner_s, from_owner_s: seconds of the whole prompt and of all its keys and values. pass_s: a row.
    stages: that compute the prompt; one alone has longer chunks.
    """
    busiest_s = np.maximum(np.maximum(prompt_s, to_owner_s), from_owner_s)
    return ttft_s(prompt_s + to_owner_s + from_owner_s, busiest_s, prompt, stages) + pass_s


def chunk_rows(prompt: int, stages: int = 2) -> int:
    """Return the tokens of each chunk of a prompt, as `edge.parallel.steps.chunk_rows` for one stage or two; more
    stages are taken to have those of two."""
    if stages == 1:
        return min(MOST_CHUNK, prompt)
    even = -(-prompt // PROMPT_CHUNKS)
    return min(MOST_CHUNK, prompt, max(LEAST_CHUNK, -(-even // LEAST_CHUNK) * LEAST_CHUNK))


def chunks(prompt: int, stages: int = 2) -> int:
    """Return the number of chunks of a prompt, by the number of stages that compute."""
    return -(-prompt // chunk_rows(prompt, stages))


def groups(concurrency: int, microbatches: int) -> int:
    """Return how many groups C requests form when M are wanted: of C / M each, rounded up."""
    each = -(-concurrency // max(1, min(microbatches, concurrency)))
    return -(-concurrency // each)


def per_token_s(pass_s: Numbers, busy_s: Numbers, rows: float, concurrency: int) -> Numbers:
    """Seconds a token with all C sequences at work, in C / b microbatches: max(pass / C, busy / b).

    A cycle of all microbatches gives C tokens. It takes a whole pass, or each of them the busiest stage's or link's
    time, whichever is longer.
    """
    return np.maximum(pass_s / concurrency, busy_s / rows)


def _kv_part(limits: Limits, shard: Shard) -> float:
    sizes = limits.sizes
    if not sizes.heads_kv:
        return 1.0
    return len(kv_heads(shard.heads, sizes.heads, sizes.heads_kv)) / sizes.heads_kv

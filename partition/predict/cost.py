"""Cost model of a language model's plan: seconds, bytes and joules, by formula, from measurements.

A step is one pass of b rows (tokens of b sequences) through all stages. M microbatches of b rows are in flight. A stage
has k layers, counted in average layers by their weights. The functions take k as a number or as an array, so the same
formulas serve one plan and all possible stages of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, count, pairwise
from typing import Any

import numpy as np

from partition.model.model import ModelShape
from partition.plan.plan import Shard
from partition.plan.tensor import Limits, attention_bytes, kv_heads
from partition.predict.drafts import Draft, most_windows
from partition.predict.residency import LayerBytes
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from partition.predict.tiers import OnGpu, TieredSpeed, bytes_before, on_gpu
from quant.types import CacheType
from quant.wire import WIRES

Numbers = Any  # a float or an array of floats
# Seconds of one all-reduce by the best algorithm. Arguments: bytes as float32, bytes in the wire type, ranks, and
# latency_s and bytes_per_s of the links.
AllreduceSeconds = Callable[[int, int, int, float, float], float]

PROMPT_CHUNKS = 8  # chunks of a prompt, so that two stages work at the same time; also used for more stages
LEAST_CHUNK, MOST_CHUNK = 32, 512  # bounds on chunks, in tokens; edge.llm.options.DEFAULT_BATCH is the largest step
WINDOW_LAYERS = 2  # layers that must fit into memory together with KV cache and runtime if weights are paged
_ANSWER_BYTES = 512  # bytes of a row's largest logits with their token ids
_F32 = 4


@dataclass(frozen=True)
class DiskSeconds:
    """Seconds in which the slowest disk of a group reads the paged weights of a pass."""

    overlapped_s: Numbers = 0.0  # while other weights are computed
    waited_s: Numbers = 0.0  # of experts: computing waits, because it has just chosen them

    def added_to(self, seconds: Numbers, passes: int = 1) -> Numbers:
        """Return the seconds of passes that compute for `seconds`."""
        return np.maximum(seconds, passes * self.overlapped_s) + passes * self.waited_s


NO_DISK = DiskSeconds()


@dataclass(frozen=True)
class Work:
    """A language model and its workload."""

    shape: ModelShape
    limits: Limits
    context: int  # tokens of KV cache for all sequences together
    depth: int  # mean number of earlier tokens of a sequence in a decode step
    prompt: int  # prompt tokens, for the time to the first token
    concurrency: int  # C concurrent sequences
    kv: CacheType
    allreduce_s: AllreduceSeconds
    wire: str = "f32"  # type of hidden states and partial sums on the wire between ranks
    draft: Draft | None = None  # speculative decoding of a lone request; None: off

    @property
    def drafts_thin(self) -> bool:
        """True if a thin owner also supports drafts. It does not if recurrent layers have to roll back."""
        return self.draft is None or self.draft.rollback is None

    @property
    def alone_rows(self) -> int:
        """Rows of a pass if there is a single request."""
        return 1 if self.draft is None else self.draft.rows

    def drafting_s(self, devices: Sequence[str], owner: str) -> float:
        """Return the seconds in which the devices of a stage draft or wait for draft tokens of one window.

        owner: the device that requests the drafts.
        """
        if self.draft is None:
            return 0.0
        waits_s = self.draft.waiting_s(self.draft.rows) if owner in devices else 0.0
        return max(waits_s, self.draft.rows * self.draft.guess_s if self.draft.worker in devices else 0.0)

    def alone_s(self, pass_s: Numbers, busy_s: Numbers, stages: Numbers) -> tuple[Numbers, Numbers]:
        """Return (seconds per token of a lone request, number of its windows in flight) for the fastest number of
        windows.

        pass_s: time of a pass of `alone_rows` rows.
        busy_s: time of the busiest stage or link in such a pass, including drafting.
        stages: number of stages, which limits the number of windows.
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
        """[layers + 1]: number of average layers before each layer, weighted by the weights that a token reads."""
        average = sum(self.limits.layer_bytes) / len(self.limits.layer_bytes)
        return tuple(accumulate((n / average for n in self.limits.layer_bytes), initial=0.0))

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """[layers + 1]: bytes of the layers before each layer, including all experts."""
        return tuple(accumulate(self.shape.layer_bytes, initial=0))

    @cached_property
    def kv_before(self) -> tuple[int, ...]:
        """[layers + 1]: bytes of KV cache of the layers before each layer."""
        return self._kv_before(self.context)

    @cached_property
    def prompt_kv_before(self) -> tuple[int, ...]:
        """[layers + 1]: bytes of the prompt's KV cache in the layers before each layer."""
        return self._kv_before(self.prompt)

    @property
    def expert_share(self) -> float:
        """Share of the experts that a token uses; 1 for a model without experts."""
        used, experts = self.shape.n_experts_used, self.shape.n_experts
        return used / experts if experts > used > 0 else 1.0

    @cached_property
    def layer_parts(self) -> tuple[LayerBytes, ...]:
        """Bytes of each layer by part. All weights and those that a token reads give the experts."""
        unused, parts = 1 - self.expert_share, []
        layers = zip(self.shape.layer_bytes, self.limits.layer_bytes, pairwise(self.kv_before), strict=True)
        for weights, read, (before, after) in layers:
            experts = min(weights, max(0, round((weights - read) / unused))) if unused else 0
            parts.append(LayerBytes(weights - experts, experts, after - before))
        return tuple(parts)

    def _kv_before(self, tokens: int) -> tuple[int, ...]:
        layers = range(self.shape.n_layers)
        layer_bytes = (self.shape.kv_layer_bytes(layer, tokens, self.kv.keys, self.kv.values) for layer in layers)
        return tuple(accumulate(layer_bytes, initial=0))

    def sum_s(self, rows: float, ranks: int, latency_s: float, bytes_per_s: float) -> float:
        """Return the seconds of one all-reduce of the hidden states of `rows` over links of this speed."""
        n_bytes = _F32 * self.shape.n_embd * max(1, round(rows))
        return self.allreduce_s(n_bytes, self.state_bytes(rows), ranks, latency_s, bytes_per_s)

    def state_bytes(self, rows: float) -> int:
        """Return the wire bytes of the hidden states of `rows` between stages."""
        n = self.shape.n_embd * max(1, round(rows))
        codec = WIRES[self.wire]
        return _F32 * n if codec is None else codec.n_bytes(n)


class GroupCost:
    """Cost of the group of ranks of one stage, as a function of its number of layers k.

    One rank, for a row with d earlier tokens:
        seconds(k, b) = step(b) + k (layer(b) + b d token) + [last] head(outputs)
    Several ranks; rank r has shares a_r of attention, f_r of the FFN and v_r of the head:
        seconds(k, b) = max_r step_r(b) + k (max_r A_r + max_r F_r + 2 sum(b)) + [last] max_r v_r head_r(outputs)
    A_r + F_r is DeviceSpeed.part_s of the rank's weights. Its constant part is split equally between both, and each
    includes the processor time sum_s of an all-reduce. sum(b) is the all-reduce of b rows of n_embd floats over the
    group's slowest link.
    A prompt of P tokens is computed in chunks of c tokens; each chunk attends to earlier chunks:
        prompt = sum over chunks of (step(c) + k (layer(c) + c x earlier tokens x prompt_token)) + [last] head(1)
    A device that pages reads the bytes without room from disk in every pass, dense weights while it computes:
        seconds = max(the above, max_r dense bytes_r / disk_r) + max_r expert bytes_r / disk_r
    Experts come last into memory. A pass of b rows reads the share 1 - (1 - used / experts)^b of those on disk, after
    the router has chosen them.
    A device with a GPU has a part of the stage there (`partition.predict.tiers`). Each place then adds the time of its
    share of the layers, and only the rest of the bytes is in memory or is paged.
    """

    def __init__(self, work: Work, speeds: Sequence[DeviceSpeed], shards: Sequence[Shard], links: Links) -> None:
        """shards: shares of heads, FFN columns and vocabulary of each rank. The vocabulary share may be empty
        unless the stage is the last one.
        """
        self.work, self.speeds, self.shards = work, tuple(speeds), tuple(shards)
        self.slowest = links.slowest([speed.device for speed in speeds])
        limits = work.limits
        attention = [attention_bytes(limits, shard.heads) for shard in shards]
        ff = [len(shard.ff) * limits.ff_bytes for shard in shards]
        average = sum(limits.layer_bytes) / len(limits.layer_bytes)
        # Shares of a layer's weights. Norms, which every rank holds, belong to the measured constant part.
        self._attention = [n / average for n in attention] if len(shards) > 1 else [0.0]
        self._ff = [n / average for n in ff] if len(shards) > 1 else [1.0]
        self._layer_bytes = [a + f for a, f in zip(self._attention, self._ff, strict=True)]
        if not limits.shares_heads and len(shards) > 1:
            # The measured half layer had all heads and half of the FFN columns, so attention belongs to the constant
            # part.
            self._attention = [0.0] * len(shards)
            self._ff = [len(shard.ff) / limits.sizes.ff for shard in shards]
        self._heads = [len(shard.heads) / max(1, limits.sizes.heads) for shard in shards]
        self._kv = [_kv_part(limits, shard) for shard in shards]
        self._vocab = [len(shard.vocab) / limits.sizes.vocab for shard in shards]
        self._parts = [
            bytes_before(work.layer_parts, min(part, 1.0), kv_part) if speed.gpu else None
            for speed, part, kv_part in zip(speeds, self._layer_bytes, self._kv, strict=True)
        ]

    def on_gpu(self, starts: Numbers, stops: Numbers) -> tuple[OnGpu, ...]:
        """Return the part of each stage [start, stop) on the GPU of each rank; () if no rank has a GPU."""
        if all(parts is None for parts in self._parts):
            return ()
        head = self.work.shape.head_bytes
        ranks = zip(self.speeds, self._parts, self._vocab, self.shards, strict=True)
        return tuple(
            OnGpu()
            if speed.gpu is None or parts is None
            else on_gpu(
                parts,
                self.work.expert_share,
                speed.gpu.memory_bytes - speed.gpu.runtime_bytes,
                round(head * vocab),
                starts,
                stops,
                shard.gpu_layers,
            )
            for speed, parts, vocab, shard in ranks
        )

    def _times(self, on_gpu: Sequence[OnGpu]) -> list[DeviceSpeed | TieredSpeed]:
        """Return the times of each rank. on_gpu: part of the stage on each rank's GPU; (): nothing."""
        parts = on_gpu or [OnGpu()] * len(self.speeds)
        return [
            speed if speed.gpu is None or not on_gpu else TieredSpeed(speed, speed.gpu, part)
            for speed, part in zip(self.speeds, parts, strict=True)
        ]

    def seconds(self, k: Numbers, rows: float, last: Numbers, on_gpu: Sequence[OnGpu] = ()) -> Numbers:
        """Return the seconds of one decode step with weights in memory. All rows yield logits.

        on_gpu: part of the stage on each rank's GPU; (): nothing.
        """
        layer_s = self.layer_s(rows, self.work.depth, on_gpu=on_gpu)
        return self._step_s(rows, on_gpu) + k * layer_s + last * self._head_s(rows, on_gpu)

    def prompt_s(
        self, k: Numbers, last: Numbers, rows: int, disk: DiskSeconds = NO_DISK, on_gpu: Sequence[OnGpu] = ()
    ) -> Numbers:
        """Return the seconds of the whole prompt in chunks of `rows` tokens. Only the last row yields logits.

        The measurements include attention within a chunk. Attention to earlier chunks is added, so a long prompt's time
        grows quadratically.

        disk: seconds of each chunk for reading weights.
        on_gpu: as for `seconds`.
        """
        whole, rest = divmod(self.work.prompt, rows)
        seconds: Numbers = last * self._head_s(1, on_gpu)
        for n, chunk, before in ((whole, rows, (whole - 1) / 2 * rows), (1, rest, whole * rows)):
            if n and chunk:
                layer_s = self.layer_s(chunk, before, prompt=True, on_gpu=on_gpu)
                seconds = seconds + n * (self._step_s(chunk, on_gpu) + k * layer_s)
        return disk.added_to(seconds, -(-self.work.prompt // rows))

    def _step_s(self, rows: float, on_gpu: Sequence[OnGpu]) -> Numbers:
        """Return the seconds of a step outside of layers and head."""
        return _largest([times.step_s.at(rows) for times in self._times(on_gpu)])

    def _head_s(self, rows: float, on_gpu: Sequence[OnGpu]) -> Numbers:
        """Return the seconds of the head for this many rows."""
        heads = zip(self._times(on_gpu), self._vocab, strict=True)
        return _largest([times.head_s.at(rows) * part for times, part in heads])

    def layer_s(self, rows: float, depth: float, *, prompt: bool = False, on_gpu: Sequence[OnGpu] = ()) -> Numbers:
        """Return the seconds of one average layer of the stage with its all-reduces.

        depth: earlier tokens that each row attends to.
        prompt: the rows belong to one sequence.
        on_gpu: as for `seconds`. Several ranks are compared by the means of their layers.
        """
        behind, ranks = rows * depth, self._times(on_gpu)
        token_s = [times.row_token_s(prompt=prompt) for times in ranks]
        if len(ranks) == 1:
            return ranks[0].layer_s.at(rows) + behind * token_s[0]
        attention, ff = [], []
        for i, times in enumerate(ranks):
            constant, slope = times.part_line_s(rows)
            own = behind * token_s[i] * self._heads[i]
            own += times.sum_s if self.work.limits.shares_heads else 0.0
            attention.append(constant / 2 + self._attention[i] * slope + own)
            ff.append(constant / 2 + self._ff[i] * slope + times.sum_s)
        return _largest(attention) + _largest(ff) + self.work.limits.sums_a_layer * self.sum_s(rows)

    def own_s(self, rank: int, k: float, last: bool, rows: float = 1, on_gpu: Sequence[OnGpu] = ()) -> float:
        """Return the seconds that one rank computes in a step whose rows all yield logits, without all-reduces and
        waiting. on_gpu: as for `seconds`.
        """
        times, behind = self._times(on_gpu)[rank], rows * self.work.depth
        head = last * self._vocab[rank] * times.head_s.at(rows)
        attention_s = behind * times.row_token_s(prompt=False)
        if len(self.speeds) == 1:
            return float(times.step_s.at(rows) + k * (times.layer_s.at(rows) + attention_s) + head)
        part = self._attention[rank] + self._ff[rank]
        constant, slope = times.part_line_s(rows)
        layer_s = max(0.0, constant + part * slope) + attention_s * self._heads[rank]
        return float(times.step_s.at(rows) + k * layer_s + head)

    def sum_s(self, rows: float) -> float:
        """Return the seconds of one all-reduce of `rows`."""
        way = self.slowest
        return self.work.sum_s(rows, len(self.speeds), way.latency_s, way.bytes_per_s)

    def moved_s(self, kv: Numbers, ways: Sequence[LinkSpeed]) -> Numbers:
        """Return the seconds in which `kv` bytes, the prompt's KV cache in this stage, cross the link of each rank,
        chunk by chunk.
        """
        n, parts = chunks(self.work.prompt), zip(ways, self._kv, strict=True)
        return np.maximum.reduce([n * way.latency_s + kv * part / way.bytes_per_s for way, part in parts])

    def bytes_needed(self, weights: Numbers, kv: Numbers, last: Numbers) -> list[Numbers]:
        """Return the bytes that each rank needs: runtime, and its shares of weights, KV cache and head."""
        head, table = last * self.work.shape.head_bytes, self._table_bytes(weights)
        return [
            speed.runtime_bytes + weights * min(part, 1.0) + kv * held_part + head * vocab + table
            for speed, part, held_part, vocab in zip(self.speeds, self._layer_bytes, self._kv, self._vocab, strict=True)
        ]

    def _table_bytes(self, weights: Numbers) -> Numbers:
        """Return the bytes of the token table, which a single rank holds if it has all layers. Several ranks look rows
        up in the file, and so does a device that pages.
        """
        if len(self.speeds) > 1 or self.work.shape.head_is_tied:
            return 0
        return np.where(np.asarray(weights) >= self.work.weights_before[-1], self.work.shape.embedding_bytes, 0)

    def bytes_held(self, weights: Numbers, kv: Numbers, last: Numbers, on_gpu: Sequence[OnGpu] = ()) -> list[Numbers]:
        """Return the bytes that each rank holds in memory and on its GPU. Other weights are paged."""
        needs, on_gpus = self.bytes_needed(weights, kv, last), self.bytes_on_gpu(last, on_gpu)
        return [
            np.minimum(need - there, speed.memory_bytes) + there
            for need, there, speed in zip(needs, on_gpus, self.speeds, strict=True)
        ]

    def bytes_on_gpu(self, last: Numbers, on_gpu: Sequence[OnGpu]) -> list[Numbers]:
        """Return the bytes on the GPU of each rank. A head that is also the token table is in memory, too."""
        head = 0 if self.work.shape.head_is_tied else self.work.shape.head_bytes
        if not on_gpu:
            return [0] * len(self.speeds)
        parts = zip(on_gpu, self._vocab, strict=True)
        return [part.weights + part.kv + part.head * last * head * vocab for part, vocab in parts]

    def paged(
        self, k: Numbers, weights: Numbers, kv: Numbers, last: Numbers, on_gpu: Sequence[OnGpu] = ()
    ) -> list[Numbers]:
        """Return the bytes of weights that each rank has on disk only: needed bytes minus memory and GPU memory.

        The result is inf if the rank cannot page, because two layers, KV cache and runtime do not fit.
        """
        paged_bytes, parts = [], on_gpu or [OnGpu()] * len(self.speeds)
        needs, on_gpus = self.bytes_needed(weights, kv, last), self.bytes_on_gpu(last, on_gpu)
        table = self._table_bytes(weights)
        for i, (speed, need, there) in enumerate(zip(self.speeds, needs, on_gpus, strict=True)):
            short = np.maximum(0.0, need - there - speed.memory_bytes)
            per_layer = weights * (self._attention[i] + self._ff[i]) / np.maximum(k, 1e-9)
            window = speed.runtime_bytes + kv * self._kv[i] - parts[i].kv + WINDOW_LAYERS * per_layer
            can = speed.disk_bytes_per_s is not None
            impossible = (short > 0) & ((not can) | (window > speed.memory_bytes))
            paged_bytes.append(np.where(impossible, np.inf, np.maximum(0.0, short - table)))
        return paged_bytes

    def disk(
        self, paged: Sequence[Numbers], k: Numbers, weights: Numbers, rows: float, on_gpu: Sequence[OnGpu] = ()
    ) -> DiskSeconds:
        """Return the time for reading what a pass of `rows` rows uses of the paged bytes.

        If all experts are used equally often, it makes no difference which of them are in memory.
        """
        average, used = self.work.limits.layer_bytes, self.work.expert_share
        token_bytes = np.asarray(k) * sum(average) / len(average)  # with the experts that one token uses
        overlapped, waited, every = [], [], on_gpu or [OnGpu()] * len(self.speeds)
        for speed, n, share, there in zip(self.speeds, paged, self._layer_bytes, every, strict=True):
            experts: Numbers = 0.0  # bytes of paged experts
            if used < 1:
                rest = np.asarray(weights) * share - there.weights, token_bytes * share * (1 - there.layers)
                experts = np.minimum(n, np.maximum(0.0, rest[0] - rest[1]) / (1 - used))  # those not on the GPU
            rate = speed.disk_bytes_per_s or 1.0
            overlapped.append((n - experts) / rate)
            waited.append(experts * (1 - (1 - used) ** rows) / rate)
        return DiskSeconds(_largest(overlapped), _largest(waited))

    @property
    def watts(self) -> tuple[float, float]:
        """Power of all ranks: what computing adds, and while they wait. nan if the power of a device is unknown."""
        idle = sum(speed.idle_watts for speed in self.speeds)
        return sum(np.nan if speed.watts is None else speed.watts for speed in self.speeds) - idle, idle


def hop_s(work: Work, before: Sequence[str], after: Sequence[str], links: Links, rows: float) -> tuple[float, float]:
    """Return (latency, busy seconds of the link) for hidden states between two stages. The transfer takes the sum of
    both.

    Rank t of the next stage receives from rank t modulo the width of the previous stage. Both values are maxima over t.
    """
    ways = [links.get(before[t % len(before)], device) for t, device in enumerate(after)]
    n_bytes = work.state_bytes(rows)
    return max(way.latency_s for way in ways), max(n_bytes / way.bytes_per_s for way in ways)


def answer_s(last: Sequence[str], owner: str, links: Links, rows: float) -> tuple[float, float]:
    """Return the same for the largest logits of each row, which every rank of the last stage sends to the owner."""
    ways = [links.get(device, owner) for device in last]
    return max(way.latency_s for way in ways), max(_ANSWER_BYTES * rows / way.bytes_per_s for way in ways)


def ttft_s(passes: Numbers, busiest: Numbers, prompt: int, stages: int = 2) -> Numbers:
    """Return the seconds of a prompt whose chunks follow each other through the stages.

    The result is busiest + (passes - busiest) / chunks. The last chunk waits for the others at the slowest stage, and
    then only its own part of the other stages is added.

    passes: seconds of the whole prompt through all stages.
    busiest: seconds of the whole prompt in the slowest stage.
    stages: number of stages that compute.
    """
    return busiest + (passes - busiest) / chunks(prompt, stages)


def pair_ttft_s(
    prompt_s: Numbers, to_owner_s: Numbers, from_owner_s: Numbers, pass_s: Numbers, prompt: int, stages: int = 2
) -> Numbers:
    """Return the time to first token if one placement prefills and another one decodes.

    Chunks are computed, and their KV cache goes to the owner and on to the decode placement, one chunk after another.
    Then the decode placement computes a row.

    prompt_s: seconds of the whole prompt.
    to_owner_s, from_owner_s: seconds to transfer the prompt's KV cache to and from the owner.
    pass_s: seconds of one row.
    stages: number of stages of the prefill placement; a single stage has longer chunks.
    """
    busiest_s = np.maximum(np.maximum(prompt_s, to_owner_s), from_owner_s)
    return ttft_s(prompt_s + to_owner_s + from_owner_s, busiest_s, prompt, stages) + pass_s


def chunk_rows(prompt: int, stages: int = 2) -> int:
    """Return the tokens of each chunk of a prompt, as `edge.parallel.steps.chunk_rows`. More than two stages count
    as two.
    """
    if stages == 1:
        return min(MOST_CHUNK, prompt)
    even = -(-prompt // PROMPT_CHUNKS)
    return min(MOST_CHUNK, prompt, max(LEAST_CHUNK, -(-even // LEAST_CHUNK) * LEAST_CHUNK))


def chunks(prompt: int, stages: int = 2) -> int:
    """Return the number of chunks of a prompt."""
    return -(-prompt // chunk_rows(prompt, stages))


def groups(concurrency: int, microbatches: int) -> int:
    """Return the number of groups that C requests form if `microbatches` are wanted. Each has C / microbatches
    requests, rounded up.
    """
    each = -(-concurrency // max(1, min(microbatches, concurrency)))
    return -(-concurrency // each)


def most_rows(concurrency: int, microbatches: int) -> int:
    """Return the rows of the largest of the microbatches that C requests form."""
    return -(-concurrency // microbatches)


def per_token_s(pass_s: Numbers, busy_s: Numbers, rows: float, concurrency: int) -> Numbers:
    """Return the seconds per token with all C sequences in flight, in C / b microbatches: max(pass / C, busy / b).

    One cycle of all microbatches yields C tokens. It takes a whole pass of the largest microbatch, or the busiest
    stage's or link's time for all microbatches, whichever is longer. Smaller microbatches wait for the largest one,
    because stages compute them in turn.

    pass_s: seconds of a pass of the largest microbatch, `most_rows`.
    busy_s: seconds of a mean microbatch of b rows at the busiest stage or link.
    """
    return np.maximum(pass_s / concurrency, busy_s / rows)


def _largest(values: Sequence[Numbers]) -> Numbers:
    """Return the largest of numbers, or of each element of arrays."""
    return values[0] if len(values) == 1 else reduce(np.maximum, values)


def _kv_part(limits: Limits, shard: Shard) -> float:
    sizes = limits.sizes
    if not sizes.heads_kv:
        return 1.0
    return len(kv_heads(shard.heads, sizes.heads, sizes.heads_kv)) / sizes.heads_kv

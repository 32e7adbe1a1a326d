"""Divide a memory budget into parts before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from devices.probe import own_rss
from devices.processes.limits import give_back_memory
from edge.errors import NotEnoughMemory
from edge.llama import llama
from edge.llama.buffers import Weight
from edge.llama.llama import ContextSizes
from edge.weights.direct_file import DirectFile
from edge.weights.experts import Experts
from edge.weights.measure import measure_products, measure_reads, read_rate
from edge.weights.memory import MIB, LoadRequest, MemoryNeed, cache_bytes, context_parts, dry_run
from edge.weights.on_gpu import GpuShare
from edge.weights.plan import PagePlan, ReadOptions, least_parts, plan
from edge.weights.reader import DEFAULT_CHUNK, DEFAULT_THREADS
from edge.weights.roles import Roles, sort_weights
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.predict.hysteresis import LAID_OUT, clearly_faster
from partition.predict.paging import Speed
from quant.gguf.file import TensorInfo
from quant.types import CacheType

# memory needed later while the process runs: 14 MiB for a terminal, 11 for the chat template process
_MARGIN = 26 * MIB
MARGIN_SHARE = 128  # additional margin as a fraction of the budget, for page tables and partial pages
_TOKEN_BYTES = 32  # bytes per vocabulary entry: logits, their copy, and sampler candidates
_THREADS_BESIDE = 2  # reader threads while all cores compute; more threads slow down computation
_BUFFERS_SHARE = 24  # read buffers take at most this fraction of the budget
_CACHE_SHARE = 8  # a default context takes at most this fraction of the budget
_LEAST_CONTEXT = 512  # tokens
_COUNTER_BYTES = 72  # ggml memory per expert of a product, or per slot of one: a cache line and a number
_BATCHES = (128, 256, 512, 1024, 2048)  # candidate batch sizes in rows
_COMPUTE_OVER_READ = 2.0  # a prompt pass should compute this many times longer than it reads


@dataclass(frozen=True)
class OtherUses:
    """Memory in a budget for other things than the model and its context."""

    results: int = 0  # bytes for results of the engine's caller
    prefix_cache: int = 0  # bytes of blocks in transfer to or from the disk
    more_rows: int = 0  # rows with logits beyond one per sequence: their logits are copied when they are collected
    draft_rows: int = 0  # rows among `more_rows` that only verify drafts
    draft_model: int = 0  # bytes of a draft model

    def parts(self, n_vocab: int) -> dict[str, int]:
        """Return the bytes by part."""
        named = {
            "results": self.results,
            "draft model": self.draft_model,
            "prefix cache": self.prefix_cache,
            "logits": 4 * n_vocab * self.more_rows,
        }
        return {name: n for name, n in named.items() if n}

    def savings(self, n_vocab: int) -> dict[str, int]:
        """Return the bytes that each option would save. Draft rows count twice: in llama.cpp's buffer, and as
        copies."""
        drafts = self.draft_model + 2 * 4 * n_vocab * self.draft_rows
        named = {"--prefix-cache 0": self.prefix_cache, "--draft off": drafts}
        return {option: n for option, n in named.items() if n}


@dataclass(frozen=True)
class BudgetOptions:
    """User options of a budget. None: measured."""

    memory: int  # bytes for the whole process
    window: int | None = None  # bytes
    io_threads: int | None = None
    io_chunk: int | None = None  # bytes
    verify: bool = False
    uses: OtherUses = field(default_factory=OtherUses)


@dataclass(frozen=True)
class BudgetPlan:
    """Division of a memory budget: resident weights, window, and everything else."""

    sizes: ContextSizes
    parts: dict[str, int]  # bytes by part, without the weights
    read: ReadOptions
    plan: PagePlan
    lay_out: bool  # True: reading streamed weights from files with a repacked copy is faster


@dataclass(frozen=True)
class Opening:
    """Model with a header that llama.cpp has read, and the options for loading its weights."""

    request: LoadRequest
    options: BudgetOptions
    choose_batch: bool  # True: the batch of the sizes is only a proposal
    tokens: bool  # True: batches contain tokens; False: hidden states
    accounted: Callable[[MemoryNeed, PagePlan], None] | None  # called with the memory need before weights are loaded
    model: llama.Model  # model whose weights have no memory yet
    weights: Mapping[str, Weight]  # weights by name
    opened: Mapping[Path, DirectFile]  # open weight files by path
    gpu: GpuShare | None = None  # weights that have memory on a GPU already

    def sources(self, tensors: Mapping[str, TensorInfo] | None = None) -> dict[str, tuple[DirectFile, int]]:
        """Return file and offset of each weight. tensors: as in `roles`."""
        tensors = tensors or self.request.file.tensors
        return {name: (self.opened[tensor.path], tensor.offset) for name, tensor in tensors.items()}

    def roles(self, tensors: Mapping[str, TensorInfo] | None = None) -> Roles:
        """Return the roles of the weights. tensors: type and place of each weight; None: as in the file."""
        types = tensors or self.request.file.tensors
        weights = {name: weight.in_type(types[name].type.id) for name, weight in self.weights.items()}
        repack, on_gpu = self.request.repack is not False, self.gpu.names if self.gpu else ()
        return sort_weights(weights, self.sources(tensors), repack=repack, tokens=self.tokens, on_gpu=on_gpu)

    def plan(self, roles: Roles, budget: int) -> BudgetPlan:
        """Choose the resident and the streamed weights for a budget in bytes. If not all fit, speeds are measured.

        Raises NotEnoughMemory with the minimum budget if no plan fits.
        """
        file, sizes, threads = self.request.file, self.request.sizes, self.request.threads
        shape = file.shape
        options, used = replace(self.options, memory=budget), shape.n_experts_used
        model, choose_batch = self.model, self.choose_batch
        give_back_memory()  # After a model was closed, up to 100 MiB would still count as used.
        outside = {"runtime": _runtime(budget, model.n_vocab * sizes.sequences), **options.uses.parts(model.n_vocab)}
        if sizes.adapter_bytes:  # adapters stay in memory
            outside["adapters"] = sum(sizes.adapter_bytes)
        # Experts that a pass may choose, at least one row of each sequence: all of them have to fit.
        at_once = used * (sizes.sequences if choose_batch else max(sizes.sequences, sizes.batch))
        read = ReadOptions(options.io_threads or DEFAULT_THREADS, options.io_chunk or DEFAULT_CHUNK, options.window)
        smallest = replace(sizes, batch=max(min(_BATCHES[0], sizes.batch), sizes.outputs)) if choose_batch else sizes
        cache = cache_bytes(shape, sizes.context, sizes.kv) - (self.gpu.cache_bytes if self.gpu else 0)
        least_cache = cache_bytes(shape, _LEAST_CONTEXT, sizes.kv)
        savings = options.uses.savings(model.n_vocab)
        if sizes.context > _LEAST_CONTEXT and (less := cache - least_cache) > 0:
            savings[f"--context {_LEAST_CONTEXT}"] = less
        # creating a context would exceed the budget before it could be refused
        if sum(outside.values()) + cache > budget:
            parts = {**outside, **_context_need(model, shape, smallest, roles, self.gpu, dry=file.path)}
            _check(shape, parts, least_parts(roles, read, smallest.batch, at_once), budget, savings)
        for proposed in dict.fromkeys((sizes, smallest)):
            sizes = proposed
            parts = {**outside, **_context_need(model, shape, sizes, roles, self.gpu)}
            whole = plan(roles, 1 << 62, read, Speed(1.0, 1.0), sizes.batch, at_once)
            if sum(parts.values()) + sum(whole.parts.values()) <= budget:
                return BudgetPlan(sizes, parts, read, whole, False)
        _check(shape, parts, least_parts(roles, read, sizes.batch, at_once), budget, savings)
        before = read, sizes, parts
        read, speed, prefill = measure(roles, read, options, threads)
        if choose_batch:
            chosen = _choose_batch(roles, sizes, budget - sum(parts.values()), speed.read, prefill)
            if self.gpu is not None and chosen.batch > sizes.batch:
                chosen = sizes  # the GPU's memory was divided for this batch
            if chosen != sizes:
                sizes, parts = chosen, {**outside, **_context_need(model, shape, chosen, roles, self.gpu)}
        if sum(parts.values()) + sum(least_parts(roles, read, sizes.batch, at_once).values()) > budget:
            read, sizes, parts = before  # the read settings that were just measured would take too much memory
        try:
            share = plan(roles, budget - sum(parts.values()), read, speed, sizes.batch, at_once)
        except PlanError as error:
            raise NotEnoughMemory(str(error)) from None
        rows = rows_of_experts(roles, share, used)
        sizes = replace(sizes, batch=min(sizes.batch, rows))
        keeps_up = _disk_keeps_up(roles, share, speed)
        if keeps_up and options.io_threads is None:
            read = replace(read, threads=min(read.threads, _THREADS_BESIDE))
        return BudgetPlan(sizes, parts, read, share, keeps_up or _reads_faster_laid_out(share, read, speed))


def context_within(shape: ModelShape, kv: CacheType, most: int, budget: int) -> int:
    """Return the context size in tokens, at most `most`, that leaves room for weights. Reduced sizes are powers of
    two."""
    context = most
    while context > _LEAST_CONTEXT and cache_bytes(shape, context, kv) * _CACHE_SHARE > budget:
        context = max(_LEAST_CONTEXT, 1 << (context - 1).bit_length() - 1)
    return context


def other_parts(file: ModelFile, sizes: ContextSizes, budget: int) -> dict[str, int]:
    """Return the bytes by part that a budget spends on things other than weights, if all of these fit. Uses a dry
    run."""
    _, lines = dry_run(file.path, sizes)
    widest = max((tensor.shape[0] for tensor in file.tensors.values()), default=0)
    shape, parts = file.shape, {"runtime": _runtime(budget, file.shape.n_vocab * sizes.sequences)}
    return parts | _context_parts(lines, shape, sizes, widest, shape.n_vocab)


def _runtime(budget: int, n_logits: int) -> int:
    """Return the bytes of the process itself, including later needs. n_logits: logits of all sequences together."""
    return own_rss() + _MARGIN + budget // MARGIN_SHARE + _TOKEN_BYTES * n_logits


def _context_need(
    model: llama.Model,
    shape: ModelShape,
    sizes: ContextSizes,
    roles: Roles,
    gpu: GpuShare | None = None,
    dry: Path | None = None,
) -> dict[str, int]:
    """Return the bytes of host memory by part of a context, including memory that llama.cpp does not report.

    dry: the model's file, for a dry run without allocating them, which is slower.
    """
    if dry is None:
        with llama.captured_log() as lines:
            llama.Context(model, sizes).close()
    else:
        _, lines = dry_run(dry, sizes)
    experts = [piece for pieces in roles.experts.values() for piece in pieces]
    matrices = (*roles.factors, *((roles.head,) if roles.head else ()), *experts)
    widest = max((piece.weight.shape[2] for piece in matrices), default=0)
    parts = _context_parts(lines, shape, sizes, widest, model.n_vocab, gpu.buffer_name if gpu else None)
    # A product with paged experts counts the rows of each slot. Kernels of repacked weights record every row once.
    n_slots = sum(pieces[0].weight.shape[0] for pieces in roles.experts.values())
    notes = 1 if all(piece.repacked for piece in experts) else shape.n_experts_used
    parts["compute buffers"] += n_slots * (_COUNTER_BYTES + 8 * sizes.batch * notes)
    if roles.table is None:  # rows are hidden states: ours, llama.cpp's copy, and those of the ranks
        parts["hidden states"] = 3 * 4 * sizes.batch * shape.n_embd
    return parts


def _context_parts(
    lines: Sequence[str], shape: ModelShape, sizes: ContextSizes, widest: int, n_vocab: int, gpu: str | None = None
) -> dict[str, int]:
    """Return the bytes by part of a context: llama.cpp's figures in `lines`, and memory that llama.cpp does not report.

    widest: number of columns of the widest weight.
    gpu: name of a GPU's buffers, which are left out.
    """
    parts = context_parts(lines, gpu)
    rows = sizes.batch
    # ggml buffers for converted rows of a product, expert choices, and attention without flash attention.
    parts["compute buffers"] += rows * sizes.adapter_row_bytes
    parts["compute buffers"] += MIB + 2 * rows * widest + 8 * rows * shape.n_experts * shape.n_experts_used
    if not any("FLASH_ATTN_EXT" in line for line in lines):
        parts["compute buffers"] += 2 * sizes.context * rows * max(shape.n_heads, default=0)
    # llama.cpp reserves logits for one row per sequence, and more if more outputs are requested.
    parts["output buffer"] += 4 * n_vocab * max(0, sizes.outputs - sizes.sequences)
    return parts


def _check(
    shape: ModelShape, parts: dict[str, int], least: dict[str, int], budget: int, savings: Mapping[str, int]
) -> None:
    """Raise NotEnoughMemory if the minimum exceeds the budget. savings: bytes that each option would save."""
    all_parts = {**parts, **least}
    total = sum(all_parts.values())
    if total > budget:
        sizes_text = ", ".join(f"{name} {n / MIB:,.0f}" for name, n in all_parts.items() if n)
        without_share = total - budget // MARGIN_SHARE  # this margin grows with the budget
        least_mib = -(-without_share * MARGIN_SHARE // ((MARGIN_SHARE - 1) * MIB))
        error = NotEnoughMemory(
            f"{shape.name} needs a budget of at least {least_mib:,} MiB ({sizes_text});"
            f" {budget / MIB:,.0f} MiB were given. {_advice(total - budget, savings)}"
        )
        error.least = least_mib * MIB
        raise error


def _advice(lacking: int, savings: Mapping[str, int]) -> str:
    """Return advice with the first options that together save enough, and their savings; all options if these are
    too few."""
    chosen, left = [], lacking
    for option, n in savings.items():
        if left <= 0:
            break
        chosen.append(f"{option} (saves {n / MIB:.1f} MiB)")
        left -= n
    larger = "a larger --memory, a smaller --batch or --kv-type"
    if not chosen:
        return f"Use {larger}"
    advice = " and ".join(filter(None, [", ".join(chosen[:-1]), chosen[-1]]))
    return f"It fits with {advice}; or use {larger}" if left <= 0 else f"{advice} would not be enough: use {larger}"


def measure(roles: Roles, read: ReadOptions, options: BudgetOptions, threads: int) -> tuple[ReadOptions, Speed, float]:
    """Return (read options, decode speeds, bytes of weights per second for a row of a prompt)."""
    if not roles.factors:
        return read, Speed(1e9, 1e9), 1e9
    largest = max(roles.factors, key=lambda piece: piece.span)
    n, chunk, rate = measure_reads(largest, options.io_threads, options.io_chunk, options.memory // _BUFFERS_SHARE)
    decode, prefill = measure_products(largest, threads)
    return replace(read, threads=n, chunk=chunk), Speed(rate, decode), prefill


def _choose_batch(roles: Roles, sizes: ContextSizes, room: int, read: float, prefill: float) -> ContextSizes:
    """Return the sizes with the smallest batch that computes longer than a pass reads non-resident weights."""
    total = sum(piece.n_bytes for piece in roles.factors)
    if not total:
        return sizes
    rows = _COMPUTE_OVER_READ * (max(0, total - room) / read) / (total / prefill)
    batch = min(next((n for n in _BATCHES if n >= rows), _BATCHES[-1]), sizes.context)
    return replace(sizes, batch=max(batch, sizes.outputs))


def _disk_keeps_up(roles: Roles, share: PagePlan, speed: Speed) -> bool:
    """Return whether a token's streamed weights are read faster than all weights are computed.

    If so, repacking after reads competes with computing for cores.
    """
    total = sum(piece.n_bytes for piece in roles.factors)
    return 0 < share.streamed_bytes / speed.read < total / speed.compute


def _reads_faster_laid_out(share: PagePlan, read: ReadOptions, speed: Speed) -> bool:
    """Return whether reading is faster on this disk if the data need no repacking."""
    largest = max((piece for piece in share.streamed if piece.repacked), key=lambda piece: piece.n_bytes, default=None)
    if largest is None:
        return False
    rate = read_rate(replace(largest, is_laid_out=True), read.threads, read.chunk)
    return clearly_faster(rate, speed.read, by=LAID_OUT)


def rows_of_experts(roles: Roles, share: PagePlan, used: int) -> int:
    """Return the largest number of batch rows whose experts all fit, whichever experts they choose."""
    most = 1 << 30
    if not share.expert_room:
        return most
    for pieces in roles.experts.values():
        room = share.expert_room // Experts.expert_bytes(pieces)
        if room < pieces[0].weight.shape[0]:
            most = min(most, max(1, room // used))
    return most

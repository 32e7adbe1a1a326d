"""A model loaded within a budget: a limit for the whole process, accounted part by part before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from devices.probe import own_rss
from edge import llama
from edge.direct import DirectFile
from edge.disk import measure_products, measure_reads
from edge.errors import NotEnoughMemory
from edge.experts import Experts
from edge.ggml_weights import OwnMemory
from edge.hooks import Hook, NodeHooks
from edge.llama import ContextSizes
from edge.memory import MIB, MemoryNeed, cache_bytes, of_context
from edge.page_plan import PagePlan, ReadOptions, least_parts, plan
from edge.paged_weights import PagedWeights
from edge.pager import Piece, Source
from edge.reader import DEFAULT_CHUNK, DEFAULT_THREADS, Reader
from edge.stub import load_stub
from edge.weight_roles import Roles, sort_weights
from partition.errors import PlanError
from partition.model import ModelShape
from partition.paging import Speed
from quant.gguf_file import GgufFile
from quant.types import TensorType

_MARGIN = 16 * MIB  # what the interpreter and llama.cpp come to need while they run
_MARGIN_SHARE = 128  # and this part of the budget: page tables, ends of pages
_CACHE_SHARE = 8  # a context that is not asked for takes at most this part of the budget
_LEAST_CONTEXT = 512  # tokens
_BATCHES = (128, 256, 512, 1024, 2048)  # rows, to choose from
_COMPUTE_OVER_READ = 2.0  # a pass over a prompt's rows should compute for so much longer than it reads


@dataclass(frozen=True)
class BudgetOptions:
    """What a person may set; None: measured."""

    memory: int  # bytes, of the whole process
    window: int | None = None  # bytes
    io_threads: int | None = None
    io_chunk: int | None = None  # bytes
    verify: bool = False


@dataclass(frozen=True)
class Within:
    """A model within its budget."""

    model: llama.Model
    own: OwnMemory
    context: llama.Context
    sizes: ContextSizes
    hooks: NodeHooks | None
    weights: PagedWeights
    memory: MemoryNeed
    files: tuple[DirectFile, ...]

    def close(self) -> None:
        """Free it all."""
        self.context.close()
        _close(self.weights, self.model, self.own, self.files)


def context_within(shape: ModelShape, kv: TensorType, most: int, budget: int) -> int:
    """Tokens of context, at most `most`, that leave a budget for the weights: a power of two below that if need be."""
    context = most
    while context > _LEAST_CONTEXT and cache_bytes(shape, context, kv) * _CACHE_SHARE > budget:
        context = max(_LEAST_CONTEXT, 1 << (context - 1).bit_length() - 1)
    return context


def load_within(
    file: GgufFile,
    shape: ModelShape,
    options: BudgetOptions,
    sizes: ContextSizes,
    *,
    choose_batch: bool,
    threads: int,
    repack: bool,
    tokens: bool,
    hooks: Sequence[Hook] = (),
    progress: Callable[[float], None] | None = None,
) -> Within:
    """Load a model so that the process never holds more than `options.memory` bytes.

    choose_batch: `sizes.batch` is only a proposal. tokens: batches bring tokens, not hidden states. NotEnoughMemory,
    with the least budget and what it is made of; the errors of `load_stub`; WeightsError.
    """
    budget = options.memory
    cache = cache_bytes(shape, sizes.context, sizes.kv)
    if cache >= budget:
        raise NotEnoughMemory(
            f"a budget of {budget / MIB:,.0f} MiB is less than the KV cache of {sizes.context} tokens,"
            f" {cache / MIB:,.0f} MiB; use a smaller --context, a smaller --kv-type or a larger --memory"
        )
    model, own = load_stub(file)
    files: list[DirectFile] = []
    weights: PagedWeights | None = None
    try:
        opened = {path: DirectFile(path, path.stat().st_size) for path in file.paths}
        files.extend(opened.values())
        sources = {name: Source(opened[tensor.path], tensor.offset) for name, tensor in file.tensors.items()}
        roles = sort_weights(own.weights, sources, repack=repack, tokens=tokens)
        runtime = own_rss() + _MARGIN + budget // _MARGIN_SHARE
        used = shape.n_experts_used
        at_once = used * max(2, sizes.sequences)  # of each sequence, or of one and of the next layer
        read = ReadOptions(options.io_threads or DEFAULT_THREADS, options.io_chunk or DEFAULT_CHUNK, options.window)
        parts = {"runtime": runtime, **_of_context(model, sizes, roles)}
        share = plan(roles, 1 << 62, read, Speed(1.0, 1.0), sizes.batch, at_once)
        if sum(parts.values()) + sum(share.parts.values()) > budget:
            _check(shape, parts, least_parts(roles, read, sizes.batch, at_once), budget)
            read, speed, prefill = _measure(roles, read, options, threads)
            if choose_batch:
                sizes, parts = _choose_batch(model, roles, sizes, parts, budget, speed.read, prefill)
            least = least_parts(roles, read, sizes.batch, at_once)
            _check(shape, parts, least, budget)
            try:
                share = plan(roles, budget - sum(parts.values()), read, speed, sizes.batch, at_once)
            except PlanError as error:
                raise NotEnoughMemory(f"{error}; use a smaller --window, or a larger --memory") from None
            sizes = replace(sizes, batch=min(sizes.batch, _rows_of_experts(roles, share, used)))
        reader = Reader(roles.longest_row, read.threads, read.chunk, verify=options.verify)
        weights = PagedWeights(roles, share, reader, threads=threads, experts_used=used, progress=progress)
        all_hooks = (*weights.hooks(), *hooks)
        node_hooks = NodeHooks(all_hooks) if all_hooks else None
        context = llama.Context(model, sizes, threads=threads, on_node=node_hooks.callback if node_hooks else None)
    except BaseException:
        _close(weights, model, own, files)
        raise
    return Within(
        model,
        own,
        context,
        sizes,
        node_hooks,
        weights,
        MemoryNeed({**parts, **share.parts}, budget, budget=budget),
        tuple(files),
    )


def _close(weights: PagedWeights | None, model: llama.Model, own: OwnMemory, files: Sequence[DirectFile]) -> None:
    model.close()
    if weights is not None:
        weights.close()
    own.close()
    for file in files:
        file.close()


def _of_context(model: llama.Model, sizes: ContextSizes, roles: Roles) -> dict[str, int]:
    """Bytes by part that a context takes: what llama.cpp says, and ggml's room for a product's rows in another type."""
    with llama.captured_log() as lines:
        llama.Context(model, sizes).close()
    parts = of_context(lines)
    pieces = (*roles.factors, *((roles.head,) if roles.head else ()), *(p for ps in roles.experts.values() for p in ps))
    widest = max((piece.weight.shape[2] for piece in pieces), default=0)
    parts["compute buffers"] += 2 * sizes.batch * widest + MIB
    return parts


def _check(shape: ModelShape, parts: dict[str, int], least: dict[str, int], budget: int) -> None:
    need = {**parts, **least}
    total = sum(need.values())
    if total > budget:
        words = ", ".join(f"{name} {n / MIB:,.0f}" for name, n in need.items() if n)
        without_share = total - budget // _MARGIN_SHARE  # that part grows with the budget
        least_mib = -(-without_share * _MARGIN_SHARE // ((_MARGIN_SHARE - 1) * MIB))
        raise NotEnoughMemory(
            f"{shape.name} needs a budget of at least {least_mib:,} MiB ({words});"
            f" {budget / MIB:,.0f} MiB were given. Use a larger --memory, a smaller --context, --batch or --kv-type"
        )


def _measure(roles: Roles, read: ReadOptions, options: BudgetOptions, threads: int) -> tuple[ReadOptions, Speed, float]:
    """(how to read, speeds of decoding, bytes of weights a second that a prompt's row passes)."""
    pieces: list[Piece] = sorted(roles.factors, key=lambda piece: -piece.span)[:8]
    if not pieces:
        return read, Speed(1e9, 1e9), 1e9
    n, chunk, rate = measure_reads(pieces, options.io_threads, options.io_chunk)
    decode, prefill = measure_products(pieces[0], threads)
    return replace(read, threads=n, chunk=chunk), Speed(rate, decode), prefill


def _choose_batch(
    model: llama.Model,
    roles: Roles,
    sizes: ContextSizes,
    parts: dict[str, int],
    budget: int,
    read: float,
    prefill: float,
) -> tuple[ContextSizes, dict[str, int]]:
    """The least batch whose rows are computed for longer than a pass reads, and its parts."""
    total = sum(piece.n_bytes for piece in roles.factors)
    streamed = max(0, total - (budget - sum(parts.values())))
    rows = _COMPUTE_OVER_READ * (streamed / read) / (total / prefill)
    batch = min(next((n for n in _BATCHES if n >= rows), _BATCHES[-1]), sizes.context)
    batch = max(batch, sizes.outputs)
    if batch == sizes.batch:
        return sizes, parts
    sizes = replace(sizes, batch=batch)
    return sizes, {"runtime": parts["runtime"], **_of_context(model, sizes, roles)}


def _rows_of_experts(roles: Roles, share: PagePlan, used: int) -> int:
    """Rows of a batch that find room for all experts they may choose."""
    most = 1 << 30
    if not share.expert_room:
        return most
    for pieces in roles.experts.values():
        room = share.expert_room // Experts.bytes_of_one([piece.weight for piece in pieces])
        if room < pieces[0].weight.shape[0]:
            most = min(most, max(1, room // used))
    return most

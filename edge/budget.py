"""A model loaded within a budget, which is a limit for the whole process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge import llama
from edge.accounts import BudgetOptions, share_out
from edge.direct import DirectFile
from edge.errors import NotEnoughMemory
from edge.ggml_weights import OwnMemory
from edge.hooks import Hook, NodeHooks
from edge.laid_out import laid_out
from edge.llama import ContextSizes
from edge.memory import MIB, MemoryNeed
from edge.page_plan import PagePlan
from edge.paged_weights import PagedWeights
from edge.pager import Source
from edge.reader import Reader
from edge.stub import load_stub
from edge.weight_roles import sort_weights
from partition.model import ModelShape
from quant.gguf_file import GgufFile


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
        self.weights.let_go()
        self.context.close()
        _close(self.weights, None, self.model, self.own, self.files)


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
    accounted: Callable[[MemoryNeed, PagePlan], None] | None = None,
) -> Within:
    """Load a model so that the process never holds more than `options.memory` bytes.

    choose_batch: `sizes.batch` is only a proposal. tokens: batches bring tokens, not hidden states. accounted: told
    what the budget is used for, before weights are loaded. NotEnoughMemory, with the least budget and what it is made
    of; the errors of `load_stub`; WeightsError.
    """
    opened: dict[Path, DirectFile] = {}
    model, own = load_stub(file)
    files: list[DirectFile] = []
    reader: Reader | None = None
    weights: PagedWeights | None = None
    try:
        for path in file.paths:
            opened[path] = DirectFile(path, *file.stamp(path))
            files.append(opened[path])
        sources = {name: Source(opened[tensor.path], tensor.offset) for name, tensor in file.tensors.items()}
        roles = sort_weights(own.weights, sources, repack=repack, tokens=tokens)
        shared = share_out(file.path, model, shape, roles, options, sizes, threads, choose_batch)
        accounts = MemoryNeed({**shared.parts, **shared.plan.parts}, options.memory, budget=options.memory)
        if accounted is not None:
            accounted(accounts, shared.plan)
        reader = Reader(roles.longest_row, shared.read.threads, shared.read.chunk, verify=options.verify)
        plan_ = _from_laid_out(shared.plan, reader, files, shared.lay_out)
        weights = PagedWeights(
            roles, plan_, reader, threads=threads, experts_used=shape.n_experts_used, progress=progress
        )
        all_hooks = (*weights.hooks(), *hooks)
        node_hooks = NodeHooks(all_hooks) if all_hooks else None
        context = llama.Context(
            model, shared.sizes, threads=threads, on_node=node_hooks.callback if node_hooks else None
        )
    except BaseException as error:
        _close(weights, reader, model, own, files)
        if isinstance(error, OSError):  # of a system that gives no addresses, or too few
            raise NotEnoughMemory(
                f"{shape.name} needs addresses for {file.size_bytes / MIB:,.0f} MiB, and the system gives none:"
                f" {error.strerror or error}; raise its limit (ulimit -v), or use a 64-bit system"
            ) from error
        raise
    return Within(model, own, context, shared.sizes, node_hooks, weights, accounts, tuple(files))


def _close(
    weights: PagedWeights | None,
    reader: Reader | None,
    model: llama.Model,
    own: OwnMemory,
    files: Sequence[DirectFile],
) -> None:
    model.close()
    if weights is not None:
        weights.close()  # and its reader
    elif reader is not None:
        reader.close()
    own.close()
    for file in files:
        file.close()


def _from_laid_out(share: PagePlan, reader: Reader, files: list[DirectFile], make: bool) -> PagePlan:
    """Read what is streamed from a file that has it laid out, where there can be one. It is opened into `files`."""
    moved, opened = laid_out(share.streamed, reader, make=make)
    files.extend(opened)
    new = dict(zip(share.streamed, moved, strict=True))
    return replace(share, streamed=moved, head_pieces=tuple(new.get(piece, piece) for piece in share.head_pieces))

"""A model loaded within a budget, which is a limit for the whole process.

A model's header without its weights, for llama.cpp to load: the weights come later, from us.

llama.cpp wants files as long as their headers say, and then maps them and touches all of that. So the stub is long, but
empty behind the header; and once llama.cpp has checked its length, it is cut short: a mapping's pages behind the end of
its file cannot be touched, and Linux then leaves off at the first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from devices.files import removed_at_end
from edge.adapters.file import AdapterFile
from edge.errors import EngineError, NotEnoughMemory
from edge.llama import llama
from edge.llama.buffers import CallerBuffer
from edge.llama.hooks import Hook, NodeHooks
from edge.llama.llama import ContextSizes
from edge.paging.budget import BudgetOptions, plan_budget
from edge.paging.direct_file import DirectFile
from edge.paging.mapped import ModelInMemory, check_generates_text
from edge.paging.memory import MIB, MemoryNeed
from edge.paging.plan import PagePlan
from edge.paging.reader import Reader
from edge.paging.repacked_cache import laid_out
from edge.paging.roles import sort_weights
from edge.paging.weights import PagedWeights
from edge.paging.window import Source
from partition.model.model import ModelShape
from partition.slices.rules import router_first
from quant.gguf.file import GgufFile


def load_within(
    file: GgufFile,
    shape: ModelShape,
    options: BudgetOptions,
    sizes: ContextSizes,
    *,
    adapters: Sequence[AdapterFile] = (),
    choose_batch: bool,
    threads: int,
    repack: bool,
    tokens: bool,
    hooks: Sequence[Hook] = (),
    progress: Callable[[float], None] | None = None,
    accounted: Callable[[MemoryNeed, PagePlan], None] | None = None,
) -> ModelInMemory:
    """Load a model so that the process never holds more than `options.memory` bytes.

    choose_batch: `sizes.batch` is only a proposal. tokens: batches bring tokens, not hidden states. accounted: called
    with what the budget is used for, before weights are loaded. NotEnoughMemory, with the least budget and what it is
    made of; the errors of `load_stub`; WeightsError.
    """
    opened: dict[Path, DirectFile] = {}
    model, own = load_stub(file)
    files: list[DirectFile] = []
    reader: Reader | None = None
    weights: PagedWeights | None = None
    try:
        check_generates_text(model, file.path)
        for adapter in adapters:
            adapter.load(model)
        for path in file.paths:
            opened[path] = DirectFile(path, *file.stamp(path))
            files.append(opened[path])
        sources = {name: Source(opened[tensor.path], tensor.offset) for name, tensor in file.tensors.items()}
        roles = sort_weights(own.weights, sources, repack=repack, tokens=tokens)
        shared = plan_budget(file.path, model, shape, roles, options, sizes, threads, choose_batch)
        accounts = MemoryNeed({**shared.parts, **shared.plan.parts}, options.memory, budget=options.memory)
        if accounted is not None:
            accounted(accounts, shared.plan)
        reader = Reader(roles.longest_row, shared.read.threads, shared.read.chunk, verify=options.verify)
        plan_ = _from_laid_out(shared.plan, reader, files, shared.lay_out)
        weights = PagedWeights(
            roles,
            plan_,
            reader,
            threads=threads,
            experts_used=shape.n_experts_used,
            router_first=router_first(shape.architecture),
            progress=progress,
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
    closing = ExitStack()
    for free in (partial(_close, weights, None, model, own, files), context.close, weights.reset):
        closing.callback(free)  # the last one comes first
    return ModelInMemory(model, context, shared.sizes, node_hooks, accounts, closing, weights=weights)


def _close(
    weights: PagedWeights | None,
    reader: Reader | None,
    model: llama.Model,
    own: CallerBuffer,
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


_CHECKED = "loaded meta data with"  # what llama.cpp says when it has read and checked all headers


def load_stub(file: GgufFile, *, predictors: bool = False) -> tuple[llama.Model, CallerBuffer]:
    """The model of `file` in llama.cpp, and its weights, of which none has memory yet. predictors: as `llama.Model`
    takes it. EngineError if llama.cpp refuses it, or the folder for temporary files does."""
    own = CallerBuffer()
    with _stub(file) as (path, shorten):

        def listen(line: str) -> None:
            if _CHECKED in line:
                shorten()

        try:
            with llama.forwarded_log(listen):
                model = llama.Model(path, repack=False, own=own, predictors=predictors)
                model.path = str(file.path)  # the stub is removed
                return model, own
        except EngineError as error:
            raise EngineError(str(error).replace(str(path), str(file.path))) from None


@contextmanager
def _stub(file: GgufFile) -> Iterator[tuple[Path, Callable[[], None]]]:
    """(path, function that cuts the files behind their headers)."""
    with tempfile.TemporaryDirectory(prefix="edge-stub-") as folder, removed_at_end(Path(folder)):
        headers: dict[Path, int] = {}
        for path in file.paths:
            copy, n_bytes = Path(folder, path.name), file.header_bytes(path)
            try:
                with open(path, "rb") as whole, open(copy, "wb") as out:
                    out.write(whole.read(n_bytes))
                    out.truncate(file.stamp(path)[0])
            except OSError as error:
                raise EngineError(
                    f"a copy of the header of {path.name}, {n_bytes} bytes and the rest empty, cannot be made in"
                    f" {folder}: {error.strerror}; name another folder with TMPDIR"
                ) from error
            headers[copy] = n_bytes

        def shorten() -> None:
            while headers:
                os.truncate(*headers.popitem())

        yield Path(folder, file.path.name), shorten

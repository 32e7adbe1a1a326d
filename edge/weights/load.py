"""Load a model within a memory budget, which limits the whole process.

llama.cpp loads a stub file: the model's header without weights. The weights are read later, by this package.

llama.cpp requires files of the length that their headers give. It then maps them and touches all of their pages. So the
stub has this length, but is empty after the header. Once llama.cpp has checked the length, the stub is truncated: pages
of a mapping beyond the end of its file cannot be touched, and Linux stops at the first one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from devices.files import removed_at_end
from edge.errors import EngineError, NotEnoughMemory
from edge.llama import llama
from edge.llama.buffers import CallerBuffer
from edge.llama.llama import ContextSizes
from edge.weights.arena import OneArena
from edge.weights.budget import BudgetOptions, Opening
from edge.weights.direct_file import DirectFile
from edge.weights.mapped import ModelInMemory, check_generates_text
from edge.weights.memory import MIB, LoadRequest, MemoryNeed
from edge.weights.on_gpu import GpuRequest, copy_to_gpu, share_of_gpu
from edge.weights.paged_weights import PagedWeights
from edge.weights.plan import PagePlan
from edge.weights.reader import Reader
from edge.weights.repacked_cache import laid_out
from quant.gguf.file import GgufFile


@dataclass(frozen=True)
class Loaded:
    """Loaded weights, with the memory need and sizes of a context for them."""

    weights: PagedWeights
    memory: MemoryNeed
    sizes: ContextSizes


def load_weights(opening: Opening) -> Loaded:
    """Load the weights within a constant budget. Raises NotEnoughMemory or WeightsError."""
    options, roles = opening.options, opening.roles()
    shared = opening.plan(roles, options.memory)
    accounts = MemoryNeed({**shared.parts, **shared.plan.parts}, options.memory, budget=options.memory)
    if opening.accounted is not None:
        opening.accounted(accounts, shared.plan)
    reader = Reader(roles.longest_row, shared.read.threads, shared.read.chunk, verify=options.verify)
    with ExitStack() as closing:
        closing.callback(reader.close)
        arena = OneArena(shared.plan.resident)
        closing.callback(arena.close)
        plan = _from_laid_out(shared.plan, reader, shared.lay_out)
        closing.pop_all()  # the weights close both, even if they fail
        weights = PagedWeights(opening, roles, plan, reader, arena, opening.request.progress)
        return Loaded(weights, accounts, shared.sizes)


def load_within(
    request: LoadRequest,
    options: BudgetOptions,
    *,
    choose_batch: bool,
    tokens: bool,
    accounted: Callable[[MemoryNeed, PagePlan], None] | None,
    load: Callable[[Opening], Loaded],
    gpu: GpuRequest | None = None,
) -> ModelInMemory:
    """Load a model so that the process never holds more than `options.memory` bytes.

    load: loads the weights that are not on a GPU. For the other arguments see `Opening`.
    gpu: part of the model that goes to a GPU; None: nothing.
    Raises NotEnoughMemory with the minimum budget and its parts, the errors of `load_stub`, and WeightsError.
    """
    file, hooks = request.file, request.hooks
    share = share_of_gpu(request, gpu) if gpu is not None else None
    model, own = load_stub(file, gpu_layers=share.native_layers if share else 0)
    try:
        with ExitStack() as closing:  # closes the context, the model, its weights, then their memory and files
            files, opened = closing.enter_context(ExitStack()), dict[Path, DirectFile]()
            closing.callback(own.close)
            after_model = closing.enter_context(ExitStack())
            on_gpu = share.place(own.weights, after_model) if share is not None else []
            closing.callback(model.close)
            check_generates_text(model, file.path)
            for adapter in request.adapters:
                adapter.load(model)
            for path in file.paths:
                opened[path] = DirectFile(path, *file.stamp(path))
                files.callback(opened[path].close)
            opening = Opening(request, options, choose_batch, tokens, accounted, model, own.weights, opened, share)
            loaded = load(opening)
            weights = loaded.weights
            after_model.callback(weights.close)  # also closes its reader
            copy_to_gpu(on_gpu, opening.sources(), request.progress)
            node_hooks = weights.node_hooks(hooks)
            on_node = node_hooks.callback if node_hooks else None
            context = llama.Context(model, loaded.sizes, threads=request.threads, on_node=on_node)
            closing.callback(context.close)
            closing.callback(weights.reset)
            # A pass that hooks observed, or that changed recurrent states or windows, must not be computed twice.
            if tokens and not (hooks or model.is_recurrent or model.window):
                weights.stop_pass = lambda: context.stopping.end_pass()
            layers = share.layers if share is not None else None
            return ModelInMemory(
                model, context, loaded.sizes, node_hooks, loaded.memory, closing.pop_all(), layers, weights
            )
    except OSError as error:  # the system gives no addresses, or too few
        raise NotEnoughMemory(
            f"{file.shape.name} needs address space for {file.size_bytes / MIB:,.0f} MiB, and the system refuses it:"
            f" {error.strerror or error}; raise its limit (ulimit -v), or use a 64-bit system"
        ) from error


def _from_laid_out(share: PagePlan, reader: Reader, make: bool) -> PagePlan:
    """Read streamed weights from files with repacked copies, if there are any."""
    moved = dict(zip(share.streamed, laid_out(share.streamed, reader, make=make), strict=True))
    pieces = tuple(moved.get(piece, piece) for piece in share.head_pieces)
    return replace(share, streamed=tuple(moved.values()), head_pieces=pieces)


_CHECKED = "loaded meta data with"  # llama.cpp's log line after it has read and checked all headers


def load_stub(file: GgufFile, *, predictors: bool = False, gpu_layers: int = 0) -> tuple[llama.Model, CallerBuffer]:
    """Return llama.cpp's model of `file`, and its weights, still without memory.

    predictors, gpu_layers: see `llama.Model`.

    Raises EngineError if llama.cpp refuses the file, or if the folder for temporary files is not usable.
    """
    own = CallerBuffer()
    with _stub(file) as (path, shorten):

        def listen(line: str) -> None:
            if _CHECKED in line:
                shorten()

        try:
            with llama.forwarded_log(listen):
                model = llama.Model(path, repack=False, own=own, predictors=predictors, gpu_layers=gpu_layers)
                model.path = str(file.path)  # the stub is removed
                return model, own
        except EngineError as error:
            raise EngineError(str(error).replace(str(path), str(file.path))) from None


@contextmanager
def _stub(file: GgufFile) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield (path, function that truncates the files after their headers)."""
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
                    f"an empty copy of {path.name} with its header of {n_bytes} bytes cannot be created in"
                    f" {folder}: {error.strerror}; name another folder with TMPDIR"
                ) from error
            headers[copy] = n_bytes

        def shorten() -> None:
            while headers:
                os.truncate(*headers.popitem())

        yield Path(folder, file.path.name), shorten

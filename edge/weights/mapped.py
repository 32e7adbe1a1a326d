"""Load a model that fits in memory: llama.cpp maps its file, and puts layers on a GPU if there is one."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from edge.errors import EngineError
from edge.llama import llama
from edge.llama.hooks import NodeHooks
from edge.llama.interrupt import PassStopped
from edge.llama.layer_stream import LayerStream
from edge.llama.llama import ContextSizes
from edge.weights import gpu_layers, memory
from edge.weights.gpu_layers import GpuLayers
from edge.weights.memory import LoadRequest, MemoryNeed
from edge.weights.paged_weights import PagedWeights, one_pass


@dataclass(frozen=True)
class ModelInMemory:
    """Model in memory, with its context."""

    model: llama.Model
    context: llama.Context
    sizes: ContextSizes
    hooks: NodeHooks | None
    memory: MemoryNeed
    closing: ExitStack  # frees everything
    gpu_layers: GpuLayers | None = None  # None without a GPU, or under a budget
    weights: PagedWeights | None = None  # weights under a budget; None: llama.cpp holds them
    stream: LayerStream | None = None  # layers that are not resident in GPU memory

    def decode(self, rows: llama.Batch, n: int, outputs: int) -> None:
        """Compute the first `n` rows. `outputs` of them give logits. A pass that was stopped to free memory is
        repeated."""
        while True:
            if self.stream is not None:
                self.stream.begin(n)
            with suppress(PassStopped):
                with nullcontext() if self.weights is None else one_pass(self.weights, rows, n):
                    if self.hooks is None:
                        self.context.decode(rows, n)
                    else:
                        self.hooks.decode(self.context, rows, n, outputs)
                return


def load_mapped(request: LoadRequest, *, on_gpu: int | None, most_on_gpu: int | None) -> ModelInMemory:
    """Load a model with its adapters.

    on_gpu, most_on_gpu: `requested` and `most` of `gpu_layers.for_model`.
    Raises NotEnoughMemory or EngineError.
    """
    path, sizes = request.file.path, request.sizes
    need = memory.check(path, request.file.shape, sizes)
    repack = need.fits if request.repack is None else request.repack
    layers = gpu_layers.for_model(request, requested=on_gpu, most=most_on_gpu, repack=repack)
    node_hooks = NodeHooks(request.hooks) if request.hooks else None
    with ExitStack() as closing:
        model = llama.Model(path, gpu_layers=layers.native if layers else 0, repack=repack, progress=request.progress)
        closing.callback(model.close)
        check_generates_text(model, path)
        for adapter in request.adapters:
            adapter.load(model)
        on_node = node_hooks.callback if node_hooks else None
        context = llama.Context(model, sizes, threads=request.threads, on_node=on_node)
        closing.callback(context.close)
        return ModelInMemory(model, context, sizes, node_hooks, need, closing.pop_all(), layers)


def check_generates_text(model: llama.Model, path: Path) -> None:
    """Raise EngineError unless a model has a decoder and a vocabulary."""
    if not model.has_decoder or model.n_vocab == 0:
        raise EngineError(f"{path.name} is not a text generation model")

"""From engine options to the sizes of a context, for a model and this machine."""

from __future__ import annotations

from collections.abc import Sequence

from edge.errors import EngineError
from edge.llama.llama import ContextSizes
from edge.llm.options import DEFAULT_CONTEXT, SINKS, EngineOptions
from edge.weights.adapter_file import AdapterFile, adapter_sizes
from edge.weights.budget import BudgetOptions, OtherUses, context_within
from partition.model.file import ModelFile
from partition.model.model import ModelShape, decode_bytes
from quant.types import CacheType, cache_type

# Bytes of a matrix product's weights per thread. Reading them takes about 20 us, and synchronizing threads 1 to 5 us.
_THREAD_BYTES = 256 << 10


def resolve(options: EngineOptions, shape: ModelShape) -> tuple[int, CacheType]:
    """Return (context in tokens, KV type) of the options for a model of this shape."""
    kv = cache_type(options.kv_type)
    context = options.context
    if context is None:
        context = min(shape.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        if options.attention_window is not None:
            context = SINKS + options.attention_window
        if options.sure_memory is not None:
            context = context_within(shape, kv, context, options.sure_memory)
    if options.attention_window is not None and context < SINKS + options.attention_window:
        raise EngineError(
            f"an attention window of {options.attention_window} tokens needs a context of"
            f" {SINKS + options.attention_window} tokens, got {context}"
        )
    return context, kv


def context_sizes(
    options: EngineOptions, shape: ModelShape, adapters: Sequence[AdapterFile] = (), rollback: int = 0
) -> ContextSizes:
    """Return the sizes of llama.cpp's context for a model of this shape.

    rollback: rows that recurrent layers can roll back.
    Raises EngineError unless a batch has a row for each sequence.
    """
    context, kv = resolve(options, shape)
    batch = min(options.rows, context)
    options.check_sequences(batch)
    outputs, by_layer = min(options.outputs or options.sequences, batch), adapter_sizes(adapters, shape.n_layers)
    return ContextSizes(
        context, kv, batch, options.sequences, outputs, options.flash_attention, rollback=rollback, **by_layer
    )


def worth_threads(file: ModelFile) -> int:
    """Return the number of threads with enough work in each matrix product of a token, at least 1."""
    products = [
        tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and name != "token_embd.weight"
    ]
    return max(1, round(decode_bytes(file, file.shape) / max(1, len(products)) / _THREAD_BYTES))


def budget_options(
    options: EngineOptions, budget: int, sizes: ContextSizes, prefix_bytes: int, *, embeddings: bool
) -> BudgetOptions:
    """Return the options of a memory budget, including its other uses.

    budget: bytes.
    prefix_bytes: bytes of the budget for prefix cache blocks on their way to disk.
    embeddings: the model is a slice and yields no logits.
    """
    more_rows = max(0, sizes.outputs - sizes.sequences)
    reserved, draft_rows = options.reserved - options.draft_bytes, min(options.draft_rows, more_rows)
    uses = OtherUses(reserved, prefix_bytes, 0 if embeddings else more_rows, draft_rows, options.draft_bytes)
    return BudgetOptions(budget, options.window, options.io_threads, options.io_chunk, options.verify, uses)

"""Engine for one model on this machine: a checked and loaded GGUF file with its KV cache, which decodes batches of
rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from devices.probe import default_threads
from edge.closing import Closing
from edge.errors import EngineError, NotEnoughMemory
from edge.llama import llama
from edge.llama.ggml import forget_views
from edge.llama.hooks import Hook
from edge.llama.predicting import HiddenListener, HiddenRows
from edge.llm.interface import DecodesBySteps
from edge.llm.options import DEFAULTS, EngineOptions
from edge.llm.prefixes import keep_prefixes
from edge.llm.resolve import budget_options, context_sizes, worth_threads
from edge.llm.snapshots import affordable, snapshot_bytes
from edge.llm.states import States, held_bytes
from edge.media.placing import PlacedRows
from edge.tasks import SILENT, Steps
from edge.text.constraints.constraint import Mask
from edge.weights.adapter import Scales
from edge.weights.adapter_file import AdapterFile, CheckedAdapter
from edge.weights.budgets import Budgets, chosen_budgets
from edge.weights.elastic.load import loader
from edge.weights.gpu_budget import load_on_gpu
from edge.weights.load import load_within
from edge.weights.loaded_adapters import LoadedAdapters
from edge.weights.mapped import ModelInMemory, load_mapped
from edge.weights.memory import LoadRequest, MemoryNeed
from edge.weights.plan import PagePlan
from partition.model.file import ModelFile, ModelLike
from partition.model.generation import generates
from partition.slices.rules import has_windows, takes_tokens
from quant.gguf.file import GgufFile

Accounted = Callable[[MemoryNeed, PagePlan], None]


class ModelRunner(Closing):
    """A model or a slice of one on this device. It computes rows and holds their KV cache."""

    def __init__(
        self,
        model: ModelLike,
        options: EngineOptions = DEFAULTS,
        hooks: Sequence[Hook] = (),
        progress: Callable[[float], None] | None = None,
        accounted: Accounted | None = None,
        *,
        embeddings: bool = False,
    ) -> None:
        """Check the file, account for memory, and load.

        model: path of the model file, or the file if it is already open.
        progress: called with the fraction of weights loaded.
        embeddings: batches contain hidden states instead of tokens.
        accounted: called with the uses of a memory budget before weights are loaded.

        Raises ModelFileError, NotEnoughMemory, WeightsError or EngineError.
        """
        self.file = ModelFile.open(model)
        self.path, self.shape = self.file.path, self.file.shape
        self._generates = generates(self.file)
        self.threads = options.threads or min(default_threads(), worth_threads(self.file))
        adapters = () if embeddings else CheckedAdapter.all_from(options.lora, self.file)
        slices = [AdapterFile(Path(path), self.file) for path in options.lora] if embeddings else []
        self.adapters = LoadedAdapters(adapters, slices or [adapter.file for adapter in adapters])
        # All ranks have agreed on their value (`shared_rollback`), whatever memory each of them has.
        rollback = options.rollback if embeddings else affordable(options.rollback, self.file, options.sure_memory)
        sizes = context_sizes(options, self.shape, self.adapters.files, rollback)
        self.context, self.sequences, self.outputs = sizes.context, sizes.sequences, sizes.outputs
        self.attention_window = options.attention_window
        n_embd = self.shape.n_embd if embeddings else 0
        new_batch = partial(llama.Batch, n_embd=n_embd, as_tokens=takes_tokens(self.file.architecture))
        request = LoadRequest(
            self.file, sizes, self.threads, self.adapters.files, options.repack, self._generates,
            new_batch, hooks, progress,
        )  # fmt: skip
        self._loaded = loaded = self._load(request, options, accounted, embeddings=embeddings)
        self.model, self._context = loaded.model, loaded.context
        self.adapters.context = self._context
        self.hidden = HiddenRows(self._context)
        self.memory, self.gpu_layers = loaded.memory, loaded.gpu_layers
        self.paging, self.batch = loaded.weights, loaded.sizes.batch
        self.states = States(self.file, self._context, sizes.kv, snapshot_bytes(options.sure_memory))
        if options.prefixes is not None:
            keep_prefixes(self.states, self.file, options.prefixes, held_bytes(self.shape) if options.memory else None)
        self.rows = new_batch(self.batch)

    def _load(
        self, request: LoadRequest, options: EngineOptions, accounted: Accounted | None, *, embeddings: bool
    ) -> ModelInMemory:
        """Load the model: memory-mapped, or within budgets of memory and GPU memory."""
        budgets = Budgets(options.memory, None)
        if self._generates:
            budgets = chosen_budgets(
                self.shape, memory=options.memory, gpu_memory=options.gpu_memory, gpu_layers=options.gpu_layers,
                # Adapters are not computed on a GPU beside a budget of memory.
                most_gpu_layers=0 if options.lora else options.most_gpu_layers,
            )  # fmt: skip
        mapped = partial(load_mapped, request, on_gpu=options.gpu_layers, most_on_gpu=options.most_gpu_layers)
        if budgets.memory is None:
            if budgets.gpu is not None and budgets.gpu.budget is not None:
                return load_on_gpu(request, budgets.gpu.budget, budgets.gpu.handle)
            return mapped()
        prefix_bytes = held_bytes(self.shape) if options.prefixes else 0
        within = partial(
            load_within,
            request,
            budget_options(options, budgets.memory, request.sizes, prefix_bytes, embeddings=embeddings),
            choose_batch=options.batch is None,
            tokens=not embeddings,
            accounted=accounted,
            load=loader(options.least_memory, options.prefer),
        )
        try:
            return within(gpu=budgets.gpu)
        except NotEnoughMemory:
            if budgets.is_own_choice:
                return mapped()
            if budgets.gpu is None or budgets.gpu.is_required:
                raise
        return within()  # the GPU has less memory than its driver reported, and nobody asked for it

    def decode_rows(self, rows: llama.Batch, n: int) -> None:
        """Compute the first `n` rows of a batch. The caller has filled in any positions and sequences."""
        if not self._generates:  # ggml would abort
            raise EngineError(f"{self.path.name} generates no text; use `edge serve` to compute embeddings with it")
        outputs = int(np.count_nonzero(rows.outputs[:n]))
        if outputs > self.outputs:  # ggml would abort
            raise EngineError(
                f"{outputs} rows should produce logits, but the engine was made for {self.outputs}; set outputs"
            )
        self._loaded.decode(rows, n, outputs)

    def use_top(self, top: int) -> None:
        """Only the `top` largest logits of each row are read from the next decode on; 0: all. Others may be -inf."""
        self._context.top = top

    def logits(self, row: int) -> NDArray[np.float32]:
        """Return the logits [n_vocab] of row `row` of the last batch, as a view that is valid until the next decode."""
        logits: NDArray[np.float32] = self._context.logits(row)[0]
        return logits

    def stop(self) -> None:
        """Make a decode in another thread, and later decodes, raise Interrupted."""
        self._context.stop()

    def resume(self) -> None:
        """Allow decoding again after `stop`."""
        self._context.resume()

    # KV cache

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Remove positions [start, end) of a sequence.

        Return False if the cache lacks the positions before, or if recurrent layers cannot roll back that far. Then the
        whole sequence must be removed, or set back to a snapshot.
        """
        _check_sequences(self.sequences, sequence)
        # llama.cpp gives the cells of positions that left a window to other sequences. Then its layers cannot roll
        # back.
        if self.model.window and end < 0 < start:
            first_needed, first = self.model.first_in_window(start), self._context.kv_ends(sequence)[0]
            if first_needed < start and not 0 <= first <= first_needed:
                return False
        return self._context.kv_remove(sequence, start, end)

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let sequence `target` share positions [start, end) of `source`. This takes no additional memory."""
        _check_sequences(self.sequences, source, target)
        self._context.kv_copy(source, target, start, end)

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Add `delta` to positions [start, end) of a sequence. Raises EngineError if this model's cache cannot
        shift.
        """
        _check_sequences(self.sequences, sequence)
        check_shift(self.file)
        self._context.kv_shift(sequence, start, end, delta)

    @property
    def rollback(self) -> int | None:
        """Number of rows at the end of a step, except its first, that `kv_remove` can remove from a step of a
        single sequence. None: any rows of any step.
        """
        return self._context.rollback if self.model.is_recurrent else None

    @property
    def can_shift(self) -> bool:
        """True if `kv_shift` gives nearly the same result as computing the tokens again."""
        return not has_windows(self.file) and self._context.can_shift

    def kv_clear(self) -> None:
        """Remove all sequences from the KV cache."""
        self._context.kv_clear()

    def kv_last(self, sequence: int) -> int:
        """Return the last position of a sequence in the cache; -1 if it is empty."""
        _check_sequences(self.sequences, sequence)
        return self._context.kv_ends(sequence)[1]

    def close(self) -> None:
        """Free the context and the model."""
        self.states.finish()
        forget_views()
        self._loaded.closing.close()


class Engine(PlacedRows, ModelRunner, DecodesBySteps):
    """A model ready to decode tokens. `close()` frees it; an engine is also a context manager."""

    stages = microbatches = 1
    logits_cross = False
    listener: HiddenListener | None = None

    @cached_property
    def _submitted(self) -> deque[NDArray[np.float32]]:
        return deque()

    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> None:
        """Decode rows of any sequences and positions. All arrays are [n].

        `collect` returns the logits of the rows marked in `outputs`, in the order of submission. On one device, this
        call computes them.
        """
        n, is_text = len(tokens), tokens[0] >= 0
        if self._submitted and not self._submitted[-1].flags.owndata:  # llama.cpp will overwrite them now
            self._submitted[-1] = self._submitted[-1].copy()
        rows = self.rows if is_text else self.embedding_batch
        self.place_rows(rows, tokens, positions, sequences)
        rows.outputs[:n] = outputs
        if is_text:
            rows.tokens[:n] = tokens
        self.adapters.choose(adapters)
        self.decode_rows(rows, n)
        if self.listener is not None and is_text:
            self.listener(rows.tokens[:n], rows.positions[:n], rows.sequences[:n], self.hidden.rows(n))
        if len(giving := outputs.nonzero()[0]):
            self._submitted.append(self._context.logits(int(giving[0]), len(giving)))

    def listen(self, listener: HiddenListener) -> None:
        """Pass the hidden states of later steps to `listener`. Raises EngineError if this llama.cpp does not
        provide them.
        """
        self.hidden.give()
        self.listener = listener

    def collect(self) -> NDArray[np.float32]:
        """Return the logits [rows, n_vocab] of the oldest uncollected step with logits, valid until the next decode."""
        return self._submitted.popleft()

    @property
    def failed(self) -> Exception | None:
        """Always None: the engine remains usable after an error."""
        return None

    @property
    def uncollected(self) -> int:
        """Number of submitted steps whose logits have not been collected."""
        return len(self._submitted)

    def chunk(self, n: int) -> int:
        """Return the tokens per decode of a prompt of `n` tokens."""
        return self.batch


def load(
    file: ModelFile, options: EngineOptions = DEFAULTS, steps: Steps = SILENT, accounted: Accounted | None = None
) -> Engine:
    """Load an engine with the arguments of `Engine`, and show progress by `steps`."""
    size = file.path.stat().st_size
    with steps.step(f"Loading {file.path.name}", size) as show:

        def loaded(fraction: float) -> None:
            show(fraction * size, what="" if fraction < 1 else "creating the KV cache")

        return Engine(file, options, progress=loaded, accounted=accounted)


def _check_sequences(n_sequences: int, *sequences: int) -> None:
    if not all(0 <= sequence < n_sequences for sequence in sequences):  # llama.cpp would end the process
        raise EngineError(f"sequences are from 0 to {n_sequences - 1}, not {', '.join(map(str, sequences))}")


def check_shift(file: GgufFile) -> None:
    """Raise EngineError for a model with attention windows. If all of its layers here are of one kind, llama.cpp
    would abort on the empty cache of the other kind.
    """
    if has_windows(file):
        raise EngineError("positions of a model with attention windows cannot be shifted; compute them again")

"""Options of loading and running a model, as a person sets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from devices.paths import state_folder
from devices.probe import default_threads
from edge.errors import EngineError
from edge.llama import llama
from edge.prefixes.store import DEFAULT_BYTES, default_folder
from edge.weights.budget import BudgetOptions, OtherUses, context_within
from edge.weights.elastic.sizes import Preference
from partition.model.model import ModelShape, decode_bytes
from quant.gguf.file import GgufFile
from quant.types import CacheType, cache_type

DEFAULT_CONTEXT = 4096  # tokens; models trained for more would reserve gigabytes of KV cache nobody asked for
MAX_CONTEXT = 1 << 24  # tokens; more than any model is trained for. llama.cpp keeps 50 bytes for each even in a dry run
SINKS = 4  # tokens at the beginning of a history, which get much of all attention: without them answers fall apart
MIN_WINDOW = 64  # tokens of an attention window; shorter ones hold no question
MAX_SEQUENCES = 255  # of the 256 of llama.cpp; one is for states that are read and written
MAX_ROLLBACK = 15  # rows; for each, llama.cpp holds all that recurrent layers do of a sequence once more
MAX_THREADS = 512  # ggml has room for no more
MAX_GPU_LAYERS = (1 << 31) - 1  # llama.cpp takes 32 bits, and more would wrap to another number
MAX_BYTES = 1 << 60
MAX_IO_THREADS = 64
MAX_IO_CHUNK = 256 << 20  # bytes
MOST_ADAPTERS = 64  # of one model; llama.cpp has room for all of them in each graph
PREFERENCES = get_args(Preference)
DEFAULT_BATCH = 512  # tokens of a prompt in one pass over the weights
# Bytes of a product's weights for each thread. Reading them takes about 20 us, and waiting for other threads 1 to 5 us.
_THREAD_BYTES = 256 << 10
_WITHOUT_FLASH = ("f16", "f32", "bf16")  # types of a KV cache that need no flash attention


@dataclass(frozen=True)
class PrefixOptions:
    """Where keys and values of prompts are kept on disk, and how many bytes of them."""

    max_bytes: int = DEFAULT_BYTES
    folder: Path = field(default_factory=default_folder)
    key_folder: Path = field(default_factory=state_folder)  # where the owner's key is

    @classmethod
    def from_limit(cls, max_bytes: int | None) -> PrefixOptions | None:
        """At most so many bytes in the usual folders; None: as many as usual. 0: nothing is kept."""
        return None if max_bytes == 0 else cls() if max_bytes is None else cls(max_bytes)


@dataclass(frozen=True)
class EngineOptions:
    """Options of loading and running a model. None means: decide from the model and the machine."""

    context: int | None = None  # tokens; None: what the model was trained for, at most DEFAULT_CONTEXT
    batch: int | None = None  # batch size, in rows; None: DEFAULT_BATCH, or what suits a disk weights come from
    sequences: int = 1  # independent sequences sharing the KV cache
    outputs: int | None = None  # rows of one decode that may give logits; None: one a sequence
    draft_rows: int = 0  # of these, those that are there for drafts alone
    threads: int | None = None  # None: one per physical core this process may use, as far as the model is worth it
    gpu_layers: int | None = None  # None: where the build has a GPU, as many as fit and pay there, else 0
    most_gpu_layers: int | None = None  # that a device lends, where gpu_layers is None
    gpu_memory: int | None = None  # bytes of a GPU's memory: layers that do not fit pass through two buffers there
    repack: bool | None = None  # lay weights out for this CPU; None: where they fit in memory
    flash_attention: str = "auto"  # "on", "off", or "auto": on, unless the architecture has none
    attention_window: int | None = None  # tokens at the end of a history that stay, beside its first SINKS; None: all
    kv_type: str = "f16"  # of stored keys and values, or KEYS/VALUES; quantized values need flash attention
    memory: int | None = None  # bytes: a budget for the whole process; what does not fit is read again and again
    least_memory: int | None = None  # bytes that it may shrink to while the model runs, and back; None: it stays
    prefer: Preference = "speed"  # fewer bits before weights are paged; or "quality": the other way round
    reserved: int = 0  # bytes of it that whoever runs the engine takes for what it makes of the logits
    draft_bytes: int = 0  # of these, those of a model that drafts
    window: int | None = None  # bytes of it that weights pass through; this and the next two, None: measured
    io_threads: int | None = None  # that read
    io_chunk: int | None = None  # bytes of one read
    verify: bool = False  # what is read again must be what it was the first time
    rollback: int = 0  # rows at the end of a step that recurrent layers are to be able to forget, as drafts need it
    lora: Sequence[str] = ()  # files of LoRA adapters, FILE or FILE:SCALE; a scale of 1 is usual
    prefixes: PrefixOptions | None = None  # where what is computed of prompts is kept; None: nowhere

    def __post_init__(self) -> None:
        """EngineError names the option that is out of its range."""
        for name, value, least, most in (
            ("context", self.context, 1, MAX_CONTEXT),
            ("batch", self.batch, 1, MAX_CONTEXT),
            ("attention_window", self.attention_window, MIN_WINDOW, MAX_CONTEXT),
            ("sequences", self.sequences, 1, MAX_SEQUENCES),
            ("outputs", self.outputs, 1, self.rows),
            ("rollback", self.rollback, 0, MAX_ROLLBACK),
            ("threads", self.threads, 1, MAX_THREADS),
            ("gpu_layers", self.gpu_layers, 0, MAX_GPU_LAYERS),
            ("most_gpu_layers", self.most_gpu_layers, 0, MAX_GPU_LAYERS),
            ("gpu_memory", self.gpu_memory, 1, MAX_BYTES),
            ("memory", self.memory, 1, MAX_BYTES),
            ("least_memory", self.least_memory, 1, self.memory or MAX_BYTES),
            ("reserved", self.reserved, 0, MAX_BYTES),
            ("draft_bytes", self.draft_bytes, 0, self.reserved),
            ("window", self.window, 1, MAX_BYTES),
            ("io_threads", self.io_threads, 1, MAX_IO_THREADS),
            ("io_chunk", self.io_chunk, 1, MAX_IO_CHUNK),
        ):
            if value is not None and not least <= value <= most:
                raise EngineError(f"{name} must be from {least} to {most}, it is {value}")
        self.check_sequences(self.rows)
        if isinstance(self.lora, str):
            raise EngineError(f"lora is a list of files, not the text {self.lora!r:.80}; write [{self.lora!r:.80}]")
        object.__setattr__(self, "lora", tuple(map(str, self.lora)))  # JSON has lists
        if len(self.lora) > MOST_ADAPTERS:
            raise EngineError(f"{len(self.lora)} adapters in lora; {MOST_ADAPTERS} are the most")
        about_budget = self.least_memory or self.window or self.io_threads or self.io_chunk or self.verify
        if self.memory is None and about_budget:
            raise EngineError(
                "least_memory, window, io_threads, io_chunk and verify are about a budget; give one with memory"
            )
        if self.prefer not in PREFERENCES:
            raise EngineError(f"prefer must be one of {', '.join(PREFERENCES)}, it is {self.prefer!r:.80}")
        if self.memory is not None and self.gpu_layers:
            raise EngineError("a memory budget is of this machine's own memory; leave gpu_layers out, or the budget")
        if self.gpu_memory is not None:
            others = [name for name in ("memory", "gpu_layers", "lora") if getattr(self, name) not in (None, ())]
            if others:
                raise EngineError(f"gpu_memory decides what the GPU has; leave it out, or {' and '.join(others)}")
        if self.flash_attention not in llama.FLASH_ATTENTION:
            raise EngineError(f"flash_attention must be auto, on or off, it is {self.flash_attention!r:.80}")

    @property
    def sure_memory(self) -> int | None:
        """Bytes of the budget that are there at all times."""
        return self.least_memory or self.memory

    @property
    def rows(self) -> int:
        """Rows one decode may have, where nothing is measured."""
        return self.batch or DEFAULT_BATCH

    def check_sequences(self, batch: int) -> None:
        """EngineError unless a batch of so many rows has one for each sequence, and as many outputs. llama.cpp reserves
        that much, and would end the process."""
        least = min(batch, self.outputs or batch)
        if self.sequences > least:
            raise EngineError(
                f"{self.sequences} sequences need as many rows in a batch, and outputs; there are {least}"
            )


DEFAULTS = EngineOptions()


def reproducible(options: EngineOptions) -> EngineOptions:
    """The same with everything set that last bits depend on, and that would else follow free memory or measurements.

    Flash attention is off: from 512 cells on, llama.cpp shares the keys of a row out to threads, so its sums depend on
    the number of threads. Sums without flash attention do not. Raises EngineError for options that cannot give the
    same tokens from run to run.
    """
    if options.sequences > 1:
        raise EngineError(
            f"{options.sequences} sequences share steps, and what a row gives depends on the rows beside it;"
            " reproducible answers come one at a time: leave sequences out"
        )
    if options.flash_attention == "on":
        raise EngineError("flash attention depends on the number of threads; reproducible answers need it off")
    if needs_flash(cache_type(options.kv_type)):
        raise EngineError(
            f"a KV cache of {options.kv_type} needs flash attention, which depends on the number of threads;"
            f" reproducible answers need one of {', '.join(_WITHOUT_FLASH)}"
        )
    if options.least_memory is not None:
        raise EngineError("bits that follow free memory change answers; reproducible ones need one size of memory")
    if options.prefixes is not None:
        raise EngineError(
            "with a prefix cache a prompt is computed in other portions from run to run; reproducible answers need"
            " prefix_cache=0"
        )
    if options.gpu_memory is not None:
        raise EngineError("gpu_memory follows what a GPU has free; reproducible answers need it left out")
    return replace(
        options,
        batch=options.rows,
        flash_attention="off",
        repack=True if options.repack is None else options.repack,
        gpu_layers=options.gpu_layers or 0,
    )


def needs_flash(kv: CacheType) -> bool:
    """Return whether a KV cache is read by flash attention alone."""
    return not {kv.keys.name, kv.values.name} <= set(_WITHOUT_FLASH)


def resolve(options: EngineOptions, shape: ModelShape) -> tuple[int, int, CacheType]:
    """(context in tokens, threads, KV type) that `options` mean for a model of this shape."""
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
            f" {SINKS + options.attention_window}, it is {context}"
        )
    return context, options.threads or default_threads(), kv


def worth_threads(file: GgufFile, shape: ModelShape) -> int:
    """Return the number of threads that have enough to do in each matrix product of a token, at least 1."""
    products = [
        tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and name != "token_embd.weight"
    ]
    return max(1, round(decode_bytes(file, shape) / max(1, len(products)) / _THREAD_BYTES))


def budget_options(
    options: EngineOptions, budget: int, sizes: llama.ContextSizes, prefix_bytes: int, *, embeddings: bool
) -> BudgetOptions:
    """Return the options of a budget in bytes, with what else it has to hold. prefix_bytes: of these, for blocks of
    prompts on their way to the disk. embeddings: the model is a part, and gives no logits."""
    more_rows = max(0, sizes.outputs - sizes.sequences)
    reserved, draft_rows = options.reserved - options.draft_bytes, min(options.draft_rows, more_rows)
    uses = OtherUses(reserved, prefix_bytes, 0 if embeddings else more_rows, draft_rows, options.draft_bytes)
    return BudgetOptions(budget, options.window, options.io_threads, options.io_chunk, options.verify, uses)

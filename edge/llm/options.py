"""Options for loading and running a model, as users set them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from devices.paths import state_folder
from edge.arguments import check_fields
from edge.errors import EngineError
from edge.prefixes.store import DEFAULT_BYTES, default_folder
from quant.types import CacheType, cache_type

DEFAULT_CONTEXT = 4096  # default tokens; a model trained for more would reserve gigabytes of KV cache
MAX_CONTEXT = 1 << 24  # limit in tokens, above that of any model; llama.cpp needs 50 bytes per token even in a dry run
SINKS = 4  # attention sinks: first tokens of a history that always stay, because responses degrade without them
MIN_WINDOW = 64  # minimum attention window in tokens; a shorter one cannot hold a question
MAX_SEQUENCES = 255  # llama.cpp has 256; one is reserved for reading and writing states
MAX_ROLLBACK = 15  # limit in rows; for each row, llama.cpp holds another copy of the recurrent state of a sequence
MAX_THREADS = 512  # limit of ggml
MAX_GPU_LAYERS = (1 << 31) - 1  # llama.cpp has 32 bits, and larger numbers would wrap
MAX_BYTES = 1 << 60
MAX_IO_THREADS = 64
MAX_IO_CHUNK = 256 << 20  # bytes
MOST_ADAPTERS = 64  # limit per model; llama.cpp has room for all of them in each graph
Preference = Literal["speed", "quality"]
PREFERENCES: tuple[Preference, ...] = get_args(Preference)
FLASH_ATTENTION = ("auto", "on", "off")
DEFAULT_BATCH = 512  # prompt tokens in one pass over the weights
_WITHOUT_FLASH = ("f16", "f32", "bf16")  # KV cache types that work without flash attention


@dataclass(frozen=True)
class PrefixOptions:
    """Folder and size of the prefix cache on disk."""

    max_bytes: int = DEFAULT_BYTES
    folder: Path = field(default_factory=default_folder)
    key_folder: Path = field(default_factory=state_folder)  # folder of the owner's key

    def __post_init__(self) -> None:
        """Raise EngineError for a negative size."""
        if self.max_bytes < 0:
            raise EngineError(f"prefix_cache must be 0 bytes or more, got {self.max_bytes}")

    @classmethod
    def from_limit(cls, max_bytes: int | None) -> PrefixOptions | None:
        """Return options with this size in the default folders. None: the default size. 0: no prefix cache, so the
        result is None.
        """
        return None if max_bytes == 0 else cls() if max_bytes is None else cls(max_bytes)


@dataclass(frozen=True)
class EngineOptions:
    """Options for loading and running a model. None means: decide from the model and the machine."""

    context: int | None = None  # tokens; None: as trained, but at most DEFAULT_CONTEXT
    batch: int | None = None  # rows per batch; None: DEFAULT_BATCH, or measured if weights come from disk
    sequences: int = 1  # number of independent sequences that share the KV cache
    outputs: int | None = None  # largest number of rows with logits per decode; None: one per sequence
    draft_rows: int = 0  # rows of `outputs` that are reserved for drafts
    threads: int | None = None  # None: one per physical core available to the process, or fewer for a small model
    gpu_layers: int | None = None  # None: with a GPU build, as many layers as fit and pay off, else 0
    most_gpu_layers: int | None = None  # limit of a device on its GPU layers if gpu_layers is None
    gpu_memory: int | None = None  # bytes of GPU memory; layers that do not fit are streamed through two buffers
    repack: bool | None = None  # repack weights for this CPU; None: if they fit into memory
    flash_attention: str = "auto"  # "on", "off", or "auto": on if the architecture supports it
    attention_window: int | None = None  # last tokens of a history that stay, in addition to its first SINKS; None: all
    kv_type: str = "f16"  # type of the KV cache, or KEYS/VALUES; quantized values need flash attention
    memory: int | None = None  # bytes: budget of the whole process; weights that do not fit are paged from disk
    least_memory: int | None = None  # bytes that the budget may shrink to while the engine runs; None: a fixed budget
    prefer: Preference = "speed"  # "speed": fewer bits before weights are paged; "quality": paging before fewer bits
    reserved: int = 0  # bytes of the budget that the caller needs for its own work on logits
    draft_bytes: int = 0  # bytes of `reserved` for a draft model
    window: int | None = None  # bytes of the paging window within the budget; None for this and the next two: measured
    io_threads: int | None = None  # number of reader threads
    io_chunk: int | None = None  # bytes per read
    verify: bool = False  # verify that paged weights have not changed since the first read
    rollback: int = 0  # rows at the end of a step that recurrent layers must be able to roll back, for drafts
    lora: Sequence[str] = ()  # LoRA adapter files, FILE or FILE:SCALE; the default scale is 1
    prefixes: PrefixOptions | None = None  # prefix cache on disk; None: no prefix cache

    def __post_init__(self) -> None:
        """Raise EngineError, naming the option, if a value is out of range, and TypeError if its type is wrong."""
        if isinstance(self.lora, str):
            raise EngineError(f"lora is a list of files, not the text {self.lora!r:.80}; write [{self.lora!r:.80}]")
        if isinstance(self.lora, Sequence):  # paths, or a list from JSON
            object.__setattr__(self, "lora", tuple(map(str, self.lora)))
        check_fields(self)
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
                raise EngineError(f"{name} must be from {least} to {most}, got {value}")
        self.check_sequences(self.rows)
        if len(self.lora) > MOST_ADAPTERS:
            raise EngineError(f"lora has {len(self.lora)} adapters; the maximum is {MOST_ADAPTERS}")
        about_budget = self.least_memory or self.window or self.io_threads or self.io_chunk or self.verify
        if self.memory is None and about_budget:
            raise EngineError("least_memory, window, io_threads, io_chunk and verify need a memory budget; set memory")
        if self.prefer not in PREFERENCES:
            raise EngineError(f"prefer must be one of {', '.join(PREFERENCES)}, got {self.prefer!r:.80}")
        if self.memory is not None and self.gpu_layers and self.lora:
            raise EngineError("adapters are not computed on a GPU beside a memory budget; leave lora or gpu_layers out")
        if self.gpu_memory is not None:
            others = [name for name in ("gpu_layers", "lora") if getattr(self, name) not in (None, ())]
            if others:
                raise EngineError(f"gpu_memory decides how much the GPU holds; leave it out, or {' and '.join(others)}")
        if self.flash_attention not in FLASH_ATTENTION:
            raise EngineError(f"flash_attention must be auto, on or off, got {self.flash_attention!r:.80}")

    @property
    def sure_memory(self) -> int | None:
        """Bytes of the budget that are available at all times."""
        return self.least_memory or self.memory

    @property
    def rows(self) -> int:
        """Rows per decode if nothing is measured."""
        return self.batch or DEFAULT_BATCH

    def check_sequences(self, batch: int) -> None:
        """Raise EngineError unless a batch of this many rows has one row, and one output, for each sequence.
        llama.cpp reserves that much and would otherwise abort.
        """
        least = min(batch, self.outputs or batch)
        if self.sequences > least:
            raise EngineError(f"{self.sequences} sequences need at least as many batch rows and outputs, got {least}")


DEFAULTS = EngineOptions()


def reproducible(options: EngineOptions) -> EngineOptions:
    """Return the options with all values fixed that influence the last bits and would otherwise depend on free memory
    or measurements.

    Flash attention is off. From 512 cells on, llama.cpp divides the keys of a row among threads, so sums would depend
    on the number of threads. Without flash attention they do not.

    Raises EngineError for options that cannot give the same tokens in every run.
    """
    if options.sequences > 1:
        raise EngineError(
            f"{options.sequences} sequences share steps, and a row's result depends on the other rows of its step;"
            " reproducible answers need one sequence: leave sequences out"
        )
    if options.flash_attention == "on":
        raise EngineError("flash attention depends on the number of threads; reproducible answers need it off")
    if needs_flash(cache_type(options.kv_type)):
        raise EngineError(
            f"a KV cache of {options.kv_type} needs flash attention, which depends on the number of threads;"
            f" reproducible answers need one of {', '.join(_WITHOUT_FLASH)}"
        )
    if options.least_memory is not None:
        raise EngineError(
            "a memory range changes the weights and with them the answers; reproducible answers need one memory size"
        )
    if options.prefixes is not None:
        raise EngineError(
            "with a prefix cache, each run may compute a prompt in other chunks; reproducible answers need"
            " prefix_cache=0"
        )
    if options.gpu_memory is not None:
        raise EngineError("gpu_memory depends on the free memory of the GPU; leave it out for reproducible answers")
    return replace(
        options,
        batch=options.rows,
        flash_attention="off",
        repack=True if options.repack is None else options.repack,
        gpu_layers=options.gpu_layers or 0,
    )


def needs_flash(kv: CacheType) -> bool:
    """Return True if a KV cache of this type requires flash attention."""
    return not {kv.keys.name, kv.values.name} <= set(_WITHOUT_FLASH)

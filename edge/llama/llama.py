"""llama.cpp models and contexts as Python objects. One of the files with ctypes.

The layers above use numpy arrays and plain numbers. `close()` frees native handles. Objects that native code calls back
into (log, progress and node callbacks) stay referenced for as long as native code may call them.
"""

from __future__ import annotations

import collections
import ctypes as C
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama import library
from edge.llama.batch import Batch as Batch
from edge.llama.buffers import CallerBuffer, disable_amx
from edge.llama.interrupt import StopFlag, deferred_interrupts
from edge.llama.library import llama_cpp as L
from edge.llama.sequences import NativeCalls, SequenceCalls, Sequences
from edge.llama.thread_pool import ThreadPool, attach_to_context
from edge.llama.vocabulary import Vocabulary
from partition.architectures.table import RULES, has_flash
from quant.types import CacheType

FLASH_ATTENTION = {
    "auto": L.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": L.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": L.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

NodeCallback = Callable[[int, bool, Any], bool]
"""(node address, ask, unused). If `ask`, return whether the node's value is wanted. Otherwise the node is computed,
and returning False ends the graph there."""

_LOG_WARN, _LOG_ERROR = 3, 4
_complaints: collections.deque[tuple[int, str]] = collections.deque(maxlen=8)  # (level, line)
_listener: Callable[[str], None] | None = None  # receives every log line while it is set


@L.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _: Any) -> None:
    if level < _LOG_WARN and _listener is None:  # skip most lines; a model logs hundreds
        return
    line = text.decode(errors="replace").rstrip("\n")
    if level in (_LOG_WARN, _LOG_ERROR):
        _complaints.append((level, line))
    if _listener is not None:
        _listener(line)


@functools.cache
def initialise() -> None:
    """Start the backend once, with a quiet log and one clear line instead of a core dump if ggml aborts."""
    library.on_abort_exit()
    L.llama_log_set(_on_log, None)
    L.llama_backend_init()
    disable_amx()


@contextmanager
def forwarded_log(listener: Callable[[str], None]) -> Iterator[None]:
    """Send each line that llama.cpp logs inside the block only to `listener`, which must not raise."""
    global _listener
    initialise()
    L.llama_log_set(_on_log, None)  # other code in this process may have replaced the log callback
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect all lines that llama.cpp logs inside the block."""
    lines: list[str] = []
    with forwarded_log(lines.append):
        yield lines


def _why() -> str:
    """Return llama.cpp's first error since the last `clear`, or else its last warning."""
    lines = [line for level, line in _complaints if level == _LOG_ERROR] or [line for _, line in _complaints][-1:]
    return (lines or ["it gives no reason"])[0].split(": ", 1)[-1]  # without the name of llama.cpp's function


def has_gpu() -> bool:
    """Return whether this build of llama.cpp can run layers on a GPU of this machine."""
    initialise()
    return bool(L.llama_supports_gpu_offload())


def system_info() -> str:
    """Return the active instruction sets and backends, as llama.cpp prints them."""
    initialise()
    return bytes(L.llama_print_system_info()).decode()


class Model(Vocabulary):
    """Loaded GGUF model. The file must have been checked before, because ggml aborts the process on unexpected
    contents."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        gpu_layers: int = 0,  # -1: all
        repack: bool = True,  # keep a second copy of some weights in this CPU's layout: faster, but not memory-mapped
        allocate: bool = True,  # False: load metadata only, to compute the memory that the model would need
        vocabulary_only: bool = False,  # for tokenizing only: no weights are loaded
        own: CallerBuffer | None = None,  # assigns addresses to the weights; if set, no weight data is loaded
        predictors: bool = False,  # also load the layers for multi-token prediction
        progress: Callable[[float], None] | None = None,  # receives the loaded fraction; may raise
    ) -> None:
        initialise()
        params = L.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = L.LLAMA_LOAD_MODE_MMAP if allocate else L.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = repack
        params.no_alloc = not allocate
        params.vocab_only = vocabulary_only
        params.load_mtp = predictors
        if own is not None:
            params.tensor_buft_overrides = own.overrides
            params.split_mode = L.LLAMA_SPLIT_MODE_NONE  # all weights are copied to one GPU
        self.path = os.path.abspath(path)
        self.at_close = ExitStack()  # closes everything that was made from this model
        self.own_memory = own  # referenced here because llama.cpp keeps pointers into it
        self.adapters: list[Any] = []  # loaded adapters, in loading order

        @L.llama_progress_callback  # type: ignore[untyped-decorator]
        def on_progress(fraction: float, _: Any) -> bool:
            try:
                if progress is not None:
                    progress(fraction)
            except Exception as error:  # native code would print and drop the exception
                failed.append(error)
            return not (interrupts or failed)

        failed: list[Exception] = []
        params.progress_callback = on_progress
        _complaints.clear()
        self._handle = None
        try:
            with deferred_interrupts() as interrupts:
                self._handle = L.llama_model_load_from_file(os.fsencode(path), params)
            if failed:
                raise failed[0]
        except BaseException:
            self.close()
            raise
        if not self._handle:
            raise EngineError(f"{os.fspath(path)}: llama.cpp cannot load it: {_why()}")
        self.vocab = L.llama_model_get_vocab(self._handle)
        self.n_vocab: int = L.llama_vocab_n_tokens(self.vocab)
        self.n_bytes: int = L.llama_model_size(self._handle)
        self.architecture, self.pre_tokenizer = map(self._text_value, (b"general.architecture", b"tokenizer.ggml.pre"))
        self.has_decoder: bool = L.llama_model_has_decoder(self._handle)
        # Recurrent layers hold one state for all tokens, and no keys or values of single tokens.
        self.has_attention: bool = not L.llama_model_is_recurrent(self._handle)
        self.is_recurrent: bool = not self.has_attention or L.llama_model_is_hybrid(self._handle)
        self.window: int = L.llama_model_n_swa(self._handle)  # size in tokens of the sliding attention window; 0: none
        rules = RULES.get(self.architecture)
        self.is_chunked: bool = rules is not None and rules.window is not None and rules.window.chunked
        # A shift rotates the keys at the beginning of the next decode. Keys without rotary positions cannot be shifted.
        rope = L.llama_model_rope_type(self._handle)
        self.rotates: bool = rope != L.LLAMA_ROPE_TYPE_NONE
        # positions have several parts
        self.has_sections: bool = rope in (L.LLAMA_ROPE_TYPE_MROPE, L.LLAMA_ROPE_TYPE_IMROPE)
        self.n_embd_inp: int = L.llama_model_n_embd_inp(self._handle)  # length of one row of input embeddings

    def _text_value(self, key: bytes) -> str:
        """Return a short metadata text of the file, or "" if the file lacks the key."""
        value = C.create_string_buffer(64)
        L.llama_model_meta_val_str(self._handle, key, value, len(value))
        return value.value.decode(errors="replace")

    def first_in_window(self, position: int) -> int:
        """Return the first position that all layers can attend to at `position`."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position + 1 - self.window)

    def close(self) -> None:
        self.at_close.close()
        self.forget_vocabulary()
        if self._handle:
            L.llama_model_free(self._handle)
            self._handle = None

    def load_adapter(self, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, which is freed with the model. The file must have been checked for this model.

        Contexts that are created later reserve room for the adapter in their graphs.
        Raises EngineError if llama.cpp refuses the adapter.
        """
        if self.own_memory is not None:
            self.own_memory.is_ordinary = True  # all weights already have their addresses
        _complaints.clear()
        with deferred_interrupts():
            adapter = L.llama_adapter_lora_init(self._handle, os.fsencode(path))
        if not adapter:
            raise EngineError(f"{os.fspath(path)}: llama.cpp cannot load this adapter: {_why()}")
        self.adapters.append(adapter)


# libc's strlen serves as llama.cpp's abort callback: an empty string means continue, any other string means stop. A
# Python callback would run once per graph node and take the interpreter's lock each time.
_strlen = C.cast(C.CDLL(None).strlen, L.ggml_abort_callback)

# maximum number of sequences with a double: llama.cpp supports 256, and one is for reads and writes
_MOST_DOUBLED = 127
_STOPPED = 2  # llama_decode's code after the abort callback stopped it


@dataclass(frozen=True)
class ContextSizes:
    """Sizes of a context."""

    context: int  # tokens
    kv: CacheType
    batch: int = 512  # maximum number of rows in one decode
    sequences: int = 1
    outputs: int = 1  # maximum number of rows with logits in one decode; llama.cpp reserves a vocabulary for each
    flash_attention: str = "auto"
    predicts: bool = False  # True: compute only the first of the model's `predictors` layers
    # size of the adapter matrices by layer; the last entry is for matrices outside layers
    adapter_bytes: tuple[int, ...] = ()
    adapter_row_bytes: int = 0  # compute buffer bytes per row for adapters, in addition to llama.cpp's own figure
    # rows at the end of a decode that recurrent layers can forget, if llama.cpp supports it for the model
    rollback: int = 0


@dataclass(frozen=True)
class SequenceLayout:
    """Sequences of a context beyond those that are decoded. See edge/llama/sequences.py."""

    scratch: int | None
    first_double: int | None
    total: int  # number of all sequences

    @classmethod
    def for_model(cls, model: Model, sizes: ContextSizes) -> SequenceLayout:
        """Return the layout for a model."""
        total = sizes.sequences
        scratch = first_double = None
        if model.has_attention:  # one extra sequence: positions are copied to it before they are read or written
            scratch = total
            total += 1
        slides = model.window > 0 and not model.is_chunked and not model.is_recurrent
        if slides and 1 < sizes.sequences <= _MOST_DOUBLED:  # a single sequence loses no cells to others
            first_double = total
            total += sizes.sequences
        return cls(scratch, first_double, total)


class Context(Sequences):
    """KV cache and compute buffers of a model."""

    top = 0  # number of largest logits of a row that are read; 0: all. A browser's page sends no others

    def __init__(
        self, model: Model, sizes: ContextSizes, *, threads: int = 1, on_node: NodeCallback | None = None
    ) -> None:
        params = L.llama_context_default_params()
        params.n_ctx = sizes.context
        params.ctx_type = L.LLAMA_CONTEXT_TYPE_MTP if sizes.predicts else L.LLAMA_CONTEXT_TYPE_DEFAULT
        params.n_batch = params.n_ubatch = sizes.batch  # one decode is one graph, because hooks count its nodes
        layout = SequenceLayout.for_model(model, sizes)
        params.n_seq_max = layout.total
        params.n_rs_seq = sizes.rollback if model.is_recurrent else 0
        params.kv_unified = True  # a cache per sequence would split a batch of several sequences
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = sizes.kv.keys.id, sizes.kv.values.id
        flash = has_flash(model.architecture)
        if not flash and sizes.flash_attention == "on":
            raise EngineError(f"llama.cpp has no flash attention for {model.architecture} models; choose auto or off")
        params.flash_attn_type = FLASH_ATTENTION[sizes.flash_attention if flash else "off"]
        params.n_outputs_max = max(sizes.outputs, params.n_seq_max)  # ggml aborts on fewer
        if model.own_memory:
            params.op_offload = False  # otherwise a GPU would receive copies of weights before they are loaded
        self.stopping = StopFlag(C.create_string_buffer(2))
        params.abort_callback, params.abort_callback_data = _strlen, C.addressof(self.stopping.flag)
        self._on_node = L.ggml_backend_sched_eval_callback(on_node) if on_node else None
        if self._on_node:
            params.cb_eval = self._on_node
        _complaints.clear()
        self.model = model
        self.active_adapters: tuple[int, ...] = ()  # numbers of the adapters in later graphs
        self.gives_hidden = False  # True: later graphs give hidden states
        self._logits_place, self._logits = (0, 0), np.empty((0, 0), np.float32)  # address and rows of the last logits
        self._handle = None
        self._pool = ThreadPool(lambda pool: attach_to_context(self._handle, pool, None))
        try:
            with deferred_interrupts():
                self._handle = L.llama_init_from_model(model._handle, params)
        except BaseException:
            self.close()
            raise
        if not self._handle:
            raise EngineError(f"llama.cpp cannot make a context of {sizes.context} tokens: {_why()}")
        self._pool.use(threads)
        self._set_up_sequences(NativeCalls(self._handle), layout, sizes)
        self.n_ctx: int = L.llama_n_ctx(self._handle)

    def _set_up_sequences(self, calls: SequenceCalls, layout: SequenceLayout, sizes: ContextSizes) -> None:
        model = self.model
        # A predictor is an attention layer, even in a recurrent model.
        is_recurrent = model.is_recurrent and not sizes.predicts
        Sequences.__init__(
            self, calls, layout.scratch, is_recurrent=is_recurrent, window=model.window,
            first_double=layout.first_double,
        )  # fmt: skip
        self.can_shift = model.rotates and not model.is_recurrent and calls.can_shift

    def close(self) -> None:
        self.forget_native()
        if self._handle:
            L.llama_free(self._handle)
            self._handle = None
        self._pool.close()

    def decode(self, batch: Batch, n: int) -> None:
        """Compute the first `n` rows. Raises EngineError if llama.cpp fails, or Interrupted after `stop()`."""
        if not self._handle:
            raise EngineError("the engine is closed")
        batch.native.n_tokens = n
        if self.model.has_sections:
            batch.set_sections(n)
        code = _STOPPED
        if not self.stopping.flag.value:
            self.decoding(batch.sequences[:n])
            code = batch.decode(self._handle)
        if code == 0:
            self.decoded(batch.sequences[:n], batch.positions[:n])
            return
        if code == _STOPPED:
            raise self.stopping.error()
        if code == 1:
            raise EngineError(f"no room in the KV cache of {self.n_ctx} tokens for {n} more")
        raise EngineError(f"llama_decode failed with code {code}: {_why()}")

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Use the model's adapters from the next decode on, each with its scale. Scale 0 disables one adapter.

        If `scales` is empty, all adapters are disabled.
        """
        if not self._handle:
            raise EngineError("the engine is closed")
        if scales and len(scales) != len(self.model.adapters):
            raise EngineError(f"{len(scales)} scales for {len(self.model.adapters)} adapters; update both devices")
        active = tuple(i for i, scale in enumerate(scales) if scale)
        n = len(active)
        adapters = (L.llama_adapter_lora_p_ctypes * n)(*(self.model.adapters[i] for i in active))
        factors = (C.c_float * n)(*(scales[i] for i in active))
        self.active_adapters = active
        if L.llama_set_adapters_lora(self._handle, adapters, n, factors):
            raise EngineError(f"llama.cpp cannot use these adapters: {_why()}")

    def wait(self) -> None:
        """Wait for the last decode: a GPU computes asynchronously."""
        if self._handle:
            L.llama_synchronize(self._handle)

    def use_threads(self, threads: int) -> None:
        """Compute with `threads` threads from the next decode on."""
        if self._handle:
            self._pool.use(threads)
            L.llama_set_n_threads(self._handle, threads, threads)

    def stop(self) -> None:
        """End a decode of another thread at its next graph node (CPU only), and make later decodes fail."""
        self.stopping.stop()

    def resume(self) -> None:
        """Allow decodes again."""
        self.stopping.resume()

    def logits(self, row: int, n: int = 1) -> NDArray[np.float32]:
        """Return the logits of `n` rows from batch row `row` (-1: last row with logits).

        The result is a view [n, n_vocab] that is valid until the next decode.
        """
        values = L.llama_get_logits_ith(self._handle, row)
        if not values:
            raise EngineError(f"row {row} of the last batch gave no logits")
        place = C.addressof(values.contents), n
        if place != self._logits_place:  # the address usually stays the same
            self._logits_place, self._logits = place, np.ctypeslib.as_array(values, shape=(n, self.model.n_vocab))
        return self._logits
